"""Global arrays on a mesh: find the mesh and the specs, pad what the ring does not divide, and enter `shard_map`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jax_ring_attention import compat
from jax_ring_attention.layouts import padded_slots, take
from jax_ring_attention.shard import Inputs, Integers

AttendHere = Callable[[Inputs, Integers], tuple[jax.Array, jax.Array]]


class Place(NamedTuple):
    """Where global arrays live: the mesh and the axes of B, T and N, each a tuple of mesh axes."""

    mesh: Any
    batch: tuple[str, ...]
    ring: tuple[str, ...]
    heads: tuple[str, ...]

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)


#: What `resolve_mesh` returns for a ring of one device.
LOCAL: tuple[tuple[str, ...], int, Place | None] = ((), 1, None)


def resolve_mesh(
    query: jax.Array,
    axis_name: Any,
    mesh: Mesh | AbstractMesh | None,
    spec: PartitionSpec | None,
) -> tuple[tuple[str, ...], int, Place | None]:
    """Which form this call has: `(ring axes, ring size, Place for global arrays or None for arrays at hand)`."""
    axes = None if axis_name is None else _as_axes(axis_name)
    manual = compat.manual_axes()
    if axes and set(axes) <= set(manual):
        if mesh is not None or spec is not None:
            raise ValueError(
                f"axis_name={axis_name!r} is a manual axis here (inside shard_map), so the arrays are this device's shards: "
                "leave out mesh and spec, which describe global arrays."
            )
        return axes, int(jax.lax.axis_size(axes)), None
    if manual and mesh is None and spec is None:
        if axes is None:
            raise ValueError(
                f"called inside shard_map over {manual}: name the ring, axis_name=..., or pass axis_name=() for attention over "
                "the local arrays alone."
            )
        if not axes:
            return LOCAL
    found = mesh if mesh is not None else _mesh_of(query)
    if found is None:
        if spec is not None or axes:
            raise ValueError(
                f"axis_name={axis_name!r} and spec={spec!r} need a mesh, and there is none in context: pass mesh=..., or call "
                "under jax.set_mesh(mesh). (The older `with mesh:` is not seen by JAX's tracing.)"
            )
        return LOCAL
    place = _resolve_place(query, axes, found, spec, manual)
    return place.ring, place.size(place.ring), place


def _as_axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _mesh_of(query: jax.Array) -> AbstractMesh | None:
    if (mesh := compat.mesh_in_context()) is not None:
        return mesh
    mesh = jax.typeof(query).sharding.mesh
    return mesh if not mesh.empty and _explicit_axes(mesh) else None


def _explicit_axes(mesh: Any) -> frozenset[str]:
    return frozenset(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def _resolve_place(query, axes, mesh, spec, manual) -> Place:
    names = tuple(mesh.axis_names)
    if spec is None:
        entries = list(jax.typeof(query).sharding.spec) if _explicit_axes(mesh) else []
        entries += [None] * (4 - len(entries))
    else:
        entries = [*spec]
        if len(entries) > 4:
            raise ValueError(f"spec={spec} has {len(entries)} entries; it is the PartitionSpec of (B, T, N, H).")
        entries += [None] * (4 - len(entries))
    batch, ring, heads, dim = (_as_axes(entry) for entry in entries)
    if axes is not None:
        if spec is not None and ring != axes:
            raise ValueError(f"axis_name={axes} but the T entry of spec={spec} is {ring}; give one, or the same in both.")
        ring = axes
    elif spec is None and not ring:
        raise ValueError(
            f"nothing says how the sequence is sharded over the mesh axes {names}: pass spec, for example "
            "P('data', 'seq', 'tensor', None) for (B, T, N, H), or axis_name; or reshard the arrays over the ring axis "
            "(Explicit axis types). axis_name=() keeps the sequence whole."
        )
    if dim:
        raise ValueError(f"the head dim is sharded over {dim}; shard heads (N) instead: every device needs whole heads.")
    used = (*batch, *ring, *heads)
    for axis in used:
        if axis not in names:
            raise ValueError(f"axis {axis!r} is not in the mesh, which has axes {names}.")
        if axis in manual:
            raise ValueError(
                f"axis {axis!r} is already manual here (inside shard_map over {manual}); of the axes of one call either the ring "
                "axes are manual and name it by axis_name, or none is."
            )
        if used.count(axis) > 1:
            raise ValueError(f"axis {axis!r} stands for more than one of B {batch}, T {ring}, N {heads}.")
    return Place(mesh, batch, ring, heads)


def attend_sharded(
    attend_here: AttendHere,
    place: Place,
    layout: str,
    ring_size: int,
    inputs: Inputs,
    integers: Integers,
) -> tuple[jax.Array, jax.Array]:
    """`attend_here` on every device of the mesh; returns global `out` and `lse` of the query's own length.

    `attend_here` must be hashable: it is a static argument.
    """
    _check_divides(place, inputs)
    length = inputs.query.shape[1]
    slots, padded = padded_slots(layout, ring_size, length)
    key_slots, key_padded = padded_slots(layout, ring_size, inputs.key.shape[1])
    is_padded = padded != length or key_padded != inputs.key.shape[1]
    if is_padded:
        inputs, integers = _replicate_tokens(place, inputs, integers)
        inputs, integers = _pad(inputs, integers, slots, padded, key_slots, key_padded)
    out, lse = _enter(attend_here, place, inputs, integers)
    if not is_padded:
        return out, lse
    whole = PartitionSpec(place.batch or None, None, place.heads or None)
    out, lse = _reshard(place, (out, lse), (whole, whole))
    return take(out, slots, 1), take(lse, slots, 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _enter(attend_here: AttendHere, place: Place, inputs: Inputs, integers: Integers) -> tuple[jax.Array, jax.Array]:
    """`attend_here` under `shard_map`; compiled once for equal static arguments, so that eager calls are not slow."""
    inputs_spec, integers_spec, out_spec, lse_spec = _specs(place, inputs, integers)
    manual = compat.manual_axes()
    sharded = jax.shard_map(
        attend_here,
        mesh=place.mesh,
        in_specs=(inputs_spec, integers_spec),
        out_specs=(out_spec, lse_spec),
        axis_names={name for name in place.mesh.axis_names if name not in manual},
    )
    return sharded(_reshard(place, inputs, inputs_spec), _reshard(place, integers, integers_spec))


def _check_divides(place: Place, inputs: Inputs) -> None:
    b, _, n, _ = inputs.query.shape
    k = inputs.key.shape[2]
    if (size := place.size(place.batch)) and b % size:
        raise ValueError(f"batch size {b} is no multiple of {size}, the size of the mesh axes {place.batch}; pad the batch.")
    size = place.size(place.heads)
    if n % size or k % size:
        raise ValueError(
            f"{n} query heads and {k} key/value heads cannot both be split over {size} devices of the mesh axes {place.heads}; "
            "shard fewer heads (leave that axis out of spec) or choose head counts that it divides."
        )


def _specs(place: Place, inputs: Inputs, integers: Integers) -> tuple[Any, Any, PartitionSpec, PartitionSpec]:
    """PartitionSpecs of all arrays, in the structure of `inputs` and `integers`, and of out and lse."""
    batch, ring, heads = (axes or None for axes in (place.batch, place.ring, place.heads))

    def tokens(x):
        return None if x is None else PartitionSpec(batch if x.shape[0] > 1 else None, ring)

    def rows(x):
        return None if x is None else PartitionSpec(batch if x.shape[0] > 1 else None)

    def dense(x):
        if x is None:
            return None
        entries = (axis if n > 1 else None for axis, n in zip((batch, heads, ring), x.shape, strict=False))
        return PartitionSpec(*entries, None)

    whole = PartitionSpec(batch, ring, heads, None)
    sinks = None if inputs.sinks is None else PartitionSpec(heads)
    inputs_spec = Inputs._make((whole, whole, whole, dense(inputs.bias), sinks))
    lengths = (rows(integers.query_lengths), rows(integers.key_lengths))
    integers_spec = Integers._make((*(tokens(x) for x in integers[:4]), *lengths, dense(integers.mask)))
    return inputs_spec, integers_spec, whole, PartitionSpec(batch, ring, heads)


def _reshard(place: Place, arrays: Any, specs: Any) -> Any:
    """Bring arrays to `specs` where axis types are Explicit; elsewhere `shard_map` does it."""
    explicit = _explicit_axes(place.mesh)
    if not explicit:
        return arrays

    def move(x, spec):
        entries = (tuple(axis for axis in _as_axes(entry) if axis in explicit) or None for entry in spec)
        mesh = place.mesh if isinstance(place.mesh, AbstractMesh) else place.mesh.abstract_mesh
        return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, PartitionSpec(*entries)))

    return jax.tree.map(move, arrays, specs)


def _replicate_tokens(place: Place, inputs: Inputs, integers: Integers) -> tuple[Inputs, Integers]:
    """With Explicit axis types padding needs the token axes whole; a length that does not divide is never sharded anyway."""

    def drop_ring(spec):
        return PartitionSpec(*(None if _as_axes(entry) == place.ring else entry for entry in spec))

    specs = _specs(place, inputs, integers)[:2]
    specs = jax.tree.map(drop_ring, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return _reshard(place, (inputs, integers), specs)


def _pad(inputs: Inputs, integers: Integers, slots, padded: int, key_slots, key_padded: int) -> tuple[Inputs, Integers]:
    """Spread the stored tokens over `padded` slots; empty slots lie past the end of the natural order, so lengths mask them."""

    def spread(x, axis, slots, size):
        if x is None or size == len(slots):
            return x
        origin = np.full(size, len(slots))  # empty slots take the one zero appended here
        origin[slots] = np.arange(len(slots))
        return take(jnp.pad(x, [(0, int(i == axis)) for i in range(x.ndim)]), origin, axis)

    def spread_dense(x):
        if x is None:
            return None
        x = x if x.shape[2] == 1 else spread(x, 2, slots, padded)
        return x if x.shape[3] == 1 else spread(x, 3, key_slots, key_padded)

    def real(lengths, length):
        whole = jnp.full((1,), length, jnp.int32)
        return whole if lengths is None else jnp.minimum(lengths, whole)

    return (
        Inputs(
            spread(inputs.query, 1, slots, padded),
            spread(inputs.key, 1, key_slots, key_padded),
            spread(inputs.value, 1, key_slots, key_padded),
            spread_dense(inputs.bias),
            inputs.sinks,
        ),
        Integers(
            spread(integers.query_position, 1, slots, padded),
            spread(integers.key_position, 1, key_slots, key_padded),
            spread(integers.query_segment, 1, slots, padded),
            spread(integers.key_segment, 1, key_slots, key_padded),
            real(integers.query_lengths, len(slots)),
            real(integers.key_lengths, len(key_slots)),
            spread_dense(integers.mask),
        ),
    )
