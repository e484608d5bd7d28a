"""The bench for several GPUs, on emulated CPU devices: it checks before it times, and its arithmetic is right."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest
from cases import LAYOUTS, SCHEDULES

from jax_ring_attention.kernels.xla import XlaKernel
from jax_ring_attention.testing import assert_matches_dense, random_inputs

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "bench_ring_multi_gpu.py"
TINY = ["--tokens", "16", "--check-tokens", "16", "--heads", "4", "--kv-heads", "4", "--head-dim", "8", "--dtype", "float32"]
TINY += ["--masks", "causal", "--repeats", "1", "--runs", "3", "--steps", "20", "--memory-gib", "0.005"]


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module; scripts import each other by plain name, as when run from the shell."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module(name)


@pytest.fixture
def bench(monkeypatch):
    module = load("bench_ring_multi_gpu", monkeypatch)
    for name in module.MULTICAST_OFF:
        monkeypatch.setenv(name, module.MULTICAST_OFF[name])
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    return module


@pytest.fixture
def trace(monkeypatch):
    return load("multi_gpu_trace", monkeypatch)


@pytest.fixture
def processes(monkeypatch):
    return load("multi_gpu_processes", monkeypatch)


def last_json(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


# All of it.


def test_every_part_runs_and_fills_its_fields(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(load("multi_gpu_peers", monkeypatch), "CUDNN", "xla")  # what they compute; cuDNN needs a GPU
    picture = tmp_path / "deep" / "ring.png"
    arguments = ["--in-process", "--fast", "--devices", "4", "--ring-sizes", "2", "--tries", "1", "--png", str(picture)]
    bench.main([*TINY, *arguments])
    report = last_json(capsys.readouterr().out)
    assert (report["script"], report["platform"], report["devices"], report["jax"]) == (
        "bench_ring_multi_gpu",
        "cpu",
        4,
        jax.__version__,
    )
    assert (report["device"], report["implementation"], report["dtype"]) == (jax.devices()[0].device_kind, "xla", "float32")
    assert (report["heads"], report["kv_heads"], report["head_dim"]) == (4, 4, 8)
    assert len(report["date"].split("-")) == 3
    assert (report["marks"]["forward"], report["marks"]["forward+backward"], report["marks"]["goal"]) == (0.852, 0.902, 0.95)
    assert "ring-flash-attention" in report["marks"]["source"]

    checked = report["correctness"]["layouts_and_schedules"]
    pairs = {(row["layout"], row["schedule"]) for row in checked["rows"]}
    assert pairs == {*zip(LAYOUTS, SCHEDULES, strict=True), ("zigzag", "ring")}  # the last is what is timed
    assert (checked["passed"], checked["wrong"]) == (4, 0)
    for row in checked["rows"]:
        assert 0 < row["forward_error"] <= row["forward_allowed"] < 1e-5
        assert 0 < row["gradients_error"] <= row["gradients_allowed"] < 1e-5
    assert report["correctness"]["repeatability"] == {"tokens": 16, "runs": 3, "different": 0}
    assert report["correctness"]["steps"].pop("seconds") > 0
    assert report["correctness"]["steps"] == {"steps": 20, "tokens": 16, "difference": 0, "wrong": 0}

    rows = {(row["name"], row["direction"]): row for row in report["speed"]["rows"]}
    names = ("one device", "ring", "cudnn, all-gather", "cudnn, all-to-all")  # so both peers agree with the ring
    assert set(rows) == {(name, direction) for name in names for direction in ("forward", "forward+backward")}
    for (name, direction), row in rows.items():
        assert (row["tokens"], row["mask"]) == (16, "causal")
        devices = 1 if name == "one device" else 4
        if name in ("one device", "ring"):
            alone, ring = rows["one device", direction]["seconds"], rows["ring", direction]["seconds"]
            assert row["efficiency"] == pytest.approx(alone / devices / row["seconds"])
            assert row["over_ring"] == pytest.approx(ring / row["seconds"])
        assert row["efficiency"] == pytest.approx(rows["ring", direction]["efficiency"] * row["over_ring"] * 4 / devices)
        flops = {"forward": 2, "forward+backward": 7}[direction] * 2 * 4 * 8 * 64**2 / 2
        assert row["tflops_per_device"] == pytest.approx(flops / devices / row["seconds"] / 1e12)
    (te,) = report["speed"]["refused"]
    assert te["name"] == "TransformerEngine ring"
    assert "not installed" in te["reason"]

    (overlap,) = report["overlap"]
    for direction in ("forward", "forward+backward"):
        assert overlap[direction]["least"] is None
        assert "no GPU" in overlap[direction]["reason"]
    (longest,) = report["longest"]
    assert longest["ring_size"] == 2
    assert longest["guess"] == pytest.approx(report["memory_bytes"] / longest["bytes_per_token"], rel=0.2)
    assert [one["status"] for one in longest["tries"]] == ["finished"]
    assert longest["tokens_per_gpu"] == max(one["tokens"] for one in longest["tries"]) >= longest["guess"] * 0.9
    assert longest["too_many"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.fast
def test_all_layouts_and_schedules_are_checked(bench, monkeypatch):
    stages, seen = bench.stages, []

    def check(case, mesh, reference):
        seen.append((case.layout, case.schedule, case.is_causal))
        return stages.check.Finding("refused" if case.layout == "striped" else "pass", {}, {}, 0.0, "")

    monkeypatch.setattr(stages.check, "check", check)
    setting = stages.Setting(2, None, 2, 1, 8, "float32", None, 1, 8, 60.0, None)
    found = stages.run("correctness", setting, masks=["causal", "full"])
    assert sorted(seen) == sorted(itertools.product(LAYOUTS, SCHEDULES, (False, True)))
    assert (found["passed"], found["wrong"]) == (12, 6)  # what refuses is not right


@pytest.mark.multiprocess
def test_a_variant_runs_in_processes_of_its_own_one_for_each_device(bench, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # the variant's flags come on top
    name = "copy engine, one process per GPU"
    options = bench.parse([*TINY, "--cpu-devices", "2", "--variants", name])
    setting = bench.stages.Setting(None, 2, 2, 1, 8, "float32", None, 1, 8, 120.0, None)
    found = bench.report_variants(bench.Runner(setting, in_process=False), options, 2)[name]
    assert found["processes"] == 2, found
    assert found["flags"] == "--xla_gpu_collective_permute_mode=peer"
    assert [(row["mask"], row["direction"]) for row in found["rows"]] == [("causal", "forward"), ("causal", "forward+backward")]
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert found["overlap"]["forward"]["least"] is None
    assert f"variant {name}, 16 tokens a GPU, causal forward: " in capsys.readouterr().out


# It fails where it should, and times nothing then.


def forget_earlier_chunks(fold):
    return lambda self, query, chunk, scope, carry: fold(self, query, chunk, scope, None)


def stretch_gradients(fold_grads):
    def wrong(*arguments):
        d_query, *rest = fold_grads(*arguments)
        return (d_query * 1.00001, *rest)

    return wrong


@pytest.mark.parametrize(("method", "corrupt"), [("fold", forget_earlier_chunks), ("fold_grads", stretch_gradients)])
def test_a_wrong_kernel_ends_the_run_before_anything_is_timed(bench, monkeypatch, capsys, method, corrupt):
    monkeypatch.setattr(XlaKernel, method, corrupt(getattr(XlaKernel, method)))
    monkeypatch.setitem(bench.stages.COMBINATIONS, "all", [bench.stages.TIMED])  # one is enough
    for stage in ("repeatability", "steps", "speed", "overlap", "memory_guess", "train_once"):
        monkeypatch.setitem(bench.stages.STAGES, stage, lambda *_, **__: pytest.fail("went on with a kernel that is wrong"))
    with pytest.raises(SystemExit, match="Nothing is timed") as ended:
        bench.main([*TINY, "--in-process", "--devices", "2"])
    assert isinstance(ended.value.code, str)  # printed, and the exit code is 1
    assert "FAIL" in capsys.readouterr().out


@pytest.mark.fast
def test_a_ring_that_differs_from_one_device_ends_the_run(bench):
    wrong = [{"name": "one device", "mask": "causal", "reason": "differs from the ring by 1.0e+00"}]
    with pytest.raises(SystemExit, match=r"one device differs from the ring by .*Nothing more is timed"):
        bench.report_speed(lambda *_, **__: {"rows": [], "refused": [], "wrong": wrong}, bench.parse(TINY))


def test_results_are_compared_in_one_order(bench):
    stages = bench.stages
    setting = stages.Setting(2, None, 2, 1, 8, "float32", None, 1, 8, 60.0, None)
    mesh = stages.ring_mesh(setting)
    natural = stages.arrays(setting, mesh, 16)
    stored = stages.store(natural, "zigzag", mesh)
    with stages.watched(setting):
        stages.agree(setting, mesh, natural, stored, "contiguous")
        stages.agree(setting, mesh, stored, stored, "zigzag")
        for results, layout in ((natural, "zigzag"), ([*natural[:3], natural[3] * float("nan")], "contiguous")):
            with pytest.raises(stages.Disagreement, match="differs from the ring"):
                stages.agree(setting, mesh, results, stored, layout)


def test_peers_compute_attention_without_a_mask_too(monkeypatch):
    peers = load("multi_gpu_peers", monkeypatch)
    monkeypatch.setattr(peers, "CUDNN", "xla")
    mesh = jax.make_mesh((2,), (peers.AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    inputs = random_inputs(0, query_length=16, heads=4, kv_heads=2)
    for name in ("cudnn, all-gather", "cudnn, all-to-all"):
        peer = peers.PEERS[name](mesh, False)
        assert_matches_dense(peer.attend, inputs, layout=peer.layout, num_shards=2, tolerance=1e-6)
    with pytest.raises(NotImplementedError, match="1 key/value heads are no multiple of 2 devices"):
        peers.all_to_all(mesh, True).attend(*random_inputs(0, query_length=16, heads=2, kv_heads=1)[:3])
    with pytest.raises(NotImplementedError, match="not installed"):
        peers.transformer_engine_ring(mesh, True)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("stage", "result", "reason"),
    [
        ("repeatability", {"tokens": 16, "runs": 3, "different": 1}, "not repeatable"),
        ("steps", {"steps": 20, "tokens": 16, "seconds": 1.0, "difference": 0.5, "wrong": 1}, "last step"),
    ],
)
def test_unrepeatable_gradients_and_drifting_steps_end_the_run(bench, monkeypatch, stage, result, reason):
    right = {"rows": [], "passed": 0, "wrong": 0}
    results = {"repeatability": {"tokens": 16, "runs": 3, "different": 0}, "correctness": right, stage: result}
    run = lambda name, **_: results[name]  # noqa: E731
    with pytest.raises(SystemExit, match=reason):
        bench.report_correctness(run, bench.parse(TINY))


@pytest.mark.fast
def test_repeatability_sees_one_bit(bench):
    one = jax.numpy.asarray([1.0, float("nan")])
    assert bench.stages.identical((one, one), (one, one))
    assert not bench.stages.identical((one, one), (one, one * (1 + 2**-23)))
    assert not bench.stages.identical([jax.numpy.zeros(1)], [-jax.numpy.zeros(1)])


@pytest.mark.multiprocess
def test_a_stage_that_does_not_progress_ends_the_run_and_says_where_it_stood():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SCRIPT), *TINY, "--cpu-devices", "2", "--limit", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert re.search(r"stopped by the watchdog in \w+, \w+\.py:\d+", done.stderr), done.stderr


@pytest.mark.fast
def test_what_a_process_died_of(processes):
    dump = 'Timeout (0:00:03)!\nThread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in other\n\n'
    dump += 'Thread 0x2 (most recent call first):\n  File "/a/c.py", line 7 in stuck\n  File "/a/d.py", line 1 in main\n'
    assert processes.why(1, dump) == "no progress within the limit, stopped by the watchdog in stuck, c.py:7"
    assert processes.why(1, "Traceback\nValueError: no\n\n") == "ValueError: no (exit code 1)"
    assert processes.why(-9, "") == "no message (signal SIGKILL)"


@pytest.mark.fast
@pytest.mark.parametrize(
    "setting",
    [{"NCCL_NVLS_ENABLE": "1"}, {"NVSHMEM_DISABLE_NVLS": "0"}, {"XLA_FLAGS": "--xla_gpu_collective_permute_mode=symmetric"}],
)
def test_multicast_stays_off(bench, processes, monkeypatch, setting):
    processes.refuse_multicast({"XLA_FLAGS": "--xla_gpu_collective_permute_mode=peer"} | processes.MULTICAST_OFF)
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="multicast"):
        bench.main(TINY)
    for name in setting:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit, match="multicast"):
        processes.in_own_processes(str(SCRIPT), {}, 1, setting)


@pytest.mark.multiprocess
def test_flags_that_jaxlib_does_not_know_are_noticed(bench, processes):
    assert processes.flags_known(bench.VARIANTS["copy engine"].flags)
    assert not processes.flags_known("--xla_gpu_no_such_flag=true")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tokens", "15"], "multiple of 2"),
        (["--heads", "3", "--kv-heads", "2"], "no multiple"),
        (["--in-process", "--variants"], "--in-process"),
        (["--devices", "2", "--variants"], "CUDA_VISIBLE_DEVICES"),
        (["--skip", "correctness"], "invalid choice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bench, capsys, arguments, reason):
    with pytest.raises(SystemExit) as refused:
        bench.main(arguments)
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err


# Arithmetic.


@pytest.mark.fast
def test_efficiency_is_the_share_of_all_devices_time(trace):
    assert trace.efficiency(8.0, 8, 1.0) == 1
    assert trace.efficiency(8.0, 8, 1.25) == pytest.approx(0.8)
    for wrong in ((0.0, 8, 1.0), (8.0, 0, 1.0), (8.0, 8, 0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            trace.efficiency(*wrong)


@pytest.mark.fast
def test_intervals(trace):
    assert trace.union([(5, 6), (1, 3), (2, 4), (4, 4.5), (7, 7)]) == [(1, 4.5), (5, 6)]
    assert trace.total([(0, 2), (1, 3)]) == 3
    assert trace.common([(0, 4), (6, 8)], [(1, 2), (3, 7), (7.5, 9)]) == 1 + 1 + 1 + 0.5
    assert trace.common([], [(0, 1)]) == trace.common([(0, 1)], [(1, 2)]) == 0


def event(pid, tid, ts, dur, name, **arguments):
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": arguments}


def named(pid, name, tid=None):
    kind = {"name": "process_name"} if tid is None else {"name": "thread_name", "tid": tid}
    return {"ph": "M", "pid": pid, "args": {"name": name}, **kind}


def made_up_trace():
    return [
        named(1, "/device:GPU:0"),
        named(1, "Stream #13(Compute)", 1),
        named(1, "Stream #21(Compute,MemcpyP2P)", 2),
        named(1, "XLA Ops", 3),
        named(2, "/device:GPU:1"),
        named(2, "Stream #13(Compute,MemcpyD2D)", 1),
        named(7, "/host:CPU"),
        named(7, "python", 1),
        event(1, 1, 0, 100, "mosaic_gpu_kernel", hlo_op="custom-call.3"),
        event(1, 2, 50, 100, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", hlo_op="collective-permute-start"),
        event(1, 2, 160, 10, "MemcpyP2P", memcpy_details="kind_src:device kind_dst:device size:64 dest:1 async:1"),
        event(1, 1, 165, 100, "loop_add_fusion"),
        event(1, 3, 0, 1000, "custom-call.3"),  # tells the stream's story again
        event(2, 1, 0, 40, "MemcpyD2D", memcpy_details="kind_src:device kind_dst:device size:64 dest:1 async:1"),  # stays there
        event(2, 1, 40, 20, "MemcpyD2D", memcpy_details="kind_src:device kind_dst:device size:64 dest:0 async:1"),
        event(2, 1, 60, 20, "MemcpyD2D", hlo_op="collective-permute-start.1"),
        event(2, 1, 100, 20, "Memset"),
        event(2, 1, 60, 30, "loop_add_fusion"),
        event(7, 1, 0, 500, "ncclGroupEnd"),
    ]


@pytest.mark.fast
def test_a_profile_says_how_much_of_the_transfers_lies_beside_kernels(trace, tmp_path):
    path = tmp_path / "plugins" / "host.trace.json.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": made_up_trace()}).encode()))
    found = trace.cover(trace.activity(trace.read_trace(tmp_path)))
    assert list(found["devices"]) == ["/device:GPU:0", "/device:GPU:1"]
    first, second = found["devices"].values()
    assert first["kernel_seconds"] == pytest.approx(200e-6)
    assert first["transfer_seconds"] == pytest.approx(110e-6)
    assert first["beside_kernels_seconds"] == pytest.approx(55e-6)
    assert first["covered"] == found["least"] == pytest.approx(0.5)
    assert second["transfer_seconds"] == pytest.approx(40e-6)
    assert second["covered"] == pytest.approx(0.5)
    assert found["reason"] is None


@pytest.mark.fast
def test_a_profile_without_transfers_says_so(trace):
    quiet = [one for one in made_up_trace() if one["pid"] != 2 and "nccl" not in one["name"] and "Memcpy" not in one["name"]]
    found = trace.cover(trace.activity(quiet))
    assert (found["least"], found["reason"]) == (None, "the profile holds no transfer between devices")
    assert trace.cover({}) == {"devices": {}, "least": None, "reason": "the profile names no GPU"}


@pytest.mark.fast
@pytest.mark.parametrize("limit", [63, 64, 900, 1000, 1023, 1024, 3000])
def test_the_search_closes_in_on_the_longest_that_fits(trace, limit):
    asked = []

    def fits(tokens):
        asked.append(tokens)
        return tokens <= limit

    most, least = trace.search_longest(fits, 1000, 8, 40)
    assert most == limit // 8 * 8
    assert least == most + 8
    assert len(asked) == len(set(asked))
    assert all(tokens % 8 == 0 for tokens in asked)


@pytest.mark.fast
def test_the_search_asks_only_so_often_and_may_find_nothing(trace):
    asked = []
    assert trace.search_longest(lambda tokens: bool(asked.append(tokens)), 1000, 8, 3) == (None, 760)
    assert asked == [1000, 872, 760]
    assert trace.search_longest(lambda _: False, 7, 8, 3) == (None, None)
    with pytest.raises(ValueError, match="at least 1"):
        trace.search_longest(lambda _: True, 100, 0, 3)


def test_running_out_of_memory_is_a_result_and_other_errors_are_not(bench, monkeypatch):
    stages = bench.stages

    def fail_with(message):
        def raise_error(*_):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(stages, "arrays", raise_error)

    setting = stages.Setting(2, None, 4, 2, 8, "float32", None, 1, 16, 60.0, None)
    fail_with("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")
    assert stages.run("train_once", setting, ring_size=2, tokens=8)["status"] == "out of memory"
    fail_with("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        stages.run("train_once", setting, ring_size=2, tokens=8)
