"""Forward: every hop of one leg in one kernel.

Queries and statistics stay where they are; the chunk in hand is read by the compute and by the DMA that sends it on, at the same
time. At hop h, the chunk being that of rank - direction * h, or half of one on each of two tracks:

    for each track     wait until transfer h - 1 has landed                (hop 0: the device's own chunk)
                       take a credit, start transfer h                     (not after the last hop)
    for each track     fold the chunk into the statistics                  (a pipeline over the listed pairs of blocks)
    for each track     wait until transfer h has left, grant a credit      (its buffer has no reader left)

So both directions of every link are at work before anything is computed. The statistics are output buffers in HBM that the
pipeline both reads and writes: every block of queries is visited in one run of steps per hop and track, and a pipeline ends with
its last write done.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jax_ring_attention.fused import launch
from jax_ring_attention.fused.hops import Route, Track, Travels
from jax_ring_attention.fused.protocol import SLOTS, Channel, Neighbours, let_go, open_up, pass_on, send_ahead
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu import launch as pair_launch
from jax_ring_attention.kernels.mosaic_tpu.common import LANES
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
    route: Route, coordinates: jax.Array, tracks: tuple[Track, ...], query: jax.Array, carry: ChunkStats | None
) -> ChunkStats:
    """`carry` merged with the statistics of the chunks of all hops, those of the first track first at every hop.

    Args:
      coordinates: from `hops.coordinates_of`.
      tracks: with the steps of every computed hop, query blocks outside.
      query: (B, K, G, H, T), or twice H with `shape.split_scale`.
      carry: as in the chunk kernel; None has seen no key.
    """
    shape = tracks[0].shape
    stats = tuple(jax.ShapeDtypeStruct((*query.shape[:3], n, shape.query_length), jnp.float32) for n in (shape.value_dim, 1, 1))
    result, _ = launch.call(
        functools.partial(_kernel, route, tracks),
        name="ring_attention_fused_forward",
        route=route,
        coordinates=coordinates,
        scalars=tuple(track.scalars for track in tracks),
        operands=(query, tuple(track.operands for track in tracks), carry),
        out_shape=(stats, tuple(buffers_of(track.own) for track in tracks)),
        scratch=tuple(Channel.semaphores(len(jax.tree.leaves(track.own))) for track in tracks),
        vmem_limit=shape.vmem_limit,
    )
    return ChunkStats(*result)


def _kernel(route: Route, tracks: tuple[Track, ...], scalars: Any, operands: Any, results: Any, scratch: Any) -> None:
    coordinates, listed = scalars
    query, given, carry = operands
    stats, buffers = ChunkStats(*results[0]), results[1]
    tracks = tuple(track.in_memory(*refs) for track, *refs in zip(tracks, listed, given, strict=True))
    channels = tuple(
        Channel(
            Neighbours(route.mesh_axes, coordinates, i), jax.tree.leaves(buffers[i].slots), scratch[i], jax.tree.leaves(track.own)
        )
        for i, track in enumerate(tracks)
    )
    first, last = route.first, route.hops

    def turn(hop: Any, start: ChunkStats | None) -> None:
        """One hop; `start` has the statistics so far, or None has seen no key."""
        sources = pass_on(channels, hop, last)
        for track, source, buffer in zip(tracks, sources, buffers, strict=True):
            fold = functools.partial(_fold_hop, track, hop - first, query, track.chunk(source), buffer.columns, start, stats)
            pl.when(track.is_busy(hop - first))(fold)
            start = stats
        let_go(channels, sources, hop, last)

    open_up(channels, last)
    send_ahead(channels, first)
    turn(first, carry)
    launch.for_hops(first + 1, last, lambda hop: turn(hop, stats))


def _fold_hop(
    track: Track,
    index: Any,
    query: Any,
    chunk: Travels,
    columns: Tokens,
    start: ChunkStats | None,
    stats: ChunkStats,
) -> None:
    """`stats = merge(start, statistics of the chunk in hand)`; all in HBM, `start` may be `stats`."""
    shape, tiling, (steps,) = track.shape, track.tiling, track.steps
    launch.unpack_tokens(chunk.tokens, columns, tiling.block_kv)
    tokens = (track.query_tokens, columns)
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
