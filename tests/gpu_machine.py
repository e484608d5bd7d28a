"""Runs the forward kernels for GPUs, of a chunk and of the fused ring, on simulated devices, in a random order of events, with
real numbers.

The kernel's own Python runs unchanged, one thread per warpgroup of every CTA of every device; what Pallas, `lax` loops and JAX
arithmetic give it inside is replaced by numpy and by a machine that picks at random what happens next: an instruction of one
warpgroup, some of which are slow, or half of a copy that is under way. Memory starts as NaN. The machine refuses what hardware
would not notice: a signal to a device that has left, a counter that is not zero at the end, a barrier that completes
twice before it is waited for, memory that changes while a copy reads it.

It knows nothing of layouts, of memory models and of instructions: those want a GPU.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ring_attention import compat


class Broken(Exception):
    """What a kernel must not let happen."""


class Thread(NamedTuple):
    """One warpgroup."""

    device: int
    cta: int
    warpgroup: int


class _At:
    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


class Ref:
    """A part of an array in somebody's memory; `owner` is (device,) or (device, cta)."""

    def __init__(self, machine: Machine, owner: tuple[int, ...], name: str, path: tuple[Any, ...] = ()) -> None:
        self.machine, self.owner, self.name, self.path = machine, owner, name, path

    @property
    def view(self) -> np.ndarray:
        array = self.machine.memory[self.owner, self.name]
        for step in self.path:
            array = step(array)
        return array

    def _then(self, step: Callable[[np.ndarray], np.ndarray]) -> Ref:
        return Ref(self.machine, self.owner, self.name, (*self.path, step))

    @property
    def at(self) -> _At:
        return _At(lambda index: self._then(lambda x: x[index]))

    def transpose(self, axes: tuple[int, ...]) -> Ref:
        return self._then(lambda x: x.transpose(axes))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    def on(self, device: int) -> Ref:
        return Ref(self.machine, (device,), self.name, self.path)

    def __getitem__(self, index: Any) -> Any:
        self.machine.pause()
        found = np.array(self.view[index])
        return found if found.ndim else found.item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.machine.pause()
        self.view[index] = np.asarray(value)


class Counter:
    """A semaphore, a barrier or one of an array of them."""

    def __init__(self, key: Any, index: Any = 0) -> None:
        self.key, self.index = key, index

    @property
    def at(self) -> _At:
        return _At(lambda index: Counter(self.key, int(index)))


class Registers:
    """What a kernel holds under a reference of its own, such as an accumulator; `settle` finishes products under way."""

    def __init__(self, value: Any, settle: Callable[[], None]) -> None:
        self.value, self.settle = value, settle

    def __getitem__(self, index: Any) -> Any:
        self.settle()
        return self.value[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        assert index is ..., "registers are written whole"
        self.value = value


class Machine:
    """`run` executes one kernel on all devices; `broken` says what went wrong first."""

    def __init__(self, devices: int, seed: int) -> None:
        self.devices, self.random = devices, random.Random(seed)
        self.memory: dict[Any, np.ndarray] = {}
        self.semaphores: dict[Any, int] = defaultdict(int)
        self.arrivals: dict[Any, int] = {}
        self.arrived: dict[Any, int] = defaultdict(int)
        self.waited: dict[Any, int] = defaultdict(int)
        self.events: list[Callable[[], None]] = []
        self.groups: dict[Thread, list[list[int]]] = defaultdict(list)
        self.waiting: dict[Thread, Callable[[], bool]] = {}
        self.alive: set[Thread] = set()
        self.broken: Exception | None = None
        self.here = threading.local()
        self.idle = threading.Semaphore(0)

    def run(
        self, body: Callable[..., None], out_type: Any, scratch: Any, grid: dict[str, int], operands: list[Any]
    ) -> list[list[np.ndarray]]:
        """Results of every device; `operands[device]` are its arrays."""
        names = [f"in {i}" for i in range(len(operands[0]))] + [f"out {i}" for i in range(len(out_type))]
        for device in range(self.devices):
            for i, x in enumerate(operands[device]):
                self.memory[(device,), f"in {i}"] = np.array(x)
            for i, x in enumerate(out_type):
                self.memory[(device,), f"out {i}"] = np.full(x.shape, np.nan, x.dtype)
        self.grid, ctas = grid, math.prod(grid.values())
        self.threads = [Thread(d, c, w) for d in range(self.devices) for c in range(ctas) for w in range(3)]
        for device, cta in {thread[:2] for thread in self.threads}:
            for i, x in enumerate(scratch):
                if hasattr(x, "num_barriers"):
                    self.arrivals[device, cta, i] = x.num_arrivals
                else:
                    self.memory[(device, cta), f"scratch {i}"] = np.full(x.shape, np.nan, x.dtype)

        def program(thread: Thread) -> None:
            refs: list[Any] = [Ref(self, (thread.device,), name) for name in names]
            for i, x in enumerate(scratch):
                owner = thread.device, thread.cta
                barrier = hasattr(x, "num_barriers")
                refs.append(Counter((*owner, i)) if barrier else Ref(self, owner, f"scratch {i}"))
            body(*refs)

        self._schedule(program)
        if self.broken is None and (left := {key: n for key, n in self.semaphores.items() if n}):
            self.broken = Broken(f"left over: {left}")
        return [[self.memory[(device,), f"out {i}"] for i in range(len(out_type))] for device in range(self.devices)]

    def _schedule(self, program: Callable[[Thread], None]) -> None:
        turn = self.turn = {thread: threading.Semaphore(0) for thread in self.threads}
        speed = {thread: self.random.choice((1.0, 1.0, 0.02)) for thread in self.threads}
        self.alive = set(self.threads)

        def run(thread: Thread) -> None:
            self.here.thread, self.here.globals = thread, 0
            turn[thread].acquire()
            try:
                if self.broken is None:
                    with np.errstate(all="ignore"):
                        program(thread)
            except Exception as error:
                self.broken = self.broken or error
            self.alive.discard(thread)
            self.idle.release()

        threads = [threading.Thread(target=run, args=(thread,)) for thread in self.threads]
        for each in threads:
            each.start()
        while self.alive:
            ready = [t for t in self.threads if t in self.alive and (self.broken or self.waiting.get(t, lambda: True)())]
            if not ready and not self.events:
                self.broken = Broken("deadlock")
                continue
            weights = [speed[t] for t in ready] + [0.5] * len(self.events)
            (choice,) = self.random.choices(range(len(weights)), weights)
            if choice >= len(ready):
                self.events.pop(choice - len(ready))()
            else:
                turn[ready[choice]].release()
                self.idle.acquire()
        for each in threads:
            each.join()
        while self.events:
            self.events.pop(0)()

    def pause(self, until: Callable[[], bool] = lambda: True) -> Thread:
        """Let others go on, at least until the condition holds; the thread at hand."""
        thread = self.here.thread
        self.waiting[thread] = until
        self.idle.release()
        self.turn[thread].acquire()
        if self.broken:
            raise Broken("stopped")
        return thread

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            self.broken = self.broken or Broken(message)

    # Semaphores and barriers.

    def get_global(self, kind: Any) -> Counter:
        del kind
        self.here.globals += 1
        return Counter(self.here.globals)

    def signal(self, semaphore: Counter, amount: int, device_id: Any = None) -> None:
        thread = self.pause()
        device = thread.device if device_id is None else device_id[0]
        self.check(any(t.device == device for t in self.alive), f"signal to device {device}, which has left")
        self.semaphores[device, semaphore.key, semaphore.index] += amount

    def wait(self, semaphore: Counter, amount: int, decrement: bool = True) -> None:
        key = self.here.thread.device, semaphore.key, semaphore.index
        self.pause(lambda: self.semaphores[key] >= amount)
        self.semaphores[key] -= amount * decrement

    def _arrive(self, key: Any) -> None:
        self.arrived[key] += 1

    def _phases(self, key: Any) -> int:
        return self.arrived[key] // self.arrivals[key[:3]]

    def arrive(self, barrier: Counter) -> None:
        self.pause()
        self._arrive((*barrier.key, barrier.index))

    def wait_barrier(self, barrier: Counter) -> None:
        key, thread = (*barrier.key, barrier.index), self.here.thread
        self.check(thread[:2] == barrier.key[:2], "a barrier of another CTA")
        phase = self.waited[key, thread]
        self.pause(lambda: self._phases(key) > phase)
        self.check(self._phases(key) == phase + 1, f"barrier {key} completed twice before {thread} waited")
        self.waited[key, thread] = phase + 1

    # Copies. Each reads twice, a while apart, and writes later still.

    def _copy(self, source: Ref, target: Ref, read: Callable[[], None], written: Callable[[], None]) -> None:
        def first() -> None:
            data = source.view.copy()
            self.events.append(lambda: second(data))

        def second(data: np.ndarray) -> None:
            same = np.array_equal(data.view(np.uint16), np.ascontiguousarray(source.view).view(np.uint16))
            self.check(same, f"{source.name} of {source.owner} changed while a copy read it")
            read()
            self.events.append(lambda: write(data))

        def write(data: np.ndarray) -> None:
            target.view[...] = data
            written()

        self.check(source.shape == target.shape, f"copy from {source.shape} to {target.shape}")
        self.events.append(first)

    def load(self, source: Ref, target: Ref, barrier: Counter) -> None:
        self.pause()
        self._copy(source, target, lambda: None, lambda: self._arrive((*barrier.key, barrier.index)))

    def store(self, source: Ref, target: Ref) -> None:
        group = [0]
        self.groups[self.pause()].append(group)

        def advance() -> None:
            group[0] += 1

        self._copy(source, target, advance, advance)

    def wait_stores(self, n: int, wait_read_only: bool = False) -> None:
        mine = self.groups[self.here.thread]
        older = mine[: len(mine) - n]
        self.pause(lambda: all(group[0] >= (1 if wait_read_only else 2) for group in older))


class _Numpy:
    """numpy under the name jnp; counting in Python integers."""

    int32 = int
    float32 = np.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def fakes(machine: Machine) -> dict[str, Any]:
    """What stands for `pl`, `plgpu`, `lax` and `jnp` inside the kernel."""

    def axis_index(name: str) -> int:
        thread = machine.here.thread
        along = np.unravel_index(thread.cta, tuple(machine.grid.values()))
        here = {"warpgroup": thread.warpgroup} | dict(zip(machine.grid, map(int, along), strict=True))
        return here.get(name, thread.device)

    def fori_loop(low: Any, high: Any, body: Callable[..., Any], state: Any) -> Any:
        for i in range(low, high):
            state = body(i, state)
        return state

    under_way: dict[Thread, list[Callable[[], None]]] = defaultdict(list)

    def wgmma(acc: Registers, a: Any, b: Ref) -> None:
        """Reads shared memory as late as it may: when the product is waited for."""

        def multiply() -> None:
            left = a.view if isinstance(a, Ref) else a
            # Not by BLAS, whose threads would fight over the cores with ours.
            acc.value = acc.value + np.einsum("ij,jk->ik", left.astype(np.float32), b.view.astype(np.float32))

        under_way[machine.pause()].append(multiply)

    def wgmma_wait(n: int) -> None:
        mine = under_way[machine.pause()]
        while len(mine) > n:
            mine.pop(0)()

    def settle() -> None:
        wgmma_wait(0)

    def wgmma_accumulator_load(acc: Registers, wait_n: int) -> np.ndarray:
        wgmma_wait(wait_n)
        return acc.value

    def run_state(body: Callable[[Any], None]) -> Callable[[Any], Any]:
        def run(initial: Any) -> Any:
            several = isinstance(initial, tuple)
            refs = tuple(Registers(x, settle) for x in (initial if several else (initial,)))
            body(refs if several else refs[0])
            settle()
            return tuple(ref.value for ref in refs) if several else refs[0].value

        return run

    class ACC:
        init = staticmethod(lambda x: x)

        def __new__(cls, shape: tuple[int, ...], dtype: Any) -> Registers:  # type: ignore[misc]
            return Registers(np.zeros(shape, dtype), settle)

    def loop(low: Any, high: Any) -> Callable[[Callable[[int], None]], None]:
        return lambda body: fori_loop(low, high, lambda i, _: body(i), None)

    return {
        "jnp": _Numpy(),
        "lax": types.SimpleNamespace(
            axis_index=axis_index,
            rem=lambda a, b: int(np.fmod(a, b)),
            div=lambda a, b: int(a / b),
            select=lambda condition, a, b: a if condition else b,
            fori_loop=fori_loop,
            broadcast_in_dim=lambda x, shape, axes: np.broadcast_to(np.expand_dims(x, 1 - axes[0]), shape),
            optimization_barrier=lambda x: x,
        ),
        "pl": types.SimpleNamespace(
            when=lambda condition: lambda body: body() if condition else None,
            loop=loop,
            ds=lambda begin, size: slice(begin, begin + size),
            get_global=machine.get_global,
            semaphore_signal=machine.signal,
            semaphore_wait=machine.wait,
            run_scoped=lambda body, acc: body(acc),
            run_state=run_state,
        ),
        "plgpu": types.SimpleNamespace(
            ACC=ACC,
            Layout=types.SimpleNamespace(WGMMA=None),
            SemaphoreType=types.SimpleNamespace(REGULAR=lambda shape=(): None),
            Barrier=lambda num_arrivals=1, num_barriers=1: types.SimpleNamespace(
                num_arrivals=num_arrivals, num_barriers=num_barriers
            ),
            SMEM=lambda shape, dtype: types.SimpleNamespace(shape=shape, dtype=dtype),
            layout_cast=lambda x, layout: x,
            set_max_registers=lambda n, action: None,
            barrier_arrive=machine.arrive,
            barrier_wait=machine.wait_barrier,
            copy_gmem_to_smem=machine.load,
            copy_smem_to_gmem=machine.store,
            wait_smem_to_gmem=machine.wait_stores,
            commit_smem=lambda: None,
            remote_ref=lambda ref, device: ref.on(device[0]),
            wgmma=wgmma,
            wgmma_wait=wgmma_wait,
            wgmma_accumulator_load=wgmma_accumulator_load,
        ),
        "load": lambda ref, layout, optimized=True: ref[...],
        "store": lambda ref, value: ref.__setitem__(..., value),
        "tiled": lambda *dims, dtype, columns=64: types.SimpleNamespace(shape=dims, dtype=dtype),
        "fence": machine.pause,
    }


class Simulation:
    """Lets calls of the kernels, outside `jax.jit`, be computed by a `Machine` with four CTAs a device; a ring has two copy."""

    def __init__(self, patch: Any, devices: int, seed: int) -> None:
        from jax_ring_attention.fused.mosaic_gpu import forward, protocol
        from jax_ring_attention.kernels.mosaic_gpu import forward as chunk_forward
        from jax_ring_attention.kernels.mosaic_gpu import item, items, launch

        self.patch, self.devices, self.seed, self.device = patch, devices, seed, 0
        self.item, self.modules = item, (forward, protocol, item, items, launch, chunk_forward)
        self.calls: list[Any] = []
        self.results: Any = None
        patch.setattr(compat, "multiprocessors", lambda: 4)
        patch.setattr(forward, "copying_ctas", lambda shape: 2)
        patch.setattr(forward, "build", self._build_for_all)
        patch.setattr(chunk_forward, "build", self._build)

    @contextlib.contextmanager
    def _fake_scratch(self) -> Iterator[None]:
        """While a kernel is called, `item` says what is in shared memory."""
        fake = fakes(Machine(1, 0))
        with self.patch.context() as patch:
            patch.setattr(self.item, "tiled", fake["tiled"])
            patch.setattr(self.item, "plgpu", fake["plgpu"])
            yield

    def _compute(self, body: Any, out_type: Any, scratch: Any, grid: dict[str, int], operands: list[Any]) -> Any:
        machine = Machine(len(operands), self.seed)
        fake = fakes(machine)
        with self.patch.context() as patch:
            for module in self.modules:
                for name in {"pl", "plgpu", "lax", "jnp", "fence"} & set(vars(module)):
                    patch.setattr(module, name, fake[name])
            patch.setattr(compat, "load_whole", fake["load"])
            patch.setattr(compat, "store_whole", fake["store"])
            results = machine.run(body, out_type, scratch, grid, operands)
        if machine.broken is not None:
            raise machine.broken
        return [[jnp.asarray(x) for x in each] for each in results]

    def _build(self, *kernel: Any) -> Any:
        """In the place of a call on one device."""
        return lambda *operands: self._compute(*kernel, [operands])[0]

    def _build_for_all(self, *kernel: Any) -> Any:
        """In the place of a call on one of several devices: remember it, or give what they have computed together."""

        def run(*operands: Any) -> Any:
            if self.results is not None:
                return self.results[self.device]
            self.calls.append((kernel, operands))
            return [jnp.zeros(x.shape, x.dtype) for x in kernel[1]]

        return run

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """`program(device)` of every device; it calls a ring's kernel once at most."""

        def everywhere() -> list[Any]:
            results = []
            for device in range(self.devices):
                self.device = device
                results.append(program(device))
            return results

        self.calls, self.results = [], None
        with self._fake_scratch():
            results = everywhere()
        if not self.calls:
            return results
        self.results = self._compute(*self.calls[0][0], [operands for _, operands in self.calls])
        return everywhere()
