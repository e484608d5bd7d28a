"""What the framework modules share: `TokenMask`, options that are fixed when a layer is built, and the call."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ring_attention import arguments as args
from jax_ring_attention.api import ring_attention
from jax_ring_attention.masks import Positions, SegmentIds

#: Keywords of `ring_attention` that a layer can be built with. The layer itself passes the others, or has no use for them.
RING_OPTIONS = frozenset(
    name
    for name, parameter in inspect.signature(ring_attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "return_residual"
)


class TokenMask(NamedTuple):
    """A mask as integers per token, to be passed as the `mask` of a layer: O(T) where a dense mask is T x S.

        layer(x, mask=TokenMask(segment_ids=document_of_token))

    It is a pytree, so it goes through `jax.jit`, `jax.vmap` and a model's own layers like an array. Each field means what it
    means in `jax_ring_attention.ring_attention`, where batch axes of the layer stand for B.

    Attributes:
      segment_ids: int [batch..., T] or (T,), or `SegmentIds(query, key_value)`; negative is padding.
      positions: int likewise, or `Positions(query, key_value)`; replaces the positions that the layout implies.
      query_seq_lengths: int [batch...], the number of real query tokens.
      key_value_seq_lengths: int [batch...], the number of real key/value tokens.
      mask: bool, broadcasts to [batch..., heads, T, S]; a dense mask besides.
    """

    segment_ids: jax.Array | SegmentIds | None = None
    positions: jax.Array | Positions | None = None
    query_seq_lengths: jax.Array | None = None
    key_value_seq_lengths: jax.Array | None = None
    mask: jax.Array | None = None

    @property
    def ndim(self) -> int:
        """What flax asks of a mask before it combines it with another: there is no answer, and this says what to do."""
        raise AttributeError(
            "a TokenMask does not combine with dense masks, nor with the cache's mask under decode=True: put the dense mask into "
            "TokenMask(mask=...), and pass a dense mask to a layer that decodes."
        )


def check_ring_options(function: str, options: dict[str, Any]) -> dict[str, Any]:
    """`options` if they are keywords of `ring_attention` that a layer can fix beforehand; else an error with the remedy."""
    for name in ("mask", "bias"):
        if name in options:
            raise ValueError(
                f"{function}() got {name}=, which belongs to a call of the layer, not to its construction; pass it there "
                "(mask=TokenMask(...) takes integers per token)."
            )
    if "return_residual" in options:
        raise ValueError(
            f"{function}() got return_residual={options['return_residual']!r}, but a layer has one output; call ring_attention "
            "in a layer of your own to have the log-sum-exp too."
        )
    args.refuse_keywords(function, {name: x for name, x in options.items() if name not in RING_OPTIONS})
    return options


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | TokenMask | None,
    options: dict[str, Any],
    is_causal: bool = False,
) -> jax.Array:
    """`ring_attention` of heads [batch..., length, heads, dim] with any number of batch axes.

    `options` were fixed when the layer was built; `mask`, `bias` and `is_causal` came with this call. Causal if either says so.
    """
    _check_lengths(query.shape[-3], key.shape[-3], mask, options)
    batch = query.shape[:-3]
    if len(batch) > 1:
        query, key, value = (_merge_batch(x, batch) for x in (query, key, value))
        bias = _merge_dense(bias, batch)
    options = options | {"is_causal": options.get("is_causal", False) or is_causal}
    if isinstance(mask, TokenMask):
        for name, x in mask._asdict().items():
            if x is None or name == "mask":
                continue
            if options.get(name) is not None:
                raise ValueError(
                    f"{name} was given when the layer was built and again in TokenMask; leave it out of one of them."
                )
            is_length = name.endswith("lengths")
            options[name] = jnp.reshape(x, -1) if is_length else jax.tree.map(_merge_tokens, x)
        mask = mask.mask
    if len(batch) > 1:
        mask = _merge_dense(mask, batch)
    out = ring_attention(query, key, value, bias, mask, **options)
    return out.reshape(*batch, *out.shape[-3:]) if len(batch) > 1 else out


def _check_lengths(length: int, key_length: int, mask: Any, options: dict[str, Any]) -> None:
    """A layer built to be causal must not meet a decode step, whose one query is the newest token and not the first."""
    placed = options.get("positions") is not None or (isinstance(mask, TokenMask) and mask.positions is not None)
    if length == key_length or placed:
        return
    for name, unlimited in (("is_causal", False), ("local_window_size", None)):
        if options.get(name, unlimited) is not unlimited:
            raise ValueError(
                f"the layer was built with {name}={options[name]!r}, which counts positions of queries and keys from 0, but has "
                f"{length} queries and {key_length} keys here, as with decode=True: pass TokenMask(positions=Positions(query, "
                f"key_value)), or leave {name} out of the layer that decodes (the cache's own mask is causal)."
            )


def _merge_batch(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    if x.shape[:-3] != batch:
        raise ValueError(f"batch axes of query, key and value must be equal; got {batch} and {x.shape[:-3]}.")
    return x.reshape(math.prod(batch), *x.shape[-3:])


def _merge_dense(x: jax.Array | None, batch: tuple[int, ...]) -> jax.Array | None:
    """A mask or bias that broadcasts to [batch..., heads, T, S], to rank 4 at most."""
    if x is None or x.ndim < 4:
        return x
    lead = (1,) * (len(batch) + 3 - x.ndim) + x.shape[:-3]
    if all(n == 1 for n in lead):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])


def _merge_tokens(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x
