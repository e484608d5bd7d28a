"""Train a small byte-level language model with ring attention on emulated CPU devices, and check it against dense attention.

The text is what every CPython ships: the documents of `pydoc_data.topics`, packed into rows of one sequence each. Before the
first step the loss and the gradients are compared with those of dense attention, on the same parameters and the same row.

    python scripts/demo.py --steps 30 --seq-len 8192

Draws OUTPUT_DIR/demo.png and prints one JSON object as the last line. Exits with an error if ring and dense attention
disagree, or if the loss did not fall.

Everything that a model of your own needs is in four places: `packing.py` (segment ids, labels), `put_on_ring` (storage
order, sharding), `ring_attend` (the call) and `sequence_loss` (a model that never mentions the ring).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ring_picture
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from packing import Batch, pack_documents
from tqdm import tqdm

from jax_ring_attention import ring_attention, to_layout

LAYOUT = "zigzag"  # shares the causal work out evenly over the devices, exactly so for one long document
SPEC = P(None, "seq")  # of (B, T, ...): the sequence is sharded, everything else is whole

VOCABULARY = 256  # bytes
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 64, 2, 4, 2, 16, 192
LEARNING_RATE = 1e-2

TOLERANCE = 1e-4  # relative error allowed between ring and dense attention, float32
CLEAR_FALL = 0.9  # the last loss must be below this share of the first


# Data: real documents of many lengths, packed into rows of one length (`packing.py`).


def read_documents(seed: int = 154) -> list[bytes]:
    """The topics of Python's own help system, about 450 KB of English, shuffled."""
    documents = [text.encode() for text in pydoc_data.topics.topics.values()]
    return [documents[i] for i in np.random.default_rng(seed).permutation(len(documents))]


def put_on_ring(batch: Batch, mesh: Mesh) -> Batch:
    """The batch in the order in which the layout stores it, one equal piece per device."""
    sharding = NamedSharding(mesh, SPEC)
    return Batch(*(jax.device_put(to_layout(x, LAYOUT, mesh.size), sharding) for x in batch))


# Attention: two functions of (query, key, value, batch) that give the same result.


def ring_attend(query: jax.Array, key: jax.Array, value: jax.Array, batch: Batch, mesh: Mesh) -> jax.Array:
    """Ring attention: no device ever holds all keys, let alone a T x T array."""
    # The causal mask compares the positions that the layout implies, those within the row, not within the document. That is
    # the same: a document is consecutive in its row, so both order its tokens alike, and segment ids hide all other documents.
    return ring_attention(query, key, value, is_causal=True, segment_ids=batch.segment_ids, layout=LAYOUT, mesh=mesh, spec=SPEC)


def dense_attend(query: jax.Array, key: jax.Array, value: jax.Array, batch: Batch) -> jax.Array:
    """The whole score matrix at once, with a mask written out from positions within the document: the reference.

    Its backward pass computes the scores again (`jax.checkpoint`), else every layer would keep its own.
    """
    segment, position = batch.segment_ids, batch.positions
    seen = segment[:, :, None] == segment[:, None, :]
    seen &= position[:, None, :] <= position[:, :, None]
    seen &= segment[:, :, None] >= 0
    return jax.checkpoint(jax.nn.dot_product_attention)(query, key, value, mask=seen[:, None])


# Model: a decoder with rotary positions, grouped-query attention and SwiGLU. Only `attend` looks beyond one token.


def init_params(seed: int = 0) -> dict:
    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def matrices(*shape, fan_in):
        return jax.random.normal(next(keys), (LAYERS, *shape)) / math.sqrt(fan_in)

    layers = {
        "attention_norm": jnp.ones((LAYERS, WIDTH)),
        "query": matrices(WIDTH, HEADS, HEAD_DIM, fan_in=WIDTH),
        "key_value": matrices(WIDTH, 2, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
        "output": matrices(HEADS, HEAD_DIM, WIDTH, fan_in=HEADS * HEAD_DIM * 2 * LAYERS),
        "mlp_norm": jnp.ones((LAYERS, WIDTH)),
        "gate_up": matrices(WIDTH, 2, HIDDEN, fan_in=WIDTH),
        "down": matrices(HIDDEN, WIDTH, fan_in=HIDDEN * 2 * LAYERS),
    }
    embedding = 0.02 * jax.random.normal(next(keys), (VOCABULARY, WIDTH))
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(WIDTH)}


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of x (B, T, N, H) at positions (B, T): the order of storage does not matter to it."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


def transformer_layer(x: jax.Array, weights: dict, batch: Batch, attend) -> jax.Array:
    h = rms_norm(x, weights["attention_norm"])
    query = jnp.einsum("btd,dnh->btnh", h, weights["query"])
    key, value = jnp.moveaxis(jnp.einsum("btd,dcnh->btcnh", h, weights["key_value"]), 2, 0)
    out = attend(rotate(query, batch.positions), rotate(key, batch.positions), value, batch)
    x = x + jnp.einsum("btnh,nhd->btd", out, weights["output"])
    gate, up = jnp.moveaxis(jnp.einsum("btd,dcf->btcf", rms_norm(x, weights["mlp_norm"]), weights["gate_up"]), 2, 0)
    return x + jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, weights["down"])


def sequence_loss(params: dict, batch: Batch, attend) -> jax.Array:
    """Mean cross entropy, in nats per byte, over the tokens that have a label. Order does not matter to a mean either."""
    x = math.sqrt(WIDTH) * params["embedding"][batch.tokens]  # the same small numbers give logits near zero below
    x, _ = jax.lax.scan(lambda x, weights: (transformer_layer(x, weights, batch, attend), None), x, params["layers"])
    logits = rms_norm(x, params["norm"]) @ params["embedding"].T
    picked = jax.nn.one_hot(batch.labels, VOCABULARY) * jax.nn.log_softmax(logits)  # label -1 picks nothing
    return -picked.sum() / (batch.labels >= 0).sum()


# Training.


def compile_loss_and_grads(attend, params: dict, batch: Batch, mesh: Mesh):
    """`(params, batch) -> (loss, grads)`, compiled; gradients end up whole on every device, like the parameters."""
    function = jax.value_and_grad(functools.partial(sequence_loss, attend=attend))
    return jax.jit(function, out_shardings=NamedSharding(mesh, P())).lower(params, batch).compile()


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def adam(params, first, second, grads, step, rate=LEARNING_RATE, b1=0.9, b2=0.95, epsilon=1e-8):
    """One step of Adam (Kingma and Ba 2015, algorithm 1); `step` counts from 1."""
    first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, grads)
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, grads)
    rate = rate * jnp.sqrt(1 - b2**step) / (1 - b1**step)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + epsilon), params, first, second)
    return params, first, second


def train(loss_and_grads, params: dict, rows: Batch, mesh: Mesh, steps: int) -> tuple[list[float], float]:
    """One row per step. Returns the losses, each before its update, and tokens per second."""
    state = (params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    losses: list[float] = []
    speed = 0.0
    length, start = rows.tokens.shape[1], time.perf_counter()
    with tqdm(range(steps), desc="training", unit="step", file=sys.stdout) as progress:
        for step in progress:
            loss, grads = loss_and_grads(state[0], put_on_ring(row(rows, step), mesh))
            state = adam(*state, grads, step + 1.0)
            losses.append(float(loss))
            speed = length * len(losses) / (time.perf_counter() - start)
            progress.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
    return losses, speed


def row(rows: Batch, step: int) -> Batch:
    """Row number `step`, starting over when there are no more, as a batch of one."""
    at = step % len(rows.tokens)
    return Batch(*(x[at : at + 1] for x in rows))


# Checks.


def relative_error(have, want) -> float:
    """The largest ||have - want|| / ||want|| over the arrays of two trees; NaN counts as infinite."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.nan_to_num(np.linalg.norm(a - b) / np.linalg.norm(b), nan=np.inf))

    return max(jax.tree.leaves(jax.tree.map(one, have, want)))


def check_against_dense(ring, dense, params: dict, batch: Batch) -> dict[str, float]:
    """Relative errors of the loss and of the worst gradient; exits when one is above the tolerance."""
    (loss, grads), (want_loss, want_grads) = ring(params, batch), dense(params, batch)
    errors = {"loss_error": relative_error(loss, want_loss), "gradient_error": relative_error(grads, want_grads)}
    print(
        f"ring against dense attention, first step: loss {float(loss):.6f} and {float(want_loss):.6f}, relative error "
        f"{errors['loss_error']:.1e}; worst gradient {errors['gradient_error']:.1e} (allowed {TOLERANCE:.0e})"
    )
    if max(errors.values()) > TOLERANCE:
        raise SystemExit("FAILED: ring and dense attention disagree")
    return errors


def check_loss_fell(losses: list[float]) -> None:
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last (must be below {CLEAR_FALL * losses[0]:.3f})")
    if not losses[-1] < CLEAR_FALL * losses[0]:
        raise SystemExit("FAILED: the loss did not fall clearly")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="one row each (default 30)")
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens per row, over all devices (default 8192)")
    parser.add_argument("--devices", type=int, default=8, help="emulated CPU devices in the ring (default 8)")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where demo.png goes (default outputs)")
    options = parser.parse_args(arguments)
    if options.devices < 2 or options.steps < 2:
        parser.error("a ring needs at least 2 devices, and a falling loss at least 2 steps")
    if options.seq_len < 1 or options.seq_len % (2 * options.devices):
        parser.error(f"--seq-len {options.seq_len} is no multiple of 2 x --devices {options.devices}, as zigzag needs")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    jax.config.update("jax_platforms", "cpu")
    if jax.config.jax_num_cpu_devices != options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    start = time.perf_counter()

    mesh = jax.make_mesh((options.devices,), ("seq",), axis_types=(AxisType.Auto,))
    rows = pack_documents(read_documents(), options.seq_len)
    params = jax.device_put(init_params(), NamedSharding(mesh, P()))
    first = put_on_ring(row(rows, 0), mesh)
    print(f"{options.devices} emulated devices, {len(rows.tokens)} rows of {options.seq_len} bytes of Python's help; compiling")

    ring = compile_loss_and_grads(functools.partial(ring_attend, mesh=mesh), params, first, mesh)
    dense = compile_loss_and_grads(dense_attend, params, first, mesh)
    memory = {name: x.memory_analysis().temp_size_in_bytes for name, x in (("ring", ring), ("dense", dense))}
    figures = {"ring_temp_bytes": memory["ring"], "dense_temp_bytes": memory["dense"]}
    figures["memory_ratio"] = memory["dense"] / memory["ring"]
    print("working memory per device: ring {:.1f} MiB, dense {:.1f} MiB".format(*(size / 2**20 for size in memory.values())))
    figures |= check_against_dense(ring, dense, params, first) | {"tolerance": TOLERANCE}

    losses, figures["tokens_per_second"] = train(ring, params, rows, mesh, options.steps)
    check_loss_fell(losses)
    figures |= {"initial_loss": losses[0], "final_loss": losses[-1]}
    picture = options.output_dir / "demo.png"
    figures["busiest_device_over_mean"] = ring_picture.draw(picture, rows.segment_ids[0], mesh.size, losses, memory)
    settings = {"script": "demo", "jax": jax.__version__, **vars(options), "output_dir": str(options.output_dir)}
    print(json.dumps({**settings, **figures, "picture": str(picture), "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
