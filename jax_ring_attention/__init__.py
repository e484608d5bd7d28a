"""Ring attention for JAX: exact attention over sequences too long for one device."""

from jax_ring_attention.api import ring_attention
from jax_ring_attention.chunk import attention_chunk_grads, attention_chunk_stats
from jax_ring_attention.kernels.contract import BlockSizes
from jax_ring_attention.layer import RingAttention
from jax_ring_attention.layouts import from_layout, to_layout
from jax_ring_attention.masks import Positions, SegmentIds
from jax_ring_attention.stats import ChunkStats, finalize_chunk_stats, identity_chunk_stats, merge_chunk_stats
from jax_ring_attention.topology import make_ring_mesh
from jax_ring_attention.vjp import RESIDUAL_NAMES

__version__ = "0.1.0"

__all__ = [
    "RESIDUAL_NAMES",
    "BlockSizes",
    "ChunkStats",
    "Positions",
    "RingAttention",
    "SegmentIds",
    "attention_chunk_grads",
    "attention_chunk_stats",
    "finalize_chunk_stats",
    "from_layout",
    "identity_chunk_stats",
    "make_ring_mesh",
    "merge_chunk_stats",
    "ring_attention",
    "to_layout",
]
