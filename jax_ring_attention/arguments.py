"""From what a user passes to one normal form, or to an error that says what to do.

Normal form: BTNH / BSKH arrays, a reach for causal and window, integers with a batch axis, dense arrays of rank 4.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring_attention.kernels.contract import BlockSizes
from jax_ring_attention.masks import MAX_POSITION, Positions, SegmentIds
from jax_ring_attention.schedule import Reach

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def as_btnh(name: str, x: Any, rank: int) -> jax.Array:
    """(L, D), (L, heads, D) or (B, L, heads, D), all of one rank, to the last of these."""
    x = jnp.asarray(x)
    if x.ndim != rank:
        raise ValueError(
            f"{name} has shape {x.shape}, rank {x.ndim}, but query has rank {rank}; "
            "query, key and value must all be (T, H), (T, N, H) or (B, T, N, H)."
        )
    if rank == 2:
        return x[None, :, None, :]
    return x[None] if rank == 3 else x


def query_rank(query: Any) -> int:
    rank = jnp.ndim(query)
    if rank not in (2, 3, 4):
        raise ValueError(
            f"query has shape {jnp.shape(query)}, rank {rank}; it must be (T, H), (T, N, H) or (B, T, N, H), "
            "batch first, then tokens, then heads."
        )
    return rank


def drop_leading(x: jax.Array, rank: int, heads_axis: int = 2) -> jax.Array:
    """Inverse of `as_btnh`, also for lse (B, T, N)."""
    if rank == 2:
        return jnp.squeeze(x, (0, heads_axis))
    return jnp.squeeze(x, 0) if rank == 3 else x


def check_query_key_value(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Shapes BTNH, BSKH, BSKHv and dtypes that attention is defined for."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype.name not in _FLOATS:
            raise ValueError(f"{name} has dtype {x.dtype}; use one of {', '.join(_FLOATS)}.")
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}, which holds nothing; every axis needs at least one entry.")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; cast them to one dtype, "
            "for example key.astype(query.dtype)."
        )
    b, _, n, h = query.shape
    if key.shape[0] != b or value.shape[0] != b:
        raise ValueError(f"batch sizes differ: query {query.shape}, key {key.shape}, value {value.shape}; axis 0 must be equal.")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key {key.shape} and value {value.shape} must agree in length (axis 1) and number of heads (axis 2).")
    if key.shape[3] != h:
        raise ValueError(f"query head dim {h} and key head dim {key.shape[3]} must be equal (only value's may differ).")
    if n % key.shape[2]:
        hint = ""
        if query.shape[1] < n:
            hint = " The arrays look like (B, heads, T, H); this function takes (B, T, heads, H)."
        raise ValueError(f"{n} query heads cannot share {key.shape[2]} key/value heads evenly; N must be a multiple of K.{hint}")


def attention_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, jax.core.Tracer) or jnp.ndim(scale) != 0:
        raise ValueError(
            f"scale={scale!r} must be a Python number; for a scale that is computed or learned, multiply query by it "
            "and pass scale=1.0."
        )
    return float(scale)


def attention_soft_cap(logits_soft_cap: Any) -> float | None:
    if logits_soft_cap is None:
        return None
    if isinstance(logits_soft_cap, jax.core.Tracer) or jnp.ndim(logits_soft_cap) != 0 or not 0 < logits_soft_cap < math.inf:
        raise ValueError(f"logits_soft_cap={logits_soft_cap!r} must be a positive Python number, or None for no cap.")
    return float(logits_soft_cap)


def attention_reach(is_causal: Any, local_window_size: Any) -> Reach:
    """(left, right): a query at q sees keys in [q - left, q + right]. Causal is right = 0."""
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal={is_causal!r} must be True or False.")
    if local_window_size is None:
        left = right = None
    elif isinstance(local_window_size, Sequence):
        if len(local_window_size) != 2:
            raise ValueError(f"local_window_size={local_window_size!r} must be (left, right) or one int for both sides.")
        left, right = (None if x is None else _window_side(x, local_window_size) for x in local_window_size)
    else:
        left = right = _window_side(local_window_size, local_window_size)
    return left, 0 if is_causal else right


def _window_side(side: Any, window: Any) -> int | None:
    try:
        side = operator.index(side)
    except TypeError:
        side = -1
    if side < 0 or isinstance(window, bool):
        raise ValueError(
            f"local_window_size={window!r} must hold ints >= 0: how many tokens to the left and right a query sees "
            "besides its own position. None on either side means unbounded."
        )
    return None if side >= MAX_POSITION else side


def attention_block_sizes(block_sizes: Any) -> BlockSizes:
    if block_sizes is None:
        return BlockSizes()
    if isinstance(block_sizes, int) and not isinstance(block_sizes, bool):
        block_sizes = (block_sizes, block_sizes)
    try:
        sizes = BlockSizes(*(None if x is None else operator.index(x) for x in block_sizes))
    except TypeError:
        sizes = BlockSizes(0, 0)
    if any(x is not None and x < 1 for x in sizes):
        raise ValueError(
            f"block_sizes={block_sizes!r} must be BlockSizes(block_q, block_kv), a pair or one int, each at least 1."
        )
    return sizes


def attention_deterministic(deterministic: Any) -> bool:
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic={deterministic!r} must be True or False.")
    return deterministic


def token_sides(
    name: str, given: Any, batch: int, query_length: int, key_length: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """One array for both sides, or `Positions` / `SegmentIds`, to (B | 1, T) and (B | 1, S) int32."""
    kind = {"positions": Positions, "segment_ids": SegmentIds}[name]
    if given is None:
        return None, None
    if isinstance(given, kind):
        query, key = given
        if name == "segment_ids" and (query is None or key is None):
            raise ValueError("segment_ids=SegmentIds(query, key_value) needs both sides; use zeros for one document.")
    elif isinstance(given, Positions | SegmentIds | tuple | list):
        raise ValueError(
            f"{name} must be one array for query and key alike, or {kind.__name__}(query, key_value); got {type(given).__name__}."
        )
    elif query_length != key_length:
        raise ValueError(
            f"{name} is one array but query has {query_length} tokens and key {key_length}; "
            f"pass {kind.__name__}(query=..., key_value=...)."
        )
    else:
        query = key = given
    return (
        _token_array(f"{name} of the query", query, batch, query_length),
        _token_array(f"{name} of key and value", key, batch, key_length),
    )


def _token_array(name: str, x: Any, batch: int, length: int) -> jax.Array | None:
    if x is None:
        return None
    x = _int_array(name, x)
    if x.shape not in ((length,), (1, length), (batch, length)):
        raise ValueError(f"{name} has shape {x.shape}; it must be ({length},) or ({batch}, {length}), in stored order.")
    return x.reshape(-1, length)


def row_lengths(name: str, x: Any, batch: int) -> jax.Array | None:
    if x is None:
        return None
    x = _int_array(name, x)
    if x.shape != (batch,):
        raise ValueError(f"{name} has shape {x.shape}; it must be ({batch},), the number of real tokens of each row.")
    return x


def _int_array(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}; it must hold integers.")
    return x.astype(jnp.int32)


def dense_array(name: str, x: Any, shape: tuple[int, int, int, int]) -> jax.Array | None:
    """A mask (bool) or bias (float) that broadcasts to `shape` (B, N, T, S), to rank 4."""
    if x is None:
        return None
    x = jnp.asarray(x)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"mask has dtype {x.dtype}; it must be bool, True where a query may see a key. "
            "Additive masks go into bias; for 0/1 integers pass mask.astype(bool)."
        )
    if name == "bias" and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"bias has dtype {x.dtype}; it must be floating point. Boolean masks go into mask.")
    full = (1,) * (4 - x.ndim) + x.shape
    if len(full) != 4 or any(have not in (1, want) for have, want in zip(full, shape, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to (B, N, T, S) = {shape}. "
            "On a mesh T counts this call's queries and S the keys of the whole ring."
        )
    return x.reshape(full)


def sink_logits(x: Any, heads: int) -> jax.Array | None:
    if x is None:
        return None
    x = jnp.asarray(x)
    if x.shape != (heads,) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"sinks has shape {x.shape} and dtype {x.dtype}; it must be ({heads},) floats, a logit per head.")
    return x


def refuse_keywords(function: str, unsupported: dict[str, Any]) -> None:
    """A TypeError for keywords that do not exist, naming the remedy for those that people expect."""
    if not unsupported:
        return
    name = next(iter(unsupported))
    hint = ""
    if "dropout" in name:
        hint = " Attention dropout is not supported: leave it out, or apply dropout to the output."
    elif name in ("causal", "window_size", "sm_scale", "softcap", "attn_mask", "attn_bias"):
        renamed = {
            "causal": "is_causal",
            "window_size": "local_window_size",
            "sm_scale": "scale",
            "softcap": "logits_soft_cap",
            "attn_mask": "mask",
            "attn_bias": "bias",
        }
        hint = f" Use {renamed[name]}."
    raise TypeError(f"{function}() has no argument {name!r} (got {unsupported[name]!r}).{hint}")
