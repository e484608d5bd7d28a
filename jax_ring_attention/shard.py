"""What one device holds while the ring turns: what is decided before, what stays at home, and what travels."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ring_attention.kernels.contract import Dense, Kernel, Problem, Scope
from jax_ring_attention.layouts import shard_positions
from jax_ring_attention.masks import Tokens, token_integers, zero_padding
from jax_ring_attention.schedule import Leg, Stream, permutation


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
      fused: the schedule, where it runs all hops of a leg in one kernel; else None.
    """

    axis_name: tuple[str, ...]
    size: int
    layout: str
    legs: tuple[Leg, ...] | None
    problem: Problem
    kernel: type[Kernel]
    fused: str | None = None

    def rank(self) -> Any:
        """This device's place in the ring, traced."""
        return lax.axis_index(self.axis_name) if self.size > 1 else jnp.int32(0)

    def move(self, leg: Leg, held: tuple[Any, ...], steps: int = 1) -> tuple[Any, ...]:
        """Send what is held for every stream of `leg` by `steps` hops along its direction."""

        def send(stream, tree):
            pairs = permutation(steps * stream.direction, self.size)
            return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

        return tuple(send(stream, tree) for stream, tree in zip(leg.streams, held, strict=True))

    def gather(self, x: Any) -> Any:
        """The shards of all ranks along the token axis, in rank order."""
        return x if x is None or self.size == 1 else lax.all_gather(x, self.axis_name, axis=1, tiled=True)

    def scatter(self, x: jax.Array) -> jax.Array:
        """Transpose of `gather`: the sum over ranks, each keeping its own shard."""
        return x if self.size == 1 else lax.psum_scatter(x, self.axis_name, scatter_dimension=1, tiled=True)


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


class Shard:
    """One device's inputs, ready for the ring.

    Attributes:
      kernels: for every length of key and value that is folded at once, its kernel.
      query_tokens: the integers of this device's queries.
      key, value: this device's own, with zeros for padding.
      dense: mask and bias, packed.
    """

    def __init__(self, ring: Ring, inputs: Inputs, integers: Integers) -> None:
        self.ring, self.inputs, self.integers = ring, inputs, integers
        self.rank = ring.rank()
        problems = chunk_problems(ring.problem, ring.size, ring.legs)
        self.kernels: dict[int, Kernel] = {problem.key_shape[1]: ring.kernel(problem) for problem in problems}
        self.query_tokens = token_integers(
            shard_positions(ring.layout, self.rank, ring.size, ring.problem.query_shape[1]),
            ring.problem.reach,
            position=integers.query_position,
            segment=integers.query_segment,
            lengths=integers.query_lengths,
        )
        home = shard_positions(ring.layout, self.rank, ring.size, ring.problem.key_shape[1])
        own = Chunk(None, integers.key_position, integers.key_segment)
        self.key, self.value = zero_padding(self._key_tokens(home, own), inputs.key, inputs.value)
        overhang = max(kernel.overhang for kernel in self.kernels.values())
        self.dense = self.kernel.pack_dense(Dense(integers.mask, inputs.bias), overhang)

    @property
    def kernel(self) -> Kernel:
        """Any of the kernels, for what does not depend on the length of the keys."""
        return next(iter(self.kernels.values()))

    def home_chunks(self, leg: Leg) -> tuple[Chunk, ...]:
        """This device's own chunk, cut into the streams of `leg`."""

        def part(x, stream):
            return None if x is None else lax.slice_in_dim(x, stream.start, stream.start + stream.size, axis=1)

        def chunk(stream):
            packed = self.kernels[stream.size].pack_chunk(part(self.key, stream), part(self.value, stream))
            return Chunk(packed, part(self.integers.key_position, stream), part(self.integers.key_segment, stream))

        return tuple(chunk(stream) for stream in leg.streams)

    def scope(self, stream: Stream, hop: Any, chunk: Chunk) -> Scope:
        """Who sees whom at this hop: the part in hand belongs to another rank."""
        ring = self.ring
        source = stream.source(self.rank, hop, ring.size)
        chunk_length = ring.problem.key_shape[1]
        natural = shard_positions(ring.layout, source, ring.size, chunk_length)
        tokens = self._key_tokens(natural[stream.start : stream.start + stream.size], chunk)
        return Scope(self.query_tokens, tokens, self.dense, source * chunk_length + stream.start, self._known_positions(stream))

    def _known_positions(self, stream: Stream) -> tuple[Any, Any] | None:
        """On one device tokens are stored in natural order, unless somebody says otherwise."""
        integers, problem = self.integers, self.ring.problem
        if self.ring.size > 1 or problem.reach == (None, None) or any(x is not None for x in integers[:-1]):
            return None
        query = np.arange(problem.query_shape[1], dtype=np.int32)[None]
        return query, np.arange(stream.start, stream.start + stream.size, dtype=np.int32)[None]

    def gathered_chunk(self) -> tuple[Chunk, Scope]:
        """The chunks of all ranks as one, in rank order, and who sees whom in it."""
        ring, gather = self.ring, self.ring.gather
        packed = self.kernel.pack_chunk(gather(self.key), gather(self.value))
        chunk = Chunk(packed, gather(self.integers.key_position), gather(self.integers.key_segment))

        def of_rank(rank):
            return shard_positions(ring.layout, rank, ring.size, ring.problem.key_shape[1])

        natural = jax.vmap(of_rank)(jnp.arange(ring.size, dtype=jnp.int32)).reshape(-1)
        return chunk, Scope(self.query_tokens, self._key_tokens(natural, chunk), self.dense, 0)

    def _key_tokens(self, natural: jax.Array, chunk: Chunk) -> Tokens:
        return token_integers(
            natural,
            self.ring.problem.reach,
            position=chunk.position,
            segment=chunk.segment,
            lengths=self.integers.key_lengths,
        )
