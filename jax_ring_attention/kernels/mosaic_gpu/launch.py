"""What the Hopper kernels share that needs Pallas: register layouts, shared memory, and the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_ring_attention.kernels.mosaic_gpu.common import ROWS, WARPGROUPS

#: Slots of every ring of shared-memory buffers.
STAGES = 2

#: Registers of a vector with one number per row, or per column, of a wgmma tile.
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


def tiled(*dims: int, dtype: Any, columns: int = 64) -> Any:
    """Shared memory as wgmma and TMA want it: tiles of 8 x `columns` numbers, 128 bytes wide, swizzled."""
    return plgpu.SMEM(dims, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))


def zeros(dim: int) -> Any:
    """A warpgroup's accumulators of (ROWS, dim), in registers."""
    return plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), plgpu.Layout.WGMMA)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, or plain Python where the answer is known."""
    if not isinstance(condition, bool):
        return pl.when(condition)

    def run(body: Callable[[], None]) -> None:
        if condition:
            body()

    return run


def build(body: Callable[..., None], out_type: Any, scratch: tuple[Any, ...], grid: dict[str, int]) -> Callable[..., Any]:
    """A kernel of two compute warpgroups and one memory warpgroup per CTA; the last axis of `grid` runs fastest."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=0,  # rows of a wgmma tile are reduced within a warp
        ),
    )
