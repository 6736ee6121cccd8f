"""Write and compile functions for a CPU: a thin layer over llvmlite's builder of LLVM code.

A function takes addresses and numbers, all int64 (the language: llvm.org/docs/LangRef.html). Vectors hold 16 numbers
(`LANES`), float32 in registers and float32 or bfloat16 in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from kernels.cpu.isa import Isa
from kernels.cpu.layout import LANES, LINE
from kernels.cpu.objects import kept_object

I8, I16, I32, I64, F32, PTR = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType(), ir.PointerType())
VECTOR = ir.VectorType(F32, LANES)
WORDS = ir.VectorType(I32, LANES)
_SPINS = 2000
"""Reads of a counter before a thread yields its core: some 0.1 ms."""


class _BFloat16(ir.Type):  # type: ignore[misc]
    def _to_string(self) -> str:
        return "bfloat"


_HALVES = ir.VectorType(_BFloat16(), LANES)
_BITS = ir.VectorType(I16, LANES)


def _int64(value: Any) -> Any:
    """Return a Python number as a constant, other values unchanged."""
    return I64(value) if isinstance(value, int) else value


def words(value: int) -> Any:
    """Return an int32 constant in all lanes."""
    return WORDS([value] * LANES)


class Module(ir.Module):  # type: ignore[misc]
    """Functions being written, for processors with an instruction set."""

    def __init__(self, isa: Isa) -> None:
        super().__init__()
        self.isa = isa


class Variable:
    """A value that can be changed."""

    def __init__(self, code: Code, value: Any) -> None:
        self._code = code
        with code.build.goto_entry_block():
            self._place = code.build.alloca(value.type)
        self.set(value)

    def set(self, value: Any) -> None:
        """Assign another value."""
        self._code.build.store(value, self._place)

    def get(self) -> Any:
        """Return the current value."""
        return self._code.build.load(self._place, typ=self._place.allocated_type)


class Code:
    """A function being written. `names` are its int64 arguments, which `args` maps to values."""

    def __init__(self, module: Module, name: str, names: Sequence[str]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(names))
        self.function = ir.Function(module, kind, name)
        self.function.attributes.add("nounwind")
        self.args = dict(zip(names, self.function.args, strict=True))
        self.build = ir.IRBuilder(self.function.append_basic_block())
        self._module, self.isa = module, module.isa

    def room(self, size: int) -> Any:
        """Return the address of `size` bytes on the stack, a multiple of 64."""
        with self.build.goto_entry_block():
            found = self.build.alloca(I8, size=I64(size))
            found.align = 64
        return self.build.ptrtoint(found, I64)

    def variable(self, value: Any) -> Variable:
        """Return a variable with a first value."""
        return Variable(self, value)

    def fields(self, address: Any, names: Sequence[str]) -> dict[str, Any]:
        """Load int64 values that lie side by side, by name."""
        return {name: self.load_number(address, 8 * place) for place, name in enumerate(names)}

    def bounds(self, chunk: Any, size: Any, end: Any) -> tuple[Any, Any]:
        """Return the first item of a chunk of `size` items, and the one after its last, at most `end`."""
        first = self.times(chunk, size)
        return first, self.least(self.plus(first, size), end)

    def plus(self, first: Any, *others: Any) -> Any:
        """Return the sum of int64 values and Python numbers."""
        for other in others:
            first = self.build.add(first, _int64(other))
        return first

    def minus(self, first: Any, other: Any) -> Any:
        """Return the difference of int64 values."""
        return self.build.sub(first, other)

    def times(self, first: Any, other: Any) -> Any:
        """Return the product of an int64 value and another one or a Python number."""
        return self.build.mul(first, _int64(other))

    def load_number(self, address: Any, offset: Any = 0) -> Any:
        """Load an int64 value."""
        return self.load(I64, address, offset)

    def between(self, low: Any, value: Any, high: Any) -> Any:
        """Whether low < value <= high."""
        is_above = self.build.icmp_signed("<", _int64(low), value)
        return self.build.and_(is_above, self.build.icmp_signed("<=", value, _int64(high)))

    def when(self, condition: Any) -> AbstractContextManager[Any]:
        """Run the code written within if the condition holds."""
        found: AbstractContextManager[Any] = self.build.if_then(condition)
        return found

    def least(self, first: Any, other: Any) -> Any:
        """Return the lesser of two int64 values; `other` may be a Python number."""
        other = _int64(other)
        return self.build.select(self.build.icmp_signed("<", first, other), first, other)

    def at(self, address: Any, offset: Any = 0) -> Any:
        """Return a pointer for an int64 address."""
        return self.build.inttoptr(self.plus(address, offset), PTR)

    def load(self, kind: Any, address: Any, offset: Any = 0) -> Any:
        """Load a value of `kind` from an address that need not be aligned to it."""
        return self.build.load(self.at(address, offset), typ=kind, align=1)

    def store(self, value: Any, address: Any, offset: Any = 0) -> None:
        """Store a value at an address that need not be aligned to it."""
        self.build.store(value, self.at(address, offset), align=1)

    def load_vector(self, address: Any, offset: Any = 0) -> Any:
        """Load 16 float32 numbers."""
        return self.load(VECTOR, address, offset)

    def load_same(self, address: Any, offset: Any = 0) -> Any:
        """Load a float32 number to all lanes."""
        return self.same(self.load(F32, address, offset))

    def load_halves(self, address: Any, offset: Any = 0) -> Any:
        """Load 16 bfloat16 numbers as float32."""
        wide = self.build.zext(self.load(_BITS, address, offset), WORDS)
        return self.build.bitcast(self.build.shl(wide, words(16)), VECTOR)

    def load_half(self, address: Any, offset: Any = 0) -> Any:
        """Load a bfloat16 number as float32."""
        word = self.build.zext(self.load(I16, address, offset), I32)
        return self.build.bitcast(self.build.shl(word, I32(16)), F32)

    def store_halves(self, value: Any, address: Any, offset: Any = 0) -> None:
        """Store 16 float32 numbers, rounded to bfloat16."""
        self.store(self.halves(value), address, offset)

    def halves(self, value: Any) -> Any:
        """Return the int16 bits of 16 float32 numbers rounded to bfloat16."""
        build = self.build
        if self.isa is Isa.AMX:
            return build.bitcast(self.call("llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, value), _BITS)
        bits, upper = build.bitcast(value, WORDS), words(16)
        is_odd = build.and_(build.lshr(bits, upper), words(1))
        rounded = build.add(build.add(bits, words(0x7FFF)), is_odd)
        # If rounded up, a NaN of all ones would become zero.
        quiet = build.or_(bits, words(1 << 22))
        rounded = build.select(build.fcmp_unordered("uno", value, value), quiet, rounded)
        return build.trunc(build.lshr(rounded, upper), _BITS)

    def rounded(self, value: Any) -> Any:
        """Round the number in each lane to the nearest integer."""
        return self.call("llvm.rint.v16f32", VECTOR, value)

    def absolute(self, value: Any) -> Any:
        """Return the absolute value of the number in each lane."""
        return self.call("llvm.fabs.v16f32", VECTOR, value)

    def farthest(self, values: Sequence[Any]) -> Any:
        """Return the largest absolute value in some vectors, float32; a NaN if there is one."""
        words = [self.build.bitcast(self.absolute(value), WORDS) for value in values]
        largest = words[0]
        for other in words[1:]:
            largest = self.call("llvm.smax.v16i32", WORDS, largest, other)
        return self.build.bitcast(self.call("llvm.vector.reduce.smax.v16i32", I32, largest), F32)

    def same(self, value: Any) -> Any:
        """Return a float32 or int32 number in all lanes."""
        kind = ir.VectorType(value.type, LANES)
        one = self.build.insert_element(kind(ir.Undefined), value, I32(0))
        return self.build.shuffle_vector(one, kind(ir.Undefined), words(0))

    def number(self, value: float) -> Any:
        """Return a float32 constant in all lanes."""
        return VECTOR([float(value)] * LANES)

    def call(self, name: str, kind: Any, *values: Any) -> Any:
        """Call a function that is not written here: LLVM's own, or one of another module or library."""
        found = self._module.globals.get(name)
        if found is None:
            found = ir.Function(self._module, ir.FunctionType(kind, [value.type for value in values]), name)
        return self.build.call(found, values)

    def run(self, name: str, *values: Any) -> None:
        """Call a function that takes int64 values and returns nothing."""
        self.call(name, ir.VoidType(), *map(_int64, values))

    def run_at(self, address: Any, *values: Any) -> None:
        """Call a function at an address that takes int64 values and returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(values))
        self.build.call(self.build.inttoptr(address, kind.as_pointer()), [*map(_int64, values)])

    def copy(self, source: Any, target: Any, size: int) -> None:
        """Copy `size` bytes, a multiple of 64."""
        with self.loop(0, size, 64) as at:
            self.store(self.load(WORDS, source, at), target, at)

    def fetch(self, address: Any, size: int) -> None:
        """Prefetch `size` bytes; invalid addresses are no fault."""
        with self.loop(0, size, 64) as line:
            self.call("llvm.prefetch.p0", ir.VoidType(), self.at(address, line), I32(0), I32(3), I32(1))

    def fma(self, first: Any, second: Any, third: Any) -> Any:
        """Return first * second + third, rounded once."""
        return self.call("llvm.fma.v16f32", VECTOR, first, second, third)

    def largest(self, first: Any, second: Any) -> Any:
        """Return the larger number in each lane."""
        return self.call("llvm.maxnum.v16f32", VECTOR, first, second)

    def inverse_root(self, value: Any) -> Any:
        """Return 1 / sqrt(value), float32."""
        return self.build.fdiv(F32(1.0), self.call("llvm.sqrt.f32", F32, value))

    def silu(self, value: Any) -> Any:
        """Return value / (1 + exp(-value)), computed by a power of e of at most 1."""
        build = self.build
        away = build.fsub(self.number(0.0), self.absolute(value))
        power = self.exp(away)
        above = build.select(build.fcmp_ordered(">=", value, self.number(0.0)), self.number(1.0), power)
        return build.fdiv(build.fmul(value, above), build.fadd(self.number(1.0), power))

    def total(self, value: Any) -> Any:
        """Return the float32 sum over all lanes, always in the same order."""
        for size in (8, 4, 2, 1):
            other = self.build.shuffle_vector(
                value, value.type(ir.Undefined), WORDS([(lane + size) % LANES for lane in range(LANES)])
            )
            value = self.build.fadd(value, other)
        return self.build.extract_element(value, I32(0))

    def exp(self, value: Any) -> Any:
        """Return exp of numbers up to 0, off by 2^-22 of it: a power of two times the Taylor series of the rest."""
        build = self.build
        value = self.largest(value, self.number(-87.0))
        turns = self.rounded(build.fmul(value, self.number(1.4426950408889634)))
        left = self.fma(turns, self.number(-0.693145751953125), value)
        left = self.fma(turns, self.number(-1.428606765330187e-06), left)
        found = self.number(1 / 5040)
        for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            found = self.fma(found, left, self.number(factor))
        power = build.shl(build.add(build.fptosi(turns, WORDS), words(127)), words(23))
        return build.fmul(found, build.bitcast(power, VECTOR))

    @contextmanager
    def loop(self, first: Any, end: Any, step: int = 1) -> Iterator[Any]:
        """Loop over int64 values from `first` up to `end`, exclusive."""
        place = Variable(self, _int64(first))
        with self.again() as go_on_if:
            value = place.get()
            go_on_if(self.build.icmp_signed("<", value, _int64(end)))
            yield value
            place.set(self.plus(value, step))

    @contextmanager
    def again(self) -> Iterator[Callable[[Any], None]]:
        """Loop over the code written within, which must call the yielded function once, with a condition. Where the
        condition does not hold, the rest is skipped, and the loop ends."""
        build = self.build
        head, body, behind = (build.append_basic_block() for _ in range(3))

        def go_on_if(condition: Any) -> None:
            build.cbranch(condition, body, behind)
            build.position_at_end(body)

        build.branch(head)
        build.position_at_end(head)
        yield go_on_if
        build.branch(head)
        build.position_at_end(behind)

    def count_up(self, address: Any, offset: Any = 0, by: int = 1) -> Any:
        """Add to an int64 counter that threads share, and return its old value."""
        return self.build.atomic_rmw("add", self.at(address, offset), I64(by), "seq_cst")

    def swap(self, address: Any, offset: Any, value: Any) -> Any:
        """Replace an int64 value that threads share, and return the old one."""
        return self.build.atomic_rmw("xchg", self.at(address, offset), value, "seq_cst")

    def look(self, address: Any, offset: Any = 0) -> Any:
        """Load an int64 value that threads share."""
        return self.build.load_atomic(self.at(address, offset), "seq_cst", 8, typ=I64)

    def wait_while(self, condition: Callable[[], Any]) -> None:
        """Spin while a condition holds."""
        looks = Variable(self, I64(0))
        with self.again() as go_on_if:
            go_on_if(condition())
            self.call("llvm.x86.sse2.pause", ir.VoidType())
            looks.set(self.plus(looks.get(), 1))
            with self.when(self.build.icmp_signed(">", looks.get(), I64(_SPINS))):
                self.call("sched_yield", I32)

    def clear(self, address: Any, size: Any) -> None:
        """Set `size` bytes to zero."""
        self.call("llvm.memset.p0.i64", ir.VoidType(), self.at(address), I8(0), size, ir.IntType(1)(0))

    def configure_tiles(self, room: Any, tiles: Sequence[tuple[int, int, Any]]) -> None:
        """Configure AMX, by 64 bytes at `room`, for tiles: number, bytes of a row, and rows (int8)."""
        self.clear(room, I64(64))
        self.store(I8(1), room)
        for tile, width, rows in tiles:
            self.store(I16(width), room, 16 + 2 * tile)
            self.store(rows, room, 48 + tile)
        self.tile("ldtilecfg", self.at(room))

    def tile(self, instruction: str, *values: Any) -> None:
        """Run an AMX instruction; Python numbers stand for tiles."""
        values = tuple(I8(value) if isinstance(value, int) else value for value in values)
        self.call(f"llvm.x86.{instruction}", ir.VoidType(), *values)

    @contextmanager
    def chunks(self, count: Any, counters: Any, prepare: Any = None, ahead: Any = None) -> Iterator[Any]:
        """Loop over chunks that this thread takes, then wait until all chunks are done.

        `counters` (COUNTERS) count chunks that all threads took and finished. `prepare` writes what a thread does
        before its first chunk, `ahead` what it does before it waits.
        """
        build = self.build
        count, is_new = _int64(count), Variable(self, I64(1))
        with self.again() as go_on_if:
            chunk = self.count_up(counters)
            go_on_if(build.icmp_signed("<", chunk, count))
            if prepare is not None:
                with self.when(build.icmp_signed("==", is_new.get(), I64(1))):
                    prepare()
                    is_new.set(I64(0))
            yield chunk
            self.count_up(counters, LINE)
        if ahead is not None:
            ahead()
        self.wait_while(lambda: build.icmp_signed("<", self.look(counters, LINE), count))

    def done(self) -> None:
        """End the function here."""
        self.build.ret_void()


def machine(isa: Isa) -> Any:
    """Return the machine that code is compiled for, whatever the processor here."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target, (cpu, features) = llvm.Target.from_triple("x86_64-unknown-linux-gnu"), isa.value
    return target.create_target_machine(cpu=cpu, features=features, opt=2)


def optimized(module: Module, is_straight: bool = False) -> Any:
    """Return a module parsed and optimized by LLVM.

    `is_straight`: run only optimizations that keep variables in registers, in a twentieth of the time. In long
    stretches of vector code, others find nothing to do.
    """
    found = llvm.parse_assembly(str(module))
    for function in found.functions:
        if not function.is_declaration:
            function.add_function_attribute("nounwind")
    if is_straight:
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.run(found, llvm.create_pass_builder(machine(module.isa), llvm.create_pipeline_tuning_options()))
        return found
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine(module.isa), options)
    builder.getModulePassManager().run(found, builder)
    return found


def compiled(isa: Isa, parts: Mapping[str, Callable[[], Any]]) -> Any:
    """Return an engine that holds the memory of all functions of modules that call each other.

    Each of `parts` makes a module, which may depend only on its name and this package's code: see kernels.cpu.objects.
    """
    target = machine(isa)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    for name, write in parts.items():
        part = kept_object(isa, name, partial(_emitted, target, write))
        engine.add_object_file(llvm.ObjectFileRef.from_data(part))
    engine.finalize_object()
    return engine


def _emitted(target: Any, write: Callable[[], Any]) -> bytes:
    emitted: bytes = target.emit_object(write())
    return emitted


def function(engine: Any, name: str, count: int) -> Any:
    """Return a Python function of `count` int64 arguments that keeps the memory of its code alive."""
    found: Any = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * count)(engine.get_function_address(name))
    found.engine = engine
    return found


def compiled_function(isa: Isa, name: str, names: Sequence[str], write: Callable[[Code], None]) -> Any:
    """Return a compiled function of these arguments that calls no other of ours. Its name must be unique."""

    def made() -> Any:
        module = Module(isa)
        write(Code(module, name, names))
        return optimized(module)

    return function(compiled(isa, {name: made}), name, len(names))
