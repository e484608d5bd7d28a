"""The training script, trained for real: ring and dense attention take the same steps, and a run continues where it stopped."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import LAYOUTS
from jax.sharding import Mesh
from programs import Program, compile_only

from jax_ring_attention import to_layout
from jax_ring_attention.testing import cpu_mesh, relative_error

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "train_long_context.py"

SIZES = {"width": 32, "layers": 2, "heads": 4, "kv-heads": 2, "head-dim": 8, "hidden": 64, "seq-len": 64, "batch": 2}
STEPS = 16
"""Enough that the size of rounding errors is a statistic and not luck: a loss is one float32 number."""


class Allowed(NamedTuple):
    """Relative errors in norm against float64: of the losses of all steps, of the parameters after the last."""

    losses: float
    params: float


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module; scripts import each other by plain name, as when run from the shell."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import train_long_context

        yield train_long_context


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> Callable[..., list[str]]:
    """The command line of a small model. Each clause of the licence is a document: several to a row, and some cut by its end."""
    directory = tmp_path_factory.mktemp("text")
    for i, clause in enumerate(re.split(r"[,;:|\n]+", (ROOT / "LICENSE").read_text())):
        (directory / f"{i}.txt").write_text(clause)

    def command_line(*more: object, **settings: object) -> list[str]:
        settings = SIZES | {"steps": STEPS, "warmup": 2} | {name.replace("_", "-"): x for name, x in settings.items()}
        words = [word for name, x in settings.items() for word in (f"--{name}", str(x))]
        return [*words, *map(str, more), "--data", str(directory / "*.txt")]

    return command_line


def mesh_of(data: int = 1, ring: int = 1, tensor: int = 1) -> Mesh:
    return cpu_mesh(data=data, ring=ring, tensor=tensor)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


# The same steps as dense attention.


@pytest.fixture(scope="module")
def exact(script, arguments):
    """A run with dense attention in float64 on one device, from the same initial parameters."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        init_state = script.init_state

        def init_in_float32(*given):
            with jax.enable_x64(False):
                state = init_state(*given)
            return jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, state)

        patch.setattr(script, "init_state", init_in_float32)
        trained = script.train(script.parse(arguments(attention="dense", dtype="float64")), mesh_of())
        assert {x.dtype for x in jax.tree.leaves(trained.state.params)} == {np.dtype(np.float64)}
        return trained._replace(state=trained.state._replace(params=flat(trained.state.params)))


@pytest.fixture(scope="module")
def allowed(script, arguments, exact) -> Allowed:
    """Twice the errors of the losses of dense attention in float32 on the mesh, three times that of its parameters."""
    dense = script.train(script.parse(arguments(attention="dense")), mesh_of(2, 2, 2))
    half_a_unit = float(jnp.finfo(jnp.float32).eps) / 2  # dense can be right by luck
    losses = max(2 * relative_error(dense.losses, exact.losses), half_a_unit)
    return Allowed(losses, 3 * relative_error(flat(dense.state.params), exact.state.params))


@pytest.fixture(scope="module")
def zigzag(script, arguments):
    return script.train(script.parse(arguments(layout="zigzag")), mesh_of(2, 2, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring_attention_takes_the_steps_of_dense_attention(script, arguments, exact, allowed, zigzag, layout):
    ring = zigzag
    if layout != "zigzag":
        ring = script.train(script.parse(arguments(layout=layout)), mesh_of(2, 2, 2))
    assert len(ring.losses) == STEPS
    assert relative_error(ring.losses, exact.losses) <= allowed.losses
    assert relative_error(flat(ring.state.params), exact.state.params) <= allowed.params


@pytest.mark.fast
def test_those_rows_hold_several_documents_and_padding(script, arguments):
    """Else the runs above would say nothing about documents."""
    options = script.parse(arguments())
    rows = script.pack_documents(script.read_documents(options.data, options.seed), options.seq_len)
    for step in range(STEPS):
        batch = script.batch_at(rows, step, options.batch, options.seed)
        assert batch.segment_ids.max() > 0
    assert (rows.segment_ids < 0).any()
    assert rows.positions.max() == options.seq_len - 1


@pytest.mark.multiprocess
def test_two_processes_take_the_steps_of_one(script, arguments, exact, allowed, tmp_path):
    """Two real processes of four devices each: ring, weights and checkpoint are spread over both. One process restores it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "TPU_SKIP_MDS_QUERY": "1"}
    shared = ["--cpu-devices", 4, "--ring", 8, "--coordinator", f"127.0.0.1:{port}", "--num-processes", 2]
    lines = [arguments(*shared, "--process-id", rank, checkpoint_dir=tmp_path) for rank in range(2)]
    commands = [[sys.executable, str(SCRIPT), *line] for line in lines]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, env=environment, **pipes) for command in commands]
    try:
        said = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert "{" not in said[1][0]  # one process speaks for all
    figures = json.loads(said[0][0].splitlines()[-1])
    assert (figures["processes"], figures["mesh"]) == (2, {"data": 1, "ring": 8, "tensor": 1})
    known = [figures["first_loss"], *exact.losses[1:-1], figures["final_loss"]]
    assert 0 < relative_error(known, exact.losses) <= allowed.losses

    options = script.parse(arguments(steps=STEPS + 1, checkpoint_dir=tmp_path))
    config, documents = script.model_config(options), script.read_documents(options.data, options.seed)
    checkpoints = script.Checkpoints(options, script.run_settings(options, config, documents))
    assert checkpoints.steps == STEPS
    restored = checkpoints.restore(script.init_state(config, script.make_optimizer(options), mesh_of(2, 2, 2), options.seed))
    assert relative_error(flat(restored.params), exact.state.params) <= allowed.params


# Continuing.


@pytest.fixture(scope="module")
def checkpoints(script, arguments, tmp_path_factory) -> Path:
    """Of a run that stopped before its last two steps."""
    directory = tmp_path_factory.mktemp("checkpoints")
    script.train(script.parse(arguments(steps=STEPS - 2, checkpoint_dir=directory)), mesh_of(2, 2, 2))
    return directory


def test_a_run_that_continues_is_bitwise_the_run_that_did_not_stop(script, arguments, checkpoints, zigzag):
    rest = script.train(script.parse(arguments(checkpoint_dir=checkpoints)), mesh_of(2, 2, 2))
    assert rest.first_step == STEPS - 2
    assert rest.losses == zigzag.losses[-2:]
    for have, want in zip(jax.tree.leaves(rest.state), jax.tree.leaves(zigzag.state), strict=True):
        np.testing.assert_array_equal(have, want)
        assert have.sharding.is_equivalent_to(want.sharding, want.ndim)
    with pytest.raises(ValueError, match=f"is at step {STEPS} already"):
        script.train(script.parse(arguments(checkpoint_dir=checkpoints)), mesh_of(2, 2, 2))


@pytest.mark.parametrize("changed", [{"seq_len": 32}, {"learning_rate": 1.0}, {"seed": 5}], ids=lambda x: next(iter(x)))
def test_a_checkpoint_of_other_settings_is_refused(script, arguments, checkpoints, changed):
    (name,) = changed
    with pytest.raises(ValueError, match=rf"{name}=\S+, this run {changed[name]}.*another --checkpoint-dir"):
        script.train(script.parse(arguments(checkpoint_dir=checkpoints, **changed)), mesh_of(2, 2, 2))


# Learning, and what is reported.


def test_the_loss_falls_and_the_last_line_says_what_was_measured(script, arguments, capsys):
    options = {"steps": 20, "learning_rate": 1e-2, "log_every": 8, "cpu_devices": 8, "dtype": "bfloat16"}
    trained = script.main(arguments("--layout", "striped", "--schedule", "bidirectional", **options))
    assert len(trained.losses) == 20
    assert np.mean(trained.losses[-3:]) < 0.75 * trained.losses[0]
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 8", "step 16"]
    figures = json.loads(last)
    assert figures["first_loss"] == pytest.approx(np.log(256), rel=0.05)
    assert (figures["final_loss"], figures["first_step"]) == (trained.losses[-1], 0)
    assert figures["mesh"] == {"data": 1, "ring": 8, "tensor": 1}
    assert figures["device"] == "cpu"
    assert min(figures["tokens_per_second"], figures["temp_bytes"]) > 0
    assert figures["parameters"] == 256 * 32 + 32 + 2 * (2 * 32 + 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 64)


def permutes(script, mesh: Mesh, options) -> int:
    """How many arrays of a key chunk's size a compiled step sends along the ring."""
    config, optimizer = script.model_config(options), script.make_optimizer(options)
    params = jax.eval_shape(lambda: script.llama.init_params(config, 0))
    batch = script.put_on_mesh(script.Batch(*[np.zeros((2, 64), np.int32)] * 4), mesh, "zigzag")
    step = script.make_step(config, options, optimizer, mesh)
    state = script.State(params, jax.eval_shape(optimizer.init, params))
    return Program(compile_only(step, state, batch).as_text()).sent()["f32", 2 * (64 // 4) * 2 * 8]


def test_a_step_runs_the_ring_forward_once_per_layer(script, arguments):
    layers, hops, mesh = 2, 3, mesh_of(ring=4)
    there_and_back = 2 * hops + 2 * hops + 2 * (hops + 1)  # key and value, again for gradients, and the gradients themselves
    assert permutes(script, mesh, script.parse(arguments())) == layers * there_and_back
    assert permutes(script, mesh, script.parse(arguments(keep="nothing"))) == layers * (there_and_back + 2 * hops)


def test_weights_and_optimizer_state_are_spread_over_all_devices(script, arguments):
    options = script.parse(arguments())
    state = script.init_state(script.model_config(options), script.make_optimizer(options), mesh_of(2, 2, 2), 0)
    matrices = [x for x in jax.tree.leaves(state) if x.ndim > 2]
    assert len(matrices) == 3 * 7  # parameters and two moments
    assert all(x.addressable_shards[0].data.size * 8 == x.size for x in matrices)


# Data and arguments.


@pytest.mark.fast
def test_every_row_comes_once_an_epoch_and_a_step_always_gets_the_same(script):
    rows = script.Batch(*(np.arange(7)[:, None] + shift for shift in range(4)))
    batches = [script.batch_at(rows, step, size=3, seed=1) for step in range(7)]
    seen = np.concatenate([batch.tokens[:, 0] for batch in batches])
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert list(seen[:7]) != list(seen[7:14])
    assert all((batch.positions == batch.tokens + 3).all() for batch in batches)
    np.testing.assert_array_equal(script.batch_at(rows, 4, size=3, seed=1).tokens, batches[4].tokens)


@pytest.mark.fast
def test_a_batch_is_stored_as_the_layout_says_with_labels_shifted_before(script):
    batch = script.pack_documents([bytes(range(50)), bytes(range(100, 114))], 64)
    stored = script.put_on_mesh(script.Batch(*(np.repeat(x, 2, axis=0) for x in batch)), mesh_of(2, 4), "striped")
    tokens, labels, segment_ids, positions = (np.asarray(x) for x in stored)
    np.testing.assert_array_equal(tokens, to_layout(np.repeat(batch.tokens, 2, axis=0), "striped", 4))
    has_label = labels >= 0
    np.testing.assert_array_equal(labels[has_label], tokens[has_label] + 1)
    np.testing.assert_array_equal((~has_label).sum(1), [2, 2])  # the last of each document
    np.testing.assert_array_equal(positions, np.where(segment_ids == 0, tokens, tokens - 100))
    assert {shard.data.shape for shard in stored.tokens.addressable_shards} == {(1, 16)}


@pytest.mark.fast
def test_documents_are_files_shuffled_the_same_way_every_time(script, tmp_path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 3)
    pattern = [str(tmp_path / "**" / "*.txt")] * 2
    documents = script.read_documents(pattern, seed=0)
    assert sorted(documents) == [bytes([i]) * 3 for i in range(9)] != documents
    assert documents == script.read_documents(pattern, seed=0) != script.read_documents(pattern, seed=1)
    with pytest.raises(ValueError, match=r"nothing\.txt matches no file"):
        script.read_documents([str(tmp_path / "nothing.txt")], seed=0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"seq_len": 66}, "--seq-len 66 must be a multiple of twice the ring, 2 x 2"),
        ({"batch": 3}, "--batch 3 must be a multiple of --data-parallel 2"),
        ({"width": 34}, r"width=34 must be a multiple of 4: data x ring"),
        ({"kv_heads": 1}, "kv_heads=1 must be a multiple of 2: each device"),
        ({"heads": 5}, "heads=5 must be a multiple of kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 must be a multiple of 2: rotary"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_sizes_that_the_mesh_does_not_divide_are_refused(script, arguments, settings, reason):
    with pytest.raises(ValueError, match=reason):
        script.train(script.parse(arguments(**settings)), mesh_of(2, 2, 2))


@pytest.mark.fast
def test_meshes_take_all_devices(script):
    assert dict(script.make_mesh(script.parse(["--tensor", "2"])).shape) == {"data": 1, "ring": 4, "tensor": 2}
    with pytest.raises(ValueError, match="--data-parallel 2 x --ring 2 x --tensor 1 is 4 devices, but there are 8"):
        script.make_mesh(script.parse(["--data-parallel", "2", "--ring", "2"]))


@pytest.mark.fast
@pytest.mark.parametrize(
    "words",
    [
        ["--coordinator", "localhost:1"],
        ["--num-processes", "2", "--process-id", "0"],
        ["--coordinator", "auto", "--process-id", "0"],
        ["--steps", "0"],
        ["--attention", "sparse"],
    ],
    ids="-".join,
)
def test_arguments_that_do_not_fit_together_are_refused(script, capsys, words):
    with pytest.raises(SystemExit) as refused:
        script.parse(words)
    assert refused.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(script, arguments, monkeypatch):
    losses = iter((5.0, 4.0, float("nan"), 3.0))
    monkeypatch.setattr(script, "compile_step", lambda *_: lambda state, batch: (state, next(losses)))
    with pytest.raises(FloatingPointError, match="loss of step 3 is nan; try a smaller --learning-rate"):
        script.train(script.parse(arguments()), mesh_of())
