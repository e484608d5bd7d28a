"""`mosaic_gpu`: kernels for Hopper GPUs (sm_90) in Pallas Mosaic GPU, in `forward.py`, `backward.py` and `backward_split.py`.

Arrays keep BTNH. Lengths are padded to blocks. Head dims up to 128 are padded to one D, 64 or 128; above, that of query and key
to a D of 192 or 256, and that of value to a multiple of 64 of its own, at most D. sum, max, lse and delta are (B, N, T) rows;
max and lse are in units of log2 for the whole ring. d_query is without the factor `scale` until it is unpacked.

Pallas Mosaic GPU is imported only when a kernel is built: it takes time and needs absl-py, which jax does not install.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring_attention import compat
from jax_ring_attention.kernels.contract import Kernel, KeyValue, Problem, Rows, Scope, pad_to, padded_tokens, silence_empty_rows
from jax_ring_attention.kernels.mosaic_gpu.common import (
    FORWARD_BLOCK_Q,
    LOG2E,
    NO_KEYS,
    Shape,
    backward_block_kv,
    backward_block_q,
    forward_block_kv,
)
from jax_ring_attention.masks import ActiveBlocks, Tokens, active_blocks, block_bounds, classify, pad_tokens
from jax_ring_attention.stats import ChunkStats

#: Lengths are padded to a multiple of this.
_BLOCK = 128
_LARGEST_HEAD_DIM = 256
_LARGEST_IN_ONE_PASS = 128

#: Lists of blocks that are known while JAX traces become constants of the program up to this many numbers.
_LARGEST_CONSTANT = 2**18


def _padded(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


class MosaicGpuKernel(Kernel):
    """See the module docstring; the methods are those of `contract.Kernel`."""

    name = "mosaic_gpu"
    has_grads = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        batch, self.query_length, heads, head_dim = problem.query_shape
        _, self.key_length, kv_heads, _ = problem.key_shape
        self.head_dim, self.value_dim = (-(-n // 64) * 64 for n in (max(head_dim, problem.value_dim), problem.value_dim))
        if self.head_dim <= _LARGEST_IN_ONE_PASS:
            self.value_dim = self.head_dim
        self.shape = Shape(
            batch=batch,
            query_length=_padded(self.query_length),
            key_length=_padded(self.key_length),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=problem.dtype,
            scale=problem.scale,
            logits_soft_cap=problem.logits_soft_cap,
            reach=problem.reach,
        )

    @staticmethod
    def is_preferred() -> bool:
        return compat.has_hopper_gpu()

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        use_xla = "; use implementation='xla'"
        if compat.JAX_VERSION < (0, 11):
            return f"it needs jax 0.11 or newer (Python 3.12), this is {jax.__version__}{use_xla}"
        if importlib.util.find_spec("absl") is None:
            return "it needs the package absl-py, which is not installed; pip install absl-py, or use implementation='xla'"
        if jax.default_backend() != "cpu" and not compat.has_hopper_gpu():
            return f"it runs on Hopper GPUs (sm_90) only{use_xla}"
        if problem.has_mask or problem.has_bias:
            return f"it takes no dense mask or bias{use_xla}, or say the mask by segment_ids, positions and windows"
        if problem.dtype not in (jnp.bfloat16, jnp.float16):
            return f"it takes bfloat16 and float16, not {problem.dtype}; cast the inputs, or use implementation='xla'"
        if max(problem.query_shape[3], problem.value_dim) > _LARGEST_HEAD_DIM:
            sizes = f"{problem.query_shape[3]} and {problem.value_dim}"
            return f"head dims are {sizes}, and it holds at most {_LARGEST_HEAD_DIM}{use_xla}"
        if problem.block_sizes != (None, None):
            return f"its tiling is fixed; leave block_sizes out{use_xla} to choose them"
        return None

    # Packing.

    def _pack(self, x: jax.Array, length: int, dim: int) -> jax.Array:
        return pad_to(x, {1: length, 3: dim})

    def _pack_row_vector(self, x: jax.Array, fill: float) -> jax.Array:
        """(B, T, N) to (B, N, T)."""
        return pad_to(jnp.swapaxes(x, 1, 2), {2: self.shape.query_length}, fill)

    def pack_query(self, query: jax.Array) -> jax.Array:
        return self._pack(query, self.shape.query_length, self.head_dim)

    def pack_chunk(self, key: jax.Array, value: jax.Array) -> KeyValue:
        length = self.shape.key_length
        return KeyValue(self._pack(key, length, self.head_dim), self._pack(value, length, self.value_dim))

    def initial_stats(self, query: jax.Array) -> ChunkStats:
        batch, length, heads, _ = query.shape
        rows = jnp.zeros_like(query, dtype=jnp.float32, shape=(batch, heads, length))
        output = jnp.zeros_like(rows, shape=(*query.shape[:3], self.value_dim))
        return ChunkStats(output, rows, rows - jnp.inf)

    def pack_stats(self, stats: ChunkStats) -> ChunkStats:
        return ChunkStats(
            self._pack(stats.output, self.shape.query_length, self.value_dim),
            self._pack_row_vector(stats.sum, 0),
            self._pack_row_vector(stats.max * LOG2E, -jnp.inf),
        )

    def unpack_stats(self, carry: ChunkStats) -> ChunkStats:
        rows = (jnp.swapaxes(x, 1, 2)[:, : self.query_length] for x in (carry.sum, carry.max / LOG2E))
        return ChunkStats(carry.output[:, : self.query_length, :, : self.problem.value_dim], *rows)

    def unpack_finished(self, carry: ChunkStats) -> tuple[jax.Array, jax.Array]:
        """`(out, lse)` of statistics whose output is divided already."""
        out, total, maximum = self.unpack_stats(carry)
        return out, jnp.where(total == 0, -jnp.inf, maximum + jnp.log(total))

    def pack_rows(self, query: jax.Array, d_output: jax.Array, lse: jax.Array, delta: jax.Array) -> Rows:
        rows = Rows(query, d_output, lse, delta)
        if self.problem.empty_rows:  # two passes over memory
            rows = silence_empty_rows(*rows)
        return Rows(
            self.pack_query(rows.query),
            self._pack(rows.d_output, self.shape.query_length, self.value_dim),
            self._pack_row_vector(jnp.where(lse == -jnp.inf, NO_KEYS, lse * LOG2E), NO_KEYS),
            self._pack_row_vector(rows.delta, 0),
        )

    @property
    def _splits_backward(self) -> bool:
        return self.problem.deterministic or self.head_dim > _LARGEST_IN_ONE_PASS

    def initial_d_query(self, rows: Rows) -> jax.Array | None:
        """Zeros, made from numbers at hand, or None where the kernel starts from constants.

        The one kernel adds to them in place. In a loop around this (`vmap`, a scan over layers) XLA would keep constant zeros
        outside, and every step would add to the same ones: docs/log.md.
        """
        if self._splits_backward:
            return None
        zeros = jnp.swapaxes(rows.lse * 0, 1, 2)[..., None]  # lse is finite, NO_KEYS where no key is seen
        return jnp.broadcast_to(zeros, rows.query.shape)

    def unpack_d_query(self, d_query: jax.Array) -> jax.Array:
        return d_query[:, : self.query_length, :, : self.problem.query_shape[3]] * self.problem.scale

    def unpack_d_chunk(self, d_chunk: KeyValue) -> tuple[jax.Array, jax.Array]:
        d_key = d_chunk.key[:, : self.key_length, :, : self.problem.query_shape[3]]
        return d_key, d_chunk.value[:, : self.key_length, :, : self.problem.value_dim]

    # Who sees whom.

    def tokens(self, scope: Scope) -> tuple[Tokens, Tokens]:
        return padded_tokens(scope, self.key_length, self.shape.query_length, self.shape.key_length)

    def blocks(self, scope: Scope, block_q: int, block_kv: int, by_query: bool) -> ActiveBlocks | None:
        """For every block of queries (or of keys) the blocks of the other side to visit; None when all pairs are full."""
        query, key = self.tokens(scope)
        if query == (None, None):
            return None
        blocks_q, blocks_kv = self.shape.query_length // block_q, self.shape.key_length // block_kv
        if scope.known is not None and blocks_q * blocks_kv <= _LARGEST_CONSTANT:
            query, key = (
                pad_tokens(Tokens(position), position.shape[1], length)
                for position, length in zip(scope.known, (self.shape.query_length, self.shape.key_length), strict=True)
            )
        query_bounds = block_bounds(query, self.shape.query_length, blocks_q)
        key_bounds = block_bounds(key, self.shape.key_length, blocks_kv)
        kinds = classify(query_bounds, key_bounds, self.problem.reach)
        blocks = active_blocks(kinds if by_query else kinds.swapaxes(1, 2))
        return ActiveBlocks(*(jnp.asarray(x) for x in blocks))

    # The kernels.

    def _fold(
        self, query: jax.Array, chunk: KeyValue, scope: Scope, carry: ChunkStats | None, finish: bool = False
    ) -> ChunkStats:
        tokens = self.tokens(scope)
        blocks = self.blocks(scope, FORWARD_BLOCK_Q, forward_block_kv(self.shape), by_query=True)
        from jax_ring_attention.kernels.mosaic_gpu import forward  # see the module docstring

        return forward.fold_chunk(self.shape, query, *chunk, blocks, *tokens, carry, finish)

    def fold(self, query: jax.Array, chunk: KeyValue, scope: Scope, carry: ChunkStats | None) -> ChunkStats:
        return self._fold(query, chunk, scope, carry)

    def fold_last(self, query: jax.Array, chunk: KeyValue, scope: Scope, carry: ChunkStats | None) -> tuple[jax.Array, jax.Array]:
        return self.unpack_finished(self._fold(query, chunk, scope, carry, finish=True))

    def fold_grads(
        self, rows: Rows, chunk: KeyValue, scope: Scope, d_query: jax.Array | None, d_bias: Any, rounded: bool
    ) -> tuple[jax.Array, Any, KeyValue]:
        tokens = self.tokens(scope)
        step = backward_block_q(self.head_dim)
        blocks = self.blocks(scope, step, backward_block_kv(self.shape), by_query=False)
        from jax_ring_attention.kernels.mosaic_gpu import backward, backward_split  # see the module docstring

        if self._splits_backward:
            by_query = self.blocks(scope, FORWARD_BLOCK_Q, step, by_query=True)
            d_query, d_key, d_value = backward_split.grads_chunk(
                self.shape, rows, *chunk, blocks, by_query, *tokens, d_query, rounded
            )
        else:
            assert d_query is not None, "initial_d_query made it"
            d_query, d_key, d_value = backward.grads_chunk(self.shape, *rows, *chunk, blocks, *tokens, d_query, rounded)
        return d_query, d_bias, KeyValue(d_key, d_value)
