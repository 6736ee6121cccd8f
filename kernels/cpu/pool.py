"""Threads that help with functions of kernels.cpu, as far as the system lets them run.

A call of libgomp ends no sooner than each of its threads was given a core, which takes long if other processes want the
cores. Here the caller begins at once, other threads take part of the remaining work when they arrive, and nobody waits
for a thread that has not arrived. Between two calls they sleep.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from llvmlite import ir

from kernels.cpu.code import I64, Code, Module, compiled_function
from kernels.cpu.isa import needed_isa

# Byte offsets in the memory that all threads share: jobs so far, the job that may be joined, threads working on it, and
# whether a caller has the pool; then the function to call, its arguments, and the most threads to call it.
_JOBS, _OPEN, _ACTIVE, _TAKEN, _PART, _ARRAY, _TEAM, _SIZE = 0, 64, 128, 192, 256, 264, 272, 320
_FUTEX, _WAIT, _WAKE = 202, 128, 129
"""Linux on x86-64: the system call, and its private operations."""
_PART_KIND = ir.FunctionType(ir.VoidType(), [I64, I64])
"""A function of the address of its arguments, and the thread's number."""


class HelperThreads:
    """The helper threads of this process; each is started when a call first wants that many."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_SIZE + 64)
        self.address = ctypes.addressof(self._memory) + -ctypes.addressof(self._memory) % 64
        self._help = compiled_function(needed_isa(), "help", ["pool", "me"], _write_helper)
        self._lock, self._started = threading.Lock(), 1
        # Threads run this code and read this memory for as long as the process lives, and a little longer.
        for kept in (self._memory, self._help):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def want(self, threads: int) -> None:
        """Make sure that there are `threads` threads, including the caller's."""
        if threads <= self._started:
            return
        with self._lock:
            for number in range(self._started, threads):
                arguments = self.address, number
                threading.Thread(target=self._help, args=arguments, name=f"kernels-{number}", daemon=True).start()
            self._started = max(self._started, threads)


def write_call(module: Module, name: str, names: tuple[str, ...], part: str) -> None:
    """Write a function of `names`, `pool` and `threads` that runs `part` in several threads.

    `part` takes the address of an array with the values of `names`, and the thread's number. `names` includes
    `counters` and `counter_bytes`; the counters are zeroed first.
    """
    code = Code(module, name, [*names, "pool", "threads"])
    build, pool = code.build, code.args["pool"]
    array = code.room(8 * len(names))
    for place, value in enumerate(names):
        code.store(code.args[value], array, 8 * place)
    code.clear(code.args["counters"], code.args["counter_bytes"])
    called = module.globals[part]
    is_taken = build.icmp_signed("!=", code.swap(pool, _TAKEN, I64(1)), I64(0))
    with build.if_else(is_taken) as (alone, together):
        with alone:
            build.call(called, [array, I64(0)])
        with together:
            code.store(build.ptrtoint(called, I64), pool, _PART)
            code.store(array, pool, _ARRAY)
            code.store(code.args["threads"], pool, _TEAM)
            job = code.plus(code.load_number(pool, _JOBS), 1)
            code.swap(pool, _OPEN, job)
            code.swap(pool, _JOBS, job)
            others = code.plus(code.args["threads"], -1)
            with code.when(build.icmp_signed(">", others, I64(0))):
                _futex(code, code.plus(pool, _JOBS), _WAKE, others)
            build.call(called, [array, I64(0)])
            code.swap(pool, _OPEN, I64(0))
            code.wait_while(lambda: build.icmp_signed("!=", code.look(pool, _ACTIVE), I64(0)))
            code.swap(pool, _TAKEN, I64(0))
    code.done()


def _futex(code: Code, address: Any, operation: int, value: Any) -> None:
    code.call("syscall", I64, I64(_FUTEX), address, I64(operation), value, I64(0), I64(0), I64(0))


def _write_helper(code: Code) -> None:
    """Write `help`, a function of the pool and a thread's number that never returns."""
    build, pool = code.build, code.args["pool"]
    seen = code.variable(I64(0))
    head, asleep, awake = (build.append_basic_block() for _ in range(3))
    build.branch(head)
    build.position_at_end(head)
    job = code.look(pool, _JOBS)
    build.cbranch(build.icmp_signed("==", job, seen.get()), asleep, awake)
    build.position_at_end(asleep)
    _futex(code, code.plus(pool, _JOBS), _WAIT, seen.get())
    build.branch(head)
    build.position_at_end(awake)
    seen.set(job)
    code.count_up(pool, _ACTIVE)
    with code.when(build.icmp_signed("!=", code.look(pool, _OPEN), I64(0))):
        is_one = build.icmp_signed("<", code.args["me"], code.load_number(pool, _TEAM))
        with code.when(is_one):
            called = build.inttoptr(code.load_number(pool, _PART), _PART_KIND.as_pointer())
            build.call(called, [code.load_number(pool, _ARRAY), code.args["me"]])
    code.count_up(pool, _ACTIVE, -1)
    build.branch(head)
