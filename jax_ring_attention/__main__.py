"""`python -m jax_ring_attention`."""

import sys

from jax_ring_attention.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
