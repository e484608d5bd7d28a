"""The whole ring in one TPU kernel, in the emulator of TPUs that comes with Pallas: `schedule="fused"` equals attention, without races.

The emulator runs one kernel at a time, so what one call's signals may do to the next call is tested by tests/test_fused_protocol.py,
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

from jax_ring_attention import SegmentIds, compat, ring_attention
from jax_ring_attention.fused import backward, forward, hops
from jax_ring_attention.fused.protocol import Channel, Neighbours
from jax_ring_attention.testing import AttentionInputs, random_inputs, value_and_grads

MODES = ("on_wait", "eager")
emulated = functools.partial(compat.tpu_interpret_mode, uninitialized_memory="nan", detect_races=True)


def rows_of_segments(batch: int, length: int) -> np.ndarray:
    return np.sort(np.random.default_rng(3).integers(-1, 3, size=(batch, length)), axis=1)


#: Ring size, DMA mode, sizes of the inputs, options: every ring size in both modes, every feature at least once.
CASES: dict[str, tuple[int, str, dict, dict]] = {
    "causal": (2, "on_wait", {"tokens": 128}, {"is_causal": True}),
    "segments that differ between rows, zigzag": (
        2,
        "eager",
        {"tokens": 60, "batch": 2},
        {"segment_ids": rows_of_segments(2, 120), "layout": "zigzag", "is_causal": True},
    ),
    "given positions": (
        3,
        "on_wait",
        {"tokens": 40},
        {"positions": np.random.default_rng(1).permutation(120), "is_causal": True},
    ),
    "grouped heads, Hv != H": (3, "eager", {"tokens": 30, "heads": 4, "kv_heads": 2, "value_dim": 40, "head_dim": 24}, {}),
    "several blocks, zigzag": (4, "on_wait", {"tokens": 256, "heads": 1}, {"is_causal": True, "layout": "zigzag", "block_sizes": 128}),
    "window on both sides: two legs": (4, "eager", {"tokens": 24}, {"local_window_size": (30, 20)}),
    "window: fewer hops": (5, "on_wait", {"tokens": 24}, {"local_window_size": (30, 0)}),
    "lengths, padded": (
        5,
        "eager",
        {"tokens": 23, "batch": 2, "cut": 2},
        {"query_seq_lengths": np.array([113, 60]), "key_value_seq_lengths": np.array([113, 17]), "is_causal": True},
    ),
    "striped": (8, "on_wait", {"tokens": 16}, {"is_causal": True, "layout": "striped"}),
    "soft cap and sinks": (8, "eager", {"tokens": 16}, {"logits_soft_cap": 2.0, "sinks": np.array([0.3, -1.0])}),
}


def inputs_of(ring_size: int, tokens: int, cut: int = 0, batch: int = 1, **sizes: Any) -> AttentionInputs:
    return random_inputs(8, batch, ring_size * tokens - cut, **({"heads": 2, "kv_heads": 1, "head_dim": 16} | sizes))


@pytest.mark.parametrize("name", CASES)
def test_every_ring_size_and_every_feature_matches_dense_without_races(name):
    ring_size, mode, sizes, options = CASES[name]
    options = {key: jnp.asarray(x) if isinstance(x, np.ndarray) and "lengths" in key else x for key, x in options.items()}
    dense = {key: options[key] for key in ("logits_soft_cap",) if key in options}
    if "sinks" in options:
        options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)
    with emulated(dma_execution_mode=mode):
        check_ring(
            inputs_of(ring_size, **sizes),
            mesh=ring_mesh(ring_size),
            spec=P(None, "seq"),
            schedule="fused",
            dense_options=dense,
            **options,
        )
        assert not compat.tpu_interpret_found_races()
