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
from jax.experimental import pallas as pl

from jax_ring_attention.fused import backward, forward, hops, launch, protocol
from jax_ring_attention.fused.backward import Results
from jax_ring_attention.fused.forward import Buffers
from jax_ring_attention.fused.hops import HopSteps, Route, Track, Travels
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


def pair(name: str, track: int) -> KeyValue:
    return KeyValue(Ref(f"key {name} {track}"), Ref(f"value {name} {track}"))


def channel_semaphores(name: str, track: int) -> tuple[Ref, ...]:
    return tuple(Ref(f"{name} {what} {track}") for what in ("sent", "arrived", "credit"))


class Broken(Exception):
    """What a protocol must not let happen."""


class Call(NamedTuple):
    """One kernel call: who receives from whom, of which barrier; one direction for every track."""

    ring: tuple[int, ...]
    route: Route
    kernel: str
    directions: tuple[int, ...] = (1,)


ONE_WAY, OTHER_WAY, BOTH_WAYS = (1,), (-1,), (1, -1)


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
            self.broken = Broken(f"left over: { {key: count for key, count in self.semaphores.items() if count} }")

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


def source_of(call: Call, device: int, track: int, hop: int) -> Any:
    return call.ring[(rank_of(call, device) - call.directions[track] * hop) % len(call.ring)]


def is_busy(number: int, call: Call, device: int, track: int, hop: int) -> bool:
    """Some devices have nothing to compute at some hops, and send all the same; at the first one everybody does."""
    return hop == call.route.first or (7 * number + 3 * device + 4 * track + 5 * hop) % 3 > 0


def run_calls(monkeypatch: Any, devices: int, calls: list[list[Call]], seed: int) -> Machine:
    """Every device runs its own list of calls; calls of equal index go together."""
    machine = Machine(devices, seed)
    here = machine.here
    fake_pl = types.SimpleNamespace(semaphore_signal=machine.signal, semaphore_wait=machine.wait, when=pl.when)
    fake_pltpu = types.SimpleNamespace(get_barrier_semaphore=machine.barrier, make_async_remote_copy=machine.copy)
    monkeypatch.setattr(protocol, "pl", fake_pl)
    monkeypatch.setattr(protocol, "pltpu", fake_pltpu)
    monkeypatch.setattr(launch, "for_hops", lambda first, last, body: [body(hop) for hop in range(first, last + 1)])
    monkeypatch.setattr(launch, "unpack_tokens", lambda *_: None)

    def label(track: int, hop: int) -> Any:
        return machine.position[here.device], source_of(here.call, here.device, track, hop), track

    def read_chunk(track: int, index: int, chunk: KeyValue) -> int:
        hop = index + here.call.route.first
        for ref in chunk:
            machine.read(ref, label(track, hop))
        here.computed.append((hop, track))
        return hop

    def fold(track, index, query, chunk, columns, start, stats):
        read_chunk(track.shape, index, chunk.chunk)

    def grads(track, steps, index, part, rows, chunk, tokens, d_start, d_query, d_chunk, scratch):
        share = label(track.shape, read_chunk(track.shape, index, chunk)), frozenset({here.device})
        for ref in d_chunk:
            machine.memory[machine.pause(), ref] = share
            machine.read(ref, share)

    def add(sums, share, block):
        for to, x in zip(sums, share, strict=True):
            device = machine.pause()
            have, new = machine.memory.get((device, to)), machine.memory[device, x]
            machine.check(have is not None and have[0] == new[0], f"device {device} adds {new} to {have}")
            machine.read(to, have)
            machine.memory[device, to] = None if have is None else (have[0], have[1] | new[1])

    monkeypatch.setattr(forward, "_fold_hop", fold)
    monkeypatch.setattr(backward, "_grads_hop", grads)
    monkeypatch.setattr(backward, "_add", add)

    def program(device: int) -> None:
        for number, call in enumerate(calls[device]):
            machine.pause()
            machine.position[device], here.call, here.computed = number, call, []
            size, route, rank = len(call.ring), call.route, rank_of(call, device)
            computed = range(route.first, route.hops + 1)
            neighbours, tracks, buffers = [], [], []
            for track, direction in enumerate(call.directions):
                own = Travels(pair("own", track), Tokens())
                for ref in own.chunk:
                    machine.memory[device, ref] = number, device, track
                neighbours += [call.ring[(rank + direction * step) % size] for step in (1, -1, -route.hops)]
                total = [int(is_busy(number, call, device, track, hop)) for hop in computed]
                # Which track it is stands in the place of its shape, which only the compute looks at.
                tiling = types.SimpleNamespace(block_kv=0)
                tracks.append(Track(track, tiling, (HopSteps(None, None, total, 0, 1),), None, own))
                buffers.append(Buffers(Travels(pair("slots", track), Tokens()), Tokens()))
            given = tuple(each.operands for each in tracks)
            scalars = neighbours, tuple(each.scalars for each in tracks)
            semaphores = tuple(channel_semaphores("chunk", track) for track in range(len(tracks)))
            if call.kernel == "forward":
                forward._kernel(route, tuple(tracks), scalars, (None, given, None), ((None,) * 3, tuple(buffers)), semaphores)
            else:
                results = tuple(
                    Results(pair("d home", track), pair("d share", track), pair("d slots", track), each)
                    for track, each in enumerate(buffers)
                )
                scratch = tuple(
                    (each, channel_semaphores("d_chunk", track), (Ref(f"home sent {track}"), Ref(f"home arrived {track}")))
                    for track, each in enumerate(semaphores)
                )
                operands, parts = (None, given, None), ((0, 1),)
                backward._kernel(route, parts, tuple(tracks), scalars, operands, (None, results), (scratch, None))
                for track, direction in enumerate(call.directions):
                    visited = {call.ring[(rank + direction * hop) % size]: hop for hop in computed}
                    took_part = {other for other, hop in visited.items() if is_busy(number, call, other, track, hop)}
                    for ref in results[track].d_chunk:
                        machine.read(ref, ((number, device, track), frozenset(took_part)))
            want = [(hop, i) for hop in computed for i in range(len(tracks)) if is_busy(number, call, device, i, hop)]
            machine.check(here.computed == want, f"device {device} computed {here.computed}")
        machine.position[device] = len(calls[device])

    machine.run([functools.partial(program, device) for device in range(devices)])
    return machine


def repeated(size: int, ways: tuple[tuple[int, ...], ...] = (ONE_WAY, OTHER_WAY, BOTH_WAYS), **options: Any) -> list[list[Call]]:
    """Forward, backward, forward, backward on one ring, one of `ways` after the other."""
    ring = tuple(range(size))

    def route(**changes):
        fields = {"mesh_axes": 1, "hops": size - 1, "first": 0, "collective_id": 0, "schedule": "fused"}
        return Route(**(fields | options | changes))

    first, second, third = (ways * 3)[:3]
    calls = [
        Call(ring, route(), "forward", first),
        Call(ring, route(), "backward", first),
        Call(ring, route(), "backward", second),
        Call(ring, route(), "forward", third),
        Call(ring, route(), "backward", third),
        Call(ring, route(first=1), "forward", second),
        Call(ring, route(first=1), "backward", second),
        Call(ring, route(), "backward", third),
        Call(ring, route(), "forward", first),
    ]
    return [calls] * size


def crossed(ids: tuple[int, int], directions: tuple[int, ...] = ONE_WAY) -> list[list[Call]]:
    """A mesh of 2 x 3 devices: calls on rings of three and on rings of two, in turn."""
    rows, columns = [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]
    lists = []
    for device in range(6):
        (row,) = (ring for ring in rows if device in ring)
        (column,) = (ring for ring in columns if device in ring)
        pair = [
            Call(row, Route(1, 2, 0, ids[0], "fused"), "forward", directions),
            Call(column, Route(1, 1, 0, ids[1], "fused"), "backward", directions),
        ]
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


@pytest.mark.parametrize("directions", [ONE_WAY, BOTH_WAYS], ids=str)
def test_rings_with_other_neighbours_keep_apart(directions, monkeypatch):
    sizes = {"a": 2, "b": 3}
    ids = hops.collective_id(("b",), sizes, "fused"), hops.collective_id(("a",), sizes, "fused")
    assert first_fault(monkeypatch, 6, crossed(ids, directions), seeds=10) is None


def granted_without_signals(monkeypatch):
    """The first credits taken for granted, not signalled after the barrier: then leaving does not prove that others entered.

    Where chunks come from both neighbours, those prove it.
    """
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


def without(*names: str) -> Callable[[Any, int], None]:
    """These methods of the channels of one track do nothing."""

    def break_them(patch: Any, track: int) -> None:
        for name in names:
            method = getattr(protocol.Channel, name)

            def unless(self, *args, method=method):
                return None if self.credit.name.endswith(str(track)) else method(self, *args)

            patch.setattr(protocol.Channel, name, unless)

    return break_them


FAULTS: dict[str, Callable[[Any, int], None]] = {
    "no credits": without("grant", "take"),
    "credits not taken": without("take"),
    "no wait for arrival": without("wait_arrived"),
    "no wait for departure": without("wait_sent"),
}


def some_fault(monkeypatch: Any, ways: tuple[tuple[int, ...], ...]) -> bool:
    return any(first_fault(monkeypatch, 5, repeated(5, ways, hops=hops)) is not None for hops in (3, 1))


@pytest.mark.parametrize("track", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_every_part_of_the_protocol_is_needed_by_every_track(name, track, monkeypatch):
    FAULTS[name](monkeypatch, track)
    assert some_fault(monkeypatch, (BOTH_WAYS,) if track else (ONE_WAY, OTHER_WAY))


@pytest.mark.parametrize("ways", [(ONE_WAY, OTHER_WAY), (BOTH_WAYS,)], ids=["one way", "both ways"])
def test_the_barrier_is_needed(ways, monkeypatch):
    monkeypatch.setattr(protocol.Neighbours, "enter", lambda self: None)
    assert some_fault(monkeypatch, ways)


def test_the_first_credits_must_be_signalled(monkeypatch):
    granted_without_signals(monkeypatch)
    assert some_fault(monkeypatch, (ONE_WAY, OTHER_WAY))


@pytest.mark.parametrize("directions", [ONE_WAY, BOTH_WAYS], ids=str)
def test_rings_with_other_neighbours_need_another_barrier(directions, monkeypatch):
    assert first_fault(monkeypatch, 6, crossed((0, 0), directions), seeds=200) is not None
