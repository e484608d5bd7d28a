"""The whole ring in one kernel, compiled ahead of time for TPUs that are not here: two kernels, no collective."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from ahead import HEADS, KV_HEADS, NAMES, SPEC, ring_mesh
from jax.sharding import NamedSharding, PartitionSpec
from programs import Program

from jax_ring_attention import ring_attention

pytestmark = pytest.mark.aot

#: head dim, value dim, dtype, tokens per device, options: every option that changes what travels or what is compared.
CLASSES = {
    "causal zigzag": (128, 128, jnp.bfloat16, 256, {"is_causal": True, "layout": "zigzag"}),
    "window on both sides, H 80": (80, 80, jnp.bfloat16, 256, {"local_window_size": (300, 300)}),
    "segments, H 64, Hv 128, float32": (64, 128, jnp.float32, 256, {"segment_ids": True}),
    # Halves of 129 tokens, padded, and of 128: blocks differ, and so does what is compared.
    "both ways, odd": (128, 128, jnp.bfloat16, 257, {"is_causal": True, "schedule": "fused_bidirectional"}),
}


@functools.cache
def compiled(topology: str, name: str, data: int = 1, tensor: int = 1):
    head_dim, value_dim, dtype, tokens, options = CLASSES[name]
    mesh = ring_mesh(topology, data, tensor)
    ring_size = mesh.shape["seq"]

    def grad(query, key, value, d_out, segment_ids):
        static = {"schedule": "fused"} | options | ({"segment_ids": segment_ids} if "segment_ids" in options else {})
        out, pull = jax.vjp(lambda *x: ring_attention(*x, mesh=mesh, spec=SPEC, **static), query, key, value)
        return out, pull(d_out)

    def struct(*shape, dtype=dtype, spec=SPEC):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    batch, length = 2 * data, tokens * ring_size
    heads, kv_heads = HEADS * tensor, KV_HEADS * tensor
    query, key = struct(batch, length, heads, head_dim), struct(batch, length, kv_heads, head_dim)
    value, d_out = struct(batch, length, kv_heads, value_dim), struct(batch, length, heads, value_dim)
    segment_ids = struct(batch, length, dtype=jnp.int32, spec=PartitionSpec(*NAMES[:2]))
    return Program(jax.jit(grad).lower(query, key, value, d_out, segment_ids).compile().as_text())


def kernels(program: Program) -> int:
    return sum("tpu_custom_call" in one.attributes for body in program.computations.values() for one in body)


TOPOLOGIES = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")
EVERYWHERE = ("causal zigzag", "segments, H 64, Hv 128, float32")
RUNS = [(name, topology) for name in CLASSES for topology in (TOPOLOGIES if name in EVERYWHERE else TOPOLOGIES[:1])]


@pytest.mark.parametrize(("name", "topology"), RUNS)
def test_forward_and_backward_compile_to_kernels_alone(name, topology):
    program = compiled(topology, name)
    legs = 2 if "window" in name else 1
    assert kernels(program) == 2 * legs
    # What travels does so inside the kernels. Only the bounds of given integers are gathered, before them.
    if "segments" in name:
        assert {one.opcode for one in program.collectives} <= {"all-gather", "all-reduce"}
        chunk = 2 * 256 * KV_HEADS * 64 * 4  # bytes of one device's keys
        assert 0 < sum(one.bytes for one in program.collectives) < chunk / 100
    else:
        assert program.collectives == []


@pytest.mark.parametrize("topology", ["v5e:8x8", "v5e:16x16"])
def test_a_ring_of_many_chips_compiles(topology):
    program = compiled(topology, "causal zigzag")
    assert kernels(program) == 2
    assert program.collectives == []


def test_rings_beside_data_and_tensor_axes_compile():
    assert kernels(compiled("v5e:2x4", "causal zigzag", 2, 2)) == 2
