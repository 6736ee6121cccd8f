"""How many compiled matrix products a process keeps on a CPU. Torch-free."""

from __future__ import annotations

KEPT_KERNELS = 256
"""Kernels in each cache.

oneDNN compiles one for each shape of a product, some 0.5 MB each, and a shape is a number of rows times a weight: five
weights in a decoder make this the last 50 widths of a forward. One that is not there any more costs 0.6 ms.
"""

KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_KERNELS), "LRU_CACHE_CAPACITY": str(KEPT_KERNELS)}
"""Variables for the environment of a process, to be there before its first product.

The first is oneDNN's cache, the second that of torch's layer above it (ideep), which holds on to the same kernels. Left
alone each keeps 1024, and a service grows for hours, by up to 0.6 GB.
"""
