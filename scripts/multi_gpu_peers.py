"""Other attention over several GPUs, for bench_ring_multi_gpu.py: the same shards in, the same shards out, forward and backward.

`CUDNN` is the implementation of `jax.nn.dot_product_attention` that the first two call. What each does, and what is fair to it:

* "cudnn, all-gather": every device gathers all keys and values; backward their gradients are summed and scattered. Without a mask
  that is one call of cuDNN on the device's queries. Its causal mask starts at the first key, and jax.nn rounds lse to bfloat16
  and gives it no gradient, so a shard's attention cannot be put together from calls with and without that mask. So each half of a
  zigzag shard is one call in which the lengths cut off the keys behind the half, which cuDNN then skips, and a boolean mask cuts
  the diagonal. That does (2P + 1) / 2P of the useful work, but cuDNN reads the mask as a bias of (T/2P) x T numbers.
* "cudnn, all-to-all": contiguous shards; heads are exchanged for tokens, each device attends over the whole sequence with its
  part of the heads under cuDNN's own causal mask, and the results are exchanged back. No work is wasted and no mask is read, but
  P must divide the key/value heads.
* "TransformerEngine ring": its ring over zigzag shards, on cuDNN kernels, where it is installed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jax_ring_attention.layouts import Layout

AXIS = "ring"
SPEC = PartitionSpec(None, AXIS)
CUDNN: Any = "cudnn"


class Peer(NamedTuple):
    """The layout that its arrays are stored in, a context to compile in, and `attend(query, key, value)` of global arrays."""

    layout: Layout
    context: contextlib.AbstractContextManager[Any]
    attend: Callable[..., jax.Array]


def per_shard(attend: Callable[..., jax.Array], mesh: Mesh) -> Callable[..., jax.Array]:
    return jax.shard_map(attend, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC, check_vma=False)


def natural_order(gathered: jax.Array, ring_size: int) -> jax.Array:
    """All shards of a zigzag sequence, one after another, as the sequence: early pieces rise with the rank, late ones fall."""
    batch, length, *rest = gathered.shape
    pieces = gathered.reshape(batch, ring_size, 2, length // (2 * ring_size), *rest)
    return jnp.concatenate([pieces[:, :, 0], pieces[:, ::-1, 1]], axis=1).reshape(gathered.shape)


def all_gather(mesh: Mesh, is_causal: bool) -> Peer:
    size = mesh.size

    def gather(x):
        return jax.lax.all_gather(x, AXIS, axis=1, tiled=True)

    def full(query, key, value):
        return jax.nn.dot_product_attention(query, gather(key), gather(value), implementation=CUDNN)

    def causal(query, key, value):
        rank = jax.lax.axis_index(AXIS)
        half = query.shape[1] // 2
        keys, values = (natural_order(gather(x), size) for x in (key, value))
        outs = []
        # The early half sees none of the second half of the sequence, whatever the rank.
        for part, piece, reach in ((0, rank, size * half), (1, 2 * size - 1 - rank, 2 * size * half)):
            rows = piece * half + jnp.arange(half)
            outs.append(
                jax.nn.dot_product_attention(
                    query[:, part * half : (part + 1) * half],
                    keys[:, :reach],
                    values[:, :reach],
                    mask=(jnp.arange(reach) <= rows[:, None])[None, None],
                    key_value_seq_lengths=jnp.full(query.shape[:1], (piece + 1) * half, jnp.int32),
                    implementation=CUDNN,
                )
            )
        return jnp.concatenate(outs, axis=1)

    return Peer("zigzag", contextlib.nullcontext(), per_shard(causal if is_causal else full, mesh))


def all_to_all(mesh: Mesh, is_causal: bool) -> Peer:
    def attend(query, key, value):
        if key.shape[2] % mesh.size:
            raise NotImplementedError(f"{key.shape[2]} key/value heads are no multiple of {mesh.size} devices")
        exchange = functools.partial(jax.lax.all_to_all, axis_name=AXIS, tiled=True)
        query, key, value = (exchange(x, split_axis=2, concat_axis=1) for x in (query, key, value))
        out = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, implementation=CUDNN)
        return exchange(out, split_axis=1, concat_axis=2)

    return Peer("contiguous", contextlib.nullcontext(), per_shard(attend, mesh))


def transformer_engine_ring(mesh: Mesh, is_causal: bool) -> Peer:
    try:
        import transformer_engine.jax as te
        from transformer_engine.jax import attention as te_attention
        from transformer_engine.jax.sharding import MeshResource
    except ImportError as error:
        raise NotImplementedError(f"not installed ({error})") from error
    mask = te_attention.AttnMaskType.CAUSAL_MASK if is_causal else te_attention.AttnMaskType.NO_MASK

    def attend(query, key, value):
        lengths = [jnp.full(x.shape[:1], x.shape[1], jnp.int32) for x in (query, key)]
        return te_attention.fused_attn(
            qkv=(query, key, value),
            bias=None,
            sequence_descriptor=te_attention.SequenceDescriptor.from_seqlens(tuple(lengths)),
            seed=None,
            attn_bias_type=te_attention.AttnBiasType.NO_BIAS,
            attn_mask_type=mask,
            qkv_layout=te_attention.QKVLayout.BSHD_BSHD_BSHD,
            scaling_factor=query.shape[-1] ** -0.5,
            dropout_probability=0.0,
            is_training=True,
            context_parallel_strategy=te_attention.CPStrategy.RING,
            context_parallel_causal_load_balanced=is_causal,
            context_parallel_axis=AXIS,
        )

    @contextlib.contextmanager
    def context():
        autocast = te.autocast if hasattr(te, "autocast") else te.fp8_autocast  # renamed in 2.8
        with mesh, autocast(enabled=False, mesh_resource=MeshResource(cp_resource=AXIS)):
            yield

    return Peer("zigzag", context(), attend)


PEERS: dict[str, Callable[[Mesh, bool], Peer]] = {
    "cudnn, all-gather": all_gather,
    "cudnn, all-to-all": all_to_all,
    "TransformerEngine ring": transformer_engine_ring,
}
