"""The reference kernel: blockwise attention in plain JAX, on any platform, for every input.

Queries and keys are cut into blocks, one matmul per pair of blocks. A block of scores (block_q x block_kv per head) is the
largest score array that ever exists. For every row of block pairs the visited blocks are listed first (`masks.active_blocks`):
full ones run without a mask, partial ones compare the tokens' integers, empty ones are not visited at all.

Tiles. `(B, L, N, D)` becomes `(groups * blocks, B / groups, K, N/K * block, D)`: the query heads that share a key/value head
are rows of one matmul, so grouped queries cost no copy of keys. There is one group for the whole batch when all rows have the
same integers, else one per row, so that every row skips its own empty blocks.

Forward: Dao 2023, "FlashAttention-2", algorithm 1; backward: algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.kernels.contract import Dense, Kernel, KeyValue, Problem, Rows, Scope, pad_to, silence_empty_rows
from jax_ring_attention.masks import (
    FULL,
    PARTIAL,
    ActiveBlocks,
    Tokens,
    active_blocks,
    block_bounds,
    classify,
    pad_tokens,
    visible,
)
from jax_ring_attention.stats import ChunkStats, accumulator_dtype, finite_or_zero

_LARGEST_DEFAULT_BLOCK = 512
_SMALLEST_DEFAULT_BLOCK = 128
#: Default blocks shrink until one block of scores, over all heads, has at most this many numbers. On CPU it must stay in cache
#: (docs/log.md has the measurement); elsewhere it bounds memory.
_SCORES_PER_STEP = {"cpu": 2**17, "other": 2**24}


class Tiling(NamedTuple):
    """`blocks` blocks of `size` tokens cover `length` tokens; the last one may hang over."""

    length: int
    size: int
    blocks: int

    @property
    def padded(self) -> int:
        return self.size * self.blocks


def _tiling(length: int, block: int) -> Tiling:
    """As few blocks of at most `block` as cover `length`, as even as possible, so that padding stays below one token a block."""
    count = max(1, -(-length // block))
    return Tiling(length, -(-length // count), count)


def _at(tiles: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tiles)


def _add_at(tiles: jax.Array, index: Any, update: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(tiles, _at(tiles, index) + update, index, 0)


class XlaKernel(Kernel):
    """See the module docstring; the methods are those of `contract.Kernel`."""

    name = "xla"
    has_grads = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        batch, query_length, heads, _ = problem.query_shape
        _, key_length, self.kv_heads, _ = problem.key_shape
        self.groups = batch if problem.row_wise else 1
        self.group_rows = batch // self.groups
        self.heads_per_kv = heads // self.kv_heads
        self.accumulator = accumulator_dtype(problem.dtype)
        budget = _SCORES_PER_STEP["cpu" if jax.default_backend() == "cpu" else "other"]
        default = _LARGEST_DEFAULT_BLOCK
        while default > _SMALLEST_DEFAULT_BLOCK and self.group_rows * heads * default**2 > budget:
            default //= 2
        self.query_tiling = _tiling(query_length, problem.block_sizes.block_q or default)
        self.key_tiling = _tiling(key_length, problem.block_sizes.block_kv or default)

    @staticmethod
    def refusal(problem: Problem) -> str | None:
        return None

    @property
    def overhang(self) -> int:
        return self.key_tiling.padded - self.key_tiling.length

    # Packing: between (B, L, N, ...) and tiles.

    def _tile(self, x: jax.Array, tiling: Tiling) -> jax.Array:
        heads, rest = x.shape[2], x.shape[3:]
        x = pad_to(x, {1: tiling.padded})
        x = x.reshape(self.groups, self.group_rows, tiling.blocks, tiling.size, self.kv_heads, heads // self.kv_heads, *rest)
        x = jnp.moveaxis(x, (2, 4, 5), (1, 3, 4))
        return x.reshape(self.groups * tiling.blocks, self.group_rows, self.kv_heads, -1, *rest)

    def _untile(self, x: jax.Array, tiling: Tiling) -> jax.Array:
        rest = x.shape[4:]
        x = x.reshape(self.groups, tiling.blocks, self.group_rows, self.kv_heads, -1, tiling.size, *rest)
        x = jnp.moveaxis(x, (1, 3, 4), (2, 4, 5))
        x = x.reshape(self.groups * self.group_rows, tiling.padded, -1, *rest)
        return x[:, : tiling.length]

    def pack_query(self, query: jax.Array) -> jax.Array:
        return self._tile(query, self.query_tiling)

    def pack_chunk(self, key: jax.Array, value: jax.Array) -> KeyValue:
        return KeyValue(self._tile(key, self.key_tiling), self._tile(value, self.key_tiling))

    def pack_dense(self, dense: Dense, overhang: int) -> Dense:
        def pad(x):
            if x is None:
                return None
            wanted = {2: self.query_tiling.padded, 3: x.shape[3] + overhang}
            return pad_to(x, {axis: size for axis, size in wanted.items() if x.shape[axis] > 1})

        return Dense(pad(dense.mask), pad(dense.bias))

    def pack_stats(self, stats: ChunkStats) -> ChunkStats:
        return ChunkStats(*(self._tile(x, self.query_tiling) for x in stats))

    def unpack_stats(self, carry: ChunkStats) -> ChunkStats:
        return ChunkStats(*(self._untile(x, self.query_tiling) for x in carry))

    def pack_rows(self, query: jax.Array, d_output: jax.Array, lse: jax.Array, delta: jax.Array) -> Rows:
        rows = silence_empty_rows(query, d_output, lse, delta)
        rows = rows._replace(lse=finite_or_zero(lse))
        return Rows(*(self._tile(x, self.query_tiling) for x in rows))

    def unpack_d_query(self, d_query: jax.Array) -> jax.Array:
        return self._untile(d_query, self.query_tiling)

    def unpack_d_chunk(self, d_chunk: KeyValue) -> tuple[jax.Array, jax.Array]:
        return self._untile(d_chunk.key, self.key_tiling), self._untile(d_chunk.value, self.key_tiling)

    # Which pairs of blocks to visit, and what they compare.

    def _pairs(self, scope: Scope) -> _Pairs:
        query_tokens, key_tokens, dense, key_offset, _ = scope
        reach = self.problem.reach
        query_tokens = pad_tokens(query_tokens, self.query_tiling.length, self.query_tiling.padded)
        key_tokens = pad_tokens(key_tokens, self.key_tiling.length, self.key_tiling.padded)
        shape = (self.groups, self.query_tiling.blocks, self.key_tiling.blocks)
        compared = reach != (None, None) or query_tokens.segment is not None or key_tokens.segment is not None
        kinds = jnp.full(shape, FULL, jnp.int32)
        if compared:
            query_bounds = block_bounds(query_tokens, self.query_tiling.padded, self.query_tiling.blocks)
            key_bounds = block_bounds(key_tokens, self.key_tiling.padded, self.key_tiling.blocks)
            kinds = jnp.broadcast_to(classify(query_bounds, key_bounds, reach), shape)
        if dense.mask is not None:
            kinds = jnp.maximum(kinds, PARTIAL)
        return _Pairs(
            kinds,
            self._token_tiles(query_tokens, self.query_tiling),
            self._token_tiles(key_tokens, self.key_tiling),
            dense,
            key_offset,
            self.key_tiling.size,
            may_be_full=dense.mask is None,
            may_be_partial=compared or dense.mask is not None,
        )

    def _token_tiles(self, tokens: Tokens, tiling: Tiling) -> Tokens:
        """Each (groups * blocks, 1, block)."""

        def tile(x):
            if x is None:
                return None
            return jnp.broadcast_to(x, (self.groups, tiling.padded)).reshape(-1, 1, tiling.size)

        return Tokens(*(tile(x) for x in tokens))

    def _dense_block(self, x: jax.Array, group: Any, query_block: Any, key_start: Any) -> jax.Array:
        """The part of a dense mask or bias for one pair, broadcastable to (rows, K, N/K, block_q, block_kv)."""
        sizes = self._dense_sizes(x)
        block = lax.dynamic_slice(x, self._dense_start(x, group, query_block, key_start), sizes)
        heads = (1, 1) if sizes[1] == 1 else (self.kv_heads, self.heads_per_kv)
        return block.reshape(sizes[0], *heads, *sizes[2:])

    def _dense_sizes(self, x: jax.Array) -> tuple[int, ...]:
        full = (self.group_rows, x.shape[1], self.query_tiling.size, self.key_tiling.size)
        return tuple(1 if n == 1 else size for n, size in zip(x.shape, full, strict=True))

    def _dense_start(self, x: jax.Array, group: Any, query_block: Any, key_start: Any) -> tuple[Any, ...]:
        full = (group * self.group_rows, 0, query_block * self.query_tiling.size, key_start)
        return tuple(jnp.int32(0 if n == 1 else start) for n, start in zip(x.shape, full, strict=True))

    def _mask_and_bias(self, pair: _Pair, masked: bool) -> tuple[jax.Array | None, jax.Array | None]:
        """Mask (of a partial pair, or where a bias may hide) and bias, broadcastable to (rows, K, N/K, block_q, block_kv)."""
        where = (pair.group, pair.query_block, pair.key_start)
        mask = None
        if masked:
            mask = visible(pair.query_tokens, pair.key_tokens, self.problem.reach)
            mask = None if mask is None else mask[:, None, None]
            if pair.dense.mask is not None:
                dense = self._dense_block(pair.dense.mask, *where)
                mask = dense if mask is None else mask & dense
        if pair.dense.bias is None:
            return mask, None
        bias = self._dense_block(pair.dense.bias, *where)
        shown = bias != -jnp.inf  # a bias of -inf hides like a mask, so that what is stored there meets no sum
        return shown if mask is None else mask & shown, bias

    # The arithmetic of one pair.

    def _matmul(self, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        """Batched over (rows, K), accumulated in float32 or float64."""
        return lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((0, 1), (0, 1))),
            precision=self.problem.precision,
            preferred_element_type=self.accumulator,
        )

    def _logits(
        self, query: jax.Array, key: jax.Array, mask: jax.Array | None, bias: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Logits (rows, K, N/K, block_q, block_kv), -inf where hidden, and the derivative of the soft cap."""
        logits = self._matmul(query, key, (3, 3)) * self.problem.scale
        logits = logits.reshape(*logits.shape[:2], self.heads_per_kv, -1, logits.shape[-1])
        if bias is not None:
            logits += bias.astype(self.accumulator)
        slope = None
        if (cap := self.problem.logits_soft_cap) is not None:
            capped = jnp.tanh(logits / cap)
            logits, slope = cap * capped, 1 - capped * capped
        if mask is not None:
            logits = jnp.where(mask, logits, -jnp.inf)
        return logits, slope

    def _shown(self, chunk: KeyValue, mask: jax.Array | None) -> KeyValue:
        """The chunk with zeros for keys that no query of this pair sees: 0 * NaN must not reach a sum."""
        if mask is None:
            return chunk
        mask = jnp.broadcast_to(mask, (*mask.shape[:4], chunk.key.shape[2]))
        seen = mask.any((2, 3))
        # The barrier keeps XLA from fusing the reduction into its uses, which would repeat it for every head dim.
        seen = jnp.broadcast_to(lax.optimization_barrier(seen), chunk.key.shape[:3])[..., None]
        return KeyValue(*(jnp.where(seen, x, jnp.zeros_like(x)) for x in chunk))

    def _fold_pair(self, pair: _Pair, query: jax.Array, chunk: KeyValue, carry: ChunkStats, masked: bool) -> ChunkStats:
        mask, bias = self._mask_and_bias(pair, masked)
        chunk = self._shown(chunk, mask)
        logits, _ = self._logits(query, chunk.key, mask, bias)
        logits = logits.reshape(*query.shape[:3], -1)
        maximum = jnp.maximum(carry.max, logits.max(-1))
        reference = maximum if mask is None else finite_or_zero(maximum)
        weights = jnp.exp(logits - reference[..., None])
        rescale = jnp.exp(carry.max - reference)
        output = self._matmul(weights.astype(chunk.value.dtype), chunk.value, (3, 2))
        return ChunkStats(carry.output * rescale[..., None] + output, carry.sum * rescale + weights.sum(-1), maximum)

    def _pair_grads(
        self, pair: _Pair, rows: Rows, chunk: KeyValue, d_bias: jax.Array | None, masked: bool
    ) -> tuple[jax.Array, KeyValue, jax.Array | None]:
        """Five matmuls: logits, d_weights, d_value, d_key, d_query."""
        mask, bias = self._mask_and_bias(pair, masked)
        chunk = self._shown(chunk, mask)
        logits, slope = self._logits(rows.query, chunk.key, mask, bias)
        flat = (*rows.query.shape[:3], -1)
        weights = jnp.exp(logits.reshape(flat) - rows.lse[..., None])
        d_weights = self._matmul(rows.d_output, chunk.value, (3, 3))
        d_logits = weights * (d_weights - rows.delta[..., None])
        if slope is not None:
            d_logits *= slope.reshape(flat)
        if d_bias is not None:
            d_bias = self._add_d_bias(d_bias, pair, d_logits.reshape(logits.shape))
        d_value = self._matmul(weights.astype(rows.d_output.dtype), rows.d_output, (2, 2))
        d_logits = (d_logits * self.problem.scale).astype(rows.query.dtype)
        d_key = self._matmul(d_logits, rows.query, (2, 2))
        d_query = self._matmul(d_logits, chunk.key, (3, 2))
        return d_query, KeyValue(d_key, d_value), d_bias

    def _add_d_bias(self, d_bias: jax.Array, pair: _Pair, d_logits: jax.Array) -> jax.Array:
        start = self._dense_start(d_bias, pair.group, pair.query_block, pair.key_start)
        sizes = self._dense_sizes(d_bias)
        d_logits = d_logits.reshape(d_logits.shape[0], -1, *d_logits.shape[3:])
        block = d_logits.sum([i for i in range(4) if sizes[i] == 1 and d_logits.shape[i] > 1], keepdims=True)
        return lax.dynamic_update_slice(d_bias, lax.dynamic_slice(d_bias, start, sizes) + block, start)

    # The loops.

    def fold(
        self,
        query: jax.Array,
        chunk: KeyValue,
        scope: Scope,
        carry: ChunkStats | None,
    ) -> ChunkStats:
        """Query blocks outside, the key blocks that each of them sees inside."""
        carry = self.initial_stats(query) if carry is None else carry
        table = self._pairs(scope)

        def query_block(_, xs):
            tile, blocks, query, carry = xs

            def step(masked):
                def body(inner, carry):
                    pair, key_tile = table.pair(tile, inner, by_query=True)
                    return self._fold_pair(pair, query, _at(chunk, key_tile), carry, masked)

                return body

            return None, table.visit(blocks, step, carry)

        tiles = jnp.arange(query.shape[0], dtype=jnp.int32)
        return lax.scan(query_block, None, (tiles, table.blocks(by_query=True), query, carry))[1]

    def fold_grads(
        self,
        rows: Rows,
        chunk: KeyValue,
        scope: Scope,
        d_query: jax.Array,
        d_bias: jax.Array | None,
        rounded: bool,
    ) -> tuple[jax.Array, jax.Array | None, KeyValue]:
        """Key blocks outside with d_key and d_value at hand, the query blocks that see each of them inside."""
        table = self._pairs(scope)

        def key_block(sums, xs):
            tile, blocks, chunk = xs
            d_chunk = KeyValue(*(jnp.zeros_like(x, dtype=self.accumulator) for x in chunk))

            def step(masked):
                def body(inner, state):
                    d_query, d_bias, d_chunk = state
                    pair, query_tile = table.pair(tile, inner, by_query=False)
                    d_rows, d_pair, d_bias = self._pair_grads(pair, _at(rows, query_tile), chunk, d_bias, masked)
                    return _add_at(d_query, query_tile, d_rows), d_bias, jax.tree.map(jnp.add, d_chunk, d_pair)

                return body

            *sums, d_chunk = table.visit(blocks, step, (*sums, d_chunk))
            return tuple(sums), jax.tree.map(lambda d, x: d.astype(x.dtype), d_chunk, chunk) if rounded else d_chunk

        tiles = jnp.arange(chunk.key.shape[0], dtype=jnp.int32)
        (d_query, d_bias), d_chunk = lax.scan(key_block, (d_query, d_bias), (tiles, table.blocks(by_query=False), chunk))
        return d_query, d_bias, d_chunk


class _Pair(NamedTuple):
    """What one pair of blocks compares and where it lies."""

    query_tokens: Tokens
    key_tokens: Tokens
    dense: Dense
    group: Any
    query_block: Any
    key_start: Any


class _Pairs(NamedTuple):
    """The table of block pairs of one chunk: `kinds` (groups, query blocks, key blocks) and what the pairs compare."""

    kinds: jax.Array
    query_tokens: Tokens
    key_tokens: Tokens
    dense: Dense
    key_offset: Any
    block_kv: int
    may_be_full: bool
    may_be_partial: bool

    def blocks(self, by_query: bool) -> ActiveBlocks:
        """Per tile of one side, the blocks of the other side to visit."""
        listed = active_blocks(self.kinds if by_query else self.kinds.swapaxes(1, 2))
        return ActiveBlocks(listed.order.reshape(-1, listed.order.shape[-1]), listed.full.ravel(), listed.active.ravel())

    def pair(self, tile: Any, inner: Any, by_query: bool) -> tuple[_Pair, Any]:
        """The pair of `tile` of one side and block `inner` of the other, and that block's tile."""
        _, query_blocks, key_blocks = self.kinds.shape
        here, there = (query_blocks, key_blocks) if by_query else (key_blocks, query_blocks)
        group, outer = tile // here, tile % here
        other = group * there + inner
        query_tile, key_tile = (tile, other) if by_query else (other, tile)
        query_block, key_block = (outer, inner) if by_query else (inner, outer)
        tokens = _at(self.query_tokens, query_tile), _at(self.key_tokens, key_tile)
        return _Pair(*tokens, self.dense, group, query_block, self.key_offset + key_block * self.block_kv), other

    def visit(self, blocks: ActiveBlocks, step: Any, state: Any) -> Any:
        """Run `step(masked)(block, state)` over the full blocks of one tile, then over the partial ones."""
        if self.may_be_full:
            body = step(masked=False)
            state = lax.fori_loop(0, blocks.full, lambda n, state: body(blocks.order[n], state), state)
        if self.may_be_partial:
            body_masked = step(masked=True)
            state = lax.fori_loop(blocks.full, blocks.active, lambda n, state: body_masked(blocks.order[n], state), state)
        return state
