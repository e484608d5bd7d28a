"""`RingAttention`: `ring_attention` with the ring and the heads fixed once."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jax_ring_attention.api import AxisName, ring_attention
from jax_ring_attention.layouts import Layout, check_layout
from jax_ring_attention.schedule import Schedule, check_schedule


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Attention on one ring, as an object to build once and call in every layer; hashable, without parameters.

        attention = RingAttention(num_heads=32, num_kv_heads=8, mesh=mesh, spec=P("data", "seq", "tensor"), layout="zigzag")
        out = attention(query, key, value, is_causal=True)

    The call is `ring_attention`, with the same results and errors.

    Args:
      num_heads: N, of the arrays that are passed.
      num_kv_heads: K, which divides N.
      mesh, axis_name, spec, layout, schedule, implementation: as in `ring_attention`.

    Raises:
      ValueError: head counts, layout or schedule that cannot be; in a call, arrays with other head counts.
    """

    num_heads: int
    num_kv_heads: int
    mesh: Mesh | AbstractMesh | None = None
    axis_name: AxisName | None = None
    spec: PartitionSpec | None = None
    layout: Layout = "contiguous"
    schedule: Schedule = "ring"
    implementation: str | None = None

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_schedule(self.schedule)
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no positive multiple of num_kv_heads={self.num_kv_heads}; every key/value head "
                "serves equally many query heads."
            )

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        **options: Any,
    ) -> Any:
        """`ring_attention(query, key, value, bias, mask, **options)` for arrays (B, T, N, H), (B, S, K, H) and (B, S, K, Hv)."""
        for name, x, heads in (
            ("query", query, self.num_heads),
            ("key", key, self.num_kv_heads),
            ("value", value, self.num_kv_heads),
        ):
            if x.ndim < 3 or x.shape[-2] != heads:
                raise ValueError(
                    f"{name} has shape {x.shape}; this RingAttention has {heads} heads for it, on the last axis but one."
                )
        for field in dataclasses.fields(self)[2:]:
            if field.name in options:
                raise ValueError(
                    f"{field.name}= is fixed to {getattr(self, field.name)!r} when a RingAttention is built; leave it out."
                )
        return ring_attention(
            query,
            key,
            value,
            bias,
            mask,
            mesh=self.mesh,
            axis_name=self.axis_name,
            spec=self.spec,
            layout=self.layout,
            schedule=self.schedule,
            implementation=self.implementation,
            **options,
        )
