"""Backward: one chunk's share of all three gradients in one kernel, five products per pair of blocks.

Transposed like the forward kernel: with logits S (keys, queries) and cotangents of the weights dP (keys, queries),

    P = exp2(S - lse)     dS = P * (dP - delta)
    d_value (Hv, keys) += d_output P'     d_key (H, keys) += query dS'     d_query (H, queries) += key' dS

Grid: batch row, key/value head, step. Key blocks are outside: d_key and d_value of one block are accumulated in their output
blocks. Inside are the query blocks of all query heads of the group, so that grouped heads cost no reduction. d_query of each
comes to VMEM during the step before its first one and leaves after its last one (`Units`). Where all of them do not fit, the
caller runs parts of the queries one after another, each adding to the d_key and d_value of the one before. d_query of blocks
without a step is not touched: it shares its memory with the result.

Pipelined like the forward kernel: S and dP of tile i + ahead, the exponents of tile i, the three sums of tile i - lag.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_ring_attention.kernels.contract import KeyValue, Rows
from jax_ring_attention.kernels.mosaic_tpu import common, launch
from jax_ring_attention.kernels.mosaic_tpu.common import Shape, Steps, Tiling
from jax_ring_attention.masks import Tokens


def grads_chunk(
    shape: Shape,
    tiling: Tiling,
    rows: Rows,
    chunk: KeyValue,
    steps: Steps,
    tokens: tuple[Tokens, Tokens],
    part: tuple[int, int],
    d_query: jax.Array,
    carry: KeyValue | None,
) -> tuple[jax.Array, KeyValue]:
    """`d_query` with this chunk's share added to its units of `part`, and (d_key, d_value), added to `carry` if there is one.

    A unit is one block of queries of one head of a group: unit g * (T / block_q) + i.

    Args:
      rows: query and d_output (B, K, G, H or Hv, T), lse and delta (B, K, G, 1, T), lse in units of log2.
      chunk: key (B, K, S, H), value (B, K, Hv, S).
      steps: key blocks outside, the units of `part` inside, counted from its start.
      tokens: as in the forward kernel.
      part: first unit and one past the last.
      d_query: (B, K, G * T / block_q, H, block_q) float32.
      carry: d_key (B, K, H, S) and d_value (B, K, Hv, S), float32.
    """
    batch, kv_heads = d_query.shape[:2]
    start, stop = part
    blocks = launch.Blocks(steps)
    row_specs, chunk_specs, token_specs, d_chunk_specs = block_specs(blocks, shape, tiling, tokens, start)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    d_chunk = tuple(
        jax.ShapeDtypeStruct((batch, kv_heads, size, shape.key_length), jnp.float32) for size in (shape.head_dim, shape.value_dim)
    )
    d_query_out = jax.ShapeDtypeStruct(d_query.shape, d_query.dtype)
    d_query, d_chunk = launch.call(
        functools.partial(_kernel, shape, tiling, part),
        name="ring_attention_backward",
        steps=steps,
        vmem_limit=shape.vmem_limit,
        grid=(batch, kv_heads),
        operands=(rows, chunk, tokens, d_query, carry),
        in_specs=(
            row_specs,
            chunk_specs,
            token_specs,
            anywhere,
            None if carry is None else d_chunk_specs,
        ),
        out_shape=(d_query_out, d_chunk),
        out_specs=(anywhere, d_chunk_specs),
        aliased=((d_query, carry), (d_query_out, d_chunk)),
        scratch=(
            pltpu.VMEM((stop - start, shape.head_dim, tiling.block_q), jnp.float32),
            pltpu.VMEM((shape.head_dim, tiling.block_kv), shape.dtype),
            pltpu.VMEM((tiling.block_kv, shape.value_dim), shape.dtype),
            *Units.scratch(),
        ),
    )
    return d_query, KeyValue(*d_chunk)


def block_specs(
    blocks: Any, shape: Shape, tiling: Tiling, tokens: tuple[Tokens, Tokens], start: int
) -> tuple[Any, Any, Any, Any]:
    """Specs, by `blocks.spec`, of the rows, the chunk, the tokens and the chunk's gradients; units are listed from `start`."""
    blocks_q = shape.query_length // tiling.block_q
    column = common.outer_of

    def head_and_block(code):  # indices are no floor divisions of signed numbers; a power of two needs no division
        unit = start + common.inner_of(code)
        if blocks_q & (blocks_q - 1) == 0:
            return unit >> (blocks_q.bit_length() - 1), unit & (blocks_q - 1)
        return lax.div(unit, jnp.int32(blocks_q)), lax.rem(unit, jnp.int32(blocks_q))

    def of_query(size: int) -> pl.BlockSpec:
        return blocks.spec(
            (None, None, None, size, tiling.block_q),
            lambda b, k, code: (b, k, head_and_block(code)[0], 0, head_and_block(code)[1]),
        )

    def of_keys(size: int) -> pl.BlockSpec:
        return blocks.spec((None, None, size, tiling.block_kv), lambda b, k, code: (b, k, 0, column(code)))

    key_spec = blocks.spec((None, None, tiling.block_kv, shape.head_dim), lambda b, k, code: (b, k, column(code), 0))
    return (
        (of_query(shape.head_dim), of_query(shape.value_dim), of_query(1), of_query(1)),
        (key_spec, of_keys(shape.value_dim)),
        launch.token_specs(blocks, tokens, tiling, lambda code: head_and_block(code)[1], column),
        (of_keys(shape.head_dim), of_keys(shape.value_dim)),
    )


def _kernel(
    shape: Shape,
    tiling: Tiling,
    part: tuple[int, int],
    codes: launch.Codes,
    operands: Any,
    results: Any,
    d_query: Any,
    key_transposed: Any,
    value_rows: Any,
    *moves: Any,
) -> None:
    rows, chunk, tokens, d_query_in, carry = operands
    d_query_out, d_chunk = results
    code, here = codes.here, (pl.program_id(0), pl.program_id(1), pl.ds(part[0], part[1] - part[0]))
    units = Units(d_query, d_query_in.at[here], d_query_out.at[here], *moves)
    units.arrive(codes)

    @pl.when(common.is_first(code))
    def _():
        for to, start in zip(d_chunk, carry or (None, None), strict=True):
            to[...] = jnp.zeros(to.shape, to.dtype) if start is None else start[...]
        key_transposed[...] = chunk.key[...].T
        value_rows[...] = chunk.value[...].T

    keys = Keys(chunk.key, key_transposed, value_rows)
    pair = functools.partial(pair_grads, shape, tiling, rows, keys, tokens, d_query.at[common.inner_of(code)], d_chunk)
    launch.branch_on_kind(code, tokens, tiling, pair)

    units.depart(codes)


class Units(NamedTuple):
    """d_query of one head's units on its way to VMEM and back, unit by unit, beside the steps.

    A unit is in VMEM from the step that `enters` it to the one that `leaves` it. At most one is coming, so that what its
    semaphore counts is this one; of those that are leaving only the number matters.

    Attributes:
      here: (units, H, block_q) in VMEM.
      source, target: as many in HBM. A unit that no step has does not move: they share memory, or every unit has a step.
      coming, leaving: DMA semaphores.
      left: (1,) in SMEM, how many of this head are leaving or have left.
    """

    here: Any
    source: Any
    target: Any
    coming: Any
    leaving: Any
    left: Any

    @staticmethod
    def scratch() -> tuple[Any, ...]:
        """The last three."""
        return pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA, pltpu.SMEM((1,), jnp.int32)

    def _come(self, code: Any) -> Any:
        unit = common.inner_of(code)
        return pltpu.make_async_copy(self.source.at[unit], self.here.at[unit], self.coming)

    def _leave(self, code: Any) -> Any:
        unit = common.inner_of(code)
        return pltpu.make_async_copy(self.here.at[unit], self.target.at[unit], self.leaving)

    def arrive(self, codes: launch.Codes) -> None:
        """Before a step: its unit is here, and the next step's starts to come."""
        code, following = codes.here, codes.following

        @pl.when(codes.number == 0)
        def _():
            self.left[0] = 0
            self._come(code).start()

        pl.when(common.enters(code))(lambda: self._come(code).wait())
        more = codes.number + 1 < codes.total
        pl.when(more & common.enters(following))(lambda: self._come(following).start())

    def depart(self, codes: launch.Codes) -> None:
        """After a step; after a head's last one all have left."""
        code = codes.here

        @pl.when(common.leaves(code))
        def _():
            self.left[0] += 1
            self._leave(code).start()

        @pl.when(codes.number == codes.total - 1)
        def _():
            pl.loop(jnp.int32(0), self.left[0])(lambda _: self._leave(code).wait())


class Keys(NamedTuple):
    """One block of keys, as the products want it: (keys, H), (H, keys) and (keys, Hv)."""

    key: Any
    key_transposed: Any
    value_rows: Any


def pair_grads(
    shape: Shape,
    tiling: Tiling,
    rows: Rows,
    chunk: Keys,
    tokens: tuple[Tokens, Tokens],
    d_query: Any,
    d_chunk: tuple[Any, Any],
    kind: int,
) -> None:
    tiles = common.tiles_of(kind, tiling)
    d_key, d_value = d_chunk

    def queries(a: int) -> tuple[slice, slice]:
        return slice(None), slice(a * tiling.tile_q, (a + 1) * tiling.tile_q)

    def keys(b: int) -> slice:
        return slice(b * tiling.tile_kv, (b + 1) * tiling.tile_kv)

    def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        return launch.matmul(a, b, contract, shape.precision)

    def issue(i: int) -> tuple[jax.Array, jax.Array]:
        """S and dP of tile i."""
        a, b, _ = tiles[i]
        return (
            product(chunk.key[keys(b), :], rows.query[queries(a)], (1, 0)),
            product(chunk.value_rows[keys(b), :], rows.d_output[queries(a)], (1, 0)),
        )

    def weigh(i: int, raw: jax.Array, d_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """P and dS of tile i, as operands of products."""
        a, b, masked = tiles[i]
        scaled, capped = launch.log2_logits(shape, raw)
        if masked:
            scaled = jnp.where(launch.tile_mask(tokens, queries(a), keys(b), shape.reach), scaled, -jnp.inf)
        weights = jnp.exp2(scaled - rows.lse[queries(a)])
        d_logits = weights * (d_weights - rows.delta[queries(a)])
        if capped is not None:
            d_logits *= 1 - capped * capped
        return weights.astype(shape.dtype), d_logits.astype(shape.dtype)

    def add(i: int, weights: jax.Array, d_logits: jax.Array) -> None:
        a, b, _ = tiles[i]
        d_value[:, keys(b)] += product(rows.d_output[queries(a)], weights, (1, 1))
        d_key[:, keys(b)] += product(rows.query[queries(a)], d_logits, (1, 1))
        d_query[queries(a)] += product(chunk.key_transposed[:, keys(b)], d_logits, (1, 0))

    issued: dict[int, Any] = {}
    weighed: dict[int, Any] = {}
    count = len(tiles)
    for i in range(-tiling.ahead, count + tiling.lag):
        if i + tiling.ahead < count:
            issued[i + tiling.ahead] = issue(i + tiling.ahead)
        if 0 <= i < count:
            weighed[i] = weigh(i, *issued.pop(i))
        if i - tiling.lag >= 0:
            add(i - tiling.lag, *weighed.pop(i - tiling.lag))
