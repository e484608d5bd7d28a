"""The protocol of the fused ring under every order of events: the kernels' own control flow on simulated devices.

`_kernel` of `fused.forward` and `fused.backward` runs unchanged, one thread per device, with Pallas' semaphores and copies
replaced by a machine that picks at random what happens next: an instruction of one device, some of which are slow, or half of a
copy that is under way. Semaphores keep their values from one call to the next, as those of a chip do. The machine refuses what
hardware would not notice: to send to a device that runs another call, to leave a semaphore that is not zero, to read a chunk
that is not the expected one.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from jax_ring_attention.fused import backward, forward, hops, launch, protocol
from jax_ring_attention.fused.hops import HopSteps, Route, Travels
from jax_ring_attention.kernels.contract import KeyValue
from jax_ring_attention.masks import Tokens

pytestmark = pytest.mark.fast


@dataclasses.dataclass(frozen=True)
class Ref:
    """A buffer or semaphore of every device, or a part of it."""

    name: str
    part: Any = None

    @property
    def at(self) -> Any:
        return _At(self.name)


class _At:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, part: Any) -> Ref:
        return Ref(self.name, part)


def pair(name: str) -> KeyValue:
    return KeyValue(Ref(f"d_key {name}"), Ref(f"d_value {name}"))


class Broken(Exception):
    """What a protocol must not let happen."""


class Call(NamedTuple):
    """One kernel call: who receives from whom, of which barrier."""

    ring: tuple[int, ...]
    route: Route
    kernel: str
    direction: int = 1


class Machine:
    """Runs a list of calls on all devices; `broken` says what went wrong first."""

    def __init__(self, devices: int, seed: int) -> None:
        self.devices, self.random = devices, random.Random(seed)
        self.speed = [self.random.choice((1.0, 0.01)) for _ in range(devices)]
        self.semaphores: dict[Any, int] = {}
        self.memory: dict[Any, Any] = {}
        self.events: list[Callable[[], None]] = []
        self.position = [-1] * devices  # the call that each device runs
        self.waiting: dict[int, Callable[[], bool]] = {}
        self.turn = [threading.Semaphore(0) for _ in range(devices)]
        self.idle = threading.Semaphore(0)
        self.broken: Exception | None = None
        self.here = threading.local()

    def run(self, programs: list[Callable[[], None]]) -> None:
        def thread(device: int) -> None:
            self.here.device = device
            self.turn[device].acquire()
            try:
                if self.broken is None:
                    programs[device]()
            except Exception as error:
                self.broken = self.broken or error
            alive.discard(device)
            self.idle.release()

        alive = set(range(self.devices))
        threads = [threading.Thread(target=thread, args=(device,)) for device in range(self.devices)]
        for each in threads:
            each.start()
        while alive:
            ready = [d for d in sorted(alive) if self.broken or self.waiting.get(d, lambda: True)()]
            if not ready and not self.events:
                self.broken = Broken("deadlock")
                continue
            weights = [self.speed[d] for d in ready] + [0.3] * len(self.events)
            (choice,) = self.random.choices(range(len(weights)), weights)
            if choice >= len(ready):
                self.events.pop(choice - len(ready))()
            else:
                self.turn[ready[choice]].release()
                self.idle.acquire()
        for each in threads:
            each.join()
        while self.events:
            self.events.pop(0)()
        if self.broken is None and any(self.semaphores.values()):
            self.broken = Broken(f"left over: {self.semaphores}")

    def pause(self, until: Callable[[], bool] = lambda: True) -> int:
        """Let others go on, at least until the condition holds; the device at hand."""
        device = self.here.device
        self.waiting[device] = until
        self.idle.release()
        self.turn[device].acquire()
        if self.broken:
            raise Broken("stopped")
        return device

    def add(self, device: int, semaphore: Any, amount: int) -> None:
        key = device, semaphore
        self.semaphores[key] = self.semaphores.get(key, 0) + amount

    def check(self, condition: bool, message: str) -> None:
        if not condition:
            self.broken = self.broken or Broken(message)

    # What Pallas provides.

    def signal(self, semaphore: Any, amount: int, device_id: Any) -> None:
        device = self.pause()
        (to,) = device_id
        if semaphore.name != "barrier":
            self.check(self.position[to] == self.position[device], f"signal to device {to} in another call")
        self.add(to, semaphore, amount)

    def wait(self, semaphore: Any, amount: int) -> None:
        device = self.here.device
        self.pause(lambda: self.semaphores.get((device, semaphore), 0) >= amount)
        self.add(device, semaphore, -amount)

    def barrier(self) -> Ref:
        return Ref("barrier", self.here.call.route.collective_id)

    def copy(self, src_ref: Ref, dst_ref: Ref, send_sem: Ref, recv_sem: Ref, device_id: Any) -> Any:
        device, (to,) = self.here.device, device_id

        def start() -> None:
            self.pause()
            call = self.position[device]

            def read() -> None:
                data = self.memory.get((device, src_ref))
                self.add(device, send_sem, 1)
                self.events.append(lambda: write(data))

            def write(data: Any) -> None:
                self.check(self.position[to] == call, f"data to device {to} in another call")
                self.memory[to, dst_ref] = data
                self.add(to, recv_sem, 1)

            self.events.append(read)

        waits = {"wait_send": (send_sem,), "wait_recv": (recv_sem,), "wait": (send_sem, recv_sem)}

        def waiter(semaphores):
            return lambda: [self.wait(semaphore, 1) for semaphore in semaphores]

        return types.SimpleNamespace(start=start, **{name: waiter(x) for name, x in waits.items()})

    # What the kernels compute.

    def read(self, ref: Ref, want: Any) -> None:
        """The same data now and a while later."""
        for _ in range(2):
            device = self.pause()
            have = self.memory.get((device, ref))
            self.check(have == want, f"device {device} reads {have} in {ref}, not {want}")


def rank_of(call: Call, device: int) -> int:
    return call.ring.index(device)


def source_of(call: Call, device: int, hop: int) -> Any:
    return call.ring[(rank_of(call, device) - call.direction * hop) % len(call.ring)]


def is_busy(number: int, call: Call, device: int, hop: int) -> bool:
    """Some devices have nothing to compute at some hops, and send all the same; at the first one everybody does."""
    return hop == call.route.first or (7 * number + 3 * device + 5 * hop) % 3 > 0


def run_calls(monkeypatch: Any, devices: int, calls: list[list[Call]], seed: int) -> Machine:
    """Every device runs its own list of calls; calls of equal index go together."""
    machine = Machine(devices, seed)
    here = machine.here
    fake_pl = types.SimpleNamespace(semaphore_signal=machine.signal, semaphore_wait=machine.wait)
    fake_pltpu = types.SimpleNamespace(get_barrier_semaphore=machine.barrier, make_async_remote_copy=machine.copy)
    monkeypatch.setattr(protocol, "pl", fake_pl)
    monkeypatch.setattr(protocol, "pltpu", fake_pltpu)
    monkeypatch.setattr(launch, "for_hops", lambda first, last, body: [body(hop) for hop in range(first, last + 1)])
    monkeypatch.setattr(launch, "unpack_tokens", lambda *_: None)

    def label(hop: int) -> Any:
        return machine.position[here.device], source_of(here.call, here.device, hop)

    def read_chunk(index: int, chunk: KeyValue) -> int:
        hop = index + here.call.route.first
        for ref in chunk:
            machine.read(ref, label(hop))
        return hop

    def fold(shape, tiling, steps, index, query, query_tokens, chunk, columns, start, stats):
        here.computed.append(read_chunk(index, chunk.chunk))

    def grads(shape, tiling, steps, index, part, rows, chunk, tokens, d_start, d_query, d_chunk, scratch):
        hop = read_chunk(index, chunk)
        here.computed.append(hop)
        for ref in d_chunk:
            machine.memory[machine.pause(), ref] = (*label(hop), frozenset({here.device}))
            machine.read(ref, (*label(hop), frozenset({here.device})))

    def add(sums, share, block):
        for to, x in zip(sums, share, strict=True):
            device = machine.pause()
            have, new = machine.memory.get((device, to)), machine.memory[device, x]
            machine.check(have is not None and have[:2] == new[:2], f"device {device} adds {new} to {have}")
            machine.read(to, have)
            machine.memory[device, to] = None if have is None else (*have[:2], have[2] | new[2])

    monkeypatch.setattr(forward, "_fold_hop", fold)
    monkeypatch.setattr(backward, "_grads_hop", grads)
    monkeypatch.setattr(backward, "_add", add)

    def program(device: int) -> None:
        for number, call in enumerate(calls[device]):
            machine.pause()
            machine.position[device], here.call, here.computed = number, call, []
            own = Travels(KeyValue(Ref("key"), Ref("value")), Tokens())
            for ref in own.chunk:
                machine.memory[device, ref] = number, device
            size, route, rank = len(call.ring), call.route, rank_of(call, device)
            steps = (call.direction, -call.direction, -call.direction * route.hops)
            neighbours = [call.ring[(rank + step) % size] for step in steps]
            busy = {hop: is_busy(number, call, device, hop) for hop in range(route.first, route.hops + 1)}
            listed = HopSteps(None, None, [int(x) for x in busy.values()], 0, 1)
            buffers = types.SimpleNamespace(
                slots=Travels(KeyValue(Ref("key slots"), Ref("value slots")), Tokens()), columns=Tokens()
            )
            semaphores = tuple(Ref(f"chunk {name}") for name in ("sent", "arrived", "credit"))
            if call.kernel == "forward":
                operands = (types.SimpleNamespace(shape=()), None, own, None)
                forward._kernel(
                    None,
                    None,
                    route,
                    listed,
                    (neighbours, (None, None, listed.total)),
                    operands,
                    ((None,) * 3, buffers),
                    semaphores,
                )
            else:
                d_semaphores = tuple(Ref(f"d_chunk {name}") for name in ("sent", "arrived", "credit"))
                home = Ref("home sent"), Ref("home arrived")
                tiling = types.SimpleNamespace(block_kv=0)
                scalars = neighbours, ((None, None, listed.total),)
                results = None, pair("home"), pair("share"), pair("slots"), buffers
                scratch = semaphores, d_semaphores, home, None
                backward._kernel(None, tiling, route, (((0, 1), listed),), scalars, (None, None, own, None), results, scratch)
                visited = {call.ring[(rank + call.direction * hop) % size]: hop for hop in busy}
                took_part = {other for other, hop in visited.items() if is_busy(number, call, other, hop)}
                for ref in pair("home"):
                    machine.read(ref, (number, device, frozenset(took_part)))
            want = [hop for hop, computes in busy.items() if computes]
            machine.check(here.computed == want, f"device {device} computed {here.computed}")
        machine.position[device] = len(calls[device])

    machine.run([functools.partial(program, device) for device in range(devices)])
    return machine


def repeated(size: int, **options: Any) -> list[list[Call]]:
    """Forward, backward, forward, backward on one ring, one direction after the other."""
    ring = tuple(range(size))

    def route(**changes):
        return Route(**({"mesh_axes": 1, "hops": size - 1, "first": 0, "collective_id": 0} | options | changes))

    calls = [
        Call(ring, route(), "forward"),
        Call(ring, route(), "backward"),
        Call(ring, route(), "backward", -1),
        Call(ring, route(first=1), "forward", -1),
        Call(ring, route(first=1), "backward", -1),
        Call(ring, route(), "forward"),
    ]
    return [calls] * size


def crossed(ids: tuple[int, int]) -> list[list[Call]]:
    """A mesh of 2 x 3 devices: calls on rings of three and on rings of two, in turn."""
    rows, columns = [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]
    lists = []
    for device in range(6):
        (row,) = (ring for ring in rows if device in ring)
        (column,) = (ring for ring in columns if device in ring)
        pair = [Call(row, Route(1, 2, 0, ids[0]), "forward"), Call(column, Route(1, 1, 0, ids[1]), "backward")]
        lists.append(pair * 3)
    return lists


def first_fault(monkeypatch: Any, devices: int, calls: list[list[Call]], seeds: int = 40) -> str | None:
    for seed in range(seeds):
        machine = run_calls(monkeypatch, devices, calls, seed)
        if isinstance(machine.broken, Broken):
            return str(machine.broken)
        if machine.broken is not None:
            raise machine.broken
    return None


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_repeated_calls_keep_apart(size, monkeypatch):
    assert first_fault(monkeypatch, size, repeated(size), seeds=6) is None


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_rings_whose_last_hops_are_not_made(hops, monkeypatch):
    assert first_fault(monkeypatch, 5, repeated(5, hops=hops), seeds=6) is None


def test_rings_with_other_neighbours_keep_apart(monkeypatch):
    sizes = {"a": 2, "b": 3}
    ids = hops.collective_id(("b",), sizes), hops.collective_id(("a",), sizes)
    assert first_fault(monkeypatch, 6, crossed(ids), seeds=20) is None


def granted_without_signals(monkeypatch):
    """The first credits taken for granted, not signalled after the barrier: then leaving does not prove that others entered."""
    taken = threading.local()
    grant, take, enter = protocol.Channel.grant, protocol.Channel.take, protocol.Neighbours.enter

    def enter_once(self):
        taken.grants, taken.takes = {}, {}
        enter(self)

    def skip(counts, channel, method):
        name = channel.credit.name
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > (protocol.SLOTS if name.startswith("chunk") else 1):
            method(channel)

    monkeypatch.setattr(protocol.Neighbours, "enter", enter_once)
    monkeypatch.setattr(protocol.Channel, "grant", lambda self: skip(taken.grants, self, grant))
    monkeypatch.setattr(protocol.Channel, "take", lambda self: skip(taken.takes, self, take))


FAULTS: dict[str, Callable[[Any], None]] = {
    "no barrier": lambda patch: patch.setattr(protocol.Neighbours, "enter", lambda self: None),
    "no credits": lambda patch: [patch.setattr(protocol.Channel, name, lambda self: None) for name in ("grant", "take")],
    "credits not taken": lambda patch: patch.setattr(protocol.Channel, "take", lambda self: None),
    "no wait for arrival": lambda patch: patch.setattr(protocol.Channel, "wait_arrived", lambda self, transfer: None),
    "no wait for departure": lambda patch: patch.setattr(protocol.Channel, "wait_sent", lambda self, transfer, source: None),
    "first credits not signalled": granted_without_signals,
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_part_of_the_protocol_is_needed(name, monkeypatch):
    FAULTS[name](monkeypatch)
    assert any(first_fault(monkeypatch, 5, repeated(5, hops=hops)) is not None for hops in (3, 1))


def test_rings_with_other_neighbours_need_another_barrier(monkeypatch):
    assert first_fault(monkeypatch, 6, crossed((0, 0)), seeds=200) is not None
