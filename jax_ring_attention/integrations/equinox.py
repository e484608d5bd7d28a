"""Ring attention as an `equinox.nn.MultiheadAttention`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from jax_ring_attention.integrations.common import RING_OPTIONS, TokenMask, attend, check_ring_options

ProcessHeads = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


class RingMultiheadAttention(eqx.nn.MultiheadAttention):
    """`equinox.nn.MultiheadAttention` whose attention runs on a ring: same fields, same parameters, same result.

        attention = RingMultiheadAttention(num_heads=8, query_size=512, key=key, is_causal=True, mesh=mesh, spec=P("data", "seq"))
        out = attention(x, x, x)  # x: (T, D), or (B, T, D) with the batch sharded as spec says
        out = jax.vmap(attention)(x, x, x)  # equinox's way of batching works too

    Leaves and their order are those of equinox's layer, so optimiser states and `eqx.tree_serialise_leaves` files interchange.
    To put a ring into a model that exists:

        model = eqx.tree_at(lambda m: m.attention, model, RingMultiheadAttention.from_attention(model.attention, **ring_options))

    Attributes:
      ring_options: keywords of `jax_ring_attention.ring_attention` that this layer passes on, as pairs; static. The rest is
        equinox's.
    """

    ring_options: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(self, *sizes: Any, **options: Any):
        """As `equinox.nn.MultiheadAttention(...)`, with ring options among the keywords.

        Args:
          *sizes: num_heads, query_size and so on, as in equinox.
          **options: the keywords of equinox's layer (`key` must be given) and of `jax_ring_attention.ring_attention`: is_causal,
            local_window_size, scale, logits_soft_cap, implementation, block_sizes and, for the ring, mesh, spec, axis_name,
            layout, schedule. They are static, so that arrays (segment_ids, positions, lengths) go into
            `mask=TokenMask(...)` at the call.

        Raises:
          ValueError: an option that is an array. TypeError: unknown keywords.
        """
        ring = {name: options.pop(name) for name in RING_OPTIONS & set(options)}
        for name in ("mask", "bias", "return_residual"):
            if name in options:
                check_ring_options("RingMultiheadAttention", {name: options[name]})
        self.ring_options = tuple(sorted(ring.items()))
        for name, x in self.ring_options:
            try:
                hash(x)
            except TypeError:
                raise ValueError(
                    f"RingMultiheadAttention() got an unhashable {name}={x!r}, but its options are static: pass integers per "
                    "token at the call, mask=TokenMask(...); sinks need a layer of your own that calls ring_attention."
                ) from None
        super().__init__(*sizes, **options)

    @classmethod
    def from_attention(cls, attention: eqx.nn.MultiheadAttention, **ring_options: Any) -> RingMultiheadAttention:
        """The same layer with the same projections and dropout, on a ring.

            ring = RingMultiheadAttention.from_attention(model.attention, mesh=mesh, spec=P("data", "seq"))

        Args:
          attention: an `equinox.nn.MultiheadAttention`, also one whose projections were replaced by other modules.
          **ring_options: as for the constructor.

        Raises:
          ValueError, TypeError: options that are no options of a layer.
        """
        check_ring_options("from_attention", ring_options)
        sizes = {name: getattr(attention, name) for name in _SIZES}
        shapes = eqx.filter_eval_shape(lambda key: cls(key=key, **sizes, **ring_options), jax.random.key(0))
        return eqx.tree_at(_parts, shapes, _parts(attention), is_leaf=lambda x: x is None)

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | TokenMask | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: ProcessHeads | None = None,
    ) -> jax.Array:
        """Attention of the projected inputs, projected again.

        Args:
          query: (T, query_size), or (B, T, query_size), which equinox's layer does not take.
          key_: (S, key_size) or (B, S, key_size).
          value: (S, value_size) or (B, S, value_size).
          mask: bool (T, S) or (num_heads, T, S), with a batch (B, num_heads, T, S) too; or `TokenMask`.
          key: a PRNG key for dropout, which is never drawn from, as in equinox where dropout is off; where it is on, the call
            is refused.
          inference: True switches dropout off, False on; None: as the layer's `dropout` says.
          deterministic: equinox's deprecated name of `inference`.
          process_heads: maps query (T, num_heads, qk_size), key and value heads to others of the same shapes, for example
            rotary embeddings; mapped over the batch.

        Returns:
          (T, output_size) or (B, T, output_size). A row that may see no key has attention 0 (in equinox: the mean of all values).

        Raises:
          ValueError: dropout that is on, and shapes that do not fit.
        """
        if deterministic is not None:
            warnings.warn("deterministic is deprecated in favour of inference, as in equinox.", DeprecationWarning, stacklevel=2)
            inference = deterministic
        self._refuse_dropout(inference)
        shapes = [x.shape for x in (query, key_, value)]
        if len({len(shape) for shape in shapes}) > 1 or len(shapes[0]) not in (2, 3) or shapes[1][:-1] != shapes[2][:-1]:
            raise ValueError(
                f"query, key and value have shapes {shapes[0]}, {shapes[1]}, {shapes[2]}: they must be (T, D), (S, D), (S, D) or "
                "all have a batch axis in front; further batch axes need jax.vmap."
            )
        heads = (self._heads(self.query_proj, query), self._heads(self.key_proj, key_), self._heads(self.value_proj, value))
        if process_heads is not None:
            process = process_heads if query.ndim == 2 else jax.vmap(process_heads)
            before = [x.shape for x in heads]
            heads = process(*heads)
            if [x.shape for x in heads] != before:
                raise ValueError(f"process_heads must keep shapes; it made {[x.shape for x in heads]} of {before}.")
        query, key_, value = heads
        out = attend(query, key_, value, None, mask, dict(self.ring_options))
        return _over_tokens(self.output_proj)(out.reshape(*out.shape[:-2], -1))

    def _refuse_dropout(self, inference: bool | None) -> None:
        rate = self.dropout.p
        is_off = self.dropout.inference if inference is None else inference
        if not is_off and not (isinstance(rate, int | float) and rate == 0):
            raise ValueError(
                f"dropout_p={rate} with inference={is_off}: ring attention never holds the weights that this would drop. Build "
                "the layer with dropout_p=0 and apply eqx.nn.Dropout to its output, or pass inference=True."
            )

    def _heads(self, projection: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return _over_tokens(projection)(x).reshape(*x.shape[:-1], self.num_heads, -1)


#: Static fields of equinox's layer that its constructor takes under the same names.
_SIZES = (
    "num_heads",
    "query_size",
    "key_size",
    "value_size",
    "output_size",
    "qk_size",
    "vo_size",
    "use_query_bias",
    "use_key_bias",
    "use_value_bias",
    "use_output_bias",
)


def _parts(attention: eqx.nn.MultiheadAttention) -> tuple[Any, ...]:
    """Everything in the layer that is not static."""
    return attention.query_proj, attention.key_proj, attention.value_proj, attention.output_proj, attention.dropout


def _over_tokens(module: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A module for one token, over (..., D)."""
    return lambda x: (jax.vmap(module) if x.ndim == 2 else jax.vmap(jax.vmap(module)))(x)
