"""What the fused rings of both kinds of device refuse."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jax_ring_attention import compat
from jax_ring_attention.schedule import UNFUSED


def manual_mesh(schedule: str) -> Mapping[str, int]:
    """Names and sizes of the axes of the mesh in context; raises NotImplementedError where some are not manual."""
    sizes: Mapping[str, int] = jax.sharding.get_abstract_mesh().shape
    if automatic := [name for name, size in sizes.items() if size > 1 and name not in compat.manual_axes()]:
        raise NotImplementedError(
            f"schedule={schedule!r} addresses devices by all their mesh coordinates, and the axes {automatic} are not manual "
            f"here; make shard_map manual over them too, pass global arrays, or use schedule={UNFUSED[schedule]!r}."
        )
    return sizes


def vmap_message(schedule: str) -> str:
    return (
        f"jax.vmap over schedule={schedule!r} would run one ring for every element, and its kernel has no such axis; make the "
        f"mapped axis part of the batch B, or use schedule={UNFUSED[schedule]!r}."
    )
