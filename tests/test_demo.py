"""The demonstration script: it works from a shell, its data are right, and it fails when attention is wrong."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_ring_attention.cli.blocks import block_kinds, device_loads
from jax_ring_attention.layouts import storage_order
from jax_ring_attention.masks import EMPTY, FULL, PARTIAL
from jax_ring_attention.testing import visible_pairs

ROOT = Path(__file__).resolve().parents[1]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def load_script(name: str, monkeypatch):
    """A script as a module; scripts import each other by plain name, as when run from the shell."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module(name)


@pytest.fixture
def demo(monkeypatch):
    return load_script("demo", monkeypatch)


@pytest.fixture
def ring_picture(monkeypatch):
    return load_script("ring_picture", monkeypatch)


def run_script(name: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_demo_trains_checks_itself_and_draws_its_picture(tmp_path):
    done = run_script("demo.py", "--seq-len", 512, "--steps", 3, "--output-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["script"], figures["devices"], figures["seq_len"], figures["steps"]) == ("demo", 8, 512, 3)
    assert figures["tolerance"] == 1e-4
    assert 0 <= figures["loss_error"] < 1e-5
    assert 0 < figures["gradient_error"] < 1e-5
    assert figures["initial_loss"] == pytest.approx(np.log(256), rel=0.05)
    assert figures["final_loss"] < 0.9 * figures["initial_loss"]
    assert 0 < figures["ring_temp_bytes"] < figures["dense_temp_bytes"]
    assert figures["memory_ratio"] == pytest.approx(figures["dense_temp_bytes"] / figures["ring_temp_bytes"])
    assert figures["tokens_per_second"] > 0
    assert figures["seconds"] > 0
    assert Path(figures["picture"]) == tmp_path / "demo.png"
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG_SIGNATURE)


def lost_key_gradient(attend):
    return lambda query, key, *rest, **options: attend(query, jax.lax.stop_gradient(key), *rest, **options)


def ignored_documents(attend):
    return lambda *arrays, segment_ids, **options: attend(*arrays, **options)


@pytest.mark.parametrize("corrupt", [lost_key_gradient, ignored_documents])
def test_demo_fails_when_attention_is_wrong(demo, monkeypatch, tmp_path, corrupt):
    monkeypatch.setattr(demo, "ring_attention", corrupt(demo.ring_attention))
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained with attention that is wrong"))
    with pytest.raises(SystemExit, match="disagree"):
        demo.main(["--seq-len", "2048", "--steps", "3", "--output-dir", str(tmp_path)])  # its first row has three documents


@pytest.mark.fast
def test_demo_fails_when_the_loss_does_not_fall(demo):
    demo.check_loss_fell([5.5, 5.2, 4.9])
    for losses in ([5.5, 5.6], [5.5, 5.0], [5.5, float("nan")]):
        with pytest.raises(SystemExit, match="did not fall"):
            demo.check_loss_fell(losses)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--seq-len", "100"], "multiple of 2 x --devices"), (["--devices", "1"], "at least 2"), (["--steps", "1"], "at least 2")],
    ids=["uneven", "one-device", "one-step"],
)
def test_demo_refuses_settings_that_prove_nothing(demo, capsys, arguments, reason):
    with pytest.raises(SystemExit) as refused:
        demo.main(arguments)
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.fast
def test_packing_keeps_every_byte_and_labels_never_cross_documents(demo):
    documents = [bytes(range(1, 71)), b"", b"ab", b"cdefg", bytes(range(100, 128)), b"z"]
    rows = demo.pack_documents(documents, length=32)
    assert rows.tokens.shape[1] == 32
    text = bytearray()
    for tokens, labels, segments, positions in zip(*rows, strict=True):
        assert (labels[segments < 0] == -1).all()
        for segment in range(segments.max() + 1):
            (at,) = np.nonzero(segments == segment)
            np.testing.assert_array_equal(at, np.arange(at[0], at[0] + len(at)))
            np.testing.assert_array_equal(positions[at], np.arange(len(at)))
            np.testing.assert_array_equal(labels[at], [*tokens[at[1:]], -1])
            text += bytes(tokens[at].tolist())
    assert bytes(text) == b"".join(documents)
    assert (rows.segment_ids == -1).any()


@pytest.mark.fast
def test_demo_text_comes_with_python_and_is_the_same_every_time(demo):
    documents = demo.read_documents()
    assert documents == demo.read_documents()
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000


@pytest.mark.fast
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_picture_shows_the_blocks_that_hold_visible_pairs(layout):
    length, ring_size, per_device = 64, 4, 2
    segment_ids = np.repeat([0, 1, 2, -1], [10, 3, 45, 6])
    order = storage_order(layout, ring_size, length)
    seen = visible_pairs(length, length, is_causal=True, segment_ids=segment_ids[order][None], natural=(order, order))[0]
    blocks = seen.reshape(8, 8, 8, 8).swapaxes(1, 2)
    want = np.where(blocks.all((2, 3)), FULL, np.where(blocks.any((2, 3)), PARTIAL, EMPTY))
    np.testing.assert_array_equal(block_kinds(segment_ids, 8, order), want)
    loads = device_loads(segment_ids, ring_size, per_device, layout)
    np.testing.assert_array_equal(loads, (want != EMPTY).reshape(ring_size, -1).sum(1))


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_picture_is_drawn_without_a_training_run(ring_picture, tmp_path, capsys, devices):
    path = tmp_path / "deep" / "ring.png"
    ring_picture.main(["--documents", "50", "30", "--seq-len", "96", "--devices", str(devices), "--output", str(path)])
    assert path.read_bytes().startswith(PNG_SIGNATURE)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    balance = figures["busiest_device_over_mean"]
    assert set(balance) == {"zigzag", "contiguous"}
    assert min(balance.values()) >= 1
