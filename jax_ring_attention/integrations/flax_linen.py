"""Ring attention as the `attention_fn` of `flax.linen.MultiHeadDotProductAttention` and `MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jax_ring_attention.integrations.common import TokenMask, check_ring_options
from jax_ring_attention.integrations.flax_common import attend_as_flax


def ring_attention_fn(**ring_options: Any) -> Callable[..., jax.Array]:
    """An `attention_fn` that computes what `flax.linen.dot_product_attention` does, on a ring.

        layer = nn.MultiHeadDotProductAttention(
            num_heads=8, attention_fn=ring_attention_fn(is_causal=True, mesh=mesh, spec=P("data", "seq"))
        )
        out = layer.apply(variables, x)  # x: [batch..., length, features]
        out = layer.apply(variables, x, mask=TokenMask(segment_ids=document_of_token))

    The layer stays flax's own, so parameters and checkpoints are untouched; `layer.clone(attention_fn=...)` switches one.

    Args:
      **ring_options: keywords of `jax_ring_attention.ring_attention`, which explains them: is_causal, local_window_size, scale,
        logits_soft_cap, sinks, implementation, block_sizes, segment_ids, positions, query_seq_lengths,
        key_value_seq_lengths and, for the ring, mesh, spec, axis_name, layout, schedule. What changes from call to call
        goes into `mask=TokenMask(...)` instead.

    Returns:
      A function of `flax.linen.dot_product_attention`'s arguments. Of these it
      * honours query, key, value [batch..., length, heads, dim] with any number of batch axes; bias; mask (dense, of any dtype,
        or `TokenMask`); dtype; precision, in both directions; force_fp32_for_softmax (statistics are float32 either way; when
        True the output is float32 too, as in flax); decode=True of the layer, whose cache comes as keys and mask, one query at
        a time: there leave is_causal out, as the cache's mask is causal;
      * refuses, by ValueError, dropout_rate > 0 unless deterministic, and module, which is sow_weights=True: both need the
        weights, which never exist; einsum_dot_general, qk_attn_weights_einsum and attn_weights_value_einsum, since the matmuls
        are the kernels' own;
      * has no use for dropout_rng and broadcast_dropout, which say how to drop, since it never does.

    Raises:
      ValueError, TypeError: options that are no options of a layer.

    Differs from flax in rows that may see no key: 0 here, the mean of all values there.
    """
    options = check_ring_options("ring_attention_fn", ring_options)

    # Linen passes only what the signature names, so an argument that is missing here would be dropped without a word.
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
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Callable[..., jax.Array] | None = None,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        for name, einsum in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if einsum is not None:
                raise ValueError(
                    f"{name}={einsum!r}: ring attention's matmuls are its kernels' own, so that it cannot stand in for them. "
                    "Leave it out (a layer passes what its qk_attn_weights_einsum_cls and attn_weights_value_einsum_cls make); "
                    "precision and dtype are honoured."
                )
        query, key, value = promote_dtype(query, key, value, dtype=dtype)
        out = attend_as_flax(
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
        )
        return out.astype(jnp.promote_types(out.dtype, jnp.float32)) if force_fp32_for_softmax else out

    return attention_fn
