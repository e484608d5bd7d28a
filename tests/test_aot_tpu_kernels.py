"""The TPU kernels compiled ahead of time: every class of shapes for every generation, and the whole ring around them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from ahead import DIM, KV_HEADS, compile_for, compiled_for, devices_of, ring_mesh
from jax.sharding import NamedSharding, PartitionSpec

from jax_ring_attention import ring_attention

pytestmark = pytest.mark.aot

#: Per chip. The transfer of a much shorter chunk is over before the kernel starts, and the compiler knows.
TOKENS = 1024
TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}

#: head dim, value dim, query heads of each key head, dtype, options: every one of each at least once.
CLASSES = {
    "full": (128, 128, 1, jnp.bfloat16, {}),
    "causal, H 64, float32": (64, 64, 2, jnp.float32, {"is_causal": True}),
    "window, H 80, float16": (80, 80, 1, jnp.float16, {"local_window_size": (100, 50)}),
    "segments, H 96": (96, 96, 4, jnp.bfloat16, {"segment_ids": True, "is_causal": True}),
    "soft cap, H 192, Hv 128": (192, 128, 1, jnp.bfloat16, {"logits_soft_cap": 30.0}),
    "lengths, H 256": (256, 256, 2, jnp.bfloat16, {"key_value_seq_lengths": True, "is_causal": True}),
}


@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_shapes_compiles_for_every_generation(name, chip):
    head_dim, value_dim, groups, dtype, options = CLASSES[name]
    mesh = jax.sharding.Mesh(devices_of(TOPOLOGIES[chip])[:1], ("seq",))
    spec = PartitionSpec(None, "seq")

    def struct(*shape, dtype=dtype, spec=spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    static = {key: x for key, x in options.items() if x is not True or key == "is_causal"}
    arrays = {
        "segment_ids": struct(2, 300, dtype=jnp.int32),
        "key_value_seq_lengths": struct(2, dtype=jnp.int32, spec=PartitionSpec()),
    }
    arrays = {key: x for key, x in arrays.items() if key in options}

    def grad(query, key, value, d_out, arrays):
        def attend(*qkv):
            return ring_attention(*qkv, implementation="mosaic_tpu", mesh=mesh, spec=spec, block_sizes=256, **static, **arrays)

        out, pull = jax.vjp(attend, query, key, value)
        return out, pull(d_out)

    heads = 2 * groups
    query, key = struct(2, 300, heads, head_dim), struct(2, 300, 2, head_dim)
    value, d_out = struct(2, 300, 2, value_dim), struct(2, 300, heads, value_dim)
    text = jax.jit(grad).lower(query, key, value, d_out, arrays).compile().as_text()
    assert text.count("tpu_custom_call") >= 2


@pytest.mark.parametrize("topology", [pytest.param("v5e:2x4", marks=pytest.mark.fast), "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_every_hop_brackets_a_kernel(topology):
    forward, grad = (compiled_for(topology, name, "mosaic_tpu", TOKENS).program for name in ("forward", "grad"))
    assert forward.sent() == {("bf16", TOKENS * KV_HEADS * DIM): 2 * 7}
    # Only the gradients of key and value on their last transfer, home, have nothing left to hide behind.
    for program, bare in ((forward, 0), (grad, 2)):
        assert {one.opcode for one in program.collectives} == {"collective-permute"}
        assert all(one.split for one in program.collectives)
        spans = program.between("collective-permute")
        assert len(spans) == len(program.collectives)
        assert sum("custom-call" not in span for span in spans) == bare


@pytest.mark.parametrize("topology", ["v5e:8x8", "v5e:16x16"])
def test_rings_of_many_chips_are_the_same_program(topology):
    for name in ("forward", "grad"):
        small, large = (compiled_for(each, name, "mosaic_tpu", TOKENS) for each in ("v5e:2x4", topology))
        assert all(one.split for one in large.program.collectives)
        assert [len(span) for span in large.program.between("collective-permute")] == [
            len(span) for span in small.program.between("collective-permute")
        ]
        assert large.temporary_bytes <= 1.05 * small.temporary_bytes


def test_memory_of_a_chip_is_linear_in_its_tokens():
    mesh = ring_mesh("v5e:2x4")
    for name in ("forward", "grad"):
        one, two, four = (
            compile_for(mesh, name, "mosaic_tpu", tokens=n, block_sizes=512).temporary_bytes for n in (4096, 8192, 16384)
        )
        assert four - two <= 2.1 * (two - one)
