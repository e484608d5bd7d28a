"""What is decided before the one kernel starts: every hop's list of steps, the neighbours, and which barrier it uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention.fused.common import manual_mesh
from jax_ring_attention.kernels.contract import KeyValue
from jax_ring_attention.kernels.mosaic_tpu import MosaicTpuKernel, common
from jax_ring_attention.kernels.mosaic_tpu.common import Shape, Tiling
from jax_ring_attention.masks import Bounds, Tokens
from jax_ring_attention.schedule import UNFUSED, Leg, Stream
from jax_ring_attention.shard import Chunk, Ring, Shard


class HopSteps(NamedTuple):
    """`common.Steps` of all computed hops, one after another.

    Attributes:
      code, compared: (hops * rows * length,) int32.
      total: (hops,) int32, 0 where this device has nothing to compute.
      length, rows: steps listed per batch row, and batch rows listed.
    """

    code: jax.Array
    compared: jax.Array
    total: jax.Array
    length: int
    rows: int

    def in_memory(self, refs: Any) -> HopSteps:
        """With references to scalar memory in the place of the three arrays."""
        code, compared, total = refs
        return self._replace(code=code, compared=compared, total=total)


class Route(NamedTuple):
    """How the chunks of one leg travel; static.

    Attributes:
      mesh_axes: how many axes the mesh has.
      hops: transfers of key and value, at least 1.
      first: the first hop that is computed: 0, or 1 where another leg does the home chunk.
      collective_id: of the barrier.
      schedule: its name, for messages.
    """

    mesh_axes: int
    hops: int
    first: int
    collective_id: int
    schedule: str


class Travels(NamedTuple):
    """What goes round: the packed chunk, and its integers as rows (B | 1, 1, S)."""

    chunk: KeyValue
    tokens: Tokens


class Track(NamedTuple):
    """One stream of a leg inside the kernel; its channels and its results are the kernel's own.

    Attributes:
      shape, tiling: of chunks of its length; nothing on the side of the queries differs between the tracks of a leg.
      steps: of the computed hops: one list in the forward kernel, one for each part of d_query in the backward kernel.
      query_tokens: rows (B | 1, 1, T). They have segments if the keys have, and where one half is padded its keys may alone.
      own: this device's own part.
    """

    shape: Shape
    tiling: Tiling
    steps: tuple[HopSteps, ...]
    query_tokens: Tokens
    own: Travels

    @property
    def scalars(self) -> Any:
        return tuple((steps.code, steps.compared, steps.total) for steps in self.steps)

    @property
    def operands(self) -> Any:
        return self.query_tokens, self.own

    def in_memory(self, scalars: Any, operands: Any) -> Track:
        """With references in the place of the arrays."""
        steps = tuple(steps.in_memory(refs) for steps, refs in zip(self.steps, scalars, strict=True))
        query_tokens, own = operands
        return self._replace(steps=steps, query_tokens=query_tokens, own=own)

    def is_busy(self, index: Any) -> Any:
        """Whether this device has anything to compute at a hop; `index` counts computed hops."""
        return self.steps[0].total[index] > 0

    def chunk(self, refs: tuple[Any, ...]) -> Travels:
        """References to all that travels, in the order of its leaves, as what they are."""
        return jax.tree.unflatten(jax.tree.structure(self.own), refs)


def route_of(ring: Ring, leg: Leg) -> Route:
    """Raises NotImplementedError where some mesh axes are not manual, or the ring's are not adjacent (`collective_id`)."""
    schedule = ring.fused
    assert schedule is not None, "asked of fused rings only"
    sizes = manual_mesh(schedule)
    number = collective_id(ring.axis_name, sizes, schedule)
    return Route(len(sizes), leg.streams[0].hops, 0 if leg.home else 1, number, schedule)


def coordinates_of(ring: Ring, leg: Leg, rank: jax.Array) -> jax.Array:
    """(streams * 3 * mesh axes,) int32: mesh coordinates of every stream's receiver, sender, and owner of its last chunk."""
    sizes = jax.sharding.get_abstract_mesh().shape
    steps = jnp.array([s.direction * step for s in leg.streams for step in (1, -1, -s.hops)], jnp.int32)
    places = jnp.unravel_index((rank + steps) % ring.size, tuple(sizes[name] for name in ring.axis_name))
    along = dict(zip(ring.axis_name, places, strict=True))
    here = {name: lax.axis_index(name) if size > 1 else 0 for name, size in sizes.items() if name not in along}
    columns = [jnp.broadcast_to(along[name] if name in along else here[name], steps.shape) for name in sizes]
    return jnp.stack([column.astype(jnp.int32) for column in columns], axis=1).reshape(-1)


def tracks_of(shard: Shard, leg: Leg, parts: Sequence[slice | None] = (None,)) -> tuple[Track, ...]:
    """The tracks of `leg`: for the forward kernel, or for the backward kernel with these parts of the units of d_query."""

    def track(stream: Stream, chunk: Chunk) -> Track:
        kernel = kernel_of(shard, stream)
        query, key = kernel.padded_tokens(shard.scope(stream, 0, chunk))
        tiling = _tiling(kernel, parts[0])
        steps = tuple(_list_hops(shard, leg, stream, (query, key), units) for units in parts)
        return Track(kernel.shape, tiling, steps, _rows(query), Travels(chunk.packed, _rows(key)))

    return tuple(track(stream, chunk) for stream, chunk in zip(leg.streams, shard.home_chunks(leg), strict=True))


def _list_hops(shard: Shard, leg: Leg, stream: Stream, own: tuple[Tokens, Tokens], units: slice | None) -> HopSteps:
    """The pairs of blocks to visit at every computed hop: query blocks outside, or, for `units`, key blocks outside.

    Nothing but the layout and the lengths is needed for a chunk whose integers they imply. The others' bounds, four numbers and
    two flags a tile, are gathered here, before the kernel. `own`: the integers of the queries and of the stream's own part.
    """
    ring, first = shard.ring, 0 if leg.home else 1
    kernel = kernel_of(shard, stream)
    tiling = _tiling(kernel, units)
    implied = shard.integers.key_position is None and shard.integers.key_segment is None
    query, key = own
    query_bounds = common.tile_bounds(query, kernel.shape.query_length, tiling.tile_q)

    def key_bounds(tokens: Tokens) -> Bounds:
        return common.tile_bounds(tokens, kernel.shape.key_length, tiling.tile_kv)

    everyone = None if implied else jax.tree.map(lambda x: lax.all_gather(x, ring.axis_name), key_bounds(key))

    def of_hop(hop: jax.Array) -> tuple[jax.Array, ...]:
        if everyone is None:
            bounds = key_bounds(kernel.padded_tokens(shard.scope(stream, hop, Chunk(None, None, None)))[1])
        else:
            source = stream.source(shard.rank, hop, ring.size)
            bounds = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, source, keepdims=False), everyone)
        kinds = common.kinds_within(query_bounds, bounds, kernel.shape, tiling)
        if units is None:
            steps = common.list_steps(kinds)
        else:  # the first hop takes all of d_query from its operand to its result
            steps = common.list_steps(kernel.by_key(kinds, units), every_inner=hop == first)
        nothing = (kinds == common.NOTHING).all() & (hop > first)  # the first hop sets what has no pairs to 0
        return steps.code, steps.compared, jnp.where(nothing, 0, steps.total)

    code, compared, total = jax.vmap(of_hop)(jnp.arange(first, stream.hops + 1, dtype=jnp.int32))
    rows, length = _listed(kernel, shard, tiling, units)
    assert code.shape[1] == rows * length
    return HopSteps(code.reshape(-1), compared.reshape(-1), total, length, rows)


def _listed(kernel: MosaicTpuKernel, shard: Shard, tiling: Tiling, units: slice | None) -> tuple[int, int]:
    """Rows of a list and the steps in each."""
    blocks_q, blocks_kv = kernel.shape.query_length // tiling.block_q, kernel.shape.key_length // tiling.block_kv
    inner = blocks_q if units is None else len(range(*units.indices(kernel.shape.groups * blocks_q)))
    rows = kernel.shape.batch if shard.ring.problem.row_wise else 1
    return rows, inner * blocks_kv


def collective_id(axis_name: tuple[str, ...], sizes: Mapping[str, int], schedule: str) -> int:
    """The number of the barrier of rings over `axis_name`, among all rings that a mesh of as many devices can have.

    `schedule` is named in the message only: a ring has the same neighbours whichever way its chunks go.

    Devices are numbered in the mesh's order; a ring over adjacent axes is `size` devices `stride` apart, and two rings with the
    same stride and size have the same neighbours. Only those may share a barrier: see `protocol`.

    Raises:
      NotImplementedError: the axes are not adjacent in the mesh, in its order.
    """
    names = tuple(sizes)
    at = names.index(axis_name[0])
    if names[at : at + len(axis_name)] != axis_name:
        raise NotImplementedError(
            f"schedule={schedule!r} wants the axes of a ring next to each other in the mesh and in its order, not {axis_name} "
            f"among {names}; reorder the axes of the mesh, or use schedule={UNFUSED[schedule]!r}."
        )
    stride = math.prod(sizes[name] for name in names[at + len(axis_name) :])
    size = math.prod(sizes[name] for name in axis_name)
    count = math.prod(sizes.values())
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(a, b) for a in divisors for b in divisors if count % (a * b) == 0].index((stride, size))


def _rows(tokens: Tokens) -> Tokens:
    """(B | 1, L) to (B | 1, 1, L)."""
    return jax.tree.map(lambda x: x[:, None], tokens)


def _tiling(kernel: MosaicTpuKernel, units: slice | None) -> Tiling:
    return kernel.forward if units is None else kernel.backward


def kernel_of(shard: Shard, stream: Stream) -> MosaicTpuKernel:
    kernel = shard.kernels[stream.size]
    assert isinstance(kernel, MosaicTpuKernel), "only its packing is understood here"
    return kernel
