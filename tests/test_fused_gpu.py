"""The fused ring on GPUs: refusals, lowering and simulated devices (any machine), a ring of one device (marker gpu, on sm_90).

A ring of one device is its own neighbour. For any number of hops it runs the whole protocol: buffers, counters, credits, copying
CTAs; only the addresses are local. Its chunk is folded hops + 1 times.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ring_mesh
from gpu_machine import Broken, Machine, fakes
from jax.sharding import PartitionSpec as P

from jax_ring_attention import compat, fused, ring_attention
from jax_ring_attention.fused import mosaic_gpu as gpu_ring
from jax_ring_attention.kernels.contract import Problem
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.layouts import shard_positions, to_layout
from jax_ring_attention.schedule import needed_offsets, plan_hops
from jax_ring_attention.shard import Inputs, Integers, Ring, Shard
from jax_ring_attention.stats import ChunkStats
from jax_ring_attention.testing import random_inputs

HAS_KERNEL = compat.JAX_VERSION >= (0, 11, 2)
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="refused before jax 0.11.2")


# Simulated devices.


class Simulation:
    """The forward pass of one ring, every device's queries and chunk, on a simulated machine."""

    def __init__(self, patch, inputs, size, seed, *, layout="contiguous", reach=(None, None), segments=None, **problem) -> None:
        from jax_ring_attention.fused.mosaic_gpu import forward, protocol, route
        from jax_ring_attention.kernels.mosaic_gpu import forward as chunk_forward
        from jax_ring_attention.kernels.mosaic_gpu import item

        batch, length, heads, dim = inputs.query.shape
        key_length, kv_heads = inputs.key.shape[1:3]
        shapes = (batch, length // size, heads, dim), (batch, key_length // size, kv_heads, dim)
        problem = Problem(*shapes, inputs.value.shape[3], inputs.query.dtype, dim**-0.5, reach, **problem)
        needed = needed_offsets(layout, size, length // size, key_length // size, reach)
        self.legs = plan_hops("fused", size, key_length // size, needed if segments is None else None)
        ring = Ring(("seq",), size, layout, self.legs, problem, MosaicGpuKernel, fused=True)
        self.rank, self.size, self.layout, self.seed = 0, size, layout, seed
        patch.setattr(Ring, "rank", lambda _: jnp.int32(self.rank))
        parts = [jnp.split(to_layout(x, layout, size), size, axis=1) for x in inputs[:3]]
        integers = [Integers()] * size
        if segments is not None:
            integers = [Integers(query_segment=x, key_segment=x) for x in jnp.split(to_layout(segments, layout, size), size, axis=1)]
        self.shards = []
        for self.rank in range(size):
            self.shards.append(Shard(ring, Inputs(*(x[self.rank] for x in parts)), integers[self.rank]))

        # What a mesh would do around the kernel.
        mesh = (("seq", size),)
        patch.setattr(route, "route_of", lambda ring, leg: route.Route(leg.streams[0].hops, int(not leg.home), leg.streams[0].direction, mesh, ring.axis_name))
        gather = lambda x, _: jnp.stack([shard.integers.key_segment for shard in self.shards])  # noqa: E731
        patch.setattr(route.lax, "all_gather", gather)
        patch.setattr(compat, "multiprocessors", lambda: 4)
        self.machine = Machine(size, seed)
        self.modules = (forward, protocol, item, chunk_forward)
        self.calls: list[Any] = []
        self.replayed: Any = None
        patch.setattr(forward, "COPYING", 2)
        patch.setattr(forward, "build", self.build)

    def build(self, body, out_type, scratch, grid):
        def run(*operands):
            if self.replayed is not None:
                return tuple(jnp.asarray(x) for x in self.replayed[self.rank])
            self.calls.append((body, out_type, scratch, grid["cta"], operands))
            return tuple(jnp.zeros(x.shape, x.dtype) for x in out_type)

        return run
