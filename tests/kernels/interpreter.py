"""Triton 3.6's interpreter, mended and made faster for tests.

Importing this lets loops of interpreted kernels run to bounds that are computed or loaded: NumPy 2.4 no longer makes an
int of an array of one element. It changes nothing on a GPU.

What an operation costs here is its types, not its numbers. So a type of a block is made once for each shape and element
type, and a constant, too; a tuple gets its type when somebody asks, numbers of one type are not asked which one they
share, and the language is patched once, not in each launch for every function that a kernel calls. What meets a number
or block of another shape is spread at once, without a type for each step. Sums of integers are not computed a second
time to see whether they overflow, and hints to a compiler are not kept.

Products of float32 and less are summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_make_tensor = TritonSemantic.to_tensor
_CHECKED = core.builtin(len).__code__
_broadcast = TritonSemantic.broadcast_impl_value
_operands = TritonSemantic.binary_op_type_checking_impl
_equals = core.dtype.__eq__
_unwrap_if_constexpr = core._unwrap_if_constexpr


def _with_index(tensor: Any, scope: Any) -> None:
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _Patches:
    """What has been patched, by the modules of the language that a function sees. It stays: to put some 300 names back
    after each launch takes a sixth of it, and who imports this launches nothing on a device.
    """

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
        """Nothing: see above."""


class _BlockTypes(type):
    """Makes a block's type once."""

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        cls.made: dict[tuple[str, tuple[Any, ...]], Any] = {}

    def __call__(cls, element_ty: core.dtype, shape: Sequence[Any]) -> Any:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        found = cls.made.get((element_ty.name, sizes))
        if found is None:
            found = cls.made[element_ty.name, sizes] = super().__call__(element_ty, shape)
            found.sizes = sizes
            found.tensor_shape = core.tuple([core.constexpr(size) for size in sizes])
            found.tensor_numel = core.constexpr(found.numel)
        return found


class _BlockType(core.block_type, metaclass=_BlockTypes):
    sizes: tuple[int, ...]
    tensor_shape: core.tuple
    tensor_numel: core.constexpr

    def with_element_ty(self, scalar_ty: core.dtype) -> Any:
        return _block_type(scalar_ty, self.sizes)


def _block_type(scalar: core.dtype, sizes: tuple[int, ...]) -> Any:
    return _BlockType.made.get((scalar.name, sizes)) or _BlockType(scalar, list(sizes))


_NO_SHAPE, _ONE = core.tuple([]), core.constexpr(1)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    block = isinstance(type, _BlockType)
    self.shape, self.numel = (type.tensor_shape, type.tensor_numel) if block else (_NO_SHAPE, _ONE)


def _init_tuple(self: Any, args: Sequence[Any], type: Any = None) -> None:
    self.values = list(args)
    self.given_type = type if type is None or isinstance(type, core.tuple_type) else core.tuple_type(type)


def _tuple_type(self: Any) -> core.tuple_type:
    if self.given_type is None:
        self.given_type = core._type_for_tuple_values(self.values)
    return self.given_type


def _set_tuple_type(self: Any, type: core.tuple_type) -> None:
    self.given_type = type


def _broadcast_others(self: TritonSemantic, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """What is of one shape stays as it is."""
    left, right = getattr(lhs.type, "sizes", None), getattr(rhs.type, "sizes", None)
    if left == right:
        return lhs, rhs
    if left is None:
        return _spread(lhs, right), rhs
    if right is None:
        return lhs, _spread(rhs, left)
    if len(left) == len(right):
        sizes = tuple(other if size == 1 else size for size, other in zip(left, right, strict=True))
        if all(size in (1, most) for size, most in zip(right, sizes, strict=True)):
            return lhs if left == sizes else _spread(lhs, sizes), rhs if right == sizes else _spread(rhs, sizes)
    return _broadcast(self, lhs, rhs)


def _spread(value: Any, sizes: tuple[int, ...] | None) -> Any:
    """A number or block as a block of these sizes."""
    assert sizes is not None
    old = value.handle
    data = np.empty(sizes, old.data.dtype)
    data[...] = old.data
    return core.tensor(interpreter.TensorHandle(data, old.dtype.scalar), _block_type(value.dtype, sizes))


_whole_numbers: dict[int, Any] = {}


def _to_tensor(self: TritonSemantic, value: Any, check_type: bool = True) -> Any:
    if type(value) is core.tensor:
        return value
    if type(value) is not int:
        return _make_tensor(self, value, check_type)
    found = _whole_numbers.get(value)
    if found is None:
        found = _whole_numbers[value] = _make_tensor(self, value, check_type)
        found.handle.data.flags.writeable = False
    return found


def _init_handle(self: Any, data: Any, dtype: Any) -> None:
    self.data, self.dtype = data, dtype


def _forget_hint(self: Any, key: str, value: Any) -> None:
    return


_FLOATS, _INTEGERS = frozenset(("fp32", "fp64")), frozenset(("int32", "int64"))


_constants: dict[tuple[Any, ...], Any] = {}


def _constant(self: TritonSemantic, like: Any, value: float) -> Any:
    """`value` as a number or block of the type `like`, made once."""
    key = (like.scalar.name, getattr(like, "sizes", ()), value)
    found = _constants.get(key)
    if found is None:
        found = self.scalar_constant(value, like.scalar)
        if like.is_block():
            found = self.splat(found, like.shape)
        found.handle.data.flags.writeable = False
        _constants[key] = found
    return found


def _plain_operands(
    self: TritonSemantic,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """Two numbers of one type stay as they are, and a constant takes the type of the number that it meets."""
    if type(lhs) is core.tensor:
        name, kind = lhs.dtype.name, type(rhs)
        if kind is core.tensor:
            if name == rhs.dtype.name and (name in _FLOATS or name in _INTEGERS):
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and (
            (name in _FLOATS and (kind is float or kind is int))
            or (name in _INTEGERS and kind is int and -(2**31) <= rhs < 2**31)
        ):
            return lhs, _constant(self, lhs.type, rhs)
    return _operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = TritonSemantic(builder)
    if getattr(member, "__code__", None) is _CHECKED:
        member = member.__wrapped__  # what looks whether it is given a `_semantic`

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _is_same(self: core.dtype, other: Any) -> bool:
    return self is other or _equals(self, other)


def _unwrap(value: Any) -> Any:
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind is int or kind is core.tensor else _unwrap_if_constexpr(value)


_np_dtypes: dict[str, np.dtype[Any]] = {}


def _np_dtype(dtype: core.dtype) -> np.dtype[Any]:
    found = _np_dtypes.get(dtype.name)
    if found is None:
        found = _np_dtypes[dtype.name] = _get_np_dtype(dtype)
    return found


def _dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
    """A product whose rows do not depend on their places, as on a GPU; the BLAS of some CPUs rounds float32 by them."""
    if a.dtype.primitive_bitwidth == 8 or b.dtype.primitive_bitwidth == 8 or d.data.dtype != np.float32:
        return _create_dot(self, a, b, d, *precision)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
    return interpreter.TensorHandle(product.astype(np.float32) + d.data, d.dtype.scalar)


_create_dot = interpreter.InterpreterBuilder.create_dot
interpreter.InterpreterBuilder.create_dot = _dot
interpreter._patch_lang_tensor = _with_index
interpreter._patch_lang = _Patches().add
interpreter._patch_attr = _patch_attr
interpreter.TensorHandle.__init__ = _init_handle
interpreter.TensorHandle.set_attr = _forget_hint
interpreter._get_np_dtype = _np_dtype
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
core.block_type = language.block_type = _BlockType
core.tensor.__init__ = _init_tensor
core.tuple.__init__ = _init_tuple
core.tuple.type = property(_tuple_type, _set_tuple_type)
core.dtype.__eq__ = _is_same
core._unwrap_if_constexpr = _unwrap
TritonSemantic.broadcast_impl_value = _broadcast_others
TritonSemantic.to_tensor = _to_tensor
TritonSemantic.binary_op_type_checking_impl = _plain_operands
