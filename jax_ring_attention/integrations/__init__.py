"""Ring attention in the attention layers of flax and equinox: one module per framework, imported by name.

    from jax_ring_attention.integrations import flax_nnx, flax_linen, equinox

Each needs its framework (the extras `flax` and `equinox`); the package itself does not.
"""
