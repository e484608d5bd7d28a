"""`schedule="fused"` on GPUs of one host: the hops of a forward leg in one Hopper kernel; the backward pass is that of "ring".

Lowered for 2, 4 and 8 GPUs, never run on more than one: README.md of the folder above says what was run.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_ring_attention import compat
from jax_ring_attention import ring as plain
from jax_ring_attention.kernels.contract import Problem
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.schedule import UNFUSED, Leg
from jax_ring_attention.shard import Shard


def is_chosen(implementation: str | None) -> bool:
    """Whether `schedule="fused"` means this one."""
    return implementation == MosaicGpuKernel.name or (implementation is None and MosaicGpuKernel.is_preferred())


def select_kernel(schedule: str, problems: tuple[Problem, ...]) -> type[MosaicGpuKernel]:
    """`mosaic_gpu`; raises NotImplementedError where it or the machine cannot, or chunks are to go both ways."""
    if schedule != "fused":
        raise NotImplementedError(
            f"schedule={schedule!r} is a TPU kernel; on GPUs use schedule='fused', whose chunks go one way, or "
            f"{UNFUSED[schedule]!r}."
        )
    reasons = [reason for problem in problems if (reason := MosaicGpuKernel.refusal(problem)) is not None]
    if compat.JAX_VERSION < (0, 11, 2):
        reasons = [f"it needs jax 0.11.2 or newer (Python 3.12), this is {jax.__version__}; use schedule='ring'"]
    elif jax.process_count() > 1:
        reasons.append(f"it wants one process that drives all GPUs, and there are {jax.process_count()}; use schedule='ring'")
    if reasons:
        raise NotImplementedError(
            f"schedule='fused' runs implementation='mosaic_gpu', which refuses: {reasons[0]}. Other implementations want "
            "schedule='ring'."
        )
    return MosaicGpuKernel


def fold_leg(shard: Shard, leg: Leg, query: Any, stats: Any, last: bool = False) -> Any:
    """As `ring.fold_leg`; a leg that goes nowhere has nothing to fuse."""
    (stream,) = leg.streams
    if stream.hops == 0:
        return plain.fold_leg(shard, leg, query, stats, last)
    from jax_ring_attention.fused.mosaic_gpu import forward, route  # Pallas is imported only when a kernel is built

    kernel = shard.kernels[stream.size]
    assert isinstance(kernel, MosaicGpuKernel), "select_kernel chose it"
    (chunk,) = shard.home_chunks(leg)
    stats = forward.fold_hops(
        kernel.shape,
        route.route_of(shard.ring, leg),
        query,
        chunk.packed,
        route.list_hops(shard, leg),
        stats,
        finish=last,
    )
    return kernel.unpack_finished(stats) if last else stats
