"""The model of ring steps against closed forms, its costs against the kernels' own lists, and the script that prints them."""

from __future__ import annotations

import itertools
import json

import numpy as np
import profile_ring_steps as profile
import pytest
import ring_costs
import ring_model
from ring_model import Stream

from jax_ring_attention.kernels.mosaic_tpu import common
from jax_ring_attention.layouts import shard_positions
from jax_ring_attention.masks import Tokens
from jax_ring_attention.schedule import Stream as Part

pytestmark = pytest.mark.fast

P = 5


def even(seconds: float, ranks: int = P) -> np.ndarray:
    return np.full((ranks, ranks), seconds)


def by_order(before: float, own: float, after: float, ranks: int = P) -> np.ndarray:
    """Seconds with the chunk of a rank before, of this one, of one after, as the chunks come by."""
    hops, here = np.arange(ranks)[:, None], np.arange(ranks)[None]
    source = Part(1, ranks - 1, 0, 1).source(here, hops, ranks)
    return np.select([source < here, source == here], [before, own], after)


RUNS = {"scanned": ring_model.scanned, "fused": ring_model.fused}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_transfers_shorter_than_the_compute_cost_nothing(run):
    timeline = run([Stream(1, even(3.0), 2.0)])
    assert timeline.total == P * 3
    assert len(timeline.transfers) == P - 1
    np.testing.assert_array_equal(timeline.busy, 15.0)
    np.testing.assert_array_equal(timeline.begin[:, 0], 3.0 * np.arange(P))


def test_a_credit_takes_its_way_at_every_hop_where_two_buffers_are_all():
    """It is granted at the end of the receiver's hop and wanted at the start of the sender's next one."""
    streams = [Stream(1, even(3.0), 2.0)]
    assert ring_model.scanned(streams, latency=0.5).total == P * 3
    assert ring_model.fused(streams, latency=0.5).total == P * 3 + (P - 1 - ring_model.SLOTS) * 0.5
    assert ring_model.fused(streams, latency=0.5, slots=ring_model.SLOTS + 1).total == P * 3


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_transfers_longer_than_the_compute_bound_every_hop(run):
    timeline = run([Stream(1, even(1.0), 2.0)], latency=0.5)
    assert timeline.total == (P - 1) * 2.5 + 1
    bare = run([Stream(1, even(1.0), 0.0)])
    assert ring_model.exposed(timeline, bare) == pytest.approx(1 - P / timeline.total)


def test_what_a_hop_costs_beside_its_kernel():
    streams = [Stream(1, even(3.0), 2.0)]
    assert ring_model.scanned(streams, boundary=0.25).total == P * 3.25
    assert ring_model.scanned([Stream(1, even(1.0), 2.0)], boundary=0.25).total == (P - 1) * 2.25 + 1.25
    assert ring_model.fused(streams, start=7.0, hop=0.25).total == 7 + P * 3.25


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_contiguous_causal_ring_waits_for_the_last_rank(run):
    timeline = run([Stream(1, by_order(4.0, 2.0, 0.0), 0.0)])
    assert timeline.total == 2 + (P - 1) * 4
    np.testing.assert_array_equal(timeline.busy, 2 + 4 * np.arange(P))
    assert timeline.end[:, P - 1].max() == timeline.total


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_zigzag_ring_is_balanced(run):
    timeline = run([Stream(1, by_order(2.0, 2.25, 2.0), 1.0)])
    assert timeline.total == 2.25 + (P - 1) * 2
    np.testing.assert_array_equal(timeline.busy, timeline.total)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_half_chunks_both_ways_halve_the_time_on_the_links(run):
    one_way = run([Stream(1, even(1.0), 4.0)])
    both = run([Stream(1, even(0.5), 2.0), Stream(-1, even(0.5), 2.0)])
    assert (one_way.total, both.total) == ((P - 1) * 4 + 1, (P - 1) * 2 + 1)
    same_link = run([Stream(1, even(0.5), 2.0), Stream(1, even(0.5), 2.0)])
    assert same_link.total == one_way.total
    for way in (1, -1):
        assert sum(one.direction == way for one in both.transfers) == P - 1


def test_gradients_follow_one_hop_behind_and_come_home():
    streams = [Stream(1, even(5.0), 1.0, gradient=2.0, add=0.5)]
    for timeline in (ring_model.scanned(streams), ring_model.fused(streams)):
        assert timeline.total == P * 5 + (P - 1) * 0.5 + 2
        assert timeline.home == 2
        assert [one.what for one in timeline.transfers].count("gradient") == P
        assert ring_model.exposed(timeline, timeline) == 0
    # Where links bound it, gradient and chunk share one: hop 0 sends a chunk, hops 1 .. P - 2 both, hop P - 1 a gradient.
    slow = [Stream(1, even(1.0), 3.0, gradient=6.0, add=0.5)]
    assert ring_model.scanned(slow).total == 3 + (P - 2) * 9 + 6 + (P - 1) * 0.5 + 6
    # In one kernel a gradient need not wait for the next hop's chunk.
    assert ring_model.fused(slow).total <= ring_model.scanned(slow).total


def test_a_sender_waits_for_a_free_buffer():
    compute = np.zeros((P, P))
    compute[0, 0] = 100.0  # rank 0 is late with its first hop, so its receive buffers stay full
    streams = [Stream(1, compute, 1.0)]
    two, many = ring_model.fused(streams), ring_model.fused(streams, slots=P)
    # Rank P - 1 sends to rank 0: transfers 0 and 1 have buffers, transfer 2 waits until hop 1 of rank 0 is over.
    assert two.begin[1, P - 1] == many.begin[1, P - 1] == 1
    assert many.begin[2, P - 1] == 2
    assert two.begin[2, P - 1] >= 100


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("gradient", [None, 0.7], ids=["forward", "backward"])
def test_no_order_of_events_is_broken(run, gradient):
    rng = np.random.default_rng(0)
    streams = [Stream(way, rng.uniform(0, 1, (P, P)), 0.4, gradient, 0.1) for way in (1, -1)]
    timeline = run(streams, latency=0.05)
    assert (timeline.begin[1:] >= timeline.end[:-1] - 1e-12).all()
    assert (timeline.computed >= timeline.begin).all()
    assert (timeline.end >= timeline.computed).all()
    for way in (1, -1):
        links = [one for one in timeline.transfers if one.direction == way]
        for before, after in itertools.pairwise(links):
            assert (after.begin >= before.end - 1e-12).all()
        chunks = [one for one in links if one.what == "chunk"]
        for hop, one in enumerate(chunks):
            assert (timeline.begin[hop + 1] >= np.roll(one.end + 0.05, way) - 1e-12).all()
    assert timeline.total >= timeline.busy.max()


def test_runs_of_lengths():
    assert ring_model.intervals([1, 2, 4, 8], [True, False, True, True]) == [(1, 1), (4, None)]
    assert ring_model.intervals([1, 2], [False, False]) == []
    assert ring_model.settled([1, 2, 4, 8], [True, False, True, True]) == 4
    assert ring_model.settled([1, 2], [True, True]) == 1
    assert ring_model.settled([1, 2], [True, False]) is None


TILING = common.Tiling(256, 512, 128, 128, 1, 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("part", [(0, 1024), (0, 512), (512, 512)], ids=["whole", "first half", "second half"])
def test_steps_are_those_that_the_kernel_lists_whoever_has_the_chunk(layout, part, monkeypatch):
    monkeypatch.setattr(ring_costs, "forward_tiling", lambda *_: TILING)
    monkeypatch.setattr(ring_costs, "backward_tiling", lambda *_: TILING)
    attention, (start, size), tokens = profile.Attention("v5e", 1, 1, 128, True), part, 1024
    lengths = Lengths(tokens, size, (None, 0))
    for direction in profile.PASSES:
        for rank, source in np.ndindex(4, 4):
            query = Tokens(shard_positions(layout, rank, 4, tokens)[None])
            key = Tokens(shard_positions(layout, source, 4, tokens)[None, start : start + size])
            kinds = common.pair_kinds(query, key, lengths, TILING)
            steps = common.list_steps(kinds if direction == "forward" else kinds.swapaxes(1, 2))
            codes = np.asarray(steps.code)[: int(steps.total)]
            order = int(np.sign(source - rank))
            chunk = ring_costs.chunk_steps.__wrapped__(attention, layout, direction, tokens, part, order)
            listed = {kind: n for kind, n in enumerate(np.bincount(common.kind_of(codes), minlength=9).tolist()) if n}
            assert {kind: n for kind, n in chunk.steps.items() if n} == listed
            assert chunk.results == int(common.is_first(codes).sum())
            assert chunk.nothing == bool((kinds == common.NOTHING).all())


class Lengths(ring_costs.NamedTuple):
    query_length: int
    key_length: int
    reach: tuple


def made_up() -> dict:
    def kernel(tiling, factor):
        whole = {"1": 8000 * factor, "2": 8800 * factor, "3": 2600 * factor, "4": 6700 * factor}
        return {"tiling": tiling, "cycles": whole, "step_overhead": 300, "hop_overhead": 200, "first_step": 135}

    forward, backward = (1024, 2048, 256, 128, 2, 1, 1), (1024, 1024, 256, 512, 1, 0, 1)
    both = {"forward": kernel(forward, 1), "backward": kernel(backward, 1.25)}
    return {"plain": both, "fused": both}


def test_a_pair_of_smaller_blocks_costs_its_tiles():
    measured = made_up()["plain"]["forward"]
    tiling = common.Tiling(*measured["tiling"])
    for kind in (common.UNMASKED, common.MASKED, common.DIAGONAL, common.DIAGONAL + 1):
        assert ring_costs.pair_cycles(measured, tiling, kind) == measured["cycles"][str(kind)]
    half = tiling._replace(block_kv=1024)
    assert ring_costs.pair_cycles(measured, half, common.UNMASKED) == pytest.approx(4000)
    assert ring_costs.pair_cycles(measured, half, common.MASKED) == pytest.approx(4400)
    assert 2000 < ring_costs.pair_cycles(measured, half, common.DIAGONAL) < 4400


def test_the_script_predicts_draws_and_says_where_its_figures_are_from(tmp_path, capsys):
    costs, picture = tmp_path / "costs.json", tmp_path / "made" / "steps.png"
    costs.write_text(json.dumps({"about": {"chip": "v5e", "head_dim": 128, "causal": True}, "costs": made_up()}))
    options = ["--chip", "v5e", "--devices", "4", "--boundary-us", "2", "5", "--costs", str(costs), "--heads", "8"]
    profile.main([*options, "--output", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "50 GB/s a link" in printed
    assert "assumed" in printed
    found = json.loads(printed.splitlines()[-1])
    rows = {(row["schedule"], row["pass"], row["boundary_us"]): row for row in found["predictions"]}
    assert set(rows) == {(name, way, us) for name in profile.SCHEDULES for way in profile.PASSES for us in (2.0, 5.0)}
    for (name, way, us), row in rows.items():
        assert 0 < row["efficiency"] < 1
        assert row["efficiency"] < row["busy"]
        assert row["exposed"] >= 0
        if us == 5:  # a kernel per hop feels what is between kernels at every hop, one kernel once
            longer = row["seconds"] - rows[name, way, 2.0]["seconds"]
            kernels = {"contiguous": 4, "zigzag": 4, "bidirectional": 8}.get(name, 1)
            assert longer == pytest.approx(kernels * 3e-6, rel=0.3)
    assert rows["zigzag", "forward", 2.0]["seconds"] < rows["contiguous", "forward", 2.0]["seconds"]
    assert rows["fused", "forward", 5.0]["seconds"] < rows["zigzag", "forward", 5.0]["seconds"]  # the same cycles, no boundaries
    for row in found["crossovers"]:
        assert set(row["hidden_from"]) == set(profile.SCHEDULES)
        assert row["fused_is_faster"]["fused"][0] == [profile.SWEEP[0], None]

    with pytest.raises(ValueError, match="name another file"):
        profile.main([*options, "--full"])
    with pytest.raises(SystemExit):
        profile.main([*options, "--kv-heads", "3"])


def test_predictions_agree_with_the_formula_where_the_kernel_is_all_that_counts():
    """Everything else 0: compute and links as in `cli.cost`."""
    attention, measured, devices, tokens = profile.Attention("v5e", 8, 8, 128, False), made_up(), 4, 4096
    nothing = profile.Parameters(0.0, 0.0, 0.0, np.inf)
    for kernel in (measured["plain"]["forward"], measured["plain"]["backward"]):
        kernel |= {"step_overhead": 0, "first_step": 0, "hop_overhead": 0}
    pairs = {"forward": (4096 // 1024) * (4096 // 2048) * 8000, "backward": 4 * 4 * 10000}
    wire = 4096 * 8 * 256 * 2 / 50e9
    for way, cycles in pairs.items():
        compute, chunk, gradient = 8 * cycles / attention.clock, wire, 2 * wire if way == "backward" else 0
        total = max(compute, chunk) + 2 * max(compute, chunk + gradient) + max(compute, gradient) + gradient
        assert profile.simulate(attention, measured, "contiguous", way, devices, tokens, nothing).total == pytest.approx(total)
