"""The whole ring in one TPU kernel, in the emulator of TPUs that comes with Pallas: equal to attention, and without races.

The emulator runs one kernel at a time, so what one call's signals may do to the next is tested by tests/test_fused_protocol.py,
which runs the kernels' own control flow on simulated devices. Compiled for real TPUs in tests/test_aot_fused.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import check_ring, mesh_of, ring_mesh
from jax.sharding import PartitionSpec as P

from jax_ring_attention import compat, ring_attention
from jax_ring_attention.fused import hops
from jax_ring_attention.fused.protocol import Channel, Neighbours
from jax_ring_attention.schedule import UNFUSED
from jax_ring_attention.testing import AttentionInputs, random_inputs, value_and_grads

#: A transfer gets one of the free places of the vector clocks; with few of them two transfers share one and hide a race.
emulated = functools.partial(compat.tpu_interpret_mode, uninitialized_memory="nan", detect_races=True, vector_clock_size=256)


def rows_of_segments(batch: int, length: int) -> np.ndarray:
    return np.sort(np.random.default_rng(3).integers(-1, 3, size=(batch, length)), axis=1)


ONE_WAY, BOTH_WAYS = "fused", "fused_bidirectional"

#: Schedule, ring size, DMA mode, sizes of the inputs, options: both ways every ring size up to 5 in both modes (4, eager, stands
#: among the mutations), and every feature at least once. Other tests go one way on rings of 2.
CASES: dict[str, tuple[str, int, str, dict, dict]] = {
    "causal, zigzag": (BOTH_WAYS, 4, "on_wait", {"tokens": 24}, {"is_causal": True, "layout": "zigzag"}),
    "halves in blocks of 256 and 128, one of them padded": (BOTH_WAYS, 2, "on_wait", {"tokens": 257}, {}),
    "segments that differ between rows, zigzag": (
        BOTH_WAYS,
        2,
        "eager",
        {"tokens": 60, "batch": 2},
        {"segment_ids": rows_of_segments(2, 120), "layout": "zigzag", "is_causal": True},
    ),
    "given positions": (
        BOTH_WAYS,
        3,
        "on_wait",
        {"tokens": 41},
        {"positions": np.random.default_rng(1).permutation(123), "is_causal": True},
    ),
    "grouped heads, Hv != H": (
        BOTH_WAYS,
        3,
        "eager",
        {"tokens": 31, "heads": 4, "kv_heads": 2, "value_dim": 40, "head_dim": 24},
        {},
    ),
    "several blocks, zigzag": (
        ONE_WAY,
        4,
        "on_wait",
        {"tokens": 256},
        {"is_causal": True, "layout": "zigzag", "block_sizes": 128},
    ),
    "window on both sides: two legs, each one way": (BOTH_WAYS, 4, "eager", {"tokens": 24}, {"local_window_size": (30, 20)}),
    "window: fewer hops": (ONE_WAY, 5, "on_wait", {"tokens": 24}, {"local_window_size": (30, 0)}),
    "lengths, padded": (
        BOTH_WAYS,
        5,
        "eager",
        {"tokens": 23, "batch": 2, "cut": 2},
        {"query_seq_lengths": np.array([113, 60]), "key_value_seq_lengths": np.array([113, 17]), "is_causal": True},
    ),
    "striped": (ONE_WAY, 8, "eager", {"tokens": 16}, {"is_causal": True, "layout": "striped"}),
    "soft cap and sinks": (BOTH_WAYS, 5, "on_wait", {"tokens": 16}, {"logits_soft_cap": 2.0, "sinks": np.array([0.3])}),
}


def inputs_of(ring_size: int, tokens: int, cut: int = 0, batch: int = 1, **sizes: Any) -> AttentionInputs:
    return random_inputs(8, batch, ring_size * tokens - cut, **({"heads": 1, "head_dim": 16} | sizes))


@pytest.mark.parametrize("name", CASES)
def test_every_ring_size_and_every_feature_matches_dense_without_races(name):
    schedule, ring_size, mode, sizes, options = CASES[name]
    options = {key: jnp.asarray(x) if isinstance(x, np.ndarray) and "lengths" in key else x for key, x in options.items()}
    dense = {key: options[key] for key in ("logits_soft_cap",) if key in options}
    if "sinks" in options:
        options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)
    with emulated(dma_execution_mode=mode):
        check_ring(
            inputs_of(ring_size, **sizes),
            mesh=ring_mesh(ring_size),
            spec=P(None, "seq"),
            schedule=schedule,
            dense_options=dense,
            **options,
        )
        assert not compat.tpu_interpret_found_races()


# What happens without the protocol. A test that cannot fail is no test.


def without(*names: str, gradients: bool = False):
    """These methods do nothing in the channels of the second half; gradients are float32 where keys are bfloat16."""

    def break_them(monkeypatch) -> None:
        init = Neighbours.__init__

        def remember(self, mesh_axes, coordinates, track=0):
            init(self, mesh_axes, coordinates, track)
            self.track = track

        def unless(method):
            def either(self, *args):
                is_broken = self.neighbours.track == 1 and gradients <= (self.buffers[0].dtype == jnp.float32)
                return None if is_broken else method(self, *args)

            return either

        monkeypatch.setattr(Neighbours, "__init__", remember)
        for name in names:
            monkeypatch.setattr(Channel, name, unless(getattr(Channel, name)))

    return break_them


#: Whether there is a backward pass, what is missing; tests/test_fused_protocol.py takes it from channels that go one way as well.
MUTATIONS = {
    "intact": (True, without()),
    "no credits": (False, without("grant", "take")),
    "no wait for arrival": (False, without("wait_arrived")),
    "no wait for departure": (False, without("wait_sent")),
    "no credits for gradients": (True, without("grant", "take", gradients=True)),
}


def run_small(schedule: str, has_grads: bool):
    inputs = random_inputs(2, 1, 4 * 16, heads=1, head_dim=16, dtype=jnp.bfloat16)
    attend = functools.partial(
        ring_attention, mesh=ring_mesh(4), spec=P(None, "seq"), schedule=schedule, implementation="mosaic_tpu"
    )
    with emulated(dma_execution_mode="eager"):
        result = value_and_grads(attend, inputs[:3], inputs.d_out) if has_grads else jax.jit(attend)(*inputs[:3])
        return jax.tree.leaves(jax.block_until_ready(result))


unfused = functools.cache(run_small)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_detector_or_the_numbers_show_what_is_missing(name, monkeypatch):
    has_grads, mutate = MUTATIONS[name]
    want = unfused("bidirectional", has_grads)
    mutate(monkeypatch)
    jax.clear_caches()  # of what was traced before
    try:
        have = run_small(BOTH_WAYS, has_grads)
    finally:
        jax.clear_caches()
    wrong = any(not np.array_equal(a, b) for a, b in zip(want, have, strict=True))
    assert (compat.tpu_interpret_found_races() or wrong) == (name != "intact")


# Inside programs.


def grads_of_layers(mesh, schedule, inputs, layers, calls=1):
    """Output and gradients of a few rematerialised layers of attention in a scan, of every call."""

    def layer(x, key):
        fixed = {"mesh": mesh, "spec": P(None, "seq"), "implementation": "mosaic_tpu"}
        return x + ring_attention(x, key, key, is_causal=True, schedule=schedule, **fixed), None

    def loss(query, keys):
        out, _ = jax.lax.scan(jax.checkpoint(layer), query, keys)
        return (out * inputs.d_out).sum()

    keys = jnp.stack([inputs.key * (i + 1) for i in range(layers)])
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return [run(inputs.query, keys) for _ in range(calls)]


def test_layers_in_a_scan_under_remat_and_a_second_call():
    inputs, mesh = random_inputs(4, 1, 3 * 16, heads=1, head_dim=16), ring_mesh(3)
    with emulated():
        (want,) = grads_of_layers(mesh, "bidirectional", inputs, layers=2)
        for have in grads_of_layers(mesh, BOTH_WAYS, inputs, layers=2, calls=2):
            jax.tree.map(np.testing.assert_array_equal, have, want)
        assert not compat.tpu_interpret_found_races()


def test_two_rings_in_one_program_beside_other_axes():
    mesh = mesh_of(seq=2, tensor=2)
    inputs = random_inputs(5, 1, 32, heads=2, kv_heads=2, head_dim=16)

    def attend(schedule, query, key, value):
        call = functools.partial(ring_attention, mesh=mesh, schedule=schedule, implementation="mosaic_tpu")
        first = call(query, key, value, spec=P(None, "seq", "tensor"))
        return call(first, key, value, spec=P(None, "tensor", "seq"))

    with emulated():
        want, have = (value_and_grads(functools.partial(attend, x), inputs[:3], inputs.d_out) for x in ("ring", "fused"))
        assert not compat.tpu_interpret_found_races()
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_d_query_in_parts(monkeypatch):
    """Where d_query of one head does not fit in VMEM: parts of the queries one after another, at every hop.

    Blocks of queries that are padding have no pair at any hop, and their d_query must be 0 all the same.
    """
    inputs = random_inputs(7, 1, 2 * 256, heads=2, kv_heads=1, head_dim=16)
    call = functools.partial(
        ring_attention,
        is_causal=True,
        query_seq_lengths=jnp.array([384]),
        block_sizes=128,
        mesh=ring_mesh(2),
        spec=P(None, "seq"),
        implementation="mosaic_tpu",
    )
    for module in ("fused", "kernels.mosaic_tpu"):
        monkeypatch.setattr(f"jax_ring_attention.{module}.resident_units", lambda shape, tiling: 3)
    with emulated():
        want, have = (
            value_and_grads(functools.partial(call, schedule=x), inputs[:3], inputs.d_out) for x in ("bidirectional", BOTH_WAYS)
        )
        assert not compat.tpu_interpret_found_races()
    jax.tree.map(np.testing.assert_array_equal, have, want)


def test_x64_changes_nothing():
    inputs = random_inputs(8, 1, 2 * 16, heads=1, head_dim=16, dtype=jnp.bfloat16)
    call = functools.partial(ring_attention, is_causal=True, mesh=ring_mesh(2), spec=P(None, "seq"), schedule="fused")
    with emulated():
        want = value_and_grads(call, inputs[:3], inputs.d_out)
        with jax.enable_x64(True):
            have = value_and_grads(call, inputs[:3], inputs.d_out)
    jax.tree.map(np.testing.assert_array_equal, have, want)


# What is refused, and what is decided before the kernel.


every_fused_schedule = pytest.mark.parametrize("schedule", UNFUSED)


def lower(schedule, ring_size=2, mesh=None, spec=None, **options):
    mesh, spec = mesh or ring_mesh(ring_size), spec or P(None, "seq")
    inputs = random_inputs(0, 1, 128 * mesh.devices.size, heads=2, head_dim=16)
    attend = functools.partial(ring_attention, mesh=mesh, spec=spec, schedule=schedule, **options)
    with compat.tpu_interpret_mode():
        return jax.eval_shape(attend, *inputs[:3])


@pytest.mark.fast
@every_fused_schedule
def test_cpu_devices_are_refused(schedule):
    inputs = random_inputs(0, 1, 256, heads=2, head_dim=16)
    message = f"schedule='{schedule}' is .* devices are CPUs; use schedule='{UNFUSED[schedule]}'"
    with pytest.raises(NotImplementedError, match=message):
        ring_attention(*inputs[:3], mesh=ring_mesh(2), spec=P(None, "seq"), schedule=schedule)


@pytest.mark.fast
@every_fused_schedule
def test_other_implementations_are_refused(schedule):
    message = rf"schedule='{schedule}' .*'mosaic_tpu', not of 'xla'.*schedule='{UNFUSED[schedule]}'"
    with pytest.raises(ValueError, match=message):
        lower(schedule, implementation="xla")


@pytest.mark.fast
@every_fused_schedule
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": jnp.ones((1, 1, 256, 256), bool)}, r"no dense mask or bias"),
        ({"block_sizes": 64}, r"multiples of 128 tokens"),
    ],
    ids=["mask", "block sizes"],
)
def test_what_the_kernel_refuses_is_refused_with_the_way_out(options, reason, schedule):
    refuses = f"schedule='{schedule}' runs implementation='mosaic_tpu', which refuses: "
    with pytest.raises(NotImplementedError, match=f"{refuses}.*{reason}.*schedule='{UNFUSED[schedule]}'"):
        lower(schedule, **options)


@pytest.mark.fast
@every_fused_schedule
def test_lists_beyond_scalar_memory_are_refused(schedule):
    shape = jax.ShapeDtypeStruct((1, 4 * 2**15, 1, 64), jnp.bfloat16)  # 2**16 pairs of blocks are what one hop may have
    attend = functools.partial(ring_attention, mesh=ring_mesh(4), spec=P(None, "seq"), schedule=schedule, block_sizes=128)
    message = rf"schedule='{schedule}' lists .* all 4 hops at once, 262144 entries.*'{UNFUSED[schedule]}'"
    with compat.tpu_interpret_mode(), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(attend, shape, shape, shape)


@pytest.mark.fast
@every_fused_schedule
def test_axes_that_are_not_adjacent_or_not_manual_are_refused(schedule):
    mesh, instead = mesh_of(a=2, b=2, c=2), f"use schedule='{UNFUSED[schedule]}'"
    adjacent = rf"schedule='{schedule}' wants .* next to each other.*\('a', 'c'\) among \('a', 'b', 'c'\).*{instead}"
    with pytest.raises(NotImplementedError, match=adjacent):
        lower(schedule, mesh=mesh, spec=P(None, ("a", "c")))
    lower(schedule, mesh=mesh, spec=P(None, ("b", "c")))
    inputs = random_inputs(0, 1, 256, heads=2, head_dim=16)

    def inside(*x):
        return ring_attention(*x, axis_name="a", schedule=schedule)

    spec = P(None, "a")
    partly = jax.shard_map(inside, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names={"a"})
    manual = rf"schedule='{schedule}' addresses .* axes \['b', 'c'\] are not manual.*{instead}"
    with compat.tpu_interpret_mode(), pytest.raises(NotImplementedError, match=manual):
        jax.eval_shape(jax.jit(partly), *inputs[:3])


@pytest.mark.fast
@every_fused_schedule
def test_vmap_is_refused(schedule):
    inputs = random_inputs(0, 2, 256, heads=1, head_dim=16)
    attend = functools.partial(ring_attention, mesh=ring_mesh(2), spec=P(None, "seq"), schedule=schedule)
    message = f"vmap over schedule='{schedule}' .*part of the batch B, .*schedule='{UNFUSED[schedule]}'"
    with compat.tpu_interpret_mode(), pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.vmap(attend), *(x[:, None] for x in inputs[:3]))


@pytest.mark.fast
def test_rings_share_a_barrier_if_and_only_if_they_have_the_same_neighbours():
    sizes = {"data": 2, "seq": 4, "tensor": 3}
    rings = [("data",), ("seq",), ("tensor",), ("data", "seq"), ("seq", "tensor"), ("data", "seq", "tensor")]

    def number(axes, sizes, schedule=ONE_WAY):
        return hops.collective_id(axes, sizes, schedule)

    assert len({number(axes, sizes) for axes in rings}) == len(rings)
    assert number(("seq",), sizes) == number(("x",), {"data": 2, "x": 4, "tensor": 3})
    assert number(("seq",), sizes) == number(("y", "z"), {"data": 2, "y": 2, "z": 2, "tensor": 3}, BOTH_WAYS)


@pytest.mark.fast
@every_fused_schedule
def test_one_device_and_a_window_within_one_chunk_have_no_ring_to_fuse(schedule):
    inputs = random_inputs(0, 1, 256, heads=1, head_dim=16)
    for mesh, options in ((ring_mesh(1), {}), (ring_mesh(2), {"local_window_size": (0, 0)})):
        attend = functools.partial(ring_attention, mesh=mesh, spec=P(None, "seq"), implementation="mosaic_tpu", **options)
        with compat.tpu_interpret_mode():
            have, want = (
                str(jax.make_jaxpr(functools.partial(attend, schedule=x))(*inputs[:3])) for x in (schedule, UNFUSED[schedule])
            )
        assert "ring_attention_fused" not in have
        assert have.count("pallas_call") == want.count("pallas_call") > 0
