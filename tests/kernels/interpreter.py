"""Triton 3.6's interpreter beside NumPy 2.4, which no longer makes an int of an array of one element.

Importing this lets loops of interpreted kernels run to bounds that are computed or loaded. It changes nothing on a GPU.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor


def _with_index(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _with_index
