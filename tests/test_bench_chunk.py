"""The benchmarks for one GPU, with the kernel that runs on CPUs in the Hopper one's place: what they gate and report."""

from __future__ import annotations

import functools

import bench_chunk
import bench_ring_single_gpu
import jax
import jax.numpy as jnp
import pytest

from jax_ring_attention import ring_attention

WORK = {"batch": 1, "length": 256, "head_dim": 16, "value_dim": 16, "causal": True}


def dense(is_causal):
    return functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)


def absent(is_causal):
    raise ModuleNotFoundError("no such module")


def refuses(is_causal):
    def attend(query, key, value):
        raise NotImplementedError("head dims up to 8")

    return attend


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_chunk, "OURS", "xla")
    monkeypatch.setattr(bench_chunk, "HEADS", 2)
    monkeypatch.setattr(bench_chunk, "take_turns", functools.partial(bench_chunk.take_turns, rounds=2, repeats=1))
    monkeypatch.setattr(bench_ring_single_gpu, "HEADS", 2)
    monkeypatch.setattr(bench_ring_single_gpu, "RING", 4)
    monkeypatch.setattr(bench_ring_single_gpu, "attend", functools.partial(ring_attention, implementation="xla"))


def test_every_implementation_that_runs_is_compared_and_timed(monkeypatch):
    peers = {"dense": (jnp.bfloat16, dense), "absent": (jnp.bfloat16, absent), "refuses": (jnp.bfloat16, refuses)}
    monkeypatch.setattr(bench_chunk, "PEERS", peers)
    result = bench_chunk.measure(WORK)
    rows = {(row["implementation"], row["direction"]): row for row in result["rows"]}
    assert set(rows) == {(name, part) for name in ("xla", "deterministic", "dense") for part in ("forward", "backward")}
    assert rows["xla", "forward"]["over_ours"] == rows["xla", "backward"]["over_ours"] == 1
    assert rows["dense", "forward"]["over_ours"] > 0
    assert result["refused"]["absent"] == "ModuleNotFoundError: no such module"
    assert result["refused"]["refuses"] == "NotImplementedError: head dims up to 8"


def test_nothing_is_timed_where_results_differ(monkeypatch):
    monkeypatch.setattr(bench_chunk, "PEERS", {"not causal": (jnp.bfloat16, lambda is_causal: dense(False))})
    monkeypatch.setattr(bench_chunk, "take_turns", lambda *_, **__: pytest.fail("timed something that is wrong"))
    with pytest.raises(SystemExit, match=r"outputs or gradients differ by .*nothing is timed"):
        bench_chunk.measure(WORK)


def test_without_peers_the_reference_kernel_is_compared(monkeypatch):
    monkeypatch.setattr(bench_chunk, "PEERS", {})
    compared = []
    monkeypatch.setattr(bench_chunk, "check", lambda have, want, check=bench_chunk.check: compared.append(check(have, want)))
    bench_chunk.measure(WORK)
    assert len(compared) == 3  # ours with itself, deterministic, and the reference in float32


@pytest.mark.parametrize("measurement", [bench_ring_single_gpu.chunking, bench_ring_single_gpu.rank_of_a_ring])
def test_a_ring_on_one_device(measurement):
    result = measurement(64, 16)
    assert len(result) == 2
    assert all(set(parts) == {"forward", "backward"} and parts["forward"] > 0 for parts in result.values())
