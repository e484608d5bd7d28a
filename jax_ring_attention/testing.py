"""Tools for testing attention: emulated devices, inputs, a dense float64 reference, and comparison with earned tolerances.

A tolerance is earned, not chosen: the error against float64 may be at most a small multiple of what a dense computation in the
same dtype makes on the same inputs. A test of attention in your own model needs a mesh, inputs, the mask straight from its
definition, and one call:

    >>> from jax.sharding import PartitionSpec as P
    >>> from jax_ring_attention import ring_attention
    >>> from jax_ring_attention.testing import assert_matches_dense, cpu_mesh, random_inputs, visible_pairs
    >>> mesh = cpu_mesh(seq=8)  # before anything else uses JAX, for example at the top of conftest.py
    >>> def attention(query, key, value):
    ...     return ring_attention(query, key, value, is_causal=True, layout="zigzag", mesh=mesh, spec=P(None, "seq"))
    >>> inputs = random_inputs(seed=0, batch=2, query_length=32, heads=4, kv_heads=2)
    >>> seen = visible_pairs(32, 32, is_causal=True)[:, None]
    >>> errors = assert_matches_dense(attention, inputs, seen, layout="zigzag", num_shards=8)
    >>> errors.d_key < 1e-6  # what was measured, if you want to know
    True

"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ring_attention.layouts import Layout, from_layout, to_layout


def emulated_devices(count: int) -> list[jax.Device]:
    """`count` emulated CPU devices of this process; with a GPU or TPU as well, next to it.

    JAX fixes their number when it first touches a device, so the first call belongs at the top of conftest.py, with the largest
    number that any test needs. Later calls give the first `count` of them.

    Raises:
      ValueError: count < 1, or JAX is already up with fewer.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1: the number of emulated devices.")
    config: Any = jax.config  # its options are attributes that type checkers do not know
    if config.jax_num_cpu_devices < count:
        with contextlib.suppress(RuntimeError):  # already up; perhaps with enough devices from XLA_FLAGS, which are counted next
            config.update("jax_num_cpu_devices", count)
    devices = jax.local_devices(backend="cpu")
    if len(devices) < count:
        raise ValueError(
            f"{count} emulated CPU devices are wanted but JAX is already up with {len(devices)}: call emulated_devices({count}) "
            f"or jax.config.update('jax_num_cpu_devices', {count}) before anything uses JAX, as at the top of conftest.py."
        )
    return devices[:count]


def cpu_mesh(axis_type: AxisType = AxisType.Auto, /, **axis_sizes: int) -> Mesh:
    """A mesh of emulated CPU devices, for example `cpu_mesh(data=2, seq=4)`; axis types Auto, or all `axis_type`.

    Raises:
      ValueError: no axis, a size below 1, or JAX is already up with too few devices (`emulated_devices`).
    """
    if not axis_sizes or min(axis_sizes.values()) < 1:
        raise ValueError(f"axis sizes {axis_sizes} must name at least one axis, each of size 1 or more: cpu_mesh(seq=8).")
    sizes = tuple(axis_sizes.values())
    types = (axis_type,) * len(sizes)
    return jax.make_mesh(sizes, tuple(axis_sizes), axis_types=types, devices=emulated_devices(math.prod(sizes)))


class AttentionInputs(NamedTuple):
    """Query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv) and an output cotangent (B, T, N, Hv)."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    d_out: jax.Array


def random_inputs(
    seed: int,
    batch: int = 1,
    query_length: int = 16,
    key_length: int | None = None,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 8,
    value_dim: int | None = None,
    dtype: Any = jnp.float32,
    spread: float = 1.0,
) -> AttentionInputs:
    """Normal inputs of standard deviation `spread` and a normal cotangent. Unset sizes follow their neighbour.

    bfloat16 errors hide at unit variance; test with spread=5 as well.
    """
    key_length = query_length if key_length is None else key_length
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    rng = np.random.default_rng(seed)

    def draw(*shape, spread=spread):
        return jnp.asarray(rng.normal(size=shape) * spread, dtype)

    return AttentionInputs(
        draw(batch, query_length, heads, head_dim),
        draw(batch, key_length, kv_heads, head_dim),
        draw(batch, key_length, kv_heads, value_dim),
        draw(batch, query_length, heads, value_dim, spread=1.0),
    )


def visible_pairs(
    query_length: int,
    key_length: int,
    *,
    batch: int = 1,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    positions: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    natural: tuple[Any, Any] | None = None,
) -> np.ndarray:
    """(B, T, S) bool in numpy: which query may see which key, straight from the definition.

    `natural` gives the natural index of every stored token of both sides (default: stored in natural order); the rest is as in
    `ring_attention`, with a pair for the two sides where they differ.
    """

    def sides(given):
        return given if isinstance(given, tuple) else (given, given)

    def per_row(x, length):
        return np.broadcast_to(np.asarray(x), (batch, length))

    lengths = (query_length, key_length)
    index = [per_row(np.arange(n) if natural is None else natural[i], n) for i, n in enumerate(lengths)]
    place = [
        per_row(x, n) if x is not None else natural_index
        for x, n, natural_index in zip(sides(positions), lengths, index, strict=True)
    ]
    seen = np.ones((batch, query_length, key_length), bool)
    distance = place[1][:, None, :].astype(np.int64) - place[0][:, :, None]
    if is_causal:
        seen &= distance <= 0
    if local_window_size is not None:
        left, right = sides(local_window_size)
        seen &= True if left is None else distance >= -left
        seen &= True if right is None else distance <= right
    if segment_ids is not None:
        query, key = (per_row(x, n) for x, n in zip(sides(segment_ids), lengths, strict=True))
        seen &= (query[:, :, None] == key[:, None, :]) & (query[:, :, None] >= 0)
    for axis, given in ((0, query_seq_lengths), (1, key_value_seq_lengths)):
        if given is not None:
            real = index[axis] < np.asarray(given)[:, None]
            seen &= real[:, :, None] if axis == 0 else real[:, None, :]
    return seen


def dense_attention(
    query: Any,
    key: Any,
    value: Any,
    seen: Any = None,
    *,
    bias: Any = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    sinks: Any = None,
    dtype: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention with the whole score matrix, `(out, lse)`, differentiable, in `dtype` (None: float64 if enabled, else float32).

    `seen` broadcasts to (B, N, T, S). A row without keys gives 0 and -inf. Only a bias of -inf hides; keys that nobody sees
    are left out of all sums.
    """
    dtype = jnp.dtype(dtype) if dtype is not None else jnp.asarray(np.float64(0)).dtype
    query, key, value = (jnp.asarray(x).astype(dtype) for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    seen = jnp.broadcast_to(jnp.ones((), bool) if seen is None else jnp.asarray(seen), shape)
    if bias is not None:
        seen = seen & (jnp.asarray(bias) != -jnp.inf)
        bias = jnp.where(jnp.asarray(bias) == -jnp.inf, 0, jnp.asarray(bias)).astype(dtype)
    by_kv_head = seen.reshape(shape[0], -1, group, *shape[2:])
    useful = jnp.moveaxis(by_kv_head.any((2, 3)), 1, 2)[..., None]
    key, value = (jnp.repeat(jnp.where(useful, x, 0), group, axis=2) for x in (key, value))
    query = jnp.where(jnp.moveaxis(seen.any(-1), 1, 2)[..., None], query, 0)
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) * jnp.asarray(scale, dtype)
    if bias is not None:
        logits = logits + bias
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = jnp.where(seen, logits, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(jnp.asarray(sinks).astype(dtype)[None, :, None, None], (*shape[:3], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(top == -jnp.inf, 0, top))
    total = weights.sum(-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    weights = weights / total[..., None]
    lse = jnp.where(empty, -jnp.inf, jnp.where(empty, 0, top[..., 0]) + jnp.log(total))
    out = jnp.einsum("bnts,bsnv->btnv", weights[..., : shape[3]], value)
    return out, jnp.moveaxis(lse, 1, 2)


class Expected(NamedTuple):
    """What dense attention gives: outputs, and gradients for the cotangents that were passed; None where nothing was given."""

    out: Any
    lse: Any
    d_query: Any
    d_key: Any
    d_value: Any
    d_bias: Any = None
    d_sinks: Any = None


def dense_expected(
    inputs: AttentionInputs,
    seen: Any = None,
    *,
    bias: Any = None,
    sinks: Any = None,
    d_lse: Any = None,
    dtype: Any = np.float64,
    **options: Any,
) -> Expected:
    """`dense_attention` and its gradients as numpy arrays, in float64 whatever `jax_enable_x64` says, or in another `dtype`.

    `d_lse` (B, T, N) adds a cotangent for lse (rows without keys pass none). Options are those of `dense_attention`.
    """
    is_double = jnp.dtype(dtype) == np.float64
    with jax.enable_x64(is_double or jnp.zeros((), float).dtype == np.float64):
        arrays = [None if x is None else np.asarray(x).astype(dtype) for x in (*inputs[:3], bias, sinks)]
        d_lse = np.zeros(inputs.query.shape[:3]) if d_lse is None else np.asarray(d_lse)
        cotangents = (np.asarray(inputs.d_out).astype(dtype), d_lse.astype(dtype))
        result = _dense_vjp(tuple(arrays), seen, cotangents, dtype=np.dtype(dtype), **options)
        return Expected(*(None if x is None else np.asarray(x) for x in result))


@functools.partial(jax.jit, static_argnames=("dtype", "scale", "logits_soft_cap"))
def _dense_vjp(arrays: Any, seen: Any, cotangents: Any, **options: Any) -> tuple[Any, ...]:
    """out, lse and the gradients of query, key, value, bias and sinks."""

    def attend(query, key, value, bias, sinks):
        return dense_attention(query, key, value, seen, bias=bias, sinks=sinks, **options)

    (out, lse), pull = jax.vjp(attend, *arrays)
    d_out, d_lse = cotangents
    return (out, lse, *pull((d_out, jnp.where(lse == -jnp.inf, 0, d_lse))))


def earned_tolerances(inputs: AttentionInputs, expected: Expected, seen: Any = None, **options: Any) -> Expected:
    """Per quantity, the relative error that may be made: 2x (gradients 3x) that of dense attention in the inputs' own dtype.

    Never below half a unit in the last place, since dense can be right by luck. Options as for `dense_expected`.
    """
    dtype = inputs.query.dtype
    plain = dense_expected(inputs, seen, dtype=dtype, **options)
    unit = float(jnp.finfo(dtype).eps)

    def allowed(name, have, want):
        if want is None:
            return None
        return max((2 if name in ("out", "lse") else 3) * relative_error(have, want), unit / 2)

    return Expected(*(allowed(name, a, b) for name, a, b in zip(Expected._fields, plain, expected, strict=True)))


def relative_error(have: Any, want: Any) -> float:
    """||have - want|| / ||want|| in float64; inf for NaN or for infinities in different places."""
    have, want = (np.asarray(x, np.float64) for x in (have, want))
    if have.shape != want.shape:
        raise AssertionError(f"shapes differ: have {have.shape}, want {want.shape}")
    finite = np.isfinite(want)
    if not (np.array_equal(finite, np.isfinite(have)) and np.array_equal(have[~finite], want[~finite])):
        return float("inf")
    norm = np.linalg.norm(want[finite])
    return float(np.linalg.norm(have[finite] - want[finite]) / (norm if norm else 1.0))


def assert_close(have: Any, want: Any, tolerance: float, names: Sequence[str] | None = None) -> None:
    """Every leaf of `have` within `tolerance` (relative, in norm) of its partner in `want`; infinities must agree exactly."""
    haves, wants = jax.tree.leaves(have), jax.tree.leaves(want)
    if len(haves) != len(wants):
        raise AssertionError(f"have {len(haves)} arrays, want {len(wants)}")
    errors = [relative_error(a, b) for a, b in zip(haves, wants, strict=True)]
    labels = names or [str(i) for i in range(len(errors))]
    report = ", ".join(f"{name} {error:.2e}" for name, error in zip(labels, errors, strict=False))
    if not all(error <= tolerance for error in errors):
        raise AssertionError(f"relative errors [{report}] exceed {tolerance:.1e}")


def value_and_grads(attention: Callable[..., Any], arguments: Sequence[Any], d_out: Any) -> tuple[Any, tuple[Any, ...]]:
    """`attention(*arguments)` and its gradients for the cotangent(s) `d_out`, under one `jax.jit`."""

    @jax.jit
    def both(arguments, d_out):
        out, pull = jax.vjp(attention, *arguments)
        return out, pull(jax.tree.map(lambda x, like: x.astype(like.dtype), d_out, out))

    return both(tuple(arguments), d_out)


def assert_matches_dense(
    attention: Callable[..., Any],
    inputs: AttentionInputs,
    seen: Any = None,
    *,
    bias: Any = None,
    sinks: Any = None,
    d_lse: Any = None,
    layout: Layout = "contiguous",
    num_shards: int = 1,
    tolerance: float | None = None,
    **options: Any,
) -> Expected:
    """`attention` gives what dense float64 attention gives: the output, lse if it returns one, and every gradient.

    Args:
      attention: `attention(query, key, value)` returns `out` or `(out, lse)`. It also gets those of `bias` and `sinks` that are
        given, by keyword, and is differentiated in all of them. It must be traceable by `jax.jit`.
      inputs: from `random_inputs`, in natural order. Their d_out is the cotangent of the output.
      seen: bool, broadcasts to (B, N, T, S): the mask that `attention` should apply, in natural order (`visible_pairs`).
      bias, sinks: differentiable arguments, as in `ring_attention`; the bias in natural order.
      d_lse: (B, T, N) cotangent of lse; default normal numbers. Refused where `attention` returns no lse.
      layout, num_shards: the order in which `attention` gets query, key, value and bias, and returns out and lse (`to_layout`).
        The comparison is in natural order.
      tolerance: one relative error for everything, instead of the earned ones.
      options: `scale` and `logits_soft_cap`, for the dense side.

    Returns:
      The relative errors found, in norm; None for what was not given.

    Raises:
      AssertionError: with every error and what was allowed. ValueError: d_lse without lse.

    Float32 with `spread=5` earns less than a flash attention can do: its backward pass takes probabilities from a float32 lse,
    and an lse far from zero is rounded coarsely. Give a `tolerance` there.
    """

    def store(x, axis=1):
        return to_layout(x, layout, num_shards, axis)

    def store_bias(x):
        x = x if x.shape[-2] == 1 else store(x, -2)
        return x if x.shape[-1] == 1 else store(x, -1)

    def attend(query, key, value, extra):
        extra = {name: store_bias(x) if name == "bias" else x for name, x in extra.items()}
        result = attention(store(query), store(key), store(value), **extra)
        return jax.tree.map(lambda x: from_layout(x, layout, num_shards), result)

    extra = {name: jnp.asarray(x) for name, x in (("bias", bias), ("sinks", sinks)) if x is not None}
    returns_lse = isinstance(jax.eval_shape(attend, *inputs[:3], extra), tuple)
    if d_lse is not None and not returns_lse:
        raise ValueError("d_lse is given but attention returns out alone; return (out, lse), or leave d_lse out.")
    if d_lse is None and returns_lse:
        d_lse = np.random.default_rng(inputs.query.size).normal(size=inputs.query.shape[:3])
    given = {"bias": bias, "sinks": sinks, "d_lse": d_lse, **options}
    want = dense_expected(inputs, seen, **given)
    if tolerance is None:
        limits = earned_tolerances(inputs, want, seen, **given)
    else:
        limits = Expected._make([tolerance] * len(Expected._fields))

    cotangents = (inputs.d_out, jnp.asarray(d_lse)) if returns_lse else inputs.d_out
    result, (*grads, d_extra) = value_and_grads(attend, (*inputs[:3], extra), cotangents)
    out, lse = result if returns_lse else (result, None)
    have = (out, lse, *grads, d_extra.get("bias"), d_extra.get("sinks"))
    errors = Expected._make(None if x is None else relative_error(x, y) for x, y in zip(have, want, strict=True))
    found = [x for x in zip(Expected._fields, errors, limits, strict=True) if x[1] is not None]
    if not all(error <= limit for _, error, limit in found):
        report = ", ".join(f"{name} {error:.2e} (allowed {limit:.1e})" for name, error, limit in found)
        raise AssertionError(f"relative errors against dense float64 attention: {report}")
    return errors
