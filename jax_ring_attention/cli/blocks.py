"""Who holds which chunk at each hop, which blocks a mask leaves to do, and who does them: tables of numbers, before any drawing.

Everything comes from the library's own schedule, layouts and masks, so that what is drawn cannot drift from what runs.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_ring_attention.layouts import storage_order
from jax_ring_attention.masks import EMPTY, Bounds, Tokens, block_bounds, classify, pad_tokens
from jax_ring_attention.schedule import Leg, Reach, Stream

CAUSAL: Reach = (None, 0)  # every key to the query's left, none to its right


def held_chunks(leg: Leg, stream: Stream, ring_size: int) -> np.ndarray:
    """[device, hop]: rank whose part of a chunk the device holds, from the first hop at which the leg computes."""
    devices, hops = np.arange(ring_size)[:, None], np.arange(first_hop(leg), stream.hops + 1)[None, :]
    return np.asarray(stream.source(devices, hops, ring_size))


def first_hop(leg: Leg) -> int:
    """0 where the leg begins with the device's own chunk, else 1."""
    return 0 if leg.home else 1


def block_kinds(segment_ids: np.ndarray, num_blocks: int, order: np.ndarray | None = None, reach: Reach = CAUSAL) -> np.ndarray:
    """[query block, key block]: EMPTY, PARTIAL or FULL, within documents, for tokens stored in `order`."""
    order = np.arange(len(segment_ids)) if order is None else order
    tokens = Tokens(jnp.asarray(order, jnp.int32)[None], jnp.asarray(segment_ids[order], jnp.int32)[None])
    bounds = block_bounds(tokens, len(order), num_blocks)
    return np.asarray(classify(bounds, bounds, reach)[0])


def device_loads(
    segment_ids: np.ndarray, ring_size: int, blocks_per_device: int, layout: str, reach: Reach = CAUSAL
) -> np.ndarray:
    """Block pairs that each device has to compute over all hops."""
    order = storage_order(layout, ring_size, len(segment_ids))
    kinds = block_kinds(segment_ids, ring_size * blocks_per_device, order, reach)
    return np.asarray((kinds != EMPTY).reshape(ring_size, -1).sum(1))


def hop_loads(
    order: np.ndarray, ring_size: int, leg: Leg, query_blocks: int, block_size: int, reach: Reach = CAUSAL
) -> np.ndarray:
    """[device, hop]: block pairs computed while the chunks of one leg go round; a stream's part is tiled by itself.

    Args:
      order: (T,) natural position of every stored token.
      query_blocks: blocks of one device's queries; divides its number of tokens.
      block_size: key tokens per block.
    """
    shards = order.reshape(ring_size, -1)
    query = _bounds(shards, query_blocks)
    total = np.zeros((), np.int64)
    for stream in leg.streams:
        held = held_chunks(leg, stream, ring_size)
        blocks = -(-stream.size // block_size)
        key = _bounds(shards[:, stream.start : stream.start + stream.size], blocks, blocks * block_size)
        here = [Bounds(*(x[held[:, hop]] for x in key)) for hop in range(held.shape[1])]
        total = total + np.stack([(np.asarray(classify(query, one, reach)) != EMPTY).sum((1, 2)) for one in here], axis=1)
    return total


def _bounds(positions: np.ndarray, num_blocks: int, padded: int | None = None) -> Bounds:
    """Bounds of (ranks, tokens) positions, ranks in place of batch rows."""
    ranks, length = positions.shape
    tokens = Tokens(jnp.asarray(positions, jnp.int32), jnp.zeros((1, length), jnp.int32))
    padded = length if padded is None else padded
    bounds = block_bounds(pad_tokens(tokens, length, padded), padded, num_blocks)
    return Bounds(*(jnp.broadcast_to(x, (ranks, num_blocks)) for x in bounds))


def blocks_per_device(length: int, ring_size: int, at_most: int = 4) -> int:
    """Few enough blocks to read; an even number, so that none straddles the two pieces of a zigzag shard, if that divides."""
    return next(n for n in (at_most, 2, 1) if length // ring_size % n == 0)
