"""The reader of static TPU schedules, on a program written by hand and on our own kernels compiled for a TPU that is not here."""

from __future__ import annotations

import argparse
import json

import profile_tpu_static as profile
import pytest
import ring_costs
import tpu_schedule

from jax_ring_attention.kernels.mosaic_tpu import common

PROGRAM = """
= control target key start
     0   :  { %s1 = smov 0 }
   0x1   :  { %9 = sbr.rel (%p0) target = $region9 }
   0x2 LB: > { %s2 = sadd.s32 1, %s1 } /* Start region 3 */
   0x3   : > { %5 = sbr.rel (%p1) target = $region4 }
   0x4   : > { %6 = vst [vmem:[%s3] sm:$0xff] %v1  ;;  %7 = vst [vmem:[#allocation4_spill] sm:$0xff] %v2 }
   0x5   : > { %8 = vst.msk [vmem:[%s3 + $0x8] sm:$0xff] %v1 }
   0x6 PF: > { %s4 = sld [smem:[%s1]] } /* Start/End empty region 4 :: Start region 5 */
   0x7   : > { %5 = sbr.rel (%p2) target = $region6 }
   0x8   : > { %6 = vmatmul.bf16.gmra.mxu0 %v3  ;;  %7 = vmatmul.msk.f32.gmra.mxu1 %v3  ;;  %8 = vmatpush.bf16.msra.mxu2 }
   0x9   : > { %v5 = vld [vmem:[#allocation4_spill] sm:$0xff]
 /* a note on a line of its own */ }
   0xa PF: > { %s5 = sadd.s32 1, %s2 } /* Start/End empty region 6 */
   0xb   : > { %57 = sbr.rel (!%p3) target = $region8 }
   0xc PF:  { %s6 = smov 1 } /* Start/End empty region 9 */
"""


@pytest.mark.fast
def test_a_program_is_cut_into_straight_pieces(tmp_path):
    path = tmp_path / "17-kernel.1-72-final_bundles.txt"
    path.write_text(PROGRAM)
    (tmp_path / "17-kernel.1-71-schedule-analysis_final_bundles.txt").write_text("not this one")
    assert tpu_schedule.kernel_files(tmp_path) == {"kernel.1": path}
    schedule = tpu_schedule.read(path, tpu_schedule.CHIPS["v5e"])
    assert [(piece.begin, piece.end) for piece in schedule.pieces] == [
        (0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12), (12, 13),
    ]  # fmt: skip
    assert [piece.in_loop for piece in schedule.pieces] == [False, True, True, True, True, True, False]
    assert [piece.skippable for piece in schedule.pieces] == [False, False, True, False, False, False, False]
    copy, branch = schedule.pieces[2], schedule.pieces[4]
    assert (copy.stores, copy.spills, branch.fills) == (2, 1, 1)
    assert schedule.branches == [branch]
    assert branch.matmul_cycles == (16 + 8) / 4
    assert (branch.bundles, branch.cycles) == (2, 6)
    assert (schedule.step_overhead, schedule.first_step) == (6, 2)
    assert [piece.loops for piece in schedule.pieces] == [(), *[(2,)] * 5, ()]
    assert (schedule.passes, schedule.overhead((2,)), schedule.most_overhead((2,))) == ([[branch]], 6, 6)


NESTED = """
     0   :  { %1 = vmatmul.bf16.gmra.mxu0 %v1 }
   0x1 LB: > { %s1 = smov 0 }
   0x2 LB: >> { %2 = vmatmul.bf16.gmra.mxu0 %v2 }
   0x3   : >> { %3 = sbr.rel (!%p1) target = $region1 }
   0x4   :  {}
   0x5   : >> { %s2 = smov 0 }
   0x6   : > { %s3 = smov 0 }
   0x7 LB: >> { %4 = vst [vmem:[%s3]] %v1 }
   0x8   : >> { %5 = sbr.rel (!%p2) target = $region2 }
   0x9   : > { %6 = sbr.rel (!%p3) target = $region3 }
   0xa   :  { %s4 = smov 0 }
"""


@pytest.mark.fast
def test_loops_are_told_apart(tmp_path):
    path = tmp_path / "1-kernel-2-final_bundles.txt"
    path.write_text(NESTED)
    schedule = tpu_schedule.read(path, tpu_schedule.CHIPS["v5e"])
    assert [(piece.begin, piece.end, piece.loops) for piece in schedule.pieces] == [
        (0, 1, ()), (1, 2, (1,)), (2, 4, (1, 2)), (4, 6, (1, 2)), (6, 7, (1,)), (7, 9, (1, 7)), (9, 10, (1,)), (10, 11, ()),
    ]  # fmt: skip
    assert [[piece.begin for piece in branches] for branches in schedule.passes] == [[0], [2]]
    assert (schedule.overhead((1, 2)), schedule.overhead((1,))) == (2, 3)


@pytest.mark.fast
def test_files_without_bundles_are_refused(tmp_path):
    path = tmp_path / "1-kernel-2-final_bundles.txt"
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="holds no bundles"):
        tpu_schedule.read(path, tpu_schedule.CHIPS["v5e"])


@pytest.mark.fast
@pytest.mark.parametrize("text", ["dq:1,2,3,4,5,6", "fwd:1,2,3", "fwd:1,2,3,4,5,x", "fwd"])
def test_tilings_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not fwd: or bwd:"):
        profile.tiling_argument(text)
    assert profile.tilings_of([profile.tiling_argument("bwd:1,2,3,4,5,6")], "backward") == [[1, 2, 3, 4, 5, 6]]


def made_up(bundles: int, matmul_cycles: int) -> dict:
    cycles = max(bundles, matmul_cycles)
    return {"bundles": bundles, "matmul_cycles": matmul_cycles, "cycles": cycles, "spills": 7, "fills": 8}


@pytest.mark.fast
def test_the_table_compares_whole_passes_and_names_what_did_not_compile(tmp_path, monkeypatch, capsys):
    def run(text):
        job = json.loads(text)
        blocks = [1024, 2048]  # 4 pairs
        if job["who"] == "tokamax":
            return None, "ImportError: no tokamax"
        if job["who"] == "splash":
            branches = [made_up(4 * (2400 + 400 * job["causal"]), 4 * 2048)]
            schedule = {"branches": branches, "step_overhead": 40, "first_step": 0}
            labels = ("forward", "backward") if job["fused"] else ("forward", "dkv", "dq")
            return {"schedules": {label: schedule for label in labels}, "blocks": {label: blocks for label in labels}}, ""
        kinds = [1, 2]  # without a mask; masked, also where a diagonal crosses
        schedule = {"branches": [made_up(4 * 2000, 4 * 2048), made_up(4 * 2200, 4 * 2048)], "step_overhead": 40, "first_step": 82}
        tiling, steps = [*blocks, 256, 128, 2, 1, 1], {"1": 12, "2": 8}
        return {"tiling": tiling, "kinds": kinds, "steps": steps, "schedules": {job["direction"]: schedule}}, ""

    monkeypatch.setattr(profile.Compiler, "_run", staticmethod(run))
    picture = tmp_path / "made" / "picture.png"
    profile.main(["--quick", "--chips", "v5e", "--head-dims", "128", "--png", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    printed = json.loads(lines[-1])
    rows = {(row["direction"], row["mask"]): row for row in printed["results"]}
    assert len(rows) == 4
    forward, backward, causal = rows["forward", "full"], rows["backward", "full"], rows["forward", "causal"]
    assert forward["ours"]["cycles"] == forward["ours"]["minimum"] == 2048
    assert forward["ours"]["efficiency"] == 1
    assert forward["ours"]["carry_percent"] == pytest.approx(100 * 82 / (2 * (4 * 2048 + 40)))
    assert forward["over_splash"] == 2048 / 2400
    assert backward["splash_dkv_dq"]["cycles"] == 2 * backward["splash"]["cycles"] == 4800  # the fused kernel is the better one
    assert causal["ours"]["cycles"] == (12 * (8192 + 40) + 8 * (8800 + 40)) / 64
    assert causal["ours"]["over_half_of_full"] == pytest.approx((12 * 8232 + 8 * 8840) / 16 / 8232)
    assert causal["splash"]["cycles"] == 20 * (4 * 2800 + 40) / 64
    assert "over_tokamax" not in forward
    assert {failure["reason"] for failure in printed["failed"]} == {"ImportError: no tokamax"}
    assert any(line.startswith("not measured") and "tokamax" in line for line in lines)


@pytest.mark.aot
@pytest.mark.parametrize(("direction", "products"), [("forward", 2), ("backward", 5)])
def test_branches_of_our_kernels_do_the_products_of_their_tiles(direction, products):
    chip, head_dim = "v5e", 128  # where no product wastes any of the matrix unit
    tiling = common.Tiling(256, 512, 128, 128, 1, 1)
    compiler = profile.Compiler()
    job = {"who": "ours", "direction": direction, "chip": chip, "head_dim": head_dim, "causal": True, "tiling": list(tiling)}
    result = compiler.run(**job)
    assert compiler.failed == []
    assert result["tiling"] == list(tiling)
    assert result["kinds"] == [common.UNMASKED, common.MASKED, common.DIAGONAL, common.DIAGONAL + 1]
    schedule = result["schedules"][direction]
    for kind, branch in zip(result["kinds"], schedule["branches"], strict=True):
        flops = products * 2 * len(common.tiles_of(kind, tiling)) * tiling.tile_q * tiling.tile_kv * head_dim
        assert branch["matmul_cycles"] == flops / tpu_schedule.CHIPS[chip].flops_per_cycle
        assert branch["in_loop"]
        assert not branch["skippable"]
        assert branch["cycles"] >= branch["matmul_cycles"]
        assert branch["bundles"] >= branch["stores"]  # one a cycle
    hot, masked, *_ = schedule["branches"]
    assert hot["end"] <= masked["begin"]
    assert 0 < schedule["step_overhead"] < hot["cycles"]
    # The first step of a result stores what was carried, or zeros: one register of 1024 numbers a cycle.
    carried = head_dim * tiling.block_q if direction == "forward" else 2 * head_dim * tiling.block_kv
    assert schedule["first_step"] >= carried / 1024
    full, partial = profile.causal_blocks(tiling.block_q, tiling.block_kv)
    steps = result["steps"]
    assert steps[str(common.UNMASKED)] == full == sum(i * 256 // 512 for i in range(32))
    assert sum(count for kind, count in steps.items() if int(kind) > common.UNMASKED) == partial == 32

    cost = profile.ours(compiler, chip, head_dim, direction, ["full", "causal"], list(tiling))
    assert cost["full"]["minimum"] == profile.useful_cycles(chip, head_dim, direction) == 1024 * products
    assert cost["full"]["cycles"] == 4 * hot["cycles"]
    # A diagonal block skips a quarter or more of its products, so half a chunk and half its diagonal cost more than half.
    assert 1 < cost["causal"]["over_half_of_full"] < 1.5


@pytest.mark.aot
def test_the_fused_ring_runs_a_pair_in_the_bundles_of_the_plain_kernel():
    compiler = profile.Compiler()
    job = {"direction": "forward", "chip": "v5e", "head_dim": 128, "causal": False}
    plain, fused = compiler.run(who="ours", **job), compiler.run(who="fused", **job, **profile.FUSED)
    assert compiler.failed == []
    row = profile.fused_row(plain, fused, "forward")
    assert len(row["fused_bundles"]) == 2  # for the hop at home, and for the others
    assert row["ratio"] < 1.02
    assert row["cycles_ratio"] < 1.02
    (alone,), (home, hops) = plain["schedules"]["forward"]["passes"], fused["schedules"]["forward"]["passes"]
    assert [one["branches"][0]["matmul_cycles"] for one in (alone, home, hops)] == [8192] * 3
    assert (len(home["branches"][0]["loops"]), len(hops["branches"][0]["loops"])) == (1, 2)
    assert 0 < row["step_overhead"][1] < 0.1 * row["bundles"]
    assert 0 < row["hop_overhead"] < row["bundles"]
    # Two buffers of key and value; the tiles of a step must fit in VMEM.
    heads, tokens = profile.FUSED["heads"], profile.FUSED["tokens"]
    assert row["buffers"] == 2 * (2 * tokens * heads * 128 * 2)
    assert 2**20 < row["scoped_vmem"][1] < 1.5 * row["scoped_vmem"][0]
    assert "v5e" in profile.fused_line({**row, "chip": "v5e", "head_dim": 128, "mask": "full"})
    with pytest.raises(RuntimeError, match="tilings differ"):
        profile.fused_row({**plain, "tiling": [1, 2, 3, 4, 5, 6, 7]}, fused, "forward")

    steps = ring_costs.cycles_of(fused["tilings"]["forward"], fused["kinds"]["forward"], fused["schedules"]["forward"])
    assert steps["cycles"] == {"1": max(8192, row["fused_bundles"][1])}
    chunk = ring_costs.chunk_steps(ring_costs.Attention("v5e", 8, 8, 128, False), "contiguous", "forward", 4096, (0, 4096), 0)
    least = profile.useful_cycles("v5e", 128, "forward") * 4096 * 4096 / profile.PAIR
    assert (
        1
        <= ring_costs.chunk_cycles(ring_costs.Attention("v5e", 8, 8, 128, False), steps, "forward", chunk, True) / (8 * least)
        < 1.1
    )
