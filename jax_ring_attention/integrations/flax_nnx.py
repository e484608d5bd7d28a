"""Ring attention as the `attention_fn` of `flax.nnx.MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax.nnx.nn import dtypes

from jax_ring_attention.integrations.common import TokenMask, check_ring_options
from jax_ring_attention.integrations.flax_common import attend_as_flax


def ring_attention_fn(**ring_options: Any) -> Callable[..., jax.Array]:
    """An `attention_fn` that computes what `flax.nnx.dot_product_attention` does, on a ring.

        layer = nnx.MultiHeadAttention(
            num_heads=8, in_features=512, decode=False, rngs=nnx.Rngs(0),
            attention_fn=ring_attention_fn(mesh=mesh, spec=P("data", "seq")),
        )
        out = layer(x, is_causal=True)  # x: [batch..., length, features]
        out = layer(x, is_causal=True, mask=TokenMask(segment_ids=document_of_token))

    The layer stays flax's own, so parameters, checkpoints and sharding annotations are untouched; an existing layer is switched
    by `layer.attention_fn = ring_attention_fn(...)`.

    Args:
      **ring_options: keywords of `jax_ring_attention.ring_attention`, which explains them: is_causal, local_window_size, scale,
        logits_soft_cap, sinks, implementation, block_sizes, segment_ids, positions, query_seq_lengths,
        key_value_seq_lengths and, for the ring, mesh, spec, axis_name, layout, schedule. What changes from call to call
        goes into `mask=TokenMask(...)` instead.

    Returns:
      A function of `flax.nnx.dot_product_attention`'s arguments. Of these it
      * honours query, key, value [batch..., length, heads, dim] with any number of batch axes and grouped heads; bias; mask
        (dense, of any dtype, or `TokenMask`); dtype and promote_dtype; precision, in both directions; is_causal (causal if the
        call or the option says so); decode=True of the layer, whose cache comes as keys and mask, one query at a time;
      * refuses, by ValueError, dropout_rate > 0 unless deterministic, and module, which is sow_weights=True: both need the
        weights, which never exist; and input_positions, which are for rotary embeddings: this function rotates nothing;
      * has no use for dropout_rng and broadcast_dropout, which say how to drop, since it never does.

    Raises:
      ValueError, TypeError: options that are no options of a layer.

    Differs from flax in rows that may see no key: 0 here, the mean of all values there. Statistics are float32 for any dtype.
    """
    options = check_ring_options("ring_attention_fn", ring_options)

    def attention_fn(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | TokenMask | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        if input_positions is not None:
            raise ValueError(
                "input_positions are for rotary embeddings, and ring attention rotates nothing: wrap this function in one that "
                "rotates query and key and then calls it without them. Positions for the mask go into "
                "mask=TokenMask(positions=...)."
            )
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
        return attend_as_flax(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            precision=precision,
            module=module,
            options=options,
            is_causal=is_causal,
        )

    return attention_fn
