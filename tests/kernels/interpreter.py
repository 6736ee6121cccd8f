"""Triton 3.6's interpreter, mended and made faster for tests.

Importing this lets loops of interpreted kernels run to bounds that are computed or loaded: NumPy 2.4 no longer makes an
int of an array of one element. It changes nothing on a GPU.

Two things are left out that took two thirds of the time: a function that a kernel calls patched the whole language
anew, which the launch has done, and sums of integers were computed twice, to see whether they overflow.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang


def _with_index(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Patches:
    """What has been patched since a launch began, by the modules of the language that a function sees."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[bool, bool]] = {}
        self._scopes: dict[tuple[bool, bool], Any] = {}

    def add(self, fn: Any) -> _Patches:
        """Patch what `fn` sees, unless a function before it saw the same."""
        key = self._seen.get(fn)
        if key is None:
            modules = [value for value in fn.__globals__.values() if isinstance(value, ModuleType)]
            key = self._seen[fn] = (language in modules, language.core in modules)
        if key not in self._scopes:
            self._scopes[key] = _patch_lang(fn)
        return self

    def restore(self) -> None:
        """Leave the language as it was."""
        while self._scopes:
            self._scopes.popitem()[1].restore()


interpreter._patch_lang_tensor = _with_index
interpreter._patch_lang = _Patches().add
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
