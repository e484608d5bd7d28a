"""Which work items the forward pass has, in which order, and which persistent CTA takes which.

Items are numbered along batch row, group of heads, tile and head: heads of a group run side by side, so that their keys and
values stay in the L2 cache, and under a mask the last tile of a group comes first, which is the longest one if it is causal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.kernels.mosaic_gpu.common import FORWARD_BLOCK_Q, Shape

#: Keys and values of the heads that run at the same time should stay in the L2 cache (50 MB), beside what else passes through it.
_CACHED_BYTES = 2**25


def heads_together(shape: Shape) -> int:
    """How many query heads run side by side: as many as divide them and have keys and values that fit in the L2 cache."""
    group = shape.heads // shape.kv_heads
    bytes_per_head = 2 * shape.key_length * shape.head_dim * jnp.dtype(shape.dtype).itemsize / group
    return max(n for n in range(1, shape.heads + 1) if shape.heads % n == 0 and (n == 1 or n * bytes_per_head <= _CACHED_BYTES))


def divide(a: jax.Array, b: int) -> tuple[Any, Any]:
    """Quotient and remainder of int32."""
    return (a, 0) if b == 1 else (lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b)))


class Items(NamedTuple):
    """All items of a call, dealt out to `workers` in rounds, forwards and backwards in turn: everyone gets long and short ones.

    Attributes:
      last_first: whether a group's last tile comes first.
    """

    shape: Shape
    last_first: bool
    workers: int

    @property
    def tiles(self) -> int:
        return self.shape.query_length // FORWARD_BLOCK_Q

    @property
    def total(self) -> int:
        return self.shape.batch * self.shape.heads * self.tiles

    def grid(self) -> dict[str, int]:
        """One CTA for each item, in order; `tile_of` has the tile."""
        together = heads_together(self.shape)
        return {"batch": self.shape.batch, "group": self.shape.heads // together, "tile": self.tiles, "head": together}

    def tile_of(self, index: Any) -> Any:
        """The `index`-th tile of a group."""
        return self.tiles - 1 - index if self.last_first else index

    def count(self, worker: Any) -> Any:
        """How many items a worker gets; in the last round perhaps not all get one."""
        rounds, left = divmod(self.total, self.workers)
        along = worker if rounds % 2 == 0 else self.workers - 1 - worker
        return rounds + lax.select(along < left, jnp.int32(1), jnp.int32(0))

    def place(self, worker: Any, k: Any) -> tuple[Any, Any, Any]:
        """Batch row, query head and tile of a worker's k-th item."""
        along = lax.select(lax.rem(k, jnp.int32(2)) == 0, worker, self.workers - 1 - worker)
        together = heads_together(self.shape)
        rest, head = divide(k * self.workers + along, together)
        rest, tile = divide(rest, self.tiles)
        batch, group = divide(rest, self.shape.heads // together)
        return batch, group * together + head, self.tile_of(tile)
