"""Orders in which the tokens of a sequence are stored over the shards of a ring.

    contiguous   shard r holds natural positions r*L .. r*L + L - 1
    zigzag       the sequence is cut into 2P pieces; shard r holds pieces r and 2P - 1 - r
    striped      shard r holds positions r, r + P, r + 2P, ...

Under a causal mask the contiguous layout gives the last shard P times the work of the first; zigzag and striped give every
shard the same. Sources: zigzag, Llama 3 (Dubey et al. 2024, section 3.3.2); striped, Brandon et al. 2023, "Striped Attention".
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(map(repr, LAYOUTS))}.")


def shard_multiple(layout: str, num_shards: int) -> int:
    """The number that a sequence length must be a multiple of to be stored evenly: 2P for zigzag, else P."""
    return 2 * num_shards if layout == "zigzag" and num_shards > 1 else num_shards


def shard_positions(layout: str, rank: Any, num_shards: int, length: int) -> jax.Array:
    """Natural positions (length,) int32 of the tokens that shard `rank` (may be traced) stores."""
    index = jnp.arange(length, dtype=jnp.int32)
    rank = jnp.asarray(rank, jnp.int32)
    if layout == "striped":
        return index * num_shards + rank
    if layout == "zigzag" and num_shards > 1:
        half = length // 2
        late = (2 * num_shards - 1 - rank) * half + index - half
        return jnp.where(index < half, rank * half + index, late)
    return index + rank * length


def shard_progressions(layout: str, num_shards: int, length: int) -> tuple[list[np.ndarray], int, int]:
    """The same as arithmetic progressions, for planning: first positions of each piece per rank, stride, tokens a piece."""
    ranks = np.arange(num_shards)
    if layout == "striped":
        return [ranks], num_shards, length
    if layout == "zigzag" and num_shards > 1:
        half = length // 2
        return [ranks * half, (2 * num_shards - 1 - ranks) * half], 1, half
    return [ranks * length], 1, length


def _padded_length(layout: str, num_shards: int, length: int) -> int:
    multiple = shard_multiple(layout, num_shards)
    return -(-length // multiple) * multiple


@functools.lru_cache(maxsize=256)
def storage_order(layout: str, num_shards: int, length: int) -> np.ndarray:
    """`order[i]` is the natural position of the token stored i-th; a permutation of `range(length)`.

    A length that the shards do not divide is ordered as if padded at its natural end, with the padding left out.
    """
    check_layout(layout)
    padded = _padded_length(layout, num_shards, length)
    natural = np.arange(padded)
    if layout == "striped":
        order = natural.reshape(-1, num_shards).T.reshape(-1)
    elif layout == "zigzag" and num_shards > 1:
        pieces = natural.reshape(2 * num_shards, -1)
        ranks = np.arange(num_shards)
        order = pieces[np.stack([ranks, 2 * num_shards - 1 - ranks], axis=1).reshape(-1)].reshape(-1)
    else:
        order = natural
    order = order[order < length]
    order.setflags(write=False)
    return order


def padded_slots(layout: str, num_shards: int, length: int) -> tuple[np.ndarray, int]:
    """Where `length` stored tokens sit once every shard has the same number of slots: `(slot of token i, number of slots)`."""
    padded = _padded_length(layout, num_shards, length)
    return np.flatnonzero(storage_order(layout, num_shards, padded) < length), padded


def take(x: jax.Array, index: np.ndarray, axis: int) -> jax.Array:
    """`x` at `index` along `axis`; with Explicit axis types the result is sharded like `x`."""
    x = jnp.asarray(x)
    where = (slice(None),) * (axis % x.ndim) + (index,)
    if any(kind == jax.sharding.AxisType.Explicit for kind in jax.typeof(x).sharding.mesh.axis_types):
        return x.at[where].get(out_sharding=jax.typeof(x).sharding)
    return x[where]


def to_layout(x: jax.Array, layout: Layout, num_shards: int, axis: int = 1) -> jax.Array:
    """Reorder `axis` from natural order to the order in which `layout` stores it over `num_shards` shards.

    Shift next-token labels BEFORE calling this: neighbours in natural order are not neighbours in storage.

    Args:
      x: any array; `axis` (default 1, the T of BTNH) is in natural order. Its length need not divide.
      layout: "contiguous", "zigzag" or "striped".
      num_shards: number of devices P in the ring.
      axis: the token axis.

    Returns:
      An array of the same shape, so that equal pieces of `axis` are the shards of rank 0, 1, ...

    Raises:
      ValueError: unknown layout or num_shards < 1.
    """
    return take(x, _checked_order(x, layout, num_shards, axis), axis)


def from_layout(x: jax.Array, layout: Layout, num_shards: int, axis: int = 1) -> jax.Array:
    """Inverse of `to_layout`, same arguments: from stored order back to natural order."""
    return take(x, np.argsort(_checked_order(x, layout, num_shards, axis)), axis)


def _checked_order(x: Any, layout: str, num_shards: int, axis: int) -> np.ndarray:
    check_layout(layout)
    if num_shards < 1:
        raise ValueError(f"num_shards={num_shards} must be at least 1: the number of devices in the ring.")
    if not -np.ndim(x) <= axis < np.ndim(x):
        raise ValueError(f"axis={axis} does not exist in an array of shape {np.shape(x)}; name its token axis.")
    return storage_order(layout, num_shards, np.shape(x)[axis])
