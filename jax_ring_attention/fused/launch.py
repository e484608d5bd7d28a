"""What both kernels of the fused ring share: the call, and a pipeline over the listed steps of one hop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_ring_attention import compat
from jax_ring_attention.fused.common import vmap_message
from jax_ring_attention.fused.hops import HopSteps, Route
from jax_ring_attention.kernels.mosaic_tpu.common import LANES
from jax_ring_attention.masks import Tokens

HBM = pltpu.MemorySpace.HBM


def call(
    body: Callable[..., None],
    *,
    name: str,
    route: Route,
    coordinates: jax.Array,
    scalars: Any,
    operands: Any,
    out_shape: Any,
    scratch: Any,
    vmem_limit: int,
) -> Any:
    """Run `body((coordinates, scalars), operands, results, scratch)` once; every argument is a tree.

    `coordinates` and `scalars` are arrays in scalar memory, `operands` and results stay in HBM.
    """
    inputs, structure = jax.tree.flatten(((coordinates, scalars), operands))
    count = 1 + len(jax.tree.leaves(scalars))
    # What comes out does not depend on where the device is, except through what it reads.
    axes = frozenset().union(*(compat.varying_axes(x) for x in inputs[1:]))
    flat_out, out_structure = jax.tree.flatten(out_shape)
    flat_scratch, scratch_structure = jax.tree.flatten(scratch)

    def kernel(*refs):
        given = jax.tree.unflatten(structure, refs[: len(inputs)])
        results = jax.tree.unflatten(out_structure, refs[len(inputs) : len(inputs) + len(flat_out)])
        body(*given, results, jax.tree.unflatten(scratch_structure, refs[len(inputs) + len(flat_out) :]))

    in_hbm = pl.BlockSpec(memory_space=HBM)
    run = pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pltpu.MemorySpace.SMEM)] * count + [in_hbm] * (len(inputs) - count),
        out_specs=[in_hbm] * len(flat_out),
        out_shape=flat_out,
        scratch_shapes=flat_scratch,
        # Checking the bounds of every copy takes a fifth of a step's own bundles; `hops.py` lists blocks that exist.
        compiler_params=pltpu.CompilerParams(
            collective_id=route.collective_id, vmem_limit_bytes=vmem_limit, disable_bounds_checks=True
        ),
        name=name,
    )
    inputs = compat.unbatchable(inputs, vmap_message(route.schedule))
    with jax.enable_x64(False):  # `emit_pipeline` of 0.10 counts its steps in 64 bits otherwise, and does not compile
        results = compat.call_without_varying(run, *inputs, axes=axes)
    return jax.tree.unflatten(out_structure, results)


class HopBlocks:
    """Block specs whose index follows the list of one hop; the batch row is grid axis 0 and the step the last one."""

    def __init__(self, steps: HopSteps, index: Any) -> None:
        """`steps` has references to scalar memory; `index` counts computed hops."""
        self.steps, self.start = steps, index * (steps.rows * steps.length)

    def step(self, listed: Any, grid: tuple[Any, ...]) -> Any:
        row = grid[0] if self.steps.rows > 1 else 0
        return listed[self.start + row * self.steps.length + grid[-1]]

    def spec(self, block: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]], compared: bool = False) -> pl.BlockSpec:
        """`index(*leading grid indices, packed block indices)`; of the pair at hand, or of the last one that compares tokens."""
        listed = self.steps.compared if compared else self.steps.code
        return pl.BlockSpec(block, lambda *grid: index(*grid[:-1], self.step(listed, grid)))


def pipeline(
    body: Callable[..., None], grid: tuple[Any, ...], operands: Any, in_specs: Any, results: Any, out_specs: Any
) -> None:
    """`body(grid indices, operands, results)` over `grid`, with blocks of the trees `operands` and `results` in VMEM."""

    def leaves(tree):
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, pl.BlockSpec))

    inputs, structure = jax.tree.flatten(operands)
    outputs, out_structure = jax.tree.flatten(results)

    def flat_body(*refs):
        at = tuple(pl.program_id(axis) for axis in range(len(grid)))
        body(at, jax.tree.unflatten(structure, refs[: len(inputs)]), jax.tree.unflatten(out_structure, refs[len(inputs) :]))

    run = pltpu.emit_pipeline(flat_body, grid=grid, in_specs=leaves(in_specs), out_specs=leaves(out_specs))
    run(*inputs, *outputs)


def unpack_tokens(rows: Tokens, columns: Tokens, block: int) -> None:
    """Integers as they travel, (B | 1, 1, S), to the form that kernels compare, (B | 1, S, LANES); both in HBM."""
    for row, column in zip(jax.tree.leaves(rows), jax.tree.leaves(columns), strict=True):
        count = row.shape[0]
        pipeline(
            _transpose,
            (count, row.shape[2] // block),
            (row,),
            (pl.BlockSpec((None, 1, block), lambda b, i: (b, 0, i)),),
            (column,),
            (pl.BlockSpec((None, block, LANES), lambda b, i: (b, i, 0)),),
        )


def _transpose(at: Any, operands: Any, results: Any) -> None:
    del at
    results[0][...] = jnp.broadcast_to(operands[0][...], (LANES, operands[0].shape[1])).T


def for_hops(first: int, last: int, body: Callable[[Any], None]) -> None:
    """`body(hop)` for first <= hop <= last; one copy of the code."""
    lax.fori_loop(first, last + 1, lambda hop, _: body(hop), None)
