"""Device order: TPU slices, their parts and several of them, hosts of GPUs, CPU; what is refused and what is warned about."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jax_ring_attention import make_ring_mesh
from jax_ring_attention.topology import hop_links


@dataclasses.dataclass(frozen=True)
class Device:
    """What a device says about itself."""

    id: int
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0
    slice_index: int | None = None
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def tpu_slice(sides, *, kind="TPU v5 lite", cores=1, index=None, first=0, low=(0, 0, 0)) -> list[Device]:
    """A slice in the order of ids: coordinates with x fastest, then cores."""
    sides = (*sides, *(1,) * (3 - len(sides)))
    points = [tuple(np.add(point[::-1], low).tolist()) for point in np.ndindex(*sides[::-1])]
    chips = itertools.product(points, range(cores))
    return [Device(first + i, point, core, index, device_kind=kind) for i, (point, core) in enumerate(chips)]


def gpus(hosts, each, *, processes_each=1, slices=False) -> list[Device]:
    return [
        Device(
            h * each + i, None, 0, h if slices else None, h * processes_each + i * processes_each // each, "gpu", "NVIDIA H100"
        )
        for h in range(hosts)
        for i in range(each)
    ]


def check(mesh: Mesh, devices, sizes, names) -> None:
    assert mesh.axis_names == names
    assert mesh.devices.shape == sizes
    assert set(mesh.devices.flat) == set(devices)
    assert mesh.devices.size == len(devices)


SLICES = [
    ("TPU v5 lite", (2, 4), 1),
    ("TPU v5 lite", (8, 8), 1),
    ("TPU v6 lite", (16, 16), 1),
    ("TPU v5", (2, 2, 2), 1),
    ("TPU v5", (4, 4, 8), 1),
    ("TPU v4", (4, 4, 4), 1),
    ("TPU7x", (2, 2, 2), 2),
    ("TPU v3", (4, 4), 2),
]


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "sides", "cores"), SLICES, ids=lambda x: str(x))
def test_every_hop_of_a_ring_over_a_slice_is_one_link(kind, sides, cores):
    devices = tpu_slice(sides, kind=kind, cores=cores)
    mesh = make_ring_mesh((len(devices),), ("seq",), devices=devices[::-1])
    check(mesh, devices, (len(devices),), ("seq",))
    assert (hop_links(mesh, "seq") == 1).all()


@pytest.mark.parametrize(
    "sizes", [(4, 16, 1), (2, 8, 4), (1, 16, 4), (4, 8, 2), (16, 4, 1), (2, 32, 1), (1, 2, 32), (8, 8, 1)], ids=str
)
def test_rings_beside_data_and_tensor_axes_take_single_links_within_boxes(sizes):
    devices, names = tpu_slice((8, 8)), ("data", "seq", "tensor")
    mesh = make_ring_mesh(sizes, names, ring_axis="seq", devices=devices)
    check(mesh, devices, sizes, names)
    assert (hop_links(mesh, "seq") == 1).all()
    for ring in np.moveaxis(mesh.devices, 1, 0).reshape(sizes[1], -1).T:
        assert np.prod(np.ptp([device.coords for device in ring], axis=0) + 1) == sizes[1]


def test_the_ring_may_be_any_axis():
    for ring_axis in ("a", "b", "c"):
        mesh = make_ring_mesh((4, 4, 4), ("a", "b", "c"), ring_axis=ring_axis, devices=tpu_slice((8, 8)))
        assert (hop_links(mesh, ring_axis) == 1).all()
        others = {"a", "b", "c"} - {ring_axis}
        assert all((hop_links(mesh, other) > 1).any() for other in others)


def test_tensor_parallel_devices_are_the_cores_of_a_chip_where_there_are_several():
    mesh = make_ring_mesh(
        (2, 4, 2), ("data", "seq", "tensor"), ring_axis="seq", devices=tpu_slice((2, 2, 2), kind="TPU7x", cores=2)
    )
    assert all(a.coords == b.coords for a, b in mesh.devices.reshape(-1, 2))
    assert (hop_links(mesh, "seq") == 1).all()


def test_a_line_is_a_ring_only_where_its_ends_are_joined():
    row = tpu_slice((16,))  # spans the pod
    mesh = make_ring_mesh((16,), ("seq",), devices=row)
    assert list(mesh.devices) == row
    assert (hop_links(mesh, "seq") == 1).all()
    with pytest.warns(UserWarning, match=r"'seq' \(8 devices\).*a line of devices \(1 x 8 x 1\).*crosses 2 links, 6 of 8 hops"):
        mesh = make_ring_mesh((8,), ("seq",), devices=[Device(i, (0, i, 0)) for i in range(8)])
    assert hop_links(mesh, "seq").max() == 2


def test_wraparound_is_told_from_the_whole_slice_and_not_from_the_part_in_hand():
    class Client:
        def devices(self):
            return tpu_slice((8, 8, 8), kind="TPU v5")

    class Attached(Device):
        client = Client()

    part = [Attached(**dataclasses.asdict(device)) for device in tpu_slice((4, 1, 1), kind="TPU v5")]
    with pytest.warns(UserWarning, match="a line"):
        make_ring_mesh((4,), ("seq",), devices=part)
    whole_side = [Attached(**dataclasses.asdict(device)) for device in tpu_slice((8, 1, 1), kind="TPU v5")]
    assert (hop_links(make_ring_mesh((8,), ("seq",), devices=whole_side), "seq") == 1).all()


@pytest.mark.parametrize(
    ("kind", "sides", "wraps"),
    [
        ("TPU v5 lite", (16, 3), True),
        ("TPU v5 lite", (8, 3), False),
        ("TPU v5", (4, 4, 4), True),
        ("TPU v5", (4, 4, 8), False),  # may be a twisted torus
        ("TPU v5", (2, 2, 2), False),
        ("TPU v3", (16, 16), False),  # not known
    ],
)
def test_opposite_ends_are_one_link_apart_only_where_wraparound_is_sure(kind, sides, wraps):
    devices = tpu_slice(sides, kind=kind)
    ends = Mesh(np.array([devices[0], devices[sides[0] - 1], *devices[1 : sides[0] - 1], *devices[sides[0] :]], object), ("seq",))
    assert hop_links(ends, "seq")[0] == (1 if wraps else sides[0] - 1)


def test_an_odd_ring_is_warned_about_and_has_one_longer_hop():
    devices = tpu_slice((3, 5))
    with pytest.warns(UserWarning, match=r"an odd number of devices \(3 x 5 x 1\).*crosses 2 links, 1 of 15 hops"):
        mesh = make_ring_mesh((15,), ("seq",), devices=devices)
    check(mesh, devices, (15,), ("seq",))
    with pytest.warns(UserWarning, match=r"on 4 x 4 x 12 devices, a ring of 3 is an odd number") as caught:
        make_ring_mesh((64, 3), ("data", "seq"), ring_axis="seq", devices=tpu_slice((4, 4, 12), kind="TPU v5"))
    assert [one.filename for one in caught] == [__file__]


def test_devices_that_leave_holes_are_warned_about_unless_the_ring_closes_anyway():
    devices = tpu_slice((4, 4))
    with pytest.warns(UserWarning, match=r"14 devices do not fill the box of 4 x 4 x 1.*pass the devices of a whole box"):
        mesh = make_ring_mesh((2, 7), ("data", "seq"), ring_axis="seq", devices=devices[:14])
    check(mesh, devices[:14], (2, 7), ("data", "seq"))
    apart = [devices[0], devices[1], devices[10], devices[11]]
    mesh = make_ring_mesh((2, 2), ("data", "seq"), ring_axis="seq", devices=apart)
    assert (hop_links(mesh, "seq") == 1).all()


def test_a_part_of_a_slice_may_lie_anywhere():
    mesh = make_ring_mesh((8,), ("seq",), devices=tpu_slice((4, 2), low=(4, 2, 0)))
    assert (hop_links(mesh, "seq") == 1).all()


@pytest.mark.parametrize("fault", [dict(coords=None), dict(coords=(0, 0, 0))])
def test_tpus_without_distinct_coordinates_keep_their_order_and_are_warned_about(fault):
    devices = [dataclasses.replace(device, **fault) for device in tpu_slice((2, 2))]
    with pytest.warns(UserWarning, match=r"coordinates; their order was kept.* and 4 are between slices or cannot be counted"):
        mesh = make_ring_mesh((4,), ("seq",), devices=devices)
    assert list(mesh.devices) == devices


# Several slices.


def slices(count, sides=(4, 4), **kwargs) -> list[Device]:
    return [device for s in range(count) for device in tpu_slice(sides, index=s, first=1000 * s, **kwargs)]


def test_rings_stay_inside_a_slice_where_the_sizes_allow():
    devices = slices(3)
    for sizes, names in (((3, 16), ("data", "seq")), ((6, 8), ("data", "seq")), ((8, 2, 3), ("seq", "a", "b"))):
        mesh = make_ring_mesh(sizes, names, ring_axis="seq", devices=devices)
        check(mesh, devices, sizes, names)
        assert (hop_links(mesh, "seq") == 1).all()


def test_an_outermost_ring_leaves_the_crossing_to_an_inner_axis():
    mesh = make_ring_mesh((8, 4), ("seq", "data"), ring_axis="seq", devices=slices(2))
    assert (hop_links(mesh, "seq") == 1).all()


def test_the_outermost_axis_crosses_slices():
    mesh = make_ring_mesh((2, 2, 4, 2), ("data", "stage", "seq", "tensor"), ring_axis="seq", devices=slices(2))
    index = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert (index[0] == 0).all()
    assert (index[1] == 1).all()


@pytest.mark.parametrize(("count", "sizes", "crossings"), [(2, (1, 32), 2), (3, (1, 48), 3), (4, (2, 32), 2), (6, (3, 32), 2)])
def test_a_ring_that_must_cross_passes_through_each_of_its_slices_once(count, sizes, crossings):
    devices = slices(count)
    mesh = make_ring_mesh(sizes, ("data", "seq"), ring_axis="seq", devices=devices)
    check(mesh, devices, sizes, ("data", "seq"))
    links = hop_links(mesh, "seq")
    assert ((links == -1).sum(axis=1) == crossings).all()
    assert (links[links != -1] == 1).all()


def test_a_chain_through_a_slice_needs_no_cycle():
    links = hop_links(make_ring_mesh((18,), ("seq",), devices=slices(2, (3, 3))), "seq")
    assert (links == -1).sum() == 2
    assert (links[links != -1] == 1).all()


def test_unequal_slices_are_chained_and_warned_about_beside_other_axes():
    devices = slices(1, (4, 2)) + tpu_slice((2, 2), index=1, first=1000)
    links = hop_links(make_ring_mesh((12,), ("seq",), devices=devices), "seq")
    assert (links == -1).sum() == 2
    assert (links[links != -1] == 1).all()
    with pytest.warns(UserWarning, match=r"hold unequal numbers of devices, \[8, 4\]"):
        mesh = make_ring_mesh((6, 2), ("seq", "data"), ring_axis="seq", devices=devices)
    check(mesh, devices, (6, 2), ("seq", "data"))


# GPUs and CPU.


@pytest.mark.fast
@pytest.mark.parametrize("kind", [dict(), dict(processes_each=8, slices=True)], ids=["a process per host", "a process per GPU"])
def test_gpu_rings_stay_inside_a_host_or_cross_each_host_once(kind):
    devices = gpus(4, 8, **kind)
    shuffled = [devices[i] for i in np.random.default_rng(0).permutation(len(devices))]
    assert list(make_ring_mesh((32,), ("seq",), devices=shuffled).devices) == devices
    host = np.vectorize(lambda device: device.id // 8)
    for sizes in ((4, 8), (8, 4)):
        mesh = make_ring_mesh(sizes, ("data", "seq"), ring_axis="seq", devices=shuffled)
        assert (np.ptp(host(mesh.devices), axis=1) == 0).all()
        assert (hop_links(mesh, "seq") == 1).all()
    mesh = make_ring_mesh((2, 16), ("data", "seq"), ring_axis="seq", devices=shuffled)
    assert ((hop_links(mesh, "seq") == -1).sum(axis=1) == 2).all()


def test_gpus_with_a_process_each_and_no_word_about_hosts_are_ordered_by_process():
    devices = gpus(1, 8, processes_each=8)
    mesh = make_ring_mesh((2, 4), ("data", "seq"), ring_axis="seq", devices=devices[::-1])
    assert list(mesh.devices.flat) == devices


@pytest.mark.fast
def test_cpu_devices_keep_their_order():
    devices = jax.devices()
    assert list(make_ring_mesh((8,), ("seq",)).devices) == devices
    mesh = make_ring_mesh((2, 4), ("data", "seq"), ring_axis="seq", devices=devices[::-1])
    assert mesh == Mesh(np.array(devices[::-1]).reshape(2, 4), ("data", "seq"))
    assert (hop_links(mesh, "seq") == 1).all()
    assert (hop_links(make_ring_mesh((1, 8), ("seq", "data"), ring_axis="seq"), "seq") == 0).all()


def test_axes_are_auto_unless_said_otherwise():
    assert make_ring_mesh((8,), ("seq",)).axis_types == (AxisType.Auto,)
    types = (AxisType.Explicit, AxisType.Auto)
    assert make_ring_mesh((2, 4), ("data", "seq"), ring_axis="seq", axis_types=types).axis_types == types


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(axis_sizes=(4,)), "ask for 4 devices, but there are 8.*devices="),
        (dict(axis_sizes=(3, 5), axis_names=("a", "b"), ring_axis="a"), "ask for 15 devices, but there are 8"),
        (dict(axis_sizes=8), r"write \(8,\)"),
        (dict(axis_names="seq"), r"write \('seq',\)"),
        (dict(axis_sizes=(2, 4)), r"\(2, 4\) and axis_names=\('seq',\) must have the same number"),
        (dict(axis_sizes=(), axis_names=()), "at least one"),
        (dict(axis_sizes=(2, 4), axis_names=("a", "a"), ring_axis="a"), "repeats a name"),
        (dict(axis_sizes=(-1, 8), axis_names=("a", "b"), ring_axis="a"), "integers of at least 1"),
        (dict(axis_sizes=(8.0,)), "integers of at least 1"),
        (dict(axis_sizes=(True, 8), axis_names=("a", "b"), ring_axis="a"), "integers of at least 1"),
        (dict(axis_sizes=(2, 4), axis_names=("data", "seq")), "several axes; name the one.*ring_axis='data'"),
        (dict(ring_axis="data"), "'data' is no axis of the mesh; choose one of 'seq'"),
        (dict(devices=[Device(0, (0, 0, 0))] * 8), "lists 7 of 8 devices again"),
        (dict(devices=[*tpu_slice((4, 1)), *gpus(1, 4)]), "several platforms, gpu, tpu"),
        (dict(devices=[]), "ask for 8 devices, but there are 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_ring_mesh(**(dict(axis_sizes=(8,), axis_names=("seq",)) | arguments))


def test_links_are_counted_along_axes_that_exist():
    with pytest.raises(ValueError, match="'tensor' is no axis of the mesh; choose one of 'seq'"):
        hop_links(make_ring_mesh((8,), ("seq",)), "tensor")


def test_the_order_depends_on_the_devices_and_not_on_the_order_they_come_in():
    devices = tpu_slice((4, 4)) + tpu_slice((4, 4), index=1, first=100)
    devices = [dataclasses.replace(device, slice_index=device.slice_index or 0) for device in devices]
    want = make_ring_mesh((2, 8, 2), ("data", "seq", "tensor"), ring_axis="seq", devices=devices)
    for seed in range(3):
        shuffled = [devices[i] for i in np.random.default_rng(seed).permutation(len(devices))]
        got = make_ring_mesh((2, 8, 2), ("data", "seq", "tensor"), ring_axis="seq", devices=shuffled)
        assert (got.devices == want.devices).all()


def test_the_warning_is_silent_where_nothing_is_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind, sides, cores in SLICES:
            devices = tpu_slice(sides, kind=kind, cores=cores)
            for size in (n for n in (1, 2, 4, 8) if len(devices) % n == 0):
                make_ring_mesh((len(devices) // size, size), ("data", "seq"), ring_axis="seq", devices=devices)
