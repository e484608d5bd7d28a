"""The forward kernel for Hopper under every order of events: on a simulated GPU, against dense attention."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from gpu_machine import Simulation

from jax_ring_attention import compat
from jax_ring_attention.kernels.contract import Dense, Problem, Scope
from jax_ring_attention.kernels.mosaic_gpu import MosaicGpuKernel
from jax_ring_attention.masks import Tokens
from jax_ring_attention.testing import dense_expected, earned_tolerances, random_inputs, relative_error, visible_pairs

pytestmark = pytest.mark.skipif(compat.JAX_VERSION < (0, 11), reason="refused before jax 0.11")

CAUSAL = {"reach": (None, 0)}

CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "one chunk, alternating": ({"query_length": 640, "heads": 3, "kv_heads": 1}, 1, {}),
    "one chunk, overlapped": ({"query_length": 256, "head_dim": 128}, 1, {}),
    "chunks, alternating": ({"query_length": 768, "batch": 2, "heads": 1}, 3, {}),
    "chunks, overlapped": ({"query_length": 768, "heads": 2, "kv_heads": 1, "head_dim": 128}, 3, {}),
    "chunks, one item a CTA at most": ({"query_length": 256, "heads": 1, "head_dim": 128}, 2, {}),
    "causal, alternating": ({"query_length": 768, "heads": 2}, 1, CAUSAL),
    "causal chunks with empty items, alternating": ({"query_length": 768, "heads": 2}, 3, CAUSAL),
    "causal chunks with empty items, overlapped": ({"query_length": 768, "heads": 2, "head_dim": 128}, 3, CAUSAL),
    "short chunks under a window": ({"query_length": 640, "heads": 1, "head_dim": 128}, 5, {"reach": (70, 30)}),
    "chunks that no block divides": ({"query_length": 600, "heads": 2, "head_dim": 128}, 3, {}),
    "wide heads": ({"query_length": 256, "heads": 1, "head_dim": 192, "value_dim": 128}, 2, CAUSAL),
}


def folded(inputs: Any, chunks: int, seed: int, patch: Any, reach: Any = (None, None)) -> tuple[Any, Any]:
    """Output and lse of `chunks` calls, each of which takes the carry of the one before."""
    query, key, value = inputs[:3]
    length, chunk_length = key.shape[1], key.shape[1] // chunks
    parts = [jnp.split(x, chunks, axis=1) for x in (key, value)]
    problem = Problem(query.shape, parts[0][0].shape, value.shape[3], query.dtype, query.shape[3] ** -0.5, reach)
    kernel = MosaicGpuKernel(problem)
    positions = jnp.arange(length)[None] if reach != (None, None) else None

    def at(*columns: int) -> Tokens:
        return Tokens(None if positions is None else positions[:, slice(*columns)])

    def program(_: int) -> Any:
        carry = None
        for i, chunk in enumerate(zip(*parts, strict=True)):
            scope = Scope(at(0, query.shape[1]), at(i * chunk_length, (i + 1) * chunk_length), Dense(), i * chunk_length)
            fold = kernel.fold if i < chunks - 1 else kernel.fold_last
            carry = fold(kernel.pack_query(query), kernel.pack_chunk(*chunk), scope, carry)
        return carry

    return Simulation(patch, 1, seed).run(program)[0]


def check(patch: Any, sizes: dict[str, Any], chunks: int, options: dict[str, Any], seed: int) -> None:
    inputs = random_inputs(seed, **({"head_dim": 64, "dtype": jnp.bfloat16} | sizes))
    length, (left, right) = inputs.query.shape[1], options.get("reach", (None, None))
    seen = visible_pairs(length, length, batch=inputs.query.shape[0], local_window_size=(left, right))[:, None]
    want = dense_expected(inputs, seen)
    earned = earned_tolerances(inputs, want, seen)
    out, lse = folded(inputs, chunks, seed, patch, **options)
    assert relative_error(out, want.out) <= earned.out
    assert relative_error(lse, want.lse) <= earned.lse


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_simulated_folds_match_dense(name, seed, monkeypatch):
    check(monkeypatch, *CASES[name], seed)
