"""Forward: every hop of one leg in one kernel.

Queries and statistics stay where they are; the chunk in hand is read by the compute and by the DMA that sends it on, at the same
time. At hop h, the chunk being that of rank - direction * h:

    wait until transfer h - 1 has landed                       (hop 0: the device's own chunk)
    take a credit, start transfer h                            (not after the last hop)
    fold the chunk into the statistics                         (a pipeline over the listed pairs of blocks)
    wait until transfer h has left, grant a credit             (its buffer has no reader left)

The statistics are output buffers in HBM that the pipeline both reads and writes: every block of queries is visited in one run of
steps per hop, and a pipeline ends with its last write done.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_ring_attention.fused import launch
from jax_ring_attention.fused.hops import HopSteps, Route, Travels
from jax_ring_attention.fused.protocol import SLOTS, Channel, Neighbours
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu import launch as pair_launch
from jax_ring_attention.kernels.mosaic_tpu.common import LANES, Shape, Tiling
from jax_ring_attention.kernels.mosaic_tpu.forward import fold_pair
from jax_ring_attention.masks import Tokens
from jax_ring_attention.stats import ChunkStats


class Buffers(NamedTuple):
    """Results of a kernel that nobody reads afterwards: (SLOTS, ...) of what travels, and the integers in hand as columns."""

    slots: Travels
    columns: Tokens


def buffers_of(own: Travels) -> Buffers:
    def slots(x):
        return jax.ShapeDtypeStruct((SLOTS, *x.shape), x.dtype)

    def columns(x):
        return jax.ShapeDtypeStruct((x.shape[0], x.shape[2], LANES), x.dtype)

    return Buffers(jax.tree.map(slots, own), jax.tree.map(columns, own.tokens))


def fold_hops(
    shape: Shape,
    tiling: Tiling,
    route: Route,
    coordinates: jax.Array,
    steps: HopSteps,
    query: jax.Array,
    query_tokens: Tokens,
    own: Travels,
    carry: ChunkStats | None,
) -> ChunkStats:
    """`carry` merged with the statistics of the chunks of all hops.

    Args:
      coordinates: from `hops.coordinates_of`.
      steps: of the computed hops, query blocks outside.
      query: (B, K, G, H, T), or twice H with `shape.split_scale`.
      query_tokens: rows (B | 1, 1, T).
      own: this device's own chunk.
      carry: as in the chunk kernel; None has seen no key.
    """
    stats = tuple(jax.ShapeDtypeStruct((*query.shape[:3], n, shape.query_length), jnp.float32) for n in (shape.value_dim, 1, 1))
    result, _ = launch.call(
        functools.partial(_kernel, shape, tiling, route, steps),
        name="ring_attention_fused_forward",
        route=route,
        coordinates=coordinates,
        scalars=(steps.code, steps.compared, steps.total),
        operands=(query, query_tokens, own, carry),
        out_shape=(stats, buffers_of(own)),
        scratch=Channel.semaphores(len(jax.tree.leaves(own))),
        vmem_limit=shape.vmem_limit,
    )
    return ChunkStats(*result)


def _kernel(
    shape: Shape, tiling: Tiling, route: Route, steps: HopSteps, scalars: Any, operands: Any, results: Any, scratch: Any
) -> None:
    coordinates, listed = scalars
    query, query_tokens, own, carry = operands
    stats, buffers = ChunkStats(*results[0]), results[1]
    here = steps.in_memory(listed)
    structure = jax.tree.structure(own)
    channel = Channel(Neighbours(route.mesh_axes, coordinates), jax.tree.leaves(buffers.slots), scratch)
    last = route.hops

    def turn(hop: Any, source: Any, start: ChunkStats | None) -> None:
        """One hop with the chunk in `source`, which landed; `start` has the statistics so far, or None has seen no key."""
        chunk = jax.tree.unflatten(structure, source)
        pl.when(hop < last)(lambda: channel.send(hop, source))
        fold = functools.partial(
            _fold_hop, shape, tiling, here, hop - route.first, query, query_tokens, chunk, buffers.columns, start, stats
        )
        pl.when(here.total[hop - route.first] > 0)(fold)
        pl.when(hop < last)(lambda: channel.wait_sent(hop, source))
        pl.when((hop > 0) & (hop + SLOTS - 1 < last))(channel.grant)

    def turn_arrived(hop: Any, start: ChunkStats | None = stats) -> None:
        channel.wait_arrived(hop - 1)
        turn(hop, channel.at(hop - 1), start)

    channel.neighbours.enter()
    for _ in range(min(SLOTS, last)):
        channel.grant()
    home = tuple(jax.tree.leaves(own))
    if route.first == 0:
        turn(0, home, carry)
    else:
        channel.send(0, home)
        channel.wait_sent(0, home)
        turn_arrived(1, carry)
    launch.for_hops(route.first + 1, last, turn_arrived)


def _fold_hop(
    shape: Shape,
    tiling: Tiling,
    steps: HopSteps,
    index: Any,
    query: Any,
    query_tokens: Tokens,
    chunk: Travels,
    columns: Tokens,
    start: ChunkStats | None,
    stats: ChunkStats,
) -> None:
    """`stats = merge(start, statistics of the chunk in hand)`; all in HBM, `start` may be `stats`."""
    launch.unpack_tokens(chunk.tokens, columns, tiling.block_kv)
    tokens = (query_tokens, columns)
    row, column = common.outer_of, common.inner_of
    blocks = launch.HopBlocks(steps, index)

    def of_query(rows: int) -> pl.BlockSpec:
        return blocks.spec((None, None, None, rows, tiling.block_q), lambda b, k, g, code: (b, k, g, 0, row(code)))

    key_spec = blocks.spec((None, None, tiling.block_kv, shape.head_dim), lambda b, k, g, code: (b, k, column(code), 0))
    value_spec = blocks.spec((None, None, shape.value_dim, tiling.block_kv), lambda b, k, g, code: (b, k, 0, column(code)))
    stats_specs = (of_query(shape.value_dim), of_query(1), of_query(1))

    def step(at: Any, operands: Any, results: ChunkStats) -> None:
        query, key, value, tokens, before = operands
        code = blocks.step(steps.code, at)

        @pl.when(common.is_first(code))
        def _():
            for to, first, initial in zip(results, before or (None,) * 3, (0, 0, -jnp.inf), strict=True):
                to[...] = jnp.full(to.shape, initial, to.dtype) if first is None else first[...]

        fold = functools.partial(fold_pair, shape, tiling, query, key, value, tokens, results)
        pair_launch.branch_on_kind(code, tokens, tiling, fold)

    launch.pipeline(
        step,
        (*query.shape[:3], steps.total[index]),
        (query, *chunk.chunk, tokens, start),
        (
            of_query(query.shape[3]),
            key_spec,
            value_spec,
            pair_launch.token_specs(blocks, tokens, tiling, row, column),
            None if start is None else stats_specs,
        ),
        stats,
        stats_specs,
    )
