"""The command line, `python -m jax_ring_attention`: `check`, `plan` and `explain`, one module each."""
