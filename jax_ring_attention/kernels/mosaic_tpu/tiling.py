"""Block sizes per chip generation, from the compiler's static schedule; docs/log.md has the table."""

from __future__ import annotations

import jax.numpy as jnp

from jax_ring_attention.kernels.contract import BlockSizes
from jax_ring_attention.kernels.mosaic_tpu.common import LANES, Shape, Tiling

#: Chips with matrix units of 256 x 256; the others have 128 x 128.
_WIDE = ("v6e", "tpu7x")
_MEBIBYTE = 2**20
#: Bytes of VMEM that a kernel may use, a little less than a core has. What is not listed gets the least.
_VMEM = {"v5e": 120 * _MEBIBYTE, "v6e": 120 * _MEBIBYTE, "v5p": 60 * _MEBIBYTE, "tpu7x": 60 * _MEBIBYTE}
_SMALLEST_VMEM = 15 * _MEBIBYTE


def _fit(length: int, block: int) -> int:
    """The block, a multiple of LANES and at most `block`, that covers `length` in the fewest, most even blocks."""
    count = -(-length // block)
    return -(-length // (count * LANES)) * LANES


def _divisor(block: int, *sizes: int) -> int:
    return next(size for size in sizes if block % size == 0)


def forward_tiling(chip: str | None, head_dim: int, query_length: int, key_length: int, requested: BlockSizes) -> Tiling:
    """Blocks of 1024 x 2048 tokens, fewer for short sequences; how they are cut and pipelined depends on the matrix unit."""
    block_q = _fit(query_length, requested.block_q or 1024)
    block_kv = _fit(key_length, requested.block_kv or 2048)
    tile_q = _divisor(block_q, 256, 128)
    if chip not in _WIDE:
        return Tiling(block_q, block_kv, tile_q, LANES, ahead=2, lag=1)
    if head_dim > LANES:
        return Tiling(block_q, block_kv, tile_q, _divisor(block_kv, 512, 256, 128), ahead=1, lag=1)
    return Tiling(block_q, block_kv, tile_q, _divisor(block_kv, 256, 128), ahead=4, lag=1, side_by_side=4)


def backward_tiling(chip: str | None, forward: Tiling) -> Tiling:
    """Blocks of 1024 x 1024 tokens; those of queries are the forward pass's."""
    block_kv = forward.block_kv if forward.block_kv <= 1024 else _divisor(forward.block_kv, 1024, 512, 256, 128)
    tile_q = _divisor(forward.block_q, 256, 128)
    if chip not in _WIDE:
        return Tiling(forward.block_q, block_kv, tile_q, _divisor(block_kv, 512, 256, 128), ahead=1, lag=0)
    return Tiling(forward.block_q, block_kv, tile_q, _divisor(block_kv, 256, 128), ahead=1, lag=1)


def vmem_limit(chip: str | None) -> int:
    """Bytes of VMEM that a kernel may use. Where no TPU is in sight, as for one that is only emulated, as much as any has."""
    return max(_VMEM.values()) if chip is None else _VMEM.get(chip, _SMALLEST_VMEM)


def resident_units(shape: Shape, tiling: Tiling) -> int:
    """Blocks of d_query that stay in VMEM at once: they get half of it."""
    return max(1, shape.vmem_limit // 2 // (4 * shape.head_dim * tiling.block_q))


def splits_scale(chip: str | None, head_dim: int, dtype: jnp.dtype) -> bool:
    """Whether queries hold the scale, split in two numbers: see `Shape`."""
    return chip in _WIDE and head_dim in (LANES // 2, LANES) and dtype == jnp.bfloat16
