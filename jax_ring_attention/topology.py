"""A mesh whose ring walks the machine: neighbours on the ring are neighbours in the network.

What devices say about themselves becomes a `Fabric`; which point of its grid comes where in the mesh is arithmetic (`grid.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ring_attention.grid import factorings, has_cycle, place_axes, snake, spanning_sides

#: Device kinds whose pod is a torus of 16 x 16 chips: a side wraps when it spans all 16.
SIDE_16_WRAPS = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
#: Device kinds that are wired from cubes of 4 x 4 x 4 chips: a slice of whole cubes is a torus.
CUBES_WRAP = ("TPU v4", "TPU v5", "TPU v5p", "TPU7x")


def make_ring_mesh(
    axis_sizes: Sequence[int],
    axis_names: Sequence[str],
    *,
    ring_axis: str | None = None,
    devices: Sequence[Any] | None = None,
    axis_types: tuple[AxisType, ...] | None = None,
) -> Mesh:
    """A mesh like `jax.make_mesh`, in which every hop of the ring along `ring_axis` crosses one link where that is possible.

    On a TPU, chips are the points of a grid, and the order of the devices decides which links a hop crosses. With the ring on a
    Hamiltonian cycle every transfer has a link to itself and the compiler runs it beside the attention. In other orders transfers
    share links, and from 8 x 8 chips of v5e on the compiler makes them blocking. Each ring is such a cycle in a box of the slice,
    and the boxes tile it: on 8 x 8 chips with `(4, 16)` for `("data", "seq")`, four boxes of 4 x 4. Of all such tilings, the one
    is taken in which the other axes have the closest neighbours, the last one first.

    * TPU slices, and hosts of GPUs: rings stay inside one where the sizes allow; else a ring passes through each of its slices
      once, so it crosses from slice to slice as often as it has slices.
    * GPUs: ordered by host, then by process and id; within a host, all are taken to be equally close (NVSwitch).
    * CPU and other devices: the given order.

    Wraparound links are used only where no tiling gives cycles without them, and only where they are sure to exist: along sides
    of 16 on v5e and v6e, and in slices A x A x A with A a multiple of 4 on v4, v5p and TPU7x (a slice with unequal sides may be
    a twisted torus). Sources: "How to Scale Your Model", chapter "TPUs"; Cloud TPU documentation, pages v4 and v5p. Cores of a
    chip that are devices of their own count as neighbours.

    Args:
      axis_sizes: number of devices along each axis, e.g. `(2, 16, 2)`; their product is the number of devices.
      axis_names: as many names, e.g. `("data", "seq", "tensor")`.
      ring_axis: the name of the axis that the ring runs along; may be left out when there is only one.
      devices: the devices, in any order; default `jax.devices()`.
      axis_types: as for `Mesh`; default Auto for all.

    Returns:
      A `Mesh` over exactly these devices. `hop_links(mesh, ring_axis)` counts the links that each hop crosses.

    Raises:
      ValueError: sizes, names or devices that do not fit together.
      Warns (UserWarning) where no cycle was found: why, and how many links the longest hop crosses.

    Example::

        mesh = make_ring_mesh((4, 16), ("data", "seq"), ring_axis="seq")
        out = ring_attention(query, key, value, mesh=mesh, spec=P("data", "seq"))
    """
    devices = list(jax.devices() if devices is None else np.asarray(devices, object).flat)
    ring = _check(axis_sizes, axis_names, ring_axis, devices)
    sizes, names = tuple(int(n) for n in axis_sizes), tuple(axis_names)
    arranged, reason = _arrange(_fabrics(devices), sizes, ring)
    mesh = Mesh(arranged, names, axis_types=axis_types)
    if reason is not None and ((links := hop_links(mesh, names[ring])) != 1).any():
        warnings.warn(
            f"the ring along {names[ring]!r} ({sizes[ring]} devices) does not follow single links: {reason} "
            f"The longest hop crosses {links.max()} links, {(links > 1).sum()} of {links.size} hops cross several, and "
            f"{(links < 0).sum()} are between slices or cannot be counted.",
            UserWarning,
            stacklevel=2,
        )
    return mesh


def hop_links(mesh: Mesh, ring_axis: str) -> np.ndarray:
    """Links that the hop from each device to the next one along `ring_axis` crosses, in the shape of the mesh.

    0 on a ring of one device; 1 between GPUs of a host and between CPU devices; -1 where nothing is counted: between slices or
    hosts, and for TPU devices without coordinates.
    """
    names = list(mesh.axis_names)
    if ring_axis not in names:
        raise ValueError(f"ring_axis={ring_axis!r} is no axis of the mesh; choose one of {', '.join(map(repr, names))}.")
    devices = np.asarray(mesh.devices, object)
    index = {}
    fabrics = _fabrics(list(devices.flat))
    for f, fabric in enumerate(fabrics):
        index.update({device: (f, i) for i, device in enumerate(fabric.devices)})
    links = np.empty(devices.shape, int)
    following = np.roll(devices, -1, axis=names.index(ring_axis))
    for at in np.ndindex(devices.shape):
        (f, i), (g, j) = index[devices[at]], index[following[at]]
        links[at] = fabrics[f].links(i, j) if f == g else -1
    return links


class Fabric(NamedTuple):
    """Devices that reach each other over fast links: a TPU slice, or the GPUs of a host.

    Attributes:
      devices: each once.
      points: (number of devices, 4): chip coordinates and core; None where all are equally close.
      sides, wraps: of the whole slice, of which these devices may be a part.
      unknown: why the links are not known, although they matter.
    """

    devices: tuple[Any, ...]
    points: np.ndarray | None = None
    sides: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    unknown: str | None = None

    def links(self, i: int, j: int) -> int:
        """Fewest links between two of the devices; -1 where not known."""
        if self.points is None:
            return -1 if self.unknown and i != j else int(i != j)
        apart = np.abs(self.points[i] - self.points[j])
        around = np.where(self.wraps, np.minimum(apart, np.asarray(self.sides) - apart), apart)
        return int(around.sum())


def _point(device: Any) -> tuple[int, ...]:
    coords = tuple(device.coords)
    return (*coords, *(0,) * (3 - len(coords)), getattr(device, "core_on_chip", None) or 0)


def _fabric_key(device: Any) -> tuple[int, int]:
    """The slice of a TPU, the host of a GPU."""
    index = getattr(device, "slice_index", None)
    if index is not None:  # on GPUs the runtime gives one to every host, which may run a process per GPU
        return (0, index)
    return (1, device.process_index) if device.platform == "gpu" else (0, 0)


def _fabrics(devices: list[Any]) -> list[Fabric]:
    platform = devices[0].platform
    if platform not in ("gpu", "tpu"):
        return [Fabric(tuple(devices))]
    groups: dict[tuple[int, int], list[Any]] = {}
    for device in devices:
        groups.setdefault(_fabric_key(device), []).append(device)
    members = [groups[key] for key in sorted(groups)]
    if platform == "gpu":
        return [Fabric(tuple(sorted(group, key=lambda d: (d.process_index, d.id)))) for group in members]
    return [_tpu_fabric(group) for group in members]


def _tpu_fabric(devices: list[Any]) -> Fabric:
    if not all(getattr(device, "coords", None) is not None for device in devices):
        return Fabric(tuple(devices), unknown="these TPU devices have no coordinates; their order was kept.")
    points = np.array([_point(device) for device in devices])
    if len({tuple(point) for point in points}) < len(points):
        return Fabric(tuple(devices), unknown="several of these TPU devices have the same coordinates; their order was kept.")
    # The client knows the whole slice: its sides, and not those of the part in hand, say which links there are.
    client = getattr(devices[0], "client", None)
    whole = [d for d in client.devices() if _fabric_key(d) == _fabric_key(devices[0])] if client is not None else devices
    everywhere = np.array([_point(device) for device in whole])
    sides = tuple(int(n) for n in everywhere.max(axis=0) - everywhere.min(axis=0) + 1)
    return Fabric(tuple(devices), points, sides, _wraps(devices[0].device_kind, sides))


def _wraps(kind: str, sides: tuple[int, ...]) -> tuple[bool, ...]:
    """Which sides of a TPU slice surely have wraparound links; kinds not listed above count as grids."""
    chips = sides[:3]
    if kind in SIDE_16_WRAPS:
        return (*(n == 16 for n in chips), False)
    if kind in CUBES_WRAP:
        return (*(len(set(chips)) == 1 and n % 4 == 0 for n in chips), False)
    return (False,) * 4


def _arrange(fabrics: list[Fabric], sizes: tuple[int, ...], ring: int) -> tuple[np.ndarray, str | None]:
    """Devices in the shape of the mesh, and why the ring may have hops of several links, if it may."""
    arranged = np.empty(sizes, object)
    counts = [len(fabric.devices) for fabric in fabrics]
    if len(set(counts)) > 1:
        # One slice after the other. Only where the mesh is all ring does that cross from slice to slice as rarely as possible.
        chains = [_arrange_fabric(fabric, (len(fabric.devices),), 0, False) for fabric in fabrics]
        arranged = _in_rows(np.concatenate([chain for chain, _ in chains]), sizes, ring)
        if sizes[ring] == arranged.size:
            return arranged, next((why for _, why in chains if why is not None), None)
        return arranged, f"the slices or hosts hold unequal numbers of devices, {counts}; pass equally many of each."
    # Few slices per ring first, then as many as possible to the outermost axes, whose traffic is the rarest.
    across = min(factorings(len(fabrics), sizes), key=lambda parts: (parts[ring], parts[::-1]))
    inside = tuple(n // p for n, p in zip(sizes, across, strict=True))
    reason = None
    for fabric, at in zip(fabrics, np.ndindex(across), strict=True):
        part, why = _arrange_fabric(fabric, inside, ring, across[ring] == 1)
        arranged[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, inside, strict=True))] = part
        reason = reason or why
    return arranged, reason


def _arrange_fabric(fabric: Fabric, sizes: tuple[int, ...], ring: int, closed: bool) -> tuple[np.ndarray, str | None]:
    arranged = np.empty(len(fabric.devices), object)
    arranged[:] = fabric.devices
    if fabric.points is None:
        return arranged.reshape(sizes), fabric.unknown
    low = fabric.points.min(axis=0)
    box = tuple(int(n) for n in fabric.points.max(axis=0) - low + 1)
    index = {tuple(point): i for i, point in enumerate(fabric.points - low)}
    if math.prod(box) != len(index):
        chain = arranged[[index[point] for point in map(tuple, snake(box)) if point in index]]
        holes = f"{len(index)} devices do not fill the box of {_times(box)} that they span; pass the devices of a whole box."
        return _in_rows(chain, sizes, ring), holes
    wraps = spanning_sides(fabric.sides, fabric.wraps, box)
    points, ring_box = place_axes(box, wraps, sizes, ring, closed=closed, costs=(1, 1, 1, 0))  # cores share a chip
    flat = [index[tuple(point)] for point in points.reshape(-1, len(box))]
    no_cycle = None
    if closed and not has_cycle(ring_box, spanning_sides(box, wraps, ring_box)):
        kind = "an odd number" if sizes[ring] % 2 else "a line"
        no_cycle = (
            f"on {_times(box)} devices, a ring of {sizes[ring]} is {kind} of devices ({_times(ring_box)}), which closes only "
            "round a side that wraps; choose axis sizes that leave the ring an even number on two sides or more."
        )
    return arranged[flat].reshape(sizes), no_cycle


def _in_rows(chain: np.ndarray, sizes: tuple[int, ...], ring: int) -> np.ndarray:
    """Consecutive devices of a chain along the ring's axis."""
    others = [n for a, n in enumerate(sizes) if a != ring]
    return np.moveaxis(chain.reshape(*others, sizes[ring]), -1, ring)


def _times(box: Sequence[int]) -> str:
    return " x ".join(str(n) for n in box[:3]) + (f" x {box[3]} cores" if box[3] > 1 else "")


def _check(sizes: Sequence[int], names: Sequence[str], ring_axis: str | None, devices: list[Any]) -> int:
    """The index of the ring's axis, or what does not fit."""
    for argument, given in (("axis_sizes", sizes), ("axis_names", names)):
        if isinstance(given, str | int):
            raise ValueError(f"{argument}={given!r} must be a sequence with one entry per axis; write ({given!r},) for one axis.")
    if len(sizes) != len(names) or not names:
        raise ValueError(f"axis_sizes={sizes!r} and axis_names={names!r} must have the same number of entries, at least one.")
    if len(set(names)) != len(names):
        raise ValueError(f"axis_names={names!r} repeats a name; give every axis its own.")
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 1 for n in sizes):
        raise ValueError(f"axis_sizes={sizes!r} must be integers of at least 1.")
    if ring_axis is None and len(names) > 1:
        raise ValueError(
            f"axis_names={names!r} has several axes; name the one that the ring runs along, e.g. ring_axis={names[0]!r}."
        )
    if ring_axis is not None and ring_axis not in names:
        raise ValueError(f"ring_axis={ring_axis!r} is no axis of the mesh; choose one of {', '.join(map(repr, names))}.")
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"axis_sizes={sizes!r} ask for {math.prod(sizes)} devices, but there are {len(devices)}; "
            "change the sizes, or pass as many with devices=."
        )
    if len(set(devices)) != len(devices):
        raise ValueError(f"devices lists {len(devices) - len(set(devices))} of {len(devices)} devices again; give each once.")
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise ValueError(f"devices are of several platforms, {', '.join(platforms)}; pass those of one.")
    return 0 if ring_axis is None else list(names).index(ring_axis)
