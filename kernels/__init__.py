"""Triton kernels, each with a torch reference.

transformers probes for a package named `kernels` and breaks on one without a version, hence `__version__`.
"""

__version__ = "0.1.0"
