"""`schedule="fused"`: every hop of a leg in one kernel; README.md has the protocol. For TPUs here, for GPUs in `mosaic_gpu`.

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
from jax_ring_attention.masks import Tokens
from jax_ring_attention.schedule import Leg
from jax_ring_attention.shard import Shard
from jax_ring_attention.stats import finalize_chunk_stats


def select_kernel(problems: tuple[Problem, ...], implementation: str | None, legs: tuple[Leg, ...]) -> type[Kernel]:
    """`mosaic_tpu`, or `mosaic_gpu` where it is named or a Hopper GPU at hand, or an error that says why not.

    `problems` are those of `legs`.

    Raises:
      ValueError: another implementation is named. NotImplementedError: it refuses, or its lists for all hops are too long.
    """
    if mosaic_gpu.is_chosen(implementation):
        return mosaic_gpu.select_kernel(problems)
    if implementation not in (None, MosaicTpuKernel.name):
        raise ValueError(
            "schedule='fused' is one kernel of implementation='mosaic_gpu' or 'mosaic_tpu', not of "
            f"{implementation!r}; leave implementation out, or use schedule='ring', which runs every implementation."
        )
    if jax.default_backend() == "cpu" and compat.tpu_chip() is None and not compat.emulates_tpu():
        raise NotImplementedError(
            "schedule='fused' is a TPU kernel, and the devices are CPUs; use schedule='ring' here. To compile for TPUs that are "
            "elsewhere, pass a mesh of their devices."
        )
    for problem in problems:
        if (reason := MosaicTpuKernel.refusal(problem)) is not None:
            raise NotImplementedError(
                f"schedule='fused' runs implementation='mosaic_tpu', which refuses: {reason}. Other implementations want "
                "schedule='ring'."
            )
        hops = 1 + max(leg.streams[0].hops for leg in legs)
        if (pairs := hops * MosaicTpuKernel(problem).longest_list) > LARGEST_LIST:
            raise NotImplementedError(
                f"schedule='fused' lists the block pairs of all {hops} hops at once, {pairs} entries, and scalar memory holds "
                f"{LARGEST_LIST}; pass larger block_sizes, or use schedule='ring'."
            )
    return MosaicTpuKernel


def fold_leg(shard: Shard, leg: Leg, query: Any, stats: Any, last: bool = False) -> Any:
    """As `ring.fold_leg`; a leg that goes nowhere has nothing to fuse."""
    if isinstance(shard.kernel, MosaicGpuKernel):
        return mosaic_gpu.fold_leg(shard, leg, query, stats, last)
    (stream,) = leg.streams
    if stream.hops == 0:
        return plain.fold_leg(shard, leg, query, stats, last)
    from jax_ring_attention.fused import forward  # Pallas is imported only when a kernel is built

    kernel = shard.kernels[stream.size]
    assert isinstance(kernel, MosaicTpuKernel), "select_kernel chose it"
    query_tokens, key_tokens = hops.own_tokens(shard, leg)
    (chunk,) = shard.home_chunks(leg)
    stats = forward.fold_hops(
        kernel.shape,
        kernel.forward,
        hops.route_of(shard.ring, leg),
        hops.coordinates_of(shard.ring, stream, shard.rank),
        hops.list_hops(shard, leg, kernel.forward),
        query,
        _rows(query_tokens),
        hops.Travels(chunk.packed, _rows(key_tokens)),
        stats,
    )
    if not last:
        return stats
    out, lse = finalize_chunk_stats(kernel.unpack_stats(stats))
    return out.astype(kernel.problem.dtype), lse


def grads_leg(shard: Shard, leg: Leg, rows: Any, sums: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """As `ring.grads_leg`; on GPUs it is that one."""
    (stream,) = leg.streams
    if stream.hops == 0 or isinstance(shard.kernel, MosaicGpuKernel):
        return plain.grads_leg(shard, leg, rows, sums)
    from jax_ring_attention.fused import backward  # Pallas is imported only when a kernel is built

    kernel = shard.kernels[stream.size]
    assert isinstance(kernel, MosaicTpuKernel), "select_kernel chose it"
    query_tokens, key_tokens = hops.own_tokens(shard, leg)
    (chunk,) = shard.home_chunks(leg)
    d_query, d_bias = sums
    tiling, units = kernel.backward, d_query.shape[2]
    at_once = resident_units(kernel.shape, tiling)
    parts = [(start, min(start + at_once, units)) for start in range(0, units, at_once)]
    d_query, d_chunk = backward.grads_hops(
        kernel.shape,
        tiling,
        hops.route_of(shard.ring, leg),
        hops.coordinates_of(shard.ring, stream, shard.rank),
        tuple((part, hops.list_hops(shard, leg, tiling, slice(*part))) for part in parts),
        rows,
        _rows(query_tokens),
        hops.Travels(chunk.packed, _rows(key_tokens)),
        d_query,
    )
    return (d_query, d_bias), (d_chunk,)


def _rows(tokens: Tokens) -> Tokens:
    """(B | 1, L) to (B | 1, 1, L)."""
    return jax.tree.map(lambda x: x[:, None], tokens)
