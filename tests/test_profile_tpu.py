"""The reader of static TPU schedules, on a program written by hand and on our own kernels compiled for a TPU that is not here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import profile_tpu_static as profile
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
