"""The ring: every device keeps its queries and sees every key/value chunk as the chunks rotate.

    forward     stats = identity
                for hop in 0 .. P-1:  send chunk on;  stats = merge(stats, attention statistics of chunk)
                out, lse = finalize(stats)

    backward    the same rotation; d_query stays at home, d_key and d_value travel with their chunk, one hop behind it, so that
                their transfer hides behind the next hop's compute, and come home on the last hop.

All of it is what ONE device does, inside `shard_map`. Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise
Transformers for Near-Infinite Context", section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.kernels.contract import Dense, Kernel, Problem, Scope
from jax_ring_attention.layouts import shard_positions
from jax_ring_attention.masks import Tokens, token_integers
from jax_ring_attention.schedule import Leg, Stream, permutation
from jax_ring_attention.stats import (
    ChunkStats,
    accumulator_dtype,
    finalize_chunk_stats,
    finite_or_zero,
    identity_chunk_stats,
    merge_chunk_stats,
)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Everything static about the ring; hashable.

    Attributes:
      axis_name: manual mesh axes that the ring runs over; empty on one device.
      size: number of devices P.
      layout: order in which the tokens are stored.
      legs: the hops, in order; None gathers all chunks instead (`schedule="all_gather"`).
      problem: the static side of the attention, with `key_shape` that of a whole chunk.
      kernel: the chunk kernel's class.
    """

    axis_name: tuple[str, ...]
    size: int
    layout: str
    legs: tuple[Leg, ...] | None
    problem: Problem
    kernel: type[Kernel]

    def rank(self) -> Any:
        return lax.axis_index(self.axis_name) if self.size > 1 else jnp.int32(0)


def chunk_problems(problem: Problem, size: int, legs: tuple[Leg, ...] | None) -> tuple[Problem, ...]:
    """One problem for each length of key and value that a kernel folds at once; `problem` is that of a whole chunk."""
    batch, whole, heads, dim = problem.key_shape
    lengths = [size * whole] if legs is None else [stream.size for leg in legs for stream in leg.streams]
    return tuple(dataclasses.replace(problem, key_shape=(batch, n, heads, dim)) for n in dict.fromkeys(lengths))


class Inputs(NamedTuple):
    """What gradients flow to.

    query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv), bias (B | 1, N | 1, T | 1, P * S | 1), sinks (N,).
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None = None
    sinks: jax.Array | None = None


class Integers(NamedTuple):
    """What decides who sees whom.

    Positions and segments (B | 1, T or S), lengths (B | 1,), mask bool like the bias.
    """

    query_position: jax.Array | None = None
    key_position: jax.Array | None = None
    query_segment: jax.Array | None = None
    key_segment: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    mask: jax.Array | None = None


class Chunk(NamedTuple):
    """What travels: the kernel's packed key and value, and the integers that the layout does not imply."""

    packed: Any
    position: jax.Array | None
    segment: jax.Array | None


class Ready(NamedTuple):
    """What stays at home for the whole ring."""

    ring: Ring
    rank: Any
    kernels: dict[int, Kernel]
    query_tokens: Tokens
    key_lengths: jax.Array | None
    dense: Dense

    @property
    def kernel(self) -> Kernel:
        """Any of the kernels, for what does not depend on the chunk's length."""
        return next(iter(self.kernels.values()))

    def scope(self, stream: Stream, hop: Any, chunk: Chunk) -> Scope:
        """Who sees whom at this hop: the part in hand belongs to another rank."""
        ring = self.ring
        source = stream.source(self.rank, hop, ring.size)
        chunk_length = ring.problem.key_shape[1]
        natural = shard_positions(ring.layout, source, ring.size, chunk_length)
        tokens = self._key_tokens(natural[stream.start : stream.start + stream.size], chunk)
        return Scope(self.query_tokens, tokens, self.dense, source * chunk_length + stream.start)

    def gathered_scope(self, chunk: Chunk) -> Scope:
        """Who sees whom when the chunks of all ranks are in hand, in rank order."""
        ring = self.ring

        def of_rank(rank):
            return shard_positions(ring.layout, rank, ring.size, ring.problem.key_shape[1])

        natural = jax.vmap(of_rank)(jnp.arange(ring.size, dtype=jnp.int32)).reshape(-1)
        return Scope(self.query_tokens, self._key_tokens(natural, chunk), self.dense, 0)

    def _key_tokens(self, natural: jax.Array, chunk: Chunk) -> Tokens:
        reach = self.ring.problem.reach
        return token_integers(natural, reach, position=chunk.position, segment=chunk.segment, lengths=self.key_lengths)


def _prepare(ring: Ring, inputs: Inputs, integers: Integers) -> Ready:
    rank = ring.rank()
    kernels = {problem.key_shape[1]: ring.kernel(problem) for problem in chunk_problems(ring.problem, ring.size, ring.legs)}
    query_tokens = token_integers(
        shard_positions(ring.layout, rank, ring.size, ring.problem.query_shape[1]),
        ring.problem.reach,
        position=integers.query_position,
        segment=integers.query_segment,
        lengths=integers.query_lengths,
    )
    overhang = max(kernel.overhang for kernel in kernels.values())
    dense = next(iter(kernels.values())).pack_dense(Dense(integers.mask, inputs.bias), overhang)
    return Ready(ring, rank, kernels, query_tokens, integers.key_lengths, dense)


def _home_chunks(ready: Ready, leg: Leg, inputs: Inputs, integers: Integers) -> tuple[Chunk, ...]:
    def part(x, stream):
        return None if x is None else lax.slice_in_dim(x, stream.start, stream.start + stream.size, axis=1)

    return tuple(
        Chunk(
            ready.kernels[stream.size].pack_chunk(part(inputs.key, stream), part(inputs.value, stream)),
            part(integers.key_position, stream),
            part(integers.key_segment, stream),
        )
        for stream in leg.streams
    )


def _move(ring: Ring, leg: Leg, held: tuple[Any, ...], steps: int = 1) -> tuple[Any, ...]:
    """Send what is held for every stream `steps` hops along its direction."""
    return tuple(
        jax.tree.map(
            lambda x, stream=stream: lax.ppermute(x, ring.axis_name, permutation(steps * stream.direction, ring.size)), one
        )
        for stream, one in zip(leg.streams, held, strict=True)
    )


def ring_forward(ring: Ring, inputs: Inputs, integers: Integers) -> tuple[jax.Array, jax.Array]:
    """`out` (B, T, N, Hv) in the query's dtype and `lse` (B, T, N) in the accumulator's, for this device's queries."""
    ready = _prepare(ring, inputs, integers)
    query = ready.kernel.pack_query(inputs.query)

    def fold(hop, leg, chunks, carry):
        for stream, chunk in zip(leg.streams, chunks, strict=True):
            carry = ready.kernels[stream.size].fold(query, chunk.packed, ready.scope(stream, hop, chunk), carry)
        return carry

    carry = ready.kernel.pack_stats(_no_keys(inputs))
    if ring.legs is None:
        chunk = _gather_chunk(ready, inputs, integers)
        carry = ready.kernel.fold(query, chunk.packed, ready.gathered_scope(chunk), carry)
    for leg in ring.legs or ():
        hops = leg.streams[0].hops
        chunks = _home_chunks(ready, leg, inputs, integers)
        if not leg.home:
            chunks = _move(ring, leg, chunks)

        def hop_and_fold(state, hop, leg=leg):
            chunks, carry = state
            arriving = _move(ring, leg, chunks)
            return (arriving, fold(hop, leg, chunks, carry)), None

        first = 0 if leg.home else 1
        if hops > first:
            steps = jnp.arange(first, hops, dtype=jnp.int32)
            (chunks, carry), _ = lax.scan(hop_and_fold, (chunks, carry), steps)
        carry = fold(hops, leg, chunks, carry)

    stats = ready.kernel.unpack_stats(carry)
    if inputs.sinks is not None:
        stats = merge_chunk_stats(stats, _sink_stats(stats, inputs.sinks))
    out, lse = finalize_chunk_stats(stats)
    return out.astype(inputs.query.dtype), lse


def ring_backward(
    ring: Ring, inputs: Inputs, integers: Integers, out: jax.Array, lse: jax.Array, d_out: jax.Array, d_lse: jax.Array
) -> Inputs:
    """Gradients of `ring_forward` with respect to `inputs`, in their dtypes."""
    ready = _prepare(ring, inputs, integers)
    accumulator = accumulator_dtype(inputs.query.dtype)
    delta = (out.astype(accumulator) * d_out.astype(accumulator)).sum(-1) - d_lse
    query = inputs.query
    if ready.query_tokens.segment is not None:  # whatever is stored in padding meets only zeros
        query = jnp.where((ready.query_tokens.segment >= 0)[:, :, None, None], query, jnp.zeros_like(query))
    rows = ready.kernel.pack_rows(query, d_out.astype(query.dtype), lse, delta)

    def grads(hop, leg, chunks, sums):
        d_query, d_bias = sums
        d_chunks = []
        for stream, chunk in zip(leg.streams, chunks, strict=True):
            scope = ready.scope(stream, hop, chunk)
            d_query, d_bias, d_chunk = ready.kernels[stream.size].fold_grads(rows, chunk.packed, scope, d_query, d_bias)
            d_chunks.append(d_chunk)
        return (d_query, d_bias), tuple(d_chunks)

    sums: tuple[Any, ...] = (ready.kernel.initial_d_query(rows), ready.kernel.initial_d_bias(ready.dense))
    parts: dict[int, tuple[jax.Array, jax.Array]] = {}
    if ring.legs is None:
        chunk = _gather_chunk(ready, inputs, integers)
        *sums_here, d_chunk = ready.kernel.fold_grads(rows, chunk.packed, ready.gathered_scope(chunk), *sums)
        d_key, d_value = ready.kernel.unpack_d_chunk(d_chunk)
        sums, parts[0] = tuple(sums_here), (_scatter(ring, d_key), _scatter(ring, d_value))
    for leg in ring.legs or ():
        hops = leg.streams[0].hops
        chunks = _home_chunks(ready, leg, inputs, integers)
        if not leg.home:
            chunks = _move(ring, leg, chunks)
        first = 0 if leg.home else 1
        arriving = _move(ring, leg, chunks) if hops > first else chunks
        sums, d_chunks = grads(first, leg, chunks, sums)

        def hop_and_add(state, hop, leg=leg):
            chunks, d_chunks, sums = state
            arriving, behind = _move(ring, leg, chunks), _move(ring, leg, d_chunks)
            sums, d_here = grads(hop, leg, chunks, sums)
            return (arriving, jax.tree.map(jnp.add, behind, d_here), sums), None

        if hops > first + 1:
            steps = jnp.arange(first + 1, hops, dtype=jnp.int32)
            (arriving, d_chunks, sums), _ = lax.scan(hop_and_add, (arriving, d_chunks, sums), steps)
        if hops > first:
            behind = _move(ring, leg, d_chunks)
            sums, d_here = grads(hops, leg, arriving, sums)
            d_chunks = jax.tree.map(jnp.add, behind, d_here)
        if hops:  # one permutation takes them home from wherever the last hop left them
            d_chunks = _move(ring, leg, d_chunks, steps=-hops)
        for stream, d_chunk in zip(leg.streams, d_chunks, strict=True):
            d_part = ready.kernels[stream.size].unpack_d_chunk(d_chunk)
            known = parts.get(stream.start)
            parts[stream.start] = d_part if known is None else jax.tree.map(jnp.add, known, d_part)

    d_query, d_bias = sums
    d_key, d_value = (jnp.concatenate(x, axis=1) for x in zip(*(parts[start] for start in sorted(parts)), strict=True))
    if inputs.bias is not None:
        d_bias = lax.slice(d_bias, (0,) * 4, inputs.bias.shape).astype(inputs.bias.dtype)
    return Inputs(
        ready.kernel.unpack_d_query(d_query).astype(query.dtype),
        d_key.astype(inputs.key.dtype),
        d_value.astype(inputs.value.dtype),
        d_bias,
        None if inputs.sinks is None else _d_sinks(inputs.sinks, lse, delta),
    )


def _no_keys(inputs: Inputs) -> ChunkStats:
    """The identity, made to vary over the mesh axes that the query varies over, as a scan carry must."""
    dtype = accumulator_dtype(inputs.query.dtype)
    varying_zero = jnp.zeros_like(inputs.query, dtype=dtype, shape=())
    stats = identity_chunk_stats(inputs.query.shape[:-1], inputs.value.shape[-1], dtype)
    return ChunkStats(*(x + varying_zero for x in stats))


def _sink_stats(stats: ChunkStats, sinks: jax.Array) -> ChunkStats:
    """A sink is a key of logit `sinks[head]` and value 0: the chunk (0, 1, sink)."""
    level = jnp.broadcast_to(sinks.astype(stats.max.dtype), stats.max.shape)
    return ChunkStats(jnp.zeros_like(stats.output), jnp.ones_like(stats.sum), level)


def _d_sinks(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    weight = jnp.exp(sinks.astype(lse.dtype) - finite_or_zero(lse))
    return -(weight * delta).sum((0, 1)).astype(sinks.dtype)


def _gather_chunk(ready: Ready, inputs: Inputs, integers: Integers) -> Chunk:
    ring = ready.ring

    def gather(x):
        return x if x is None or ring.size == 1 else lax.all_gather(x, ring.axis_name, axis=1, tiled=True)

    packed = ready.kernel.pack_chunk(gather(inputs.key), gather(inputs.value))
    return Chunk(packed, gather(integers.key_position), gather(integers.key_segment))


def _scatter(ring: Ring, x: jax.Array) -> jax.Array:
    if ring.size == 1:
        return x
    return lax.psum_scatter(x, ring.axis_name, scatter_dimension=1, tiled=True)
