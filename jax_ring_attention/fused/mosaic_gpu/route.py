"""What is decided before the kernel of a GPU ring starts: who sends to whom, and which blocks every hop visits."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.fused.common import manual_mesh
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.kernels.mosaic_gpu.common import FORWARD_BLOCK_Q, forward_block_kv
from jax_ring_attention.masks import ActiveBlocks, Tokens
from jax_ring_attention.schedule import Leg
from jax_ring_attention.shard import Chunk, Ring, Shard


class Route(NamedTuple):
    """How the chunks of one leg travel; static.

    Attributes:
      hops: transfers, at least 1.
      first: the first hop that is computed: 0, or 1 where another leg does the home chunk.
      direction: +1 or -1.
      mesh: names and sizes of all mesh axes, in the mesh's order.
      axes: those that the ring runs over; with none, the device is a ring of its own.
    """

    hops: int
    first: int = 0
    direction: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    axes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(size for name, size in self.mesh if name in self.axes)


def route_of(ring: Ring, leg: Leg) -> Route:
    """Raises NotImplementedError where some mesh axes are not manual: the kernel asks for all its coordinates."""
    sizes = manual_mesh("fused")
    (stream,) = leg.streams
    return Route(stream.hops, 0 if leg.home else 1, stream.direction, tuple(sizes.items()), ring.axis_name)


class HopLists(NamedTuple):
    """Who sees whom, at every computed hop.

    Attributes:
      blocks: `ActiveBlocks` with the computed hops as a leading axis; None visits all blocks, unmasked.
      query_tokens: (B | 1, T).
      key_tokens: (computed hops, B | 1, S).
    """

    blocks: ActiveBlocks | None
    query_tokens: Tokens
    key_tokens: Tokens


def list_hops(shard: Shard, leg: Leg) -> HopLists:
    """Integers that the layout does not imply, 4 bytes a token, are gathered from all devices before the kernel."""
    (stream,) = leg.streams
    ring, kernel = shard.ring, shard.kernels[stream.size]
    assert isinstance(kernel, MosaicGpuKernel), "select_kernel chose it"
    given = shard.integers.key_position, shard.integers.key_segment
    everyone = jax.tree.map(lambda x: lax.all_gather(x, ring.axis_name), given)

    def of_hop(hop: jax.Array) -> tuple[ActiveBlocks | None, Tokens, Tokens]:
        source = stream.source(shard.rank, hop, ring.size)
        here = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, source, keepdims=False), everyone)
        scope = shard.scope(stream, hop, Chunk(None, *here))
        blocks = kernel.blocks(scope, FORWARD_BLOCK_Q, forward_block_kv(kernel.shape), by_query=True)
        return blocks, *kernel.tokens(scope)

    hops = jnp.arange(0 if leg.home else 1, stream.hops + 1, dtype=jnp.int32)
    return HopLists(*jax.vmap(of_hop, out_axes=(0, None, 0))(hops))
