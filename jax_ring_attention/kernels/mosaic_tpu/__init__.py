"""`mosaic_tpu`: kernels for TPUs in Pallas; `forward.py` and `backward.py` hold one each.

Tokens run along lanes: query, d_output and output are (B, K, G, head dim, T), value is (B, K, Hv, S), only key is (B, K, S, H),
where G = N / K query heads share a key/value head. sum, max, lse and delta are (B, K, G, 1, T); max and lse are in units of log2
for the whole ring. d_query is (B, K, G * T / block_q, H, block_q), d_key and d_value are (B, K, H or Hv, S); d_query and d_key
are without the factor `scale` until they are unpacked. Lengths are padded to whole blocks, head dims to whole sublanes.

Pallas is imported only when a kernel is built.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention import compat
from jax_ring_attention.kernels.contract import Kernel, KeyValue, Problem, Rows, Scope, pad_to, padded_tokens, silence_empty_rows
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu.common import LANES, LOG2E, NO_KEYS, Shape, Steps, Tiling
from jax_ring_attention.kernels.mosaic_tpu.tiling import backward_tiling, forward_tiling, resident_units, splits_scale, vmem_limit
from jax_ring_attention.masks import Tokens
from jax_ring_attention.stats import ChunkStats

_SUBLANES = 16
#: Entries of lists of steps in scalar memory: two integers of 4 bytes each.
LARGEST_LIST = 2**16


class MosaicTpuKernel(Kernel):
    """See the module docstring; the methods are those of `contract.Kernel`."""

    name = "mosaic_tpu"
    has_grads = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        batch, self.query_length, heads, head_dim = problem.query_shape
        _, self.key_length, kv_heads, _ = problem.key_shape
        self.chip = compat.tpu_chip()
        self.operand_dtype = jnp.dtype(jnp.float32 if problem.dtype == jnp.float16 else problem.dtype)
        padded_dim, padded_value_dim = (-(-dim // _SUBLANES) * _SUBLANES for dim in (head_dim, problem.value_dim))
        self.forward = forward_tiling(self.chip, padded_dim, self.query_length, self.key_length, problem.block_sizes)
        self.backward = backward_tiling(self.chip, self.forward)
        self.shape = Shape(
            batch=batch,
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            query_length=_round_up(self.query_length, self.forward.block_q),
            key_length=_round_up(self.key_length, self.forward.block_kv),
            head_dim=padded_dim,
            value_dim=padded_value_dim,
            dtype=self.operand_dtype,
            scale=problem.scale,
            logits_soft_cap=problem.logits_soft_cap,
            reach=problem.reach,
            precision=_precision(problem),
            split_scale=splits_scale(self.chip, padded_dim, self.operand_dtype) and problem.logits_soft_cap is None,
            vmem_limit=vmem_limit(self.chip),
        )

    @staticmethod
    def is_preferred() -> bool:
        return jax.default_backend() == "tpu"

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        use_xla = "; use implementation='xla'"
        if jax.default_backend() not in ("cpu", "tpu"):
            return f"it runs on TPUs only{use_xla}"
        if problem.has_mask or problem.has_bias:
            return f"it takes no dense mask or bias{use_xla}, or say the mask by segment_ids, positions and windows"
        if problem.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"it takes bfloat16, float16 and float32, not {problem.dtype}; cast the inputs, or use implementation='xla'"
        wrong = [f"{name}={size}" for name, size in problem.block_sizes._asdict().items() if size is not None and size % LANES]
        if wrong:
            return f"its blocks are multiples of {LANES} tokens, not {' and '.join(wrong)}{use_xla} for others"
        if (pairs := MosaicTpuKernel(problem).longest_list) > LARGEST_LIST:
            return (
                f"its list of block pairs would have {pairs} entries and scalar memory holds {LARGEST_LIST}; shard over "
                f"more devices, pass larger block_sizes{use_xla}"
            )
        return None

    @property
    def longest_list(self) -> int:
        """Pairs of blocks that one chunk's list of steps may have, in the forward or the backward kernel."""
        blocks = (
            self.shape.groups * (self.shape.query_length // tiling.block_q) * (self.shape.key_length // tiling.block_kv)
            for tiling in (self.forward, self.backward)
        )
        return max(blocks) * (self.shape.batch if self.problem.row_wise else 1)

    # Packing.

    def _by_kv_head(self, x: jax.Array, heads: int) -> jax.Array:
        """(B, L, heads * n, D) to (B, heads, n, D, L)."""
        x = x.reshape(*x.shape[:2], heads, -1, x.shape[-1])
        return jnp.transpose(x, (0, 2, 3, 4, 1))

    def _pack_query(self, x: jax.Array, dim: int) -> jax.Array:
        x = self._by_kv_head(x, self.shape.kv_heads)
        return pad_to(x, {3: dim, 4: self.shape.query_length})

    def _unpack_query(self, x: jax.Array, dim: int) -> jax.Array:
        x = x[..., :dim, : self.query_length]
        return jnp.transpose(x, (0, 4, 1, 2, 3)).reshape(self.shape.batch, self.query_length, -1, dim)

    def _pack_row_vector(self, x: jax.Array, fill: float) -> jax.Array:
        """(B, T, N) to (B, K, G, 1, T)."""
        x = self._by_kv_head(x[..., None], self.shape.kv_heads)
        return pad_to(x, {4: self.shape.query_length}, fill)

    def pack_query(self, query: jax.Array) -> jax.Array:
        if not self.shape.split_scale:
            return self._pack_query(query.astype(self.operand_dtype), self.shape.head_dim)
        scaled = query.astype(jnp.float32) * (self.problem.scale * LOG2E)
        # Without the barrier the compiler may keep the rounded number in float32, and the rest would be 0.
        large = lax.optimization_barrier(scaled.astype(self.operand_dtype))
        small = (scaled - large.astype(jnp.float32)).astype(self.operand_dtype)
        return self._pack_query(jnp.concatenate([large, small], axis=-1), 2 * self.shape.head_dim)

    def pack_chunk(self, key: jax.Array, value: jax.Array) -> KeyValue:
        key = jnp.swapaxes(key, 1, 2).astype(self.operand_dtype)
        value = jnp.transpose(value, (0, 2, 3, 1)).astype(self.operand_dtype)
        return KeyValue(
            pad_to(key, {2: self.shape.key_length, 3: self.shape.head_dim}),
            pad_to(value, {2: self.shape.value_dim, 3: self.shape.key_length}),
        )

    def initial_stats(self, query: jax.Array) -> ChunkStats:
        rows = jnp.zeros_like(query, dtype=jnp.float32, shape=(*query.shape[:3], 1, self.shape.query_length))
        output = jnp.zeros_like(rows, shape=(*query.shape[:3], self.shape.value_dim, self.shape.query_length))
        return ChunkStats(output, rows, rows - jnp.inf)

    def pack_stats(self, stats: ChunkStats) -> ChunkStats:
        return ChunkStats(
            self._pack_query(stats.output, self.shape.value_dim),
            self._pack_row_vector(stats.sum, 0),
            self._pack_row_vector(stats.max * LOG2E, -jnp.inf),
        )

    def unpack_stats(self, carry: ChunkStats) -> ChunkStats:
        rows = (self._unpack_query(x, 1)[..., 0] for x in (carry.sum, carry.max / LOG2E))
        return ChunkStats(self._unpack_query(carry.output, self.problem.value_dim), *rows)

    def pack_rows(self, query: jax.Array, d_output: jax.Array, lse: jax.Array, delta: jax.Array) -> Rows:
        rows = silence_empty_rows(query, d_output, lse, delta)
        return Rows(
            self._pack_query(rows.query.astype(self.operand_dtype), self.shape.head_dim),
            self._pack_query(rows.d_output.astype(self.operand_dtype), self.shape.value_dim),
            self._pack_row_vector(jnp.where(lse == -jnp.inf, NO_KEYS, lse * LOG2E), NO_KEYS),
            self._pack_row_vector(rows.delta, 0),
        )

    def initial_d_query(self, rows: Rows) -> jax.Array:
        batch, kv_heads, groups, head_dim, length = rows.query.shape
        block = self.backward.block_q
        return jnp.zeros_like(rows.query, dtype=jnp.float32, shape=(batch, kv_heads, groups * length // block, head_dim, block))

    def unpack_d_query(self, d_query: jax.Array) -> jax.Array:
        batch, kv_heads, _, head_dim, block = d_query.shape
        units = d_query.reshape(batch, kv_heads, self.shape.groups, -1, head_dim, block)
        whole = units.swapaxes(3, 4).reshape(batch, kv_heads, self.shape.groups, head_dim, -1)
        return self._unpack_query(whole, self.problem.query_shape[3]) * self.problem.scale

    def unpack_d_chunk(self, d_chunk: KeyValue) -> tuple[jax.Array, jax.Array]:
        def unpack(x, dim):
            return jnp.transpose(x[:, :, :dim, : self.key_length], (0, 3, 1, 2))

        dim, value_dim = self.problem.query_shape[3], self.problem.value_dim
        return unpack(d_chunk.key, dim) * self.problem.scale, unpack(d_chunk.value, value_dim)

    # Who sees whom.

    def padded_tokens(self, scope: Scope) -> tuple[Tokens, Tokens]:
        """The integers of both sides over whole blocks."""
        return padded_tokens(scope, self.key_length, self.shape.query_length, self.shape.key_length)

    def list_steps(self, tokens: tuple[Tokens, Tokens], tiling: Tiling, by_query: bool, units: slice = slice(None)) -> Steps:
        kinds = common.pair_kinds(*tokens, self.shape, tiling)
        return common.list_steps(kinds if by_query else self.by_key(kinds, units))

    def by_key(self, kinds: jax.Array, units: slice) -> jax.Array:
        """Key blocks outside, the query blocks of every head of the group inside, of which `units` are listed."""
        return jnp.tile(kinds.swapaxes(1, 2), (1, 1, self.shape.groups))[:, :, units]

    def compared(self, tokens: tuple[Tokens, Tokens]) -> tuple[Tokens, Tokens]:
        """The integers as the kernels read them: a row for queries, columns for keys."""
        query, key = tokens

        def columns(x):
            return None if x is None else jnp.broadcast_to(x[:, :, None], (*x.shape, LANES))

        return Tokens(*(None if x is None else x[:, None] for x in query)), Tokens(*(columns(x) for x in key))

    # The kernels.

    def fold(self, query: jax.Array, chunk: KeyValue, scope: Scope, carry: ChunkStats | None) -> ChunkStats:
        from jax_ring_attention.kernels.mosaic_tpu import forward  # see the module docstring

        tokens = self.padded_tokens(scope)
        steps = self.list_steps(tokens, self.forward, by_query=True)
        return forward.fold_chunk(self.shape, self.forward, query, chunk, steps, self.compared(tokens), carry)

    def fold_grads(
        self, rows: Rows, chunk: KeyValue, scope: Scope, d_query: jax.Array, d_bias: Any, rounded: bool
    ) -> tuple[jax.Array, Any, KeyValue]:
        from jax_ring_attention.kernels.mosaic_tpu import backward  # see the module docstring

        tokens = self.padded_tokens(scope)
        compared = self.compared(tokens)
        units = d_query.shape[2]
        at_once = resident_units(self.shape, self.backward)
        d_chunk: KeyValue | None = None
        for start in range(0, units, at_once):
            part = start, min(start + at_once, units)
            steps = self.list_steps(tokens, self.backward, by_query=False, units=slice(*part))
            d_query, d_chunk = backward.grads_chunk(
                self.shape, self.backward, rows, chunk, steps, compared, part, d_query, d_chunk
            )
        assert d_chunk is not None, "there is at least one unit"
        return d_query, d_bias, d_chunk


def _round_up(length: int, block: int) -> int:
    return -(-length // block) * block


def _precision(problem: Problem) -> lax.Precision:
    """The compiler knows one pass of bfloat16, or as many as float32 needs; what asks for more than one pass gets all."""
    if problem.dtype == jnp.bfloat16:
        return lax.Precision.DEFAULT
    if problem.dtype == jnp.float16:  # held as float32, and exact there
        return lax.Precision.HIGHEST
    return lax.Precision.DEFAULT if problem.precision in (None, "default", "bfloat16", "fastest") else lax.Precision.HIGHEST
