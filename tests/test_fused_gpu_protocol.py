"""The fused ring on GPUs under every order of events: the whole kernel on simulated devices, against dense attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_machine import Broken, Simulation

from jax_ring_attention import compat
from jax_ring_attention.fused import mosaic_gpu as gpu_ring
from jax_ring_attention.kernels.contract import Problem
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.layouts import from_layout, to_layout
from jax_ring_attention.schedule import needed_offsets, plan_hops
from jax_ring_attention.shard import Inputs, Integers, Ring, Shard
from jax_ring_attention.testing import dense_expected, earned_tolerances, random_inputs, relative_error, visible_pairs

pytestmark = pytest.mark.skipif(compat.JAX_VERSION < (0, 11, 2), reason="refused before jax 0.11.2")


class RingOf:
    """Forward passes on a ring of `size` simulated devices; what a mesh would do around the kernel is patched."""

    def __init__(self, patch: Any, size: int, seed: int) -> None:
        from jax_ring_attention.fused.mosaic_gpu import route

        self.size, self.rank = size, 0
        self.simulation = Simulation(patch, size, seed)
        self.shards: list[Shard] = []
        patch.setattr(Ring, "rank", lambda _: jnp.int32(self.rank))
        patch.setattr(route, "route_of", self._route)
        patch.setattr(route.lax, "all_gather", lambda _, axis: jnp.stack([x.integers.key_segment for x in self.shards]))

    def _route(self, ring: Ring, leg: Any) -> Any:
        from jax_ring_attention.fused.mosaic_gpu.route import Route

        (stream,) = leg.streams
        return Route(stream.hops, int(not leg.home), stream.direction, (("seq", self.size),), ring.axis_name)

    def _fold(self, leg: Any, queries: list[Any], stats: list[Any], last: bool) -> list[Any]:
        def here(rank: int) -> Any:
            self.rank = rank
            return gpu_ring.fold_leg(self.shards[rank], leg, queries[rank], stats[rank], last)

        return self.simulation.run(here)

    def attend(
        self, inputs: Any, layout: str = "contiguous", reach: Any = (None, None), segments: Any = None, **changes: Any
    ) -> tuple[Any, Any]:
        """Output and lse in natural order, as `ring_forward` makes them."""
        (batch, length, heads, dim), size = inputs.query.shape, self.size
        key_length, kv_heads = inputs.key.shape[1] // size, inputs.key.shape[2]
        problem = Problem(
            (batch, length // size, heads, dim),
            (batch, key_length, kv_heads, dim),
            inputs.value.shape[3],
            inputs.query.dtype,
            dim**-0.5,
            reach,
            row_wise=segments is not None,
            **changes,
        )
        needed = needed_offsets(layout, size, length // size, key_length, reach)
        legs = plan_hops("fused", size, key_length, needed)
        ring = Ring(("seq",), size, layout, legs, problem, MosaicGpuKernel, fused=True)

        def split(x: Any) -> list[Any]:
            return [None] * size if x is None else jnp.split(to_layout(x, layout, size), size, axis=1)

        parts = zip(*(split(x) for x in (*inputs[:3], segments)), strict=True)
        self.shards = []
        for rank, (query, key, value, segment) in enumerate(parts):
            self.rank, integers = rank, Integers(query_segment=segment, key_segment=segment)
            self.shards.append(Shard(ring, Inputs(query, key, value), integers))
        queries = [shard.kernel.pack_query(shard.inputs.query) for shard in self.shards]
        stats: list[Any] = [None] * size
        for leg in legs:
            stats = self._fold(leg, queries, stats, leg is legs[-1])
        return tuple(from_layout(jnp.concatenate(x, axis=1), layout, size) for x in zip(*stats, strict=True))


def check(patch: Any, size: int, seed: int, sizes: Any, seen_by: Any, **options: Any) -> None:
    inputs = random_inputs(seed, **({"head_dim": 64, "dtype": jnp.bfloat16} | sizes))
    length, key_length = inputs.query.shape[1], inputs.key.shape[1]
    segments = options.get("segments")
    seen = visible_pairs(length, key_length, batch=inputs.query.shape[0], segment_ids=segments, **seen_by)[:, None]
    want = dense_expected(inputs, seen)
    earned = earned_tolerances(inputs, want, seen)
    out, lse = RingOf(patch, size, seed).attend(inputs, **options)
    assert relative_error(out, want.out) <= earned.out
    assert relative_error(lse, want.lse) <= earned.lse


CASES: dict[str, tuple[int, Any, Any, Any]] = {
    "two devices": (2, {"query_length": 512}, {}, {}),
    "five devices, grouped heads": (5, {"query_length": 640, "heads": 3, "kv_heads": 1}, {}, {}),
    "two rows of more items than CTAs": (2, {"query_length": 256, "batch": 2, "heads": 3}, {}, {}),
    "causal": (4, {"query_length": 512}, {"is_causal": True}, {"reach": (None, 0)}),
    "causal zigzag": (2, {"query_length": 1024, "heads": 1}, {"is_causal": True}, {"reach": (None, 0), "layout": "zigzag"}),
    "window on both sides, two legs": (
        4,
        {"query_length": 512, "heads": 1},
        {"local_window_size": (100, 65)},
        {"reach": (100, 65)},
    ),
    "lengths that no block divides": (3, {"query_length": 3 * 150}, {"is_causal": True}, {"reach": (None, 0)}),
    "wide heads, without staging": (2, {"query_length": 256, "heads": 1, "head_dim": 192, "value_dim": 128}, {}, {}),
}


def many_orders_of_events(patch: Any, seeds: int) -> None:
    for seed in range(seeds):
        check(patch, 4, seed, {"query_length": 512, "heads": 2}, {})


@pytest.mark.parametrize("name", CASES)
def test_simulated_rings_match_dense(name, monkeypatch):
    size, sizes, seen_by, options = CASES[name]
    check(monkeypatch, size, 0, sizes, seen_by, **options)


def test_given_segments_travel_by_a_gather_before_the_kernel(monkeypatch):
    segments = jnp.asarray(np.sort(np.random.default_rng(0).integers(-1, 3, size=(2, 384)), axis=1), jnp.int32)
    check(monkeypatch, 3, 0, {"query_length": 384, "batch": 2, "heads": 1}, {}, segments=segments)


def unordered_loads(patch: Any, module: Any) -> None:
    patch.setattr(module.Channel, "wait_arrived", lambda self, transfer: None)


def no_credit(patch: Any, module: Any) -> None:
    patch.setattr(module.Channel, "wait_free", lambda self, transfer: None)


def early_announcement(patch: Any, module: Any) -> None:
    def announce(self: Any, transfer: Any) -> None:
        module.pl.semaphore_signal(self.counters.arrived.at[transfer], 1, device_id=self.neighbours.receiver)

    patch.setattr(module.Channel, "announce", announce)


def nobody_cleans_up(patch: Any, module: Any) -> None:
    patch.setattr(module.Channel, "leave", lambda self, cta: None)


def one_counter_for_all(patch: Any, module: Any) -> None:
    """Transfers counted together, as if all copying CTAs went at one speed."""

    class All:
        """An array of counters that is one counter."""

        def __init__(self, counter: Any) -> None:
            self.at = {transfer: counter for transfer in range(8)}

    def wait_arrived(self: Any, transfer: int) -> None:
        module.pl.semaphore_wait(self.counters.arrived.at[transfer], self.copying * (transfer + 1), decrement=False)

    make = module.Counters.of
    patch.setattr(module.Counters, "of", lambda route: make(route)._replace(arrived=All(make(route).arrived.at[0])))
    patch.setattr(module.Channel, "wait_arrived", wait_arrived)


FAULTS = [unordered_loads, no_credit, early_announcement, nobody_cleans_up, one_counter_for_all]


@pytest.mark.fast
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_part_of_the_protocol_is_needed(fault, monkeypatch):
    from jax_ring_attention.fused.mosaic_gpu import protocol

    fault(monkeypatch, protocol)
    with pytest.raises((Broken, AssertionError)):  # most seeds find each of them
        many_orders_of_events(monkeypatch, 30)


@pytest.mark.fast
def test_the_whole_protocol_under_many_orders_of_events(monkeypatch):
    many_orders_of_events(monkeypatch, 6)
