"""Shapes and meshes shared by tests and scripts."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ring_attention import from_layout, ring_attention, to_layout
from jax_ring_attention.testing import AttentionInputs, Expected, assert_close, dense_expected, value_and_grads, visible_pairs

RING_SIZES = (1, 2, 3, 4, 5, 8)
LAYOUTS = ("contiguous", "zigzag", "striped")
SCHEDULES = ("ring", "bidirectional", "all_gather")

FLOAT32_TOLERANCE = 3e-6
"""Relative error in norm against float64 for unit-variance float32 inputs; dense float32 makes about 3e-7 itself."""


def ring_mesh(size: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """A ring of `size` emulated devices over the axis "seq"."""
    return jax.make_mesh((size,), ("seq",), axis_types=(axis_type,), devices=jax.devices()[:size])


def mesh_of(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """For example mesh_of(data=2, seq=2, tensor=2)."""
    count = 1
    for size in sizes.values():
        count *= size
    types = (axis_type,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:count])


def check_ring(
    inputs: AttentionInputs,
    *,
    mesh: Mesh,
    spec,
    layout: str = "contiguous",
    tolerance: float = FLOAT32_TOLERANCE,
    d_lse=None,
    segment_ids=None,
    positions=None,
    dense_options: dict | None = None,
    **options,
) -> Expected:
    """Output, lse and all gradients of global-array `ring_attention` equal dense float64 attention.

    Everything is given in natural order; what `layout` stores is converted here. `options` go to `ring_attention`,
    the mask is rebuilt from them by `visible_pairs`, straight from the definition.
    """
    axes = spec[1] if isinstance(spec[1], tuple) else (spec[1],)
    shards = 1
    for axis in axes:
        shards *= mesh.shape[axis] if axis is not None else 1
    batch, length, _, _ = inputs.query.shape
    mask_options = {
        name: options[name]
        for name in ("is_causal", "local_window_size", "query_seq_lengths", "key_value_seq_lengths")
        if options.get(name) is not None
    }
    seen = visible_pairs(length, inputs.key.shape[1], batch=batch, segment_ids=segment_ids, positions=positions, **mask_options)[
        :, None
    ]
    differentiable = {name: options.pop(name) for name in ("bias", "sinks") if options.get(name) is not None}
    mask = options.pop("mask", None)
    if mask is not None:
        seen = seen & mask
    want = dense_expected(inputs, seen, d_lse=d_lse, **differentiable, **(dense_options or {}))

    def store(x, axis=1):
        return None if x is None else to_layout(x, layout, shards, axis)

    def store_dense(x):
        if x is None:
            return None
        x = x if x.shape[2] == 1 else store(x, 2)
        return x if x.shape[3] == 1 else store(x, 3)

    def attend(query, key, value, extra):
        out, lse = ring_attention(
            store(query),
            store(key),
            store(value),
            bias=store_dense(extra.get("bias")),
            mask=store_dense(mask),
            sinks=extra.get("sinks"),
            segment_ids=store(segment_ids, -1),
            positions=store(positions, -1),
            layout=layout,
            mesh=mesh,
            spec=spec,
            return_residual=True,
            **options,
        )
        return from_layout(out, layout, shards), from_layout(lse, layout, shards)

    cotangents = (inputs.d_out, np.zeros_like(want.lse) if d_lse is None else d_lse)
    (out, lse), grads = value_and_grads(attend, (*inputs[:3], differentiable), cotangents)
    have = Expected(out, lse, *grads[:3], grads[3].get("bias"), grads[3].get("sinks"))
    names = [name for name, x in zip(Expected._fields, want, strict=True) if x is not None]
    assert_close(have, want, tolerance, names)
    return have
