"""What the two TPU kernels share that needs Pallas: index maps, the call, products, masks of tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_ring_attention import compat
from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.kernels.mosaic_tpu.common import LANES, Shape, Steps, Tiling
from jax_ring_attention.masks import Tokens


class Blocks:
    """Block specs whose index follows the list of steps; the batch row is grid axis 0 and the step the last one."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def _step(self, grid: Sequence[Any], listed: Any) -> Any:
        row = grid[0] if self.steps.rows > 1 else 0
        return listed[row * self.steps.length + grid[-1]]

    def spec(self, block: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]], compared: bool = False) -> pl.BlockSpec:
        """`index(*leading grid indices, packed block indices)`; of the pair at hand, or of the last one that compares tokens."""

        def index_map(*args):
            *grid, code, last_compared = args
            return index(*grid[:-1], self._step(grid, last_compared if compared else code))

        return pl.BlockSpec(block, index_map)


class Codes(NamedTuple):
    """The listed step at hand.

    Attributes:
      listed: `listed(number)` is the code of a step.
      number, total: of this step, and how many there are.
    """

    listed: Callable[[Any], Any]
    number: Any
    total: Any

    @property
    def here(self) -> Any:
        return self.listed(self.number)

    @property
    def following(self) -> Any:
        """The next step's; this one's after the last."""
        return self.listed(jnp.minimum(self.number + 1, self.total - 1))


def token_specs(
    blocks: Any, tokens: tuple[Tokens, Tokens], tiling: Tiling, row: Callable[[Any], Any], column: Callable[[Any], Any]
) -> tuple[Tokens, Tokens]:
    """Specs, made by `blocks.spec`, of the integers of both sides; fetched for pairs that compare them only."""

    def query_spec(x):
        return blocks.spec((None, 1, tiling.block_q), lambda *at: (at[0] if x.shape[0] > 1 else 0, 0, row(at[-1])), compared=True)

    def key_spec(x):
        return blocks.spec(
            (None, tiling.block_kv, LANES), lambda *at: (at[0] if x.shape[0] > 1 else 0, column(at[-1]), 0), compared=True
        )

    return jax.tree.map(query_spec, tokens[0]), jax.tree.map(key_spec, tokens[1])


def call(
    body: Callable[..., None],
    *,
    name: str,
    steps: Steps,
    grid: tuple[int, ...],
    operands: Any,
    in_specs: Any,
    out_shape: Any,
    out_specs: Any,
    aliased: tuple[Any, Any],
    vmem_limit: int,
    scratch: tuple[Any, ...] = (),
) -> Any:
    """Run `body(codes, operands, results, *scratch)` over `grid` and the listed steps.

    `operands` is a tree of arrays, `in_specs` has their specs in the same order. The arrays of `aliased[0]`, where there are
    any, share memory with the results `aliased[1]`, in order.
    """
    flat, structure = jax.tree.flatten(operands)
    flat_specs = jax.tree.leaves(in_specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec))
    flat_out, out_structure = jax.tree.flatten(out_shape)
    sources = {id(x): i for i, x in enumerate(flat)}
    targets = {id(x): i for i, x in enumerate(flat_out)}
    aliases = {
        sources[id(source)] + 2: targets[id(target)]
        for source, target in zip(jax.tree.leaves(aliased[0]), jax.tree.leaves(aliased[1]), strict=False)
    }
    axes = len(grid)

    def kernel(listed, compared, *refs):
        del compared
        row = pl.program_id(0) if steps.rows > 1 else 0
        start = row * steps.length
        codes = Codes(lambda number: listed[start + number], pl.program_id(axes), pl.num_programs(axes))
        inputs = jax.tree.unflatten(structure, refs[: len(flat)])
        results = jax.tree.unflatten(out_structure, refs[len(flat) : len(flat) + len(flat_out)])
        body(codes, inputs, results, *refs[len(flat) + len(flat_out) :])

    # Under check_vma=True results vary wherever anything that the kernel reads does.
    total, *inputs = compat.vary_together((steps.total, steps.code, steps.compared, *flat))
    semantics: list[Any] = ["parallel"] * axes + ["arbitrary"]  # two cores may share the heads
    varying = jax.typeof(total).manual_axis_type
    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*grid, total),
            in_specs=flat_specs,
            out_specs=jax.tree.leaves(out_specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec)),
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varying) for x in flat_out],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_limit),
        name=name,
    )(*inputs)
    return jax.tree.unflatten(out_structure, results)


def branch_on_kind(code: Any, tokens: tuple[Tokens, Tokens], tiling: Tiling, run: Callable[[int], None]) -> None:
    """`run(kind)` for the kind of the step; without integers to compare every pair is full."""
    if not jax.tree.leaves(tokens):
        run(common.UNMASKED)
        return
    kind = common.kind_of(code)
    for each in (common.UNMASKED, common.MASKED, *(common.DIAGONAL + j for j in range(common.diagonals(tiling)))):
        pl.when(kind == each)(functools.partial(run, each))


def matmul(a: jax.Array, b: jax.Array, contract: tuple[int, int], precision: lax.Precision) -> jax.Array:
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def log2_logits(shape: Shape, raw: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Products of keys and queries to logits in units of log2, and tanh where there is a soft cap."""
    if shape.logits_soft_cap is None:
        return raw * (shape.scale * common.LOG2E), None
    capped = jnp.tanh(raw * (shape.scale / shape.logits_soft_cap))
    return capped * (shape.logits_soft_cap * common.LOG2E), capped


def tile_mask(tokens: tuple[Tokens, Tokens], queries: tuple[slice, slice], keys: slice, reach: Any) -> jax.Array:
    """(keys, queries) bool."""
    query, key = tokens
    return common.visible_tile(
        Tokens(*(None if x is None else x[queries] for x in query)),
        Tokens(*(None if x is None else x[keys, :] for x in key)),
        reach,
    )
