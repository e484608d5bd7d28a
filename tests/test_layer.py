"""`RingAttention`: the same attention, with the ring and the heads fixed once."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from cases import ring_mesh
from jax.sharding import PartitionSpec as P

from jax_ring_attention import RingAttention, ring_attention
from jax_ring_attention.testing import random_inputs

pytestmark = pytest.mark.fast


def test_it_is_ring_attention():
    inputs, mesh = random_inputs(1, 2, 32, heads=4, kv_heads=2), ring_mesh(4)
    fixed = {"mesh": mesh, "spec": P(None, "seq"), "layout": "zigzag", "schedule": "bidirectional", "implementation": "xla"}
    attention = RingAttention(4, 2, **fixed)
    assert hash(attention) == hash(RingAttention(4, 2, **fixed))
    have = jax.jit(lambda *x: attention(*x, is_causal=True, return_residual=True))(*inputs[:3])
    want = ring_attention(*inputs[:3], is_causal=True, return_residual=True, **fixed)
    jax.tree.map(np.testing.assert_array_equal, have, want)


@pytest.mark.parametrize("heads", [(3, 2), (0, 1), (2, 0)])
def test_head_counts_that_cannot_be(heads):
    with pytest.raises(ValueError, match=rf"num_heads={heads[0]} .*num_kv_heads={heads[1]}"):
        RingAttention(*heads)


def test_wrong_names_are_found_when_it_is_built():
    with pytest.raises(ValueError, match=r"layout='zig'"):
        RingAttention(2, 1, layout="zig")
    with pytest.raises(ValueError, match=r"schedule='rong'"):
        RingAttention(2, 1, schedule="rong")


def test_arrays_with_other_heads_and_fixed_options():
    inputs = random_inputs(1, 1, 8, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"key has shape \(1, 8, 2, .*has 1 heads"):
        RingAttention(4, 1)(*inputs[:3])
    with pytest.raises(ValueError, match=r"schedule= is fixed to 'ring'"):
        RingAttention(4, 2)(*inputs[:3], schedule="fused")
    with pytest.raises(TypeError, match="causal"):
        RingAttention(4, 2)(*inputs[:3], causal=True)
