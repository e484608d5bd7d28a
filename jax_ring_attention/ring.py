"""The ring: every device keeps its queries and sees every key/value chunk as the chunks rotate.

    forward     stats = identity
                for hop in 0 .. P-1:  send the chunk on;  stats = merge(stats, attention statistics of the chunk)
                out, lse = finalize(stats)      (the last hop's kernel does it: `Kernel.fold_last`)

    backward    the same rotation; d_query stays at home, d_key and d_value travel with their chunk, one hop behind it, so that
                their transfer hides behind the next hop's compute, and come home after the last hop.

All of it is what ONE device does, inside `shard_map`; `shard.py` has what it holds, `schedule.py` the hops. A hop is issued
before the compute that hides it, and the last one is peeled off the scan: P - 1 hops, never P.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context", section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.masks import zero_padding
from jax_ring_attention.schedule import Leg
from jax_ring_attention.shard import Chunk, Inputs, Integers, Ring, Shard
from jax_ring_attention.stats import ChunkStats, accumulator_dtype, finite_or_zero


def fold_leg(shard: Shard, leg: Leg, query: Any, stats: Any, last: bool = False) -> Any:
    """Statistics of the chunks of one leg, merged into `stats` (None: no key seen yet); the last leg gives `(out, lse)`."""
    move, hops = shard.ring.move, leg.streams[0].hops

    def fold(hop: Any, chunks: tuple[Chunk, ...], stats: Any, last: bool = False) -> Any:
        for stream, chunk in zip(leg.streams, chunks, strict=True):
            kernel, scope = shard.kernels[stream.size], shard.scope(stream, hop, chunk)
            step = kernel.fold_last if last and stream is leg.streams[-1] else kernel.fold
            stats = step(query, chunk.packed, scope, stats)
        return stats

    def send_and_fold(state, hop):
        chunks, stats = state
        arriving = move(leg, chunks)
        return (arriving, fold(hop, chunks, stats)), None

    first, chunks = _first_hop(shard, leg)
    if hops > first:
        stats = shard.kernel.initial_stats(query) if stats is None else stats
        steps = jnp.arange(first, hops, dtype=jnp.int32)
        (chunks, stats), _ = lax.scan(send_and_fold, (chunks, stats), steps)
    return fold(hops, chunks, stats, last)


def ring_forward(
    ring: Ring, inputs: Inputs, integers: Integers, fold_leg: Callable[..., Any] = fold_leg
) -> tuple[jax.Array, jax.Array]:
    """`out` (B, T, N, Hv) in the query's dtype and `lse` (B, T, N) in the accumulator's, for this device's queries.

    `fold_leg` runs the hops of one leg.
    """
    shard = Shard(ring, inputs, integers)
    query = shard.kernel.pack_query(inputs.query)
    stats = None  # no key seen
    if inputs.sinks is not None:
        stats = shard.kernel.pack_stats(_sink_stats(shard, query, inputs.sinks))
    if ring.legs is None:
        chunk, scope = shard.gathered_chunk()
        return shard.kernel.fold_last(query, chunk.packed, scope, stats)
    for leg in ring.legs[:-1]:
        stats = fold_leg(shard, leg, query, stats)
    return fold_leg(shard, ring.legs[-1], query, stats, last=True)


def grads_leg(shard: Shard, leg: Leg, rows: Any, sums: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """`sums` with the gradients of one leg added, and the gradients of this device's own chunk, back at home."""
    move, hops = shard.ring.move, leg.streams[0].hops

    def grads(hop: Any, chunks: tuple[Chunk, ...], sums: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        d_chunks = []
        for stream, chunk in zip(leg.streams, chunks, strict=True):
            scope = shard.scope(stream, hop, chunk)
            kernel, rounded = shard.kernels[stream.size], shard.ring.size == 1
            *sums_now, d_chunk = kernel.fold_grads(rows, chunk.packed, scope, sums[0], sums[1], rounded)
            sums = tuple(sums_now)
            d_chunks.append(d_chunk)
        return sums, tuple(d_chunks)

    def send_and_add(state, hop):
        chunks, d_chunks, sums = state
        arriving, d_arriving = move(leg, chunks), move(leg, d_chunks)
        sums, d_here = grads(hop, chunks, sums)
        return (arriving, jax.tree.map(jnp.add, d_arriving, d_here), sums), None

    first, chunks = _first_hop(shard, leg)
    if hops == first:
        sums, d_chunks = grads(first, chunks, sums)
    else:
        arriving = move(leg, chunks)
        sums, d_chunks = grads(first, chunks, sums)
        if hops > first + 1:
            steps = jnp.arange(first + 1, hops, dtype=jnp.int32)
            (arriving, d_chunks, sums), _ = lax.scan(send_and_add, (arriving, d_chunks, sums), steps)
        d_arriving = move(leg, d_chunks)
        sums, d_here = grads(hops, arriving, sums)
        d_chunks = jax.tree.map(jnp.add, d_arriving, d_here)
    if hops:  # one permutation takes them home from wherever the last hop left them
        d_chunks = move(leg, d_chunks, steps=-hops)
    return sums, d_chunks


def ring_backward(
    ring: Ring,
    inputs: Inputs,
    integers: Integers,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array,
    grads_leg: Callable[..., Any] = grads_leg,
) -> Inputs:
    """Gradients of `ring_forward` with respect to `inputs`, in their dtypes; `grads_leg` runs the hops of one leg."""
    shard = Shard(ring, inputs, integers)
    accumulator = accumulator_dtype(inputs.query.dtype)
    delta = (out.astype(accumulator) * d_out.astype(accumulator)).sum(-1) - d_lse
    (query,) = zero_padding(shard.query_tokens, inputs.query)
    rows = shard.kernel.pack_rows(query, d_out.astype(query.dtype), lse, delta)
    # What is summed at home, d_query and d_bias, and the finished (d_key, d_value) of each part of this device's chunk.
    sums: tuple[Any, ...] = (shard.kernel.initial_d_query(rows), shard.kernel.initial_d_bias(shard.dense))
    parts: dict[int, tuple[jax.Array, jax.Array]] = {}
    if ring.legs is None:
        chunk, scope = shard.gathered_chunk()
        d_query, d_bias, d_chunk = shard.kernel.fold_grads(rows, chunk.packed, scope, sums[0], sums[1], ring.size == 1)
        d_key, d_value = shard.kernel.unpack_d_chunk(d_chunk)
        sums, parts[0] = (d_query, d_bias), (ring.scatter(d_key), ring.scatter(d_value))
    for leg in ring.legs or ():
        sums, d_chunks = grads_leg(shard, leg, rows, sums)
        for stream, d_chunk in zip(leg.streams, d_chunks, strict=True):
            d_part, known = shard.kernels[stream.size].unpack_d_chunk(d_chunk), parts.get(stream.start)
            parts[stream.start] = d_part if known is None else jax.tree.map(jnp.add, known, d_part)

    d_query, d_bias = sums
    d_key, d_value = (jnp.concatenate(x, axis=1) for x in zip(*(parts[start] for start in sorted(parts)), strict=True))
    if inputs.bias is not None:
        d_bias = lax.slice(d_bias, (0,) * 4, inputs.bias.shape).astype(inputs.bias.dtype)
    return Inputs(
        shard.kernel.unpack_d_query(d_query).astype(query.dtype),
        d_key.astype(inputs.key.dtype),
        d_value.astype(inputs.value.dtype),
        d_bias,
        None if inputs.sinks is None else _d_sinks(inputs.sinks, lse, delta),
    )


def _first_hop(shard: Shard, leg: Leg) -> tuple[int, tuple[Chunk, ...]]:
    """The first hop at which `leg` computes, and the chunks in hand then."""
    chunks = shard.home_chunks(leg)
    return (0, chunks) if leg.home else (1, shard.ring.move(leg, chunks))


def _sink_stats(shard: Shard, query: Any, sinks: jax.Array) -> ChunkStats:
    """A sink is a key of logit `sinks[head]` and value 0: the chunk (0, 1, sink), folded before all others."""
    nothing = shard.kernel.unpack_stats(shard.kernel.initial_stats(query))
    level = jnp.broadcast_to(sinks.astype(nothing.max.dtype), nothing.max.shape)
    return ChunkStats(nothing.output, jnp.ones_like(nothing.sum), level)


def _d_sinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    weight = jnp.exp(sinks.astype(lse.dtype) - finite_or_zero(lse))
    return -(weight * delta).sum((0, 1)).astype(sinks.dtype)
