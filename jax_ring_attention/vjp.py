"""The one custom VJP, around what a device does inside the ring.

Residuals are the inputs, `out` and `lse`: O(T / P). The last two carry names, so that a remat policy can keep them
(`jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)`) and the ring is not run again in the backward pass.
"""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_ring_attention import compat, fused
from jax_ring_attention.ring import fold_leg, grads_leg, ring_backward, ring_forward
from jax_ring_attention.shard import Inputs, Integers, Ring

RESIDUAL_NAMES = ("ring_attention_out", "ring_attention_lse")

DERIVATIVES_MESSAGE = (
    "ring_attention has a custom VJP: reverse mode once, and forward mode over it, are available. For forward mode alone "
    "(jvp, jacfwd) and for reverse mode twice use implementation='autodiff', which supports every order and mode at the memory "
    "of T x S scores."
)


def _forward(ring: Ring, inputs: Inputs, integers: Integers) -> tuple[jax.Array, jax.Array]:
    return ring_forward(ring, inputs, integers, fused.fold_leg if ring.fused else fold_leg)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, inputs: Inputs, integers: Integers) -> tuple[jax.Array, jax.Array]:
    return _forward(ring, inputs, integers)


def _attend_fwd(ring, inputs, integers):
    out, lse = _forward(ring, inputs, integers)
    out, lse = checkpoint_name(out, RESIDUAL_NAMES[0]), checkpoint_name(lse, RESIDUAL_NAMES[1])
    return (out, lse), (inputs, integers, out, lse)


def _attend_bwd(ring, residuals, cotangents):
    inputs, integers, out, lse = residuals
    d_out, d_lse = cotangents
    leg = fused.grads_leg if ring.fused else grads_leg
    gradients = ring_backward(ring, inputs, integers, out, lse, d_out, d_lse, leg)
    return compat.untransposable(gradients, DERIVATIVES_MESSAGE), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(ring: Ring, inputs: Inputs, integers: Integers) -> tuple[jax.Array, jax.Array]:
    """`ring_forward`, with the ring's own backward pass where the kernel has one."""
    return _attend(ring, inputs, integers) if ring.kernel.has_grads else ring_forward(ring, inputs, integers)
