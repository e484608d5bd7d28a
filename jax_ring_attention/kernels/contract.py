"""What a chunk kernel is given and what it must provide.

A kernel folds one key/value chunk at a time into the statistics (forward) or gradients (backward) of a fixed set of
queries. It may hold queries, chunks and carry in a layout of its own: `pack_*` runs once before the first hop, `unpack_*`
once after the last, and what `pack_chunk` returns is what travels around the ring.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from jax_ring_attention.masks import Tokens
from jax_ring_attention.schedule import Reach
from jax_ring_attention.stats import ChunkStats


class BlockSizes(NamedTuple):
    """Tokens per block of a kernel; None leaves the choice to the kernel. Larger than the sequence is clamped to it.

    Attributes:
      block_q: query tokens per block.
      block_kv: key/value tokens per block.
    """

    block_q: int | None = None
    block_kv: int | None = None


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
      block_sizes: requested tiling.
      precision: matmul precision, as `jax.default_matmul_precision` names it.
    """

    query_shape: tuple[int, int, int, int]
    key_shape: tuple[int, int, int, int]
    value_dim: int
    dtype: jax.numpy.dtype
    scale: float
    reach: Reach = (None, None)
    logits_soft_cap: float | None = None
    row_wise: bool = False
    has_mask: bool = False
    has_bias: bool = False
    block_sizes: BlockSizes = BlockSizes()
    precision: str | None = None


class Dense(NamedTuple):
    """Dense mask (bool) and bias, each (B | 1, N | 1, T | 1, S_all | 1) or None, where S_all counts the keys of all chunks."""

    mask: jax.Array | None = None
    bias: jax.Array | None = None


class Kernel(Protocol):
    """A chunk kernel for one `Problem`. Arrays marked `packed` have whatever layout the kernel likes."""

    name: str

    #: Whether `fold_grads` exists; if not, autodiff runs through `fold` and the ring has no custom VJP.
    has_grads: bool

    def __init__(self, problem: Problem) -> None: ...

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        """Why this kernel cannot do `problem` and what can, or None."""

    @property
    def overhang(self) -> int:
        """How many columns past the end of a chunk the last block reads from a dense mask or bias."""

    def pack_query(self, query: jax.Array) -> Any: ...

    def pack_chunk(self, key: jax.Array, value: jax.Array) -> Any: ...

    def pack_dense(self, dense: Dense, overhang: int) -> Dense: ...

    def pack_stats(self, stats: ChunkStats) -> Any: ...

    def unpack_stats(self, carry: Any) -> ChunkStats: ...

    def fold(
        self, query: Any, chunk: Any, query_tokens: Tokens, key_tokens: Tokens, dense: Dense, key_offset: Any, carry: Any
    ) -> Any:
        """`merge(carry, stats of chunk)`; `key_offset` is the chunk's first column in `dense`."""

    def pack_rows(self, query: jax.Array, d_output: jax.Array, lse: jax.Array, delta: jax.Array) -> Any: ...

    def initial_d_query(self, rows: Any) -> Any: ...

    def fold_grads(
        self,
        rows: Any,
        chunk: Any,
        query_tokens: Tokens,
        key_tokens: Tokens,
        dense: Dense,
        key_offset: Any,
        d_query: Any,
        d_bias: jax.Array | None,
    ) -> tuple[Any, jax.Array | None, Any]:
        """`(d_query + this chunk's, d_bias + this chunk's, d_chunk in pack_chunk's structure and accumulator dtype)`."""

    def unpack_d_query(self, d_query: Any) -> jax.Array: ...

    def unpack_d_chunk(self, d_chunk: Any) -> tuple[jax.Array, jax.Array]: ...
