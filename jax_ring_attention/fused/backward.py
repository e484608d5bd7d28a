"""Backward: every hop of one leg in one kernel.

Key and value travel as in the forward kernel; their gradients, float32, follow one hop behind, so that their transfer hides
behind the next hop's compute. d_query stays at home. Transfer u of the gradients moves what hop u has summed; it lands in buffer
u % 2 of the receiver, which adds its own share and sends it on from there. At hop h, each step for every track:

    key, value   as in `forward`
    compute      this device's share of d_key and d_value, into `share`; d_query is added to
    d_chunk      wait until transfer h - 1 has landed; add the share to it
                 wait until transfer h - 1 has left (it was sent all through this hop), grant a credit
                 take a credit, start transfer h                          (not after the last hop)

At its first hop a device writes its share where the transfer before would have landed; so one buffer is free at the start, not
two. After the last hop the sums go straight home, into a result that nobody else writes. Their owner runs this kernel: the chunk
came from there.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_ring_attention.fused import launch
from jax_ring_attention.fused.forward import Buffers, buffers_of
from jax_ring_attention.fused.hops import HopSteps, Route, Track, Travels
from jax_ring_attention.fused.protocol import SLOTS, Channel, Delivery, Neighbours, deliver, let_go, open_up, pass_on, send_ahead
from jax_ring_attention.kernels.contract import KeyValue, Rows
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu import launch as pair_launch
from jax_ring_attention.kernels.mosaic_tpu.backward import Keys, Units, block_specs, pair_grads
from jax_ring_attention.masks import Tokens

Part = tuple[int, int]


def grads_hops(
    route: Route, coordinates: jax.Array, parts: tuple[Part, ...], tracks: tuple[Track, ...], rows: Rows, d_query: jax.Array
) -> tuple[jax.Array, tuple[KeyValue, ...]]:
    """`d_query` with the share of the chunks of all hops added, and the gradients of this device's own part of every track.

    Args:
      parts: the units of d_query that are in VMEM at once.
      tracks: with the steps of every computed hop for each part, key blocks outside.
      rows: query and d_output (B, K, G, H or Hv, T), lse and delta (B, K, G, 1, T), lse in units of log2.
      d_query: (B, K, G * T / block_q, H, block_q) float32.
      The rest is as in `forward.fold_hops`.

    Returns:
      d_query, and per track d_key (B, K, H, S) and d_value (B, K, Hv, S), float32.
    """
    shape, tilings = tracks[0].shape, [track.tiling for track in tracks]
    block_kv = max(tiling.block_kv for tiling in tilings)
    units = max(stop - start for start, stop in parts)
    d_query, results = launch.call(
        functools.partial(_kernel, route, parts, tracks),
        name="ring_attention_fused_backward",
        route=route,
        coordinates=coordinates,
        scalars=tuple(track.scalars for track in tracks),
        operands=(rows, tuple(track.operands for track in tracks), d_query),
        out_shape=(jax.ShapeDtypeStruct(d_query.shape, d_query.dtype), tuple(_results_of(track) for track in tracks)),
        scratch=(
            tuple(
                (
                    Channel.semaphores(len(jax.tree.leaves(track.own))),
                    Channel.semaphores(2),
                    (pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))),
                )
                for track in tracks
            ),
            (
                pltpu.VMEM((units, shape.head_dim, tilings[0].block_q), jnp.float32),
                pltpu.VMEM((shape.head_dim, block_kv), shape.dtype),
                pltpu.VMEM((block_kv, shape.value_dim), shape.dtype),
                *Units.scratch(),
            ),
        ),
        vmem_limit=shape.vmem_limit,
    )
    return d_query, tuple(KeyValue(*result.d_chunk) for result in results)


class Results(NamedTuple):
    """Of one track: the gradients that came home; and what nobody reads afterwards: a share, buffers for both channels."""

    d_chunk: Any
    share: Any
    d_slots: Any
    buffers: Buffers


def _results_of(track: Track) -> Results:
    shape = track.shape
    one = tuple(
        jax.ShapeDtypeStruct((shape.batch, shape.kv_heads, n, shape.key_length), jnp.float32)
        for n in (shape.head_dim, shape.value_dim)
    )
    d_slots = jax.tree.map(lambda x: jax.ShapeDtypeStruct((SLOTS, *x.shape), x.dtype), one)
    return Results(one, one, d_slots, buffers_of(track.own))


def _kernel(
    route: Route,
    parts: tuple[Part, ...],
    tracks: tuple[Track, ...],
    scalars: Any,
    operands: Any,
    results: Any,
    scratch: Any,
) -> None:
    coordinates, listed = scalars
    rows, given, d_start = operands
    d_query, of_track = results
    semaphores, scratch = scratch
    tracks = tuple(track.in_memory(*refs) for track, *refs in zip(tracks, listed, given, strict=True))
    chunks, grads = [], []
    for i, (track, result) in enumerate(zip(tracks, of_track, strict=True)):
        neighbours = Neighbours(route.mesh_axes, coordinates, i)
        chunks.append(Channel(neighbours, jax.tree.leaves(result.buffers.slots), semaphores[i][0], jax.tree.leaves(track.own)))
        grads.append(Channel(neighbours, result.d_slots, semaphores[i][1]))
    first, last = route.first, route.hops

    def compute(track: Track, columns: Tokens, hop: Any, chunk: Travels, d_start: Any, d_chunk: Any) -> None:
        launch.unpack_tokens(chunk.tokens, columns, track.tiling.block_kv)
        tokens = (track.query_tokens, columns)
        for part, steps in zip(parts, track.steps, strict=True):
            _grads_hop(track, steps, hop - first, part, rows, chunk.chunk, tokens, d_start, d_query, d_chunk, scratch)

    def turn(hop: Any, d_start: Any, is_first: bool = False) -> None:
        sources = pass_on(chunks, hop, last)
        busy = [track.is_busy(hop - first) for track in tracks]
        for i, (track, result) in enumerate(zip(tracks, of_track, strict=True)):
            share = functools.partial(compute, track, result.buffers.columns, hop, track.chunk(sources[i]), d_start)
            if is_first:
                share(grads[i].at(hop - 1))
            else:
                pl.when(busy[i])(functools.partial(share, result.share))
            d_start = d_query
        let_go(chunks, sources, hop, last)
        for i, (track, result) in enumerate(zip(tracks, of_track, strict=True)):
            channel, sums = grads[i], grads[i].at(hop - 1)
            if not is_first:
                channel.wait_arrived(hop - 1)
                pl.when(busy[i])(functools.partial(_add, sums, result.share, track.tiling.block_kv))
                channel.wait_sent(hop - 1, channel.at(hop - 2))
                pl.when(hop < last)(channel.grant)
            pl.when(hop < last)(functools.partial(channel.send, hop, sums))

    open_up(chunks, last)
    if last > first:
        for channel in grads:
            channel.grant()
    send_ahead(chunks, first)
    turn(first, d_start, is_first=True)
    launch.for_hops(first + 1, last, lambda hop: turn(hop, d_query))
    deliver(
        [
            Delivery(channel.at(last - 1), tuple(result.d_chunk), channel.neighbours.home, each[2])
            for channel, result, each in zip(grads, of_track, semaphores, strict=True)
        ]
    )


def _add(sums: Any, share: Any, block: int) -> None:
    """`sums += share`, both (B, K, H or Hv, S) in HBM."""
    for to, x in zip(sums, share, strict=True):
        spec = pl.BlockSpec((None, None, x.shape[2], block), lambda b, k, j: (b, k, 0, j))

        def step(at: Any, operands: Any, result: Any) -> None:
            del at
            result[...] = operands[0][...] + operands[1][...]

        launch.pipeline(step, (*x.shape[:2], x.shape[3] // block), (to, x), (spec, spec), to, spec)


def _grads_hop(
    track: Track,
    steps: HopSteps,
    index: Any,
    part: Part,
    rows: Rows,
    chunk: KeyValue,
    tokens: tuple[Tokens, Tokens],
    d_start: Any,
    d_query: Any,
    d_chunk: Any,
    scratch: Any,
) -> None:
    """`d_query = d_start + the share of the chunk in hand`, and its `d_chunk`, for the units of `part`, as in the chunk kernel.

    All are in HBM; d_start is d_query, or every unit has a step. Parts after the first add to `d_chunk`.
    """
    start, stop = part
    shape, tiling = track.shape, track.tiling
    blocks = launch.HopBlocks(steps, index)
    d_units, key_transposed, value_rows, *moves = scratch
    if tiling.block_kv < value_rows.shape[0]:  # room for the larger blocks of another track
        keys_here = pl.ds(0, tiling.block_kv)
        key_transposed, value_rows = key_transposed.at[:, keys_here], value_rows.at[keys_here]

    def step(at: Any, operands: Any, results: Any) -> None:
        rows, chunk, tokens, carry = operands
        batch, head, number = at
        codes = pair_launch.Codes(lambda number: blocks.step(steps.code, (batch, head, number)), number, steps.total[index])
        code, here = codes.here, (batch, head, pl.ds(start, stop - start))
        units = Units(d_units, d_start.at[here], d_query.at[here], *moves)
        units.arrive(codes)

        @pl.when(common.is_first(code))
        def _():
            for to, before in zip(results, carry or (None, None), strict=True):
                to[...] = jnp.zeros(to.shape, to.dtype) if before is None else before[...]
            key_transposed[...] = chunk.key[...].T
            value_rows[...] = chunk.value[...].T

        keys = Keys(chunk.key, key_transposed, value_rows)
        pair = functools.partial(pair_grads, shape, tiling, rows, keys, tokens, d_units.at[common.inner_of(code)], tuple(results))
        pair_launch.branch_on_kind(code, tokens, tiling, pair)
        units.depart(codes)

    row_specs, chunk_specs, token_specs, d_chunk_specs = block_specs(blocks, shape, tiling, tokens, start)
    launch.pipeline(
        step,
        (*d_query.shape[:2], steps.total[index]),
        (rows, chunk, tokens, tuple(d_chunk) if start else None),
        (row_specs, chunk_specs, token_specs, d_chunk_specs if start else None),
        tuple(d_chunk),
        d_chunk_specs,
    )
