"""A Llama-style decoder in plain JAX, for sequences sharded over a ring: parameters, where they live, the loss.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings. Only `attend` looks beyond one token, so nothing
else knows in which order tokens are stored: rotary angles are computed from positions stored with the tokens, and a loss is a
mean over tokens. The mesh has three axes:

    data     rows of the batch
    ring     tokens of a row; ring attention
    tensor   heads and hidden units

Every weight matrix is also sharded over data and ring together, and gathered layer by layer where it is used (ZeRO-3).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from packing import Batch

from jax_ring_attention import RESIDUAL_NAMES, ring_attention

Attend = Callable[[jax.Array, jax.Array, jax.Array, Batch], jax.Array]
"""Query (B, T, N, H), key and value (B, T, K, H) and the batch to the output (B, T, N, H)."""

AXES = ("data", "ring", "tensor")
TOKENS = P("data", "ring")  # of (B, T, ...)
HEADS = P("data", "ring", "tensor")  # of (B, T, N, H), and of (B, T, F) hidden units
WHOLE_WIDTH = ("data", "ring")  # the width of every weight matrix lives here until it is gathered


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int = 256  # bytes
    width: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 704
    rope_base: float = 500_000.0
    dtype: str = "float32"  # of activations; parameters, norms and the loss are float32

    def check(self, mesh: Mesh) -> None:
        """ValueError for sizes that the mesh does not divide or the model cannot have."""
        spread = mesh.shape["data"] * mesh.shape["ring"]
        for name, parts, why in (
            ("width", spread, f"data x ring = {spread} devices hold a slice of it"),
            ("kv_heads", mesh.shape["tensor"], "each device of the tensor axis holds whole heads"),
            ("hidden", mesh.shape["tensor"], "the tensor axis splits it"),
            ("head_dim", 2, "rotary embeddings turn pairs"),
        ):
            if getattr(self, name) % parts:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of {parts}: {why}.")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}.")


# Attention.


def ring_attend(mesh: Mesh, **options: Any) -> Attend:
    """Ring attention with `options` such as layout, schedule and implementation."""

    def attend(query, key, value, batch):
        # Causality compares the positions within the row that the layout implies, not those within the document. That is the
        # same: a document is consecutive in its row, so both order its tokens alike, and segment ids hide all other documents.
        return ring_attention(query, key, value, is_causal=True, segment_ids=batch.segment_ids, mesh=mesh, spec=HEADS, **options)

    return attend


def dense_attend(query: jax.Array, key: jax.Array, value: jax.Array, batch: Batch) -> jax.Array:
    """The whole score matrix at once, with a mask written out from positions within the document, in whatever order."""
    segment, position = batch.segment_ids, batch.positions
    seen = segment[:, :, None] == segment[:, None, :]
    seen &= position[:, None, :] <= position[:, :, None]
    seen &= segment[:, :, None] >= 0
    return jax.nn.dot_product_attention(query, key, value, mask=seen[:, None])


# What a layer keeps for its backward pass besides its input; the rest is computed again.
KEEP = {
    "attention": jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES),  # so that the ring does not turn again
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}


# Parameters. Layers are stacked along a leading axis, for `lax.scan`.


def param_specs() -> dict[str, Any]:
    layers = {
        "attention_norm": P(),
        "query": P(None, WHOLE_WIDTH, "tensor"),
        "key": P(None, WHOLE_WIDTH, "tensor"),
        "value": P(None, WHOLE_WIDTH, "tensor"),
        "output": P(None, "tensor", None, WHOLE_WIDTH),
        "mlp_norm": P(),
        "gate": P(None, WHOLE_WIDTH, "tensor"),
        "up": P(None, WHOLE_WIDTH, "tensor"),
        "down": P(None, "tensor", WHOLE_WIDTH),
    }
    return {"embedding": P(None, WHOLE_WIDTH), "layers": layers, "norm": P()}


def init_params(config: Config, seed: int) -> dict[str, Any]:
    """Float32 parameters, the same on every mesh."""
    c = config
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def matrices(*shape, fan_in):
        return jax.random.normal(next(keys), (c.layers, *shape)) / math.sqrt(fan_in)

    layers = {
        "attention_norm": jnp.ones((c.layers, c.width)),
        "query": matrices(c.width, c.heads, c.head_dim, fan_in=c.width),
        "key": matrices(c.width, c.kv_heads, c.head_dim, fan_in=c.width),
        "value": matrices(c.width, c.kv_heads, c.head_dim, fan_in=c.width),
        # What is added to the residual stream 2 x layers times is made smaller, so that the sum is not.
        "output": matrices(c.heads, c.head_dim, c.width, fan_in=c.heads * c.head_dim * 2 * c.layers),
        "mlp_norm": jnp.ones((c.layers, c.width)),
        "gate": matrices(c.width, c.hidden, fan_in=c.width),
        "up": matrices(c.width, c.hidden, fan_in=c.width),
        "down": matrices(c.hidden, c.width, fan_in=c.hidden * 2 * c.layers),
    }
    embedding = 0.02 * jax.random.normal(next(keys), (c.vocabulary, c.width))
    return {"embedding": embedding, "layers": layers, "norm": jnp.ones(c.width)}


def gathered(weights: Any, specs: Any, mesh: Mesh, dtype: Any) -> Any:
    """The matrices in `dtype`, whole along their width, still split over tensor; their gradients are scattered in turn."""

    def gather(x, spec):
        if WHOLE_WIDTH not in spec:
            return x
        kept = P(*(None if entry == WHOLE_WIDTH else entry for entry in spec))
        return jax.lax.with_sharding_constraint(x.astype(dtype), NamedSharding(mesh, kept))

    return jax.tree.map(gather, weights, specs)


# The model.


def widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = widened(x)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def rotary_angles(positions: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, (B, T, 1, H / 2), of positions (B, T) stored in the order of the tokens."""
    half = config.head_dim // 2
    angle = positions[:, :, None, None] * config.rope_base ** (-jnp.arange(half) / half)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = angles
    a, b = jnp.split(widened(x), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def decoder_layer(x: jax.Array, w: dict[str, jax.Array], angles: Any, batch: Batch, attend: Attend) -> jax.Array:
    h = rms_norm(x, w["attention_norm"])
    query, key, value = (jnp.einsum("btd,dnh->btnh", h, w[name]) for name in ("query", "key", "value"))
    out = attend(rotate(query, angles), rotate(key, angles), value, batch)
    x = x + jnp.einsum("btnh,nhd->btd", out, w["output"])
    h = rms_norm(x, w["mlp_norm"])
    h = jax.nn.silu(jnp.einsum("btd,df->btf", h, w["gate"])) * jnp.einsum("btd,df->btf", h, w["up"])
    return x + jnp.einsum("btf,fd->btd", h, w["down"])


def sequence_loss(params: dict[str, Any], batch: Batch, config: Config, mesh: Mesh, attend: Attend, keep: str) -> jax.Array:
    """Mean cross entropy, in nats per token, over the tokens that have a label. Tokens may be stored in any order."""
    specs = param_specs()
    embedding = gathered(params["embedding"], specs["embedding"], mesh, config.dtype)
    angles = rotary_angles(batch.positions, config)
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"], is_leaf=lambda x: isinstance(x, P))

    def by_token(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, TOKENS))

    @functools.partial(jax.checkpoint, policy=KEEP[keep], prevent_cse=False)  # inside scan nothing can be merged anyway
    def layer(x, weights):
        weights = gathered(weights, layer_specs, mesh, config.dtype)
        return by_token(decoder_layer(x, weights, angles, batch, attend)), None

    x = by_token(math.sqrt(config.width) * embedding[batch.tokens])  # small embeddings give logits near zero below
    x, _ = jax.lax.scan(layer, x, params["layers"])
    wide = jnp.promote_types(config.dtype, jnp.float32)
    logits = jnp.einsum("btd,vd->btv", rms_norm(x, params["norm"]), embedding, preferred_element_type=wide)
    has_label = batch.labels >= 0
    picked = jnp.take_along_axis(logits, jnp.where(has_label, batch.labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.where(has_label, losses, 0).sum() / jnp.maximum(has_label.sum(), 1)
