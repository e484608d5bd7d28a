"""What `attention_fn` means in flax, for both of its APIs: every keyword honoured, or refused by name with the remedy.

Their functions and layers say the same words: bias, mask, dropout, precision, module. Only what differs stands in `flax_nnx`
and `flax_linen`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring_attention import compat
from jax_ring_attention.integrations.common import TokenMask, attend


def attend_as_flax(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    bias: jax.Array | None,
    mask: jax.Array | TokenMask | None,
    dropout_rate: float,
    deterministic: bool,
    precision: Any,
    module: Any,
    options: dict[str, Any],
    is_causal: bool = False,
) -> jax.Array:
    """`attend` after flax's words for it; query, key and value are promoted to one dtype already."""
    if dropout_rate > 0 and not deterministic:
        raise ValueError(
            f"dropout_rate={dropout_rate} with deterministic={deterministic}: ring attention never holds the weights that this "
            "would drop. Build the layer with dropout_rate=0 and apply nn.Dropout / nnx.Dropout to its output, or pass "
            "deterministic=True."
        )
    if module is not None:
        raise ValueError(
            f"sow_weights=True (module={type(module).__name__}): ring attention never holds the T x S weights that this would "
            "sow. Leave it out, or give the layer that you inspect flax's own dot_product_attention."
        )
    if mask is not None:  # flax's mask helpers make floats; what is not 0 is visible
        mask = mask._replace(mask=_as_bool(mask.mask)) if isinstance(mask, TokenMask) else _as_bool(mask)
    with jax.default_matmul_precision(precision_name(precision)):
        return attend(query, key, value, bias, mask, options, is_causal)


def _as_bool(mask: Any) -> jax.Array | None:
    return None if mask is None else jnp.asarray(mask).astype(bool)


def precision_name(precision: Any) -> str | None:
    """A `flax.typing.PrecisionLike` as `jax.default_matmul_precision` spells it; None leaves the one in force."""
    if precision is None:
        return compat.default_matmul_precision()
    if isinstance(precision, tuple | list):
        names = {precision_name(x) for x in precision}
        if len(names) != 1:
            raise ValueError(
                f"precision={precision!r} differs between the operands; ring attention has one for all of its matmuls: pass one."
            )
        return names.pop()
    if isinstance(precision, lax.DotAlgorithmPreset):
        return precision.name
    try:
        return lax.Precision(precision).name.lower()  # also resolves its other spellings, such as "float32"
    except ValueError:
        return precision  # the name of a preset; JAX lists what it takes if it is not
