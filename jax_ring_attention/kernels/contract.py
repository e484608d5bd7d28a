"""What a chunk kernel is given and what it must provide.

A kernel folds one key/value chunk at a time into the statistics (forward) or gradients (backward) of a fixed set of
queries. It may hold queries, chunks and carry in a layout of its own: `pack_*` runs once before the first hop, `unpack_*`
once after the last, and what `pack_chunk` returns is what travels around the ring.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jax_ring_attention.masks import Tokens, pad_tokens
from jax_ring_attention.schedule import Reach
from jax_ring_attention.stats import ChunkStats, accumulator_dtype, finalize_chunk_stats


class BlockSizes(NamedTuple):
    """Tokens per block of a kernel; None leaves the choice to the kernel. Larger than the sequence is clamped to it.

    Attributes:
      block_q: query tokens per block.
      block_kv: key/value tokens per block.
    """

    block_q: int | None = None
    block_kv: int | None = None


_KERNEL_CHOICE = BlockSizes()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything static about folding one chunk; hashable.

    Attributes:
      query_shape: (B, T, N, H) of the queries at hand.
      key_shape: (B, S, K, H) of one chunk.
      value_dim: Hv.
      dtype: of query, key and value.
      scale: factor on the logits, before the bias.
      reach: (left, right), see `masks`.
      logits_soft_cap: c in c * tanh(logits / c), after the bias and before the mask; None leaves the logits alone.
      row_wise: whether the tokens' integers may differ between batch rows.
      has_mask, has_bias: whether a dense mask or bias is given.
      empty_rows: whether a query may see no key of all chunks; if not, no row needs silencing.
      deterministic: whether gradients must be the same bit by bit from run to run.
      block_sizes: requested tiling.
      precision: matmul precision, as `jax.default_matmul_precision` names it.
    """

    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_dim: int
    dtype: jnp.dtype
    scale: float
    reach: Reach = (None, None)
    logits_soft_cap: float | None = None
    row_wise: bool = False
    has_mask: bool = False
    has_bias: bool = False
    empty_rows: bool = True
    deterministic: bool = False
    block_sizes: BlockSizes = _KERNEL_CHOICE
    precision: str | None = None


class Dense(NamedTuple):
    """Dense mask (bool) and bias, each (B | 1, N | 1, T | 1, S_all | 1) or None, where S_all counts the keys of all chunks."""

    mask: jax.Array | None = None
    bias: jax.Array | None = None


class KeyValue(NamedTuple):
    """One chunk's key and value, or their gradients, in a kernel's own layout."""

    key: jax.Array
    value: jax.Array


class Rows(NamedTuple):
    """What the backward pass reads per query, in a kernel's own layout."""

    query: jax.Array
    d_output: jax.Array
    lse: jax.Array
    delta: jax.Array


def pad_to(x: jax.Array, sizes: dict[int, int], fill: float = 0) -> jax.Array:
    """`x` with axis i padded at its end to `sizes[i]`."""
    widths = [(0, sizes.get(i, n) - n) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill) if any(after for _, after in widths) else x


def silence_empty_rows(query: jax.Array, d_output: jax.Array, lse: jax.Array, delta: jax.Array) -> Rows:
    """`Rows` with zeros where lse is -inf: a row that saw no key passes nothing, whatever is stored in it."""
    alive = lse != -jnp.inf

    def keep(x):
        return jnp.where(alive if x.ndim == alive.ndim else alive[..., None], x, jnp.zeros_like(x))

    return Rows(keep(query), keep(d_output), lse, keep(delta))


class Scope(NamedTuple):
    """Who sees whom while one chunk is folded.

    Attributes:
      query_tokens, key_tokens: the integers of both sides.
      dense: packed by `Kernel.pack_dense`.
      key_offset: the chunk's first column in `dense`.
      known: both sides' positions as numpy arrays (1, L), where they are known while JAX traces and no token is padding.
    """

    query_tokens: Tokens
    key_tokens: Tokens
    dense: Dense
    key_offset: Any
    known: tuple[Any, Any] | None = None


def padded_tokens(scope: Scope, key_length: int, padded_queries: int, padded_keys: int) -> tuple[Tokens, Tokens]:
    """(B | 1, T or S) of both sides, extended to whole blocks; both have a segment or neither.

    Added keys are padding. Added queries need no hiding: nobody reads what they give.
    """
    query, key = scope.query_tokens, pad_tokens(scope.key_tokens, key_length, padded_keys)
    if query.segment is None and key.segment is not None:
        query = query._replace(segment=jnp.zeros((1, padded_queries), jnp.int32))
    if key.segment is None and query.segment is not None:
        key = key._replace(segment=jnp.zeros((1, padded_keys), jnp.int32))
    return Tokens(*(None if x is None else pad_to(x, {1: padded_queries}, -1) for x in query)), key


class Kernel(abc.ABC):
    """A chunk kernel for one `Problem`. Whatever `pack_*` returns is in the kernel's own layout."""

    name: ClassVar[str]

    #: Whether `fold_grads` exists; if not, autodiff runs through `fold` and the ring has no custom VJP.
    has_grads: ClassVar[bool]

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def is_preferred() -> bool:
        """Whether `implementation=None` should consider this kernel on the devices at hand."""
        return True

    @staticmethod
    @abc.abstractmethod
    def refusal(problem: Problem) -> str | None:
        """Why this kernel cannot do `problem` and what can, or None."""

    @property
    def overhang(self) -> int:
        """How many columns past the end of a chunk the last block reads from a dense mask or bias."""
        return 0

    @abc.abstractmethod
    def pack_query(self, query: jax.Array) -> Any:
        """From (B, T, N, H)."""

    @abc.abstractmethod
    def pack_chunk(self, key: jax.Array, value: jax.Array) -> Any:
        """From (B, S, K, H) and (B, S, K, Hv); this is what travels."""

    def pack_dense(self, dense: Dense, overhang: int) -> Dense:
        """Dense arrays with `overhang` columns more, where the kernel's blocks need them."""
        return dense

    def pack_stats(self, stats: ChunkStats) -> Any:
        """Statistics (B, T, N, ...) to a carry."""
        return stats

    def unpack_stats(self, carry: Any) -> ChunkStats:
        """Inverse of `pack_stats`."""
        return carry

    def initial_stats(self, query: Any) -> Any:
        """The carry that has seen no key; made from the packed query, so that it varies over the same mesh axes."""
        rows = jnp.zeros_like(query, dtype=accumulator_dtype(query.dtype), shape=query.shape[:-1])
        output = jnp.zeros_like(rows, shape=(*rows.shape, self.problem.value_dim))
        return ChunkStats(output, rows, rows - jnp.inf)

    @abc.abstractmethod
    def fold(self, query: Any, chunk: Any, scope: Scope, carry: Any) -> Any:
        """`merge(carry, statistics of chunk)`; a carry of None has seen no key, and need not be read from memory."""

    def fold_last(self, query: Any, chunk: Any, scope: Scope, carry: Any) -> tuple[jax.Array, jax.Array]:
        """`fold` of the last chunk, finished: out (B, T, N, Hv) in the problem's dtype, lse (B, T, N) in the accumulator's."""
        out, lse = finalize_chunk_stats(self.unpack_stats(self.fold(query, chunk, scope, carry)))
        return out.astype(self.problem.dtype), lse

    # Only where `has_grads`.

    def pack_rows(self, query: jax.Array, d_output: jax.Array, lse: jax.Array, delta: jax.Array) -> Any:
        """What the backward pass reads per query; rows with lse -inf saw no key and pass nothing."""
        raise NotImplementedError(f"kernel {self.name!r} has no backward pass of its own")

    def initial_d_query(self, rows: Any) -> Any:
        """What the first `fold_grads` adds to: zeros, or None where it need not read them."""
        return jnp.zeros_like(rows.query, dtype=accumulator_dtype(rows.query.dtype))

    def initial_d_bias(self, dense: Dense) -> jax.Array | None:
        """Zeros for the gradient of the packed bias, if there is one."""
        return None if dense.bias is None else jnp.zeros_like(dense.bias, dtype=accumulator_dtype(self.problem.dtype))

    def fold_grads(
        self, rows: Any, chunk: Any, scope: Scope, d_query: Any, d_bias: jax.Array | None, rounded: bool
    ) -> tuple[Any, jax.Array | None, Any]:
        """`(d_query + this chunk's, d_bias + this chunk's, d_chunk)` in accumulator dtype; d_chunk is arranged like the chunk.

        With `rounded`, d_chunk is finished, nobody adds to it, and it may have the chunk's dtype.
        """
        raise NotImplementedError(f"kernel {self.name!r} has no backward pass of its own")

    def unpack_d_query(self, d_query: Any) -> jax.Array:
        """To (B, T, N, H)."""
        raise NotImplementedError(f"kernel {self.name!r} has no backward pass of its own")

    def unpack_d_chunk(self, d_chunk: Any) -> tuple[jax.Array, jax.Array]:
        """To (B, S, K, H) and (B, S, K, Hv)."""
        raise NotImplementedError(f"kernel {self.name!r} has no backward pass of its own")
