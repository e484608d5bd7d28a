"""Every hop of a leg in one kernel: `schedule="fused"`, for TPUs here and for GPUs in `mosaic_gpu`, and `"fused_bidirectional"`,
for TPUs. README.md has the protocol.

`fold_leg` and `grads_leg` take the place of those in `ring.py`: same arguments, same results.
"""

from __future__ import annotations

from typing import Any

import jax

from jax_ring_attention import compat
from jax_ring_attention import ring as plain
from jax_ring_attention.fused import hops, mosaic_gpu
from jax_ring_attention.kernels.contract import Kernel, Problem
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.kernels.mosaic_tpu import LARGEST_LIST, MosaicTpuKernel
from jax_ring_attention.kernels.mosaic_tpu.tiling import resident_units
from jax_ring_attention.schedule import UNFUSED, Leg
from jax_ring_attention.shard import Shard
from jax_ring_attention.stats import finalize_chunk_stats


def select_kernel(
    schedule: str, problems: tuple[Problem, ...], implementation: str | None, legs: tuple[Leg, ...]
) -> type[Kernel]:
    """`mosaic_tpu`, or `mosaic_gpu` where it is named or a Hopper GPU at hand, or an error that says why not.

    `problems` are those of `legs`.

    Raises:
      ValueError: another implementation is named. NotImplementedError: it refuses, or its lists for all hops are too long.
    """
    if mosaic_gpu.is_chosen(implementation):
        return mosaic_gpu.select_kernel(schedule, problems)
    unfused = UNFUSED[schedule]
    if implementation not in (None, MosaicTpuKernel.name):
        kernels = "'mosaic_gpu' or 'mosaic_tpu'" if schedule == "fused" else "'mosaic_tpu'"
        raise ValueError(
            f"schedule={schedule!r} is one kernel of implementation={kernels}, not of {implementation!r}; leave "
            f"implementation out, or use schedule={unfused!r}, which runs every implementation."
        )
    if jax.default_backend() == "cpu" and compat.tpu_chip() is None and not compat.emulates_tpu():
        raise NotImplementedError(
            f"schedule={schedule!r} is a TPU kernel, and the devices are CPUs; use schedule={unfused!r} here. To compile for "
            "TPUs that are elsewhere, pass a mesh of their devices."
        )
    longest: dict[int, int] = {}  # by the length of a chunk, or of half of one
    for problem in problems:
        if (reason := MosaicTpuKernel.refusal(problem)) is not None:
            raise NotImplementedError(
                f"schedule={schedule!r} runs implementation='mosaic_tpu', which refuses: {reason}. Other implementations want "
                f"schedule={unfused!r}."
            )
        longest[problem.key_shape[1]] = MosaicTpuKernel(problem).longest_list
    for leg in legs:
        hops = 1 + leg.streams[0].hops
        if (pairs := hops * sum(longest[stream.size] for stream in leg.streams)) > LARGEST_LIST:
            raise NotImplementedError(
                f"schedule={schedule!r} lists the block pairs of all {hops} hops at once, {pairs} entries, and scalar memory "
                f"holds {LARGEST_LIST}; pass larger block_sizes, or use schedule={unfused!r}."
            )
    return MosaicTpuKernel


def fold_leg(shard: Shard, leg: Leg, query: Any, stats: Any, last: bool = False) -> Any:
    """As `ring.fold_leg`; a leg that goes nowhere has nothing to fuse."""
    if isinstance(shard.kernel, MosaicGpuKernel):
        return mosaic_gpu.fold_leg(shard, leg, query, stats, last)
    if leg.streams[0].hops == 0:
        return plain.fold_leg(shard, leg, query, stats, last)
    from jax_ring_attention.fused import forward  # Pallas is imported only when a kernel is built

    route = hops.route_of(shard.ring, leg)  # first: it refuses meshes that the rest would trip over
    stats = forward.fold_hops(route, hops.coordinates_of(shard.ring, leg, shard.rank), hops.tracks_of(shard, leg), query, stats)
    if not last:
        return stats
    out, lse = finalize_chunk_stats(shard.kernel.unpack_stats(stats))
    return out.astype(shard.kernel.problem.dtype), lse


def grads_leg(shard: Shard, leg: Leg, rows: Any, sums: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """As `ring.grads_leg`; on GPUs it is that one."""
    if leg.streams[0].hops == 0 or isinstance(shard.kernel, MosaicGpuKernel):
        return plain.grads_leg(shard, leg, rows, sums)
    from jax_ring_attention.fused import backward  # Pallas is imported only when a kernel is built

    d_query, d_bias = sums
    kernel, units = hops.kernel_of(shard, leg.streams[0]), d_query.shape[2]
    at_once = resident_units(kernel.shape, kernel.backward)
    parts = tuple((start, min(start + at_once, units)) for start in range(0, units, at_once))
    d_query, d_chunks = backward.grads_hops(
        hops.route_of(shard.ring, leg),
        hops.coordinates_of(shard.ring, leg, shard.rank),
        parts,
        hops.tracks_of(shard, leg, tuple(slice(*part) for part in parts)),
        rows,
        d_query,
    )
    return (d_query, d_bias), d_chunks
