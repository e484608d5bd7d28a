"""The command line: it finds what is wrong, its formulas are what compiled programs do, its pictures show what runs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LAYOUTS, SCHEDULES, ring_mesh
from jax.sharding import NamedSharding, PartitionSpec
from programs import Program, compile_only

from jax_ring_attention import ring_attention
from jax_ring_attention.chunk import KERNELS
from jax_ring_attention.cli import blocks, check, console, cost
from jax_ring_attention.cli.hardware import HARDWARE
from jax_ring_attention.cli.main import COMMANDS, build_parser, main
from jax_ring_attention.kernels.xla import XlaKernel
from jax_ring_attention.layouts import storage_order
from jax_ring_attention.schedule import needed_offsets, plan_hops
from jax_ring_attention.testing import visible_pairs

ROOT = Path(__file__).resolve().parents[1]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
SPEC = PartitionSpec(None, "seq")


def output_of(capsys, *arguments: object) -> str:
    """What a command that succeeds prints."""
    assert main([str(x) for x in arguments]) == 0
    return capsys.readouterr().out


def error_of(capsys, *arguments: object) -> str:
    """What a command that refuses its arguments says, without a traceback."""
    try:
        code = main([str(x) for x in arguments])
    except SystemExit as refused:  # argparse
        code = refused.code
    assert code == 2
    return capsys.readouterr().err


# The parser.


@pytest.mark.fast
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda x: "-".join(x) or "top")
def test_help_explains_every_option(capsys, command):
    with pytest.raises(SystemExit) as done:
        main([*command, "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (command or COMMANDS))


@pytest.mark.fast
def test_every_option_has_a_help_text():
    (commands,) = (action for action in build_parser()._actions if isinstance(action.choices, dict))
    assert set(commands.choices) == set(COMMANDS) == {"check", "plan", "explain"}
    for command in commands.choices.values():
        assert all(len(action.help) > 10 for action in command._actions)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required"),
        (["paint"], "invalid choice"),
        (["check", "--seq-len", "250"], "multiple of 16"),
        (["check", "--heads", "3"], "--heads 3 is no multiple of --kv-heads 2"),
        (["check", "--devices", "99"], "JAX finds 8"),
        (["check", "--cpu-devices", "3"], "too late"),
        (["check", "--num-processes", "2"], "go with --distributed"),
        (["check", "--implementation", "magic"], "invalid choice"),
        (["plan", "--seq-len", "1M", "--devices", "64"], "--hardware"),
        (["plan", "--seq-len", "many", "--devices", "64", "--hardware", "h100"], "no number of tokens"),
        (["plan", "--seq-len", "1k", "--devices", "0", "--hardware", "h100"], "at least 1"),
        (["plan", "--seq-len", "1k", "--devices", "8", "--hardware", "h100", "--dtype", "f32"], "--peak-tflops"),
        (["plan", "--seq-len", "1k", "--devices", "8", "--hardware", "h100", "--kv-heads", "5"], "no multiple of --kv-heads 5"),
        (["plan", "--seq-len", "1k", "--devices", "8", "--hardware", "h100", "--efficiency", "2"], "share of the peak"),
        (["plan", "--seq-len", "4", "--devices", "8", "--hardware", "h100"], "use fewer devices"),
        (["plan", "--seq-len", "1M", "--devices", "5000", "--hardware", "h100"], "at most 4096"),
        (["explain", "--seq-len", "100"], "multiple of 8"),
        (["explain", "--seq-len", "24", "--layout", "zigzag"], "multiple of 16"),
        (["explain", "--block-size", "1000"], "does not divide the 1024"),
        (["explain", "--block-size", "16"], "use at least 86"),
        (["explain", "--window", "1", "2", "3"], "LEFT RIGHT"),
        (["explain", "--window", "-1"], "at least 0"),
        (["explain", "--png", "ring.jpg"], "must end in .png"),
    ],
    ids=lambda x: "_".join(x) if isinstance(x, list) else "",
)
def test_settings_that_do_not_fit_are_refused_with_the_remedy(capsys, arguments, says):
    assert says in error_of(capsys, *arguments)


@pytest.mark.fast
@pytest.mark.parametrize("command", [["plan", "--seq-len", "1k", "--devices", "8", "--hardware", "h100"], ["explain"]])
def test_pictures_without_matplotlib_name_the_extra(capsys, monkeypatch, tmp_path, command):
    find = importlib.util.find_spec
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert "jax-ring-attention[demo]" in error_of(capsys, *command, "--png", tmp_path / "x.png")
    assert output_of(capsys, *command)  # text needs none


def test_commands_do_not_import_matplotlib_unless_they_draw():
    script = "import sys; from jax_ring_attention.cli.main import main; main(['explain']); assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.fast
def test_numbers_of_tokens_in_powers_of_1024():
    assert [console.token_count(x) for x in ("7", "1_000", "128k", "1M", "1.5K")] == [7, 1000, 131072, 2**20, 1536]
    assert (console.bytes_text(1536), console.bytes_text(7), console.bytes_text(200 * 2**30)) == ("1.5 KiB", "7 B", "200 GiB")
    assert (console.seconds_text(0.0015), console.seconds_text(2.5e-8)) == ("1.5 ms", "25 ns")
    assert console.number_text(35.2e12) == "35.2 T"


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


# check


SMALL = ["check", "--devices", "2", "--seq-len", "16", "--head-dim", "8", "--fast"]


def test_check_passes_as_a_program_of_its_own():
    command = [sys.executable, "-m", "jax_ring_attention", "check", "--cpu-devices", "4", "--fast"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^jax .*, 4 cpu devices", done.stdout)
    ran = [line.split()[0] for line in done.stdout.splitlines() if " pass " in line]
    able = [name for name in KERNELS if KERNELS[name].is_preferred()]
    assert ran == [name for _ in range(3) for name in able for _ in range(2)]
    assert f"{len(ran)} of {len(ran)} passed" in done.stdout


@pytest.mark.fast
def test_check_covers_every_combination_and_fast_every_layout_and_schedule():
    names = ("a", "b")
    everything = list(check.cases(names, ("float32", "bfloat16"), is_fast=False))
    assert set(everything) == set(itertools.product(names, ("float32", "bfloat16"), LAYOUTS, SCHEDULES, (True, False)))
    assert len(everything) == 72
    fast = list(check.cases(names, ("float32",), is_fast=True))
    assert len(fast) == 12
    assert {one.layout for one in fast} == set(LAYOUTS)
    assert {one.schedule for one in fast} == set(SCHEDULES)


class LosesAKey(XlaKernel):
    """Forward and backward agree with each other and are wrong: the last key of every chunk is not seen."""

    def pack_chunk(self, key, value):
        return super().pack_chunk(key.at[:, -1].set(0), value.at[:, -1].set(0))


class ForgetsItsGradient(XlaKernel):
    """Right forward, wrong backward."""

    def unpack_d_query(self, d_query):
        return 1.01 * super().unpack_d_query(d_query)


class Breaks(XlaKernel):
    def pack_query(self, query):
        raise NotImplementedError("not yet")


class RefusesFloat32(XlaKernel):
    @staticmethod
    def refusal(problem):
        return "it is for bfloat16" if problem.dtype == jnp.float32 else None


class IsForOtherDevices(XlaKernel):
    @staticmethod
    def is_preferred():
        return False


def run_two_cases(monkeypatch) -> None:
    every = check.cases
    monkeypatch.setattr(check, "cases", lambda *arguments: itertools.islice(every(*arguments), 2))


def check_with(monkeypatch, capsys, kernel, *arguments: str) -> tuple[int, str]:
    """Exit code and text of a check where `kernel` is one more implementation, and nothing else runs.

    Two cases suffice. Every kernel gets a name of its own, since what JAX has traced it remembers by the implementation's name.
    """
    run_two_cases(monkeypatch)
    monkeypatch.setitem(KERNELS, kernel.__name__, kernel)
    code = main([*SMALL, "--implementation", kernel.__name__, *arguments])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (LosesAKey, "relative errors: out"),
        (ForgetsItsGradient, "relative errors: d_query"),
        (Breaks, "NotImplementedError: not yet"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_check_fails_when_an_implementation_is_wrong(monkeypatch, capsys, kernel, says):
    code, text = check_with(monkeypatch, capsys, kernel)
    assert code == 1
    assert "0 of 2 passed" in text
    assert text.count(says) == 2
    assert text.count("FAIL") == 2


def test_check_lists_refusals_and_does_not_call_them_success(monkeypatch, capsys):
    code, text = check_with(monkeypatch, capsys, RefusesFloat32)
    assert code == 1
    assert "refused, 2 cases of float32: it is for bfloat16." in text
    assert "nothing was checked" in text
    code, text = check_with(monkeypatch, capsys, RefusesFloat32, "--dtype", "bfloat16")
    assert code == 0, text
    assert "2 of 2 passed" in text


@pytest.mark.multiprocess
def test_check_runs_one_ring_over_two_processes():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "jax_ring_attention", "check", "--fast", "--implementation", "autodiff"]
    command += ["--cpu-devices", "2"]
    command += ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id"]
    gloo = environment() | {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank)], env=gloo, **pipes) for rank in range(2)]
    try:
        said = [one.communicate(timeout=240) for one in processes]
    finally:
        for one in processes:
            one.kill()
    assert [one.returncode for one in processes] == [0, 0], said
    assert ", 4 cpu devices (cpu), processes: 2;" in said[0][0]
    assert "6 of 6 passed" in said[0][0]
    assert "layout" not in said[1][0]  # one of them speaks


def test_check_leaves_out_what_is_made_for_other_devices_and_says_so(monkeypatch, capsys):
    run_two_cases(monkeypatch)
    for name in KERNELS:
        monkeypatch.setattr(KERNELS[name], "is_preferred", staticmethod(lambda name=name: name == "autodiff"))
    monkeypatch.setitem(KERNELS, "other", IsForOtherDevices)
    text = output_of(capsys, *SMALL)
    assert "not run: other is not made for these devices (cpu)" in text
    assert "2 of 2 passed" in text  # those of autodiff


# plan: the formulas against compiled programs.


@pytest.mark.fast
@pytest.mark.parametrize("ring_size", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [1, 3])
def test_pairs_per_hop_are_those_of_the_mask(ring_size, layout, block):
    length = 144
    work = cost.Workload(length, ring_size, 2, 1, 8, 8, is_causal=True, block_size=block)
    order, tokens = storage_order(layout, ring_size, length), length // ring_size
    seen = visible_pairs(length, length, is_causal=True, natural=(order, order))[0].reshape(ring_size, tokens, ring_size, tokens)
    for schedule in ("ring", "bidirectional"):
        (leg,) = plan_hops(schedule, ring_size, tokens)
        for stream in leg.streams:
            have = cost.stream_pairs(work, layout, stream)
            for hop, rank in np.ndindex(have.shape):
                part = seen[rank, :, stream.source(rank, hop, ring_size), stream.start : stream.start + stream.size]
                whole = part.reshape(tokens // block, block, -1, block).any((1, 3)).sum() * block**2
                assert have[hop, rank] == whole
    assert cost.hop_pairs(work._replace(block_size=1), layout, "ring").sum() == work.visible_pairs == seen.sum()


WORK = cost.Workload(48, 8, heads=8, kv_heads=2, head_dim=8, value_dim=12, dtype=jnp.float16, batch=2, is_causal=True)


def structs(work: cost.Workload) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Query, key, value and d_out on a ring."""
    sharding = NamedSharding(ring_mesh(work.devices), SPEC)
    tails = (
        (work.heads, work.head_dim),
        (work.kv_heads, work.head_dim),
        (work.kv_heads, work.value_dim),
        (work.heads, work.value_dim),
    )
    return tuple(jax.ShapeDtypeStruct((work.batch, work.seq_len, *tail), work.dtype, sharding=sharding) for tail in tails)


def compiled(work: cost.Workload, schedule: str, layout: str = "zigzag", **options):
    """The forward program, and the backward one with its residuals as arguments."""

    def attend(query, key, value):
        given = {"is_causal": work.is_causal, "layout": layout, "schedule": schedule, **options}
        return ring_attention(query, key, value, mesh=ring_mesh(work.devices), spec=SPEC, **given)

    *inputs, d_out = structs(work)
    _, pull = jax.eval_shape(lambda *x: jax.vjp(attend, *x), *inputs)
    sharding = NamedSharding(ring_mesh(work.devices), SPEC)
    pull = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pull)
    return compile_only(attend, *inputs), compile_only(lambda pull, d_out: pull(d_out), pull, d_out)


@pytest.mark.parametrize("ring_size", [2, 3, 8])
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_planned_bytes_are_those_of_the_compiled_ring(ring_size, schedule):
    work = WORK._replace(devices=ring_size)
    programs = [Program(one.as_text()) for one in compiled(work, schedule)]
    assert [one.bytes_sent() for one in programs] == list(cost.sent_bytes(work, schedule, "zigzag"))
    # What is printed: bytes of a hop times hops. A backward hop carries chunk and gradient; the first brings no gradient yet, and
    # two more transfers bring the last gradients to the last hop and home.
    hops = ring_size - 1
    chunk, gradient = (work.tokens("zigzag") * one for one in (work.chunk_token, work.d_chunk_token))
    assert programs[0].bytes_sent() == hops * chunk
    assert programs[1].bytes_sent() == hops * (chunk + gradient) + gradient


def test_planned_bytes_of_all_gather_are_those_of_the_compiled_program():
    forward, backward = (Program(one.as_text()) for one in compiled(WORK, "all_gather"))

    def operands(program: Program, opcode: str) -> int:
        return sum(one.bytes for one in program.collectives if one.opcode == opcode)

    others = WORK.devices - 1  # an all-gather sends its operand to the others, a reduce-scatter a share of it to each
    assert others * operands(forward, "all-gather") == cost.sent_bytes(WORK, "all_gather")[0]
    sent = operands(backward, "all-gather") + operands(backward, "reduce-scatter") // WORK.devices
    assert others * sent == cost.sent_bytes(WORK, "all_gather")[1]


LONG = cost.Workload(16384, 8, heads=2, kv_heads=2, head_dim=32, value_dim=32, dtype=jnp.float32, is_causal=True)
WIDE = cost.Workload(8192, 4, heads=4, kv_heads=2, head_dim=32, value_dim=64, dtype=jnp.float16, batch=2)

#: Compiled over planned. The CPU compiler keeps one more copy of the statistics where a hop folds two halves.
FACTORS = {"ring": 1.4, "bidirectional": 2.0, "all_gather": 1.4}


@pytest.mark.parametrize(("work", "schedule"), [*((LONG, schedule) for schedule in SCHEDULES), (WIDE, "ring")], ids=str)
def test_planned_buffers_are_the_memory_of_the_compiled_program(work, schedule, record_property):
    """Blocks are small, so that the scores of one pair of blocks, which are constant, do not count."""
    programs = compiled(work, schedule, block_sizes=64)
    planned = [sum(buffers(work, schedule, "zigzag").values()) for buffers in (cost.forward_buffers, cost.backward_buffers)]
    for name, program, want in zip(("forward", "backward"), programs, planned, strict=True):
        have = program.memory_analysis().temp_size_in_bytes
        record_property(f"{name}_{schedule}", have / want)
        print(f"{name} {schedule}: compiled {have}, planned {want}, ratio {have / want:.2f}")
        assert want / 1.4 <= have <= FACTORS[schedule] * want


# plan: what it prints.


PLAN = ["plan", "--seq-len", "1M", "--devices", "64", "--heads", "32", "--kv-heads", "8", "--head-dim", "128"]


@pytest.mark.fast
def test_plan_by_hand(capsys):
    plan = json.loads(output_of(capsys, *PLAN, "--hardware", "h100", "--causal", "--efficiency", "0.5", "--json"))
    assert plan["tokens_per_device"] == 16384
    chunk = 16384 * 8 * (128 + 128) * 2
    assert plan["memory"]["activations"] == {
        "query": 16384 * 32 * 128 * 2,
        "key and value": chunk,
        "out": 16384 * 32 * 128 * 2,
        "lse": 16384 * 32 * 4,
    }
    assert plan["memory"]["buffers"]["forward"]["key and value chunks"] == 2 * chunk
    assert plan["memory"]["buffers"]["backward"]["gradient chunks"] == 2 * (2 * chunk)
    memory = plan["memory"]
    assert memory["peak"] == sum(memory["kept_per_layer"].values()) + sum(memory["buffers"]["backward"].values())
    assert sum(memory["kept_per_layer"].values()) == sum(memory["activations"].values())
    assert plan["best"] == {"layout": "zigzag", "schedule": "ring"}
    forward, backward = plan["hops"]["forward"], plan["hops"]["backward"]
    assert forward["bytes"] == chunk
    assert backward["bytes"] == 3 * chunk
    assert forward["flops"] == 4 * 32 * 128 * 16384**2 / 2  # zigzag: half of a hop is visible, for every device
    assert backward["flops"] == 2.5 * forward["flops"]
    assert plan["hardware"]["link_gbs"] == 50  # 64 GPUs leave the 8 of one NVLink switch
    assert forward["transfer_seconds"] == chunk / 50e9
    assert forward["compute_seconds"] == pytest.approx(forward["flops"] / (0.5 * 989e12))
    assert forward["compute_over_transfer"] == pytest.approx(forward["compute_seconds"] / forward["transfer_seconds"])
    # At the threshold, both take equally long: transfer grows with t, compute with its square.
    assert forward["hidden_from_tokens_per_device"] == np.ceil(16384 / forward["compute_over_transfer"])
    assert plan["sent_bytes"]["ring"] == [63 * chunk, 63 * 3 * chunk + 2 * chunk]
    by_name = {(one["layout"], one["schedule"]): one for one in plan["estimates"]}
    assert set(by_name) == set(itertools.product(LAYOUTS, SCHEDULES))
    ring = by_name["zigzag", "ring"]
    home = 2 * chunk / 50e9  # the gradients' way home is all that waits
    assert ring["exposed_seconds"] == pytest.approx(home)
    blocks = 16384 // 128  # the diagonal's blocks are computed whole
    assert ring["forward_seconds"] == pytest.approx(64 * forward["compute_seconds"] * (1 + 1 / blocks / 64))
    assert ring["efficiency"] == pytest.approx(1, abs=0.005)
    contiguous = by_name["contiguous", "ring"]
    assert contiguous["busiest_over_mean"] == pytest.approx(2 - 1 / 64, abs=0.001)
    assert contiguous["efficiency"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.fast
def test_plan_where_the_link_is_the_limit(capsys):
    slow = json.loads(output_of(capsys, *PLAN, "--hardware", "v5e", "--link-gbs", "0.02", "--json"))
    ring, both = (next(x for x in slow["estimates"] if x["schedule"] == s) for s in ("ring", "bidirectional"))
    chunk = slow["hops"]["forward"]["bytes"]
    assert ring["seconds"] == pytest.approx((63 * chunk + 63 * 3 * chunk + 2 * chunk) / 0.02e9, rel=0.01)
    assert both["seconds"] == pytest.approx(ring["seconds"] / 2, rel=0.01)  # both links of a torus
    assert slow["hardware"]["link_of"] == "the command line"
    assert slow["best"]["schedule"] == "bidirectional"
    switch = json.loads(output_of(capsys, *PLAN, "--hardware", "a100", "--link-gbs", "0.02", "--json"))
    ring, both = (next(x for x in switch["estimates"] if x["schedule"] == s) for s in ("ring", "bidirectional"))
    assert both["seconds"] == pytest.approx(ring["seconds"])  # one port behind a switch


@pytest.mark.fast
def test_zigzag_halves_going_opposite_ways_unbalance_single_hops_but_not_their_sum(capsys):
    work = cost.Workload(1024, 8, 1, 1, 8, 8, is_causal=True)
    whole, halves = (cost.hop_pairs(work, "zigzag", schedule) for schedule in ("ring", "bidirectional"))
    assert len(np.unique(whole)) <= 2  # the first hop has the diagonals
    np.testing.assert_array_equal(whole.sum(0), halves.sum(0))
    assert halves.max(1).sum() > 1.1 * whole.max(1).sum()


@pytest.mark.fast
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("devices", [1, 5, 64])
def test_plan_prints_for_all_hardware_and_names_the_source(capsys, hardware, devices):
    arguments = ["plan", "--seq-len", "100000", "--devices", devices, "--hardware", hardware, "--layers", 2, "--hidden", 64]
    text = output_of(capsys, *arguments, "--formulas")
    assert HARDWARE[hardware].source in text
    assert cost.FORMULAS in text
    assert text.count("\n* ") == 2  # the fastest, and the note that says so
    assert "2 x (query, key and value + out and lse + layer input)" in text
    assert cost.FORMULAS not in output_of(capsys, *arguments)


@pytest.mark.fast
def test_plan_says_when_memory_does_not_suffice(capsys):
    assert ", fits" in output_of(capsys, *PLAN, "--hardware", "h100")
    assert "DOES NOT FIT" in output_of(capsys, *PLAN, "--hardware", "h100", "--memory-gib", "0.5")


def test_plan_draws_its_roofline(capsys, tmp_path):
    path = tmp_path / "deep" / "roofline.png"
    assert str(path) in output_of(capsys, *PLAN, "--hardware", "v5p", "--png", path)
    assert path.read_bytes().startswith(PNG_SIGNATURE)


# explain


@pytest.mark.fast
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
def test_each_device_holds_every_chunk_once_starting_with_its_own(schedule):
    (leg,) = plan_hops(schedule, 5, 16)
    for stream in leg.streams:
        held = blocks.held_chunks(leg, stream, 5)
        np.testing.assert_array_equal(held[:, 0], range(5))
        np.testing.assert_array_equal(np.sort(held, axis=1), np.tile(range(5), (5, 1)))
        step = stream.direction  # what a device holds came from its neighbour, one hop ago
        np.testing.assert_array_equal(held[:, 1:], np.roll(held[:, :-1], step, axis=0))


@pytest.mark.fast
@pytest.mark.parametrize("reach", [(None, 0), (None, None), (9, 4)], ids=str)
@pytest.mark.parametrize("schedule", ["ring", "bidirectional"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_of_the_hops_add_up_to_the_blocks_of_the_mask(layout, schedule, reach):
    length, size, block = 96, 4, 3
    tokens = length // size
    order = storage_order(layout, size, length)
    legs = plan_hops(schedule, size, tokens, needed_offsets(layout, size, tokens, tokens, reach))
    by_hop = np.concatenate([blocks.hop_loads(order, size, leg, tokens // block, block, reach) for leg in legs], axis=1)
    whole = blocks.device_loads(np.zeros(length, np.int32), size, tokens // block, layout, reach)
    np.testing.assert_array_equal(by_hop.sum(1), whole)
    seen = visible_pairs(length, length, local_window_size=reach, natural=(order, order))[0]
    lists = seen.reshape(size, tokens // block, block, length // block, block).any((2, 4)).sum((1, 2))
    assert (whole >= lists).all()  # bounds are sound, not complete
    if layout != "striped" and (layout == "contiguous" or tokens // 2 % block == 0):
        np.testing.assert_array_equal(whole, lists)


@pytest.mark.fast
def test_explain_by_hand(capsys):
    text = output_of(capsys, "explain", "--devices", "2", "--seq-len", "16", "--layout", "zigzag", "--causal")
    assert "device 0: 0..3, 12..15" in text
    assert "device 1: 4..11" in text
    assert re.search(r"device 0 +0 +1\n +device 1 +1 +0", text)
    square = ["/... ....", "#/.. ....", "##/. ####", "###/ ####", "##.. /...", "##.. #/..", "##.. ##/.", "##.. ###/"]
    assert re.findall(r"([#/.]{4} [#/.]{4})$", text, re.MULTILINE) == square
    kinds = [(sign != ".") for row in square for sign in row.replace(" ", "")]
    assert f"device 0: {sum(kinds[:32]):5d} " in text
    assert "zigzag: busiest device over mean 1.00" in text
    assert "contiguous: busiest device over mean 1.44" in text


@pytest.mark.fast
def test_explain_shows_the_hops_that_a_window_needs_and_no_others(capsys):
    text = output_of(capsys, "explain", "--window", "1500", "100")
    assert "moving by +1\n  hop       0  1  2\n" in text
    assert "moving by -1\n  hop       1\n" in text
    assert "sees 1500 tokens to its left and 100 to its right" in text
    assert "sees 5 tokens to its left and 5 to" in output_of(capsys, "explain", "--window", "5")
    assert "sees unbounded tokens to its left and 7 to" in output_of(capsys, "explain", "--window", "none", "7")
    assert "sees 5 tokens to its left and 0 to" in output_of(capsys, "explain", "--window", "5", "--causal")


@pytest.mark.fast
def test_explain_all_gather_has_no_hops(capsys):
    text = output_of(capsys, "explain", "--schedule", "all_gather", "--layout", "striped")
    assert "chunks of all 8 ranks at once" in text
    assert "device 3: 3, 11, .. 8187" in text
    assert "busiest device of each hop" not in text


@pytest.mark.parametrize(
    "options",
    [["--schedule", "ring"], ["--schedule", "bidirectional"], ["--schedule", "all_gather"], ["--window", "1500", "100"]],
)
def test_explain_draws(capsys, tmp_path, options):
    path = tmp_path / "deep" / "ring.png"
    assert str(path) in output_of(capsys, "explain", "--causal", *options, "--png", path)
    assert path.read_bytes().startswith(PNG_SIGNATURE)
