"""Ring attention in the attention layers of flax and equinox: one module per framework, imported by name.

    from jax_ring_attention.integrations import TokenMask
    from jax_ring_attention.integrations.flax_nnx import ring_attention_fn  # or .flax_linen
    from jax_ring_attention.integrations.equinox import RingMultiheadAttention

Each needs its framework (the extras `flax` and `equinox`); the package itself does not.
"""

from jax_ring_attention.integrations.common import TokenMask

__all__ = ["TokenMask"]
