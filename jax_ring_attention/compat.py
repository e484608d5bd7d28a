"""The one place that knows how JAX versions differ, or that leans on a detail of JAX.

Every function says which versions need it. Supported: 0.10.2 (the last for Python 3.11) and newer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

#: What JAX prints when a `jax.custom_vjp` function meets forward mode; the text is the same in 0.10 to 0.12.
FORWARD_MODE_MESSAGE = "can't apply forward-mode"


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which `x` varies: empty outside `shard_map` and under `check_vma=False`."""
    # 0.9 and before spelled it `aval.vma`; 0.10 and newer have `aval.manual_axis_type.varying`.
    return jax.typeof(x).manual_axis_type.varying


def vary_over(tree: Any, axes: Iterable[str]) -> Any:
    """Mark every array of `tree` as varying over `axes` too; its transpose is the `psum` that gradients need.

    A scan or a custom VJP under `check_vma=True` wants equal types in and out, so inputs are brought to one type first.
    """
    wanted = frozenset(axes)

    def mark(x):
        missing = tuple(sorted(wanted - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def checks_varying(axes: Iterable[str]) -> bool:
    """Whether the enclosing `shard_map` tracks varying axes (`check_vma=True`) for these manual axes."""
    axes = tuple(axes)
    return bool(axes) and bool(varying_axes(lax.axis_index(axes)))


def manual_axes() -> tuple[str, ...]:
    """Names of the mesh axes that are manual here, that is, inside which `shard_map` bodies we are."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_in_context() -> jax.sharding.AbstractMesh | None:
    """The mesh set by `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def default_matmul_precision() -> str | None:
    """What `jax.default_matmul_precision` is set to here."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
