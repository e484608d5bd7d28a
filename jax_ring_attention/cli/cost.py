"""What ring attention costs by formula: memory, floating-point operations, bytes on the wire, and the time that follows.

Everything is counted per device and per layer. What a hop sends comes from `schedule.plan_hops`, who sees whom from
`layouts.shard_progressions`; only the rates of the hardware are assumptions. `FORMULAS` says the same in words.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_ring_attention.layouts import shard_multiple, shard_progressions
from jax_ring_attention.schedule import Leg, Stream, plan_hops
from jax_ring_attention.stats import accumulator_dtype

FORMULAS = """\
B batch, T tokens, P devices, N heads, K key/value heads, H head dim (Hv of value), e bytes of a number in the inputs' dtype, a of
an accumulator (float32: 4); t = T/P tokens per device, rounded up where P (zigzag: 2P) does not divide T.

chunk            B t K (H + Hv) e               key and value of one device, what travels
gradient chunk   B t K (H + Hv) a               d_key and d_value, what travels behind it in the backward pass
statistics       B t N (Hv + 2) a               output, sum and max while the ring turns
residuals        B t N (Hv e + a)               out and lse, kept for the backward pass (query, key and value are inputs)
buffers          2 chunks, one in hand and one arriving; a packed query; statistics, those so far and the next
                 backward: 2 chunks, 2 gradient chunks, packed query and d_out, d_query and delta in accumulators
                 all_gather: 2P chunks, as they come and packed, statistics once, P gradient chunks
FLOPs            forward 2 B N (H + Hv) per token pair, backward 2 B N (3H + 2Hv); a hop without mask has t^2 pairs
blocks           a kernel computes whole blocks: pairs counts all tokens of block pairs that hold a visible one
hop, forward     max(FLOPs of the busiest device / (peak x efficiency), chunk / link); P - 1 hops move, P compute
hop, backward    max(FLOPs ... / (peak x efficiency), (chunk + gradient chunk) / link); gradients make P moves, the last one home,
                 which nothing hides
link             one direction. bidirectional and all_gather use both: twice the rate on a torus, the same behind a switch
all_gather       (P - 1) chunks, then all FLOPs; backward the same, then (P - 1) gradient chunks
hidden from      t >= bytes per token and hop x peak x efficiency / (link x FLOPs per pair x share of the pairs computed)
efficiency       FLOPs of visible pairs / P / (peak x efficiency) / time: what the ring keeps of the kernel's speed"""


class Workload(NamedTuple):
    """One layer's attention over one ring. `dtype` is that of query, key and value."""

    seq_len: int
    devices: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: Any = jnp.bfloat16
    batch: int = 1
    is_causal: bool = False
    block_size: int = 1

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def accumulator(self) -> int:
        """Bytes of a number in an accumulator."""
        return accumulator_dtype(jnp.dtype(self.dtype)).itemsize

    def tokens(self, layout: str) -> int:
        """Tokens per device, padding included."""
        return -(-self.seq_len // shard_multiple(layout, self.devices)) * shard_multiple(layout, self.devices) // self.devices

    @property
    def chunk_token(self) -> int:
        """Bytes of one token of a chunk of key and value."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def d_chunk_token(self) -> int:
        """Bytes of one token of their gradients."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.accumulator

    @property
    def forward_flops(self) -> int:
        """Per pair of tokens: scores, and weights times values."""
        return 2 * self.batch * self.heads * (self.head_dim + self.value_dim)

    @property
    def backward_flops(self) -> int:
        """Per pair of tokens: scores and d_weights again, then d_query, d_key and d_value."""
        return 2 * self.batch * self.heads * (3 * self.head_dim + 2 * self.value_dim)

    @property
    def visible_pairs(self) -> int:
        """Pairs of a query and a key that it sees, over the whole sequence."""
        return self.seq_len * (self.seq_len + 1) // 2 if self.is_causal else self.seq_len**2


# Memory.


def activation_bytes(work: Workload, layout: str = "contiguous") -> dict[str, int]:
    """What a device holds of each array of one layer."""
    rows = work.batch * work.tokens(layout)
    return {
        "query": rows * work.heads * work.head_dim * work.itemsize,
        "key and value": work.tokens(layout) * work.chunk_token,
        "out": rows * work.heads * work.value_dim * work.itemsize,
        "lse": rows * work.heads * work.accumulator,
    }


def forward_buffers(work: Workload, schedule: str, layout: str = "contiguous") -> dict[str, int]:
    """What the forward pass holds besides its arguments and results; a fold reads statistics and writes the next."""
    rows = work.batch * work.tokens(layout) * work.heads
    return {
        "key and value chunks": _held(work, schedule, layout, work.chunk_token, gathered=2),
        "packed query": rows * work.head_dim * work.itemsize,
        "statistics": (1 if schedule == "all_gather" else 2) * rows * (work.value_dim + 2) * work.accumulator,
    }


def backward_buffers(work: Workload, schedule: str, layout: str = "contiguous") -> dict[str, int]:
    """What the backward pass holds besides query, key, value, out, lse and the gradients that it returns."""
    rows = work.batch * work.tokens(layout) * work.heads
    return {
        "key and value chunks": _held(work, schedule, layout, work.chunk_token, gathered=2),
        "gradient chunks": _held(work, schedule, layout, work.d_chunk_token, gathered=1),
        "d_query sum": rows * work.head_dim * work.accumulator,
        "packed query, d_out, delta": rows * ((work.head_dim + work.value_dim) * work.itemsize + work.accumulator),
    }


def _held(work: Workload, schedule: str, layout: str, per_token: int, gathered: int) -> int:
    """Bytes of chunks: one in hand and one arriving, or all chunks `gathered` times (as they come, and packed for the kernel)."""
    chunks = gathered * work.devices if schedule == "all_gather" else min(2, work.devices)
    return chunks * work.tokens(layout) * per_token


# Traffic.


class Moves(NamedTuple):
    """How often the parts of one leg move: the chunks, and in the backward pass their gradients."""

    leg: Leg
    chunk: int
    gradient: int


def ring_moves(work: Workload, schedule: str, layout: str = "contiguous") -> tuple[Moves, ...]:
    """The moves of a `ring` or `bidirectional` schedule: a chunk on each hop, its gradient behind it and once more to go home."""
    legs = plan_hops(schedule, work.devices, work.tokens(layout))
    counts = [leg.streams[0].hops for leg in legs]
    return tuple(Moves(leg, n, n + 1 if n and leg.home else n) for leg, n in zip(legs, counts, strict=True))


def sent_bytes(work: Workload, schedule: str, layout: str = "contiguous") -> tuple[int, int]:
    """Bytes that a device sends over the whole pass, `(forward, backward)`."""
    if schedule == "all_gather":
        tokens = (work.devices - 1) * work.tokens(layout)
        return tokens * work.chunk_token, tokens * (work.chunk_token + work.d_chunk_token)
    forward = backward = 0
    for move in ring_moves(work, schedule, layout):
        tokens = sum(stream.size for stream in move.leg.streams)
        forward += move.chunk * tokens * work.chunk_token
        backward += tokens * (move.chunk * work.chunk_token + move.gradient * work.d_chunk_token)
    return forward, backward


# Who computes how much.


def stream_pairs(work: Workload, layout: str, stream: Stream) -> np.ndarray:
    """[hop, rank]: token pairs that device `rank` computes with the part of a chunk in its hand, in whole blocks."""
    size, tokens, block = work.devices, work.tokens(layout), work.block_size
    ranks, hops = np.arange(size)[None, :], np.arange(stream.hops + 1)[:, None]
    sources = stream.source(ranks, hops, size)
    starts, stride, count = shard_progressions(layout, size, tokens)
    total = np.zeros((stream.hops + 1, size), np.int64)
    for piece, key_starts in enumerate(starts):
        first = max(stream.start, piece * count)  # the part of this piece that the stream carries
        length = min(stream.start + stream.size, (piece + 1) * count) - first
        if length <= 0:
            continue
        key_start = key_starts[sources] + stride * (first - piece * count)
        queries, keys = -(-count // block), -(-length // block)
        for query_starts in starts:
            if work.is_causal:
                # Query block i ends at position start + stride * (block * (i + 1) - 1), key block j begins at its start + stride
                # * block * j. So i sees j <= i + ahead, which makes a ramp, clipped to the blocks that there are.
                ahead = (query_starts[ranks] - key_start + stride * (block - 1)) // (stride * block)
                seen = _ramp(ahead + queries, keys) - _ramp(ahead, keys)
            else:
                seen = queries * keys
            total += np.minimum(seen * block * block, count * length)
    return total


def _ramp(x: np.ndarray, top: int) -> np.ndarray:
    """Sum of min(j, top) over j = 1 .. x; 0 where x < 1."""
    rising = np.clip(x, 0, top)
    return rising * (rising + 1) // 2 + np.maximum(x - top, 0) * top


def hop_pairs(work: Workload, layout: str, schedule: str) -> np.ndarray:
    """[hop, rank] token pairs that each device computes while hop after hop goes by; all_gather is counted like ring."""
    named = "ring" if schedule == "all_gather" else schedule
    (leg,) = plan_hops(named, work.devices, work.tokens(layout))
    return np.sum([stream_pairs(work, layout, stream) for stream in leg.streams], axis=0)


# Time.


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device attains, in FLOP/s and bytes/s; `is_torus` as in `Hardware`."""

    flops: float
    link: float
    is_torus: bool

    def wire_seconds(self, by_direction: dict[int, int]) -> float:
        """Time to send so many bytes each way at once."""
        ways = by_direction.values()
        return (max(ways, default=0) if self.is_torus else sum(ways)) / self.link


class Times(NamedTuple):
    """Seconds of one pass; `exposed` is the part in which no device computes because all wait for data."""

    total: float
    exposed: float


class Estimate(NamedTuple):
    """One choice of layout and schedule.

    Attributes:
      busiest: pairs computed by the busiest device over the mean of all devices, over the whole pass.
      in_step: the same, where every hop waits for the busiest device of that hop.
      forward, backward: times.
      efficiency: share of the kernel's own speed that is left, forward and backward together.
    """

    layout: str
    schedule: str
    busiest: float
    in_step: float
    forward: Times
    backward: Times
    efficiency: float

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


def estimate(work: Workload, rates: Rates, layout: str, schedule: str) -> Estimate:
    """Predicted time of one layer's attention, forward and backward."""
    pairs = hop_pairs(work, layout, schedule)
    mean = float(pairs.sum(0).mean())
    by_device, by_hop = float(pairs.sum(0).max()), float(pairs.max(1).sum())
    if schedule == "all_gather":
        forward, backward = _gather_times(work, rates, layout, by_device)
        in_step = by_device
    else:
        forward, backward = _ring_times(work, rates, layout, schedule, pairs.max(1))
        in_step = by_hop
    ideal = work.visible_pairs / work.devices * (work.forward_flops + work.backward_flops) / rates.flops
    efficiency = ideal / (forward.total + backward.total)
    return Estimate(layout, schedule, by_device / mean, in_step / mean, forward, backward, efficiency)


def _ring_times(work: Workload, rates: Rates, layout: str, schedule: str, pairs: np.ndarray) -> tuple[Times, Times]:
    """Hop by hop; `pairs` [hop] are those of the busiest device."""
    ((leg, hops, _),) = ring_moves(work, schedule, layout)

    def wire(per_token: int) -> float:
        return rates.wire_seconds({stream.direction: stream.size * per_token for stream in leg.streams})

    chunk, gradient = wire(work.chunk_token), wire(work.d_chunk_token)
    passes = []
    for flops, behind in ((work.forward_flops, 0.0), (work.backward_flops, gradient)):
        compute = pairs * flops / rates.flops
        sent = np.zeros(hops + 1)
        sent[:hops] += chunk
        sent[1:] += behind
        total = float(np.maximum(compute, sent).sum()) + (behind if hops else 0.0)  # the way home hides behind nothing
        passes.append(Times(total, total - float(compute.sum())))
    return passes[0], passes[1]


def _gather_times(work: Workload, rates: Rates, layout: str, pairs: float) -> tuple[Times, Times]:
    def wire(per_token: int) -> float:
        whole = (work.devices - 1) * work.tokens(layout) * per_token
        return rates.wire_seconds({1: whole // 2, -1: whole - whole // 2})

    gather, scatter = wire(work.chunk_token), wire(work.d_chunk_token)
    forward, backward = (pairs * flops / rates.flops for flops in (work.forward_flops, work.backward_flops))
    return Times(forward + gather, gather), Times(backward + gather + scatter, gather + scatter)


def hidden_from(work: Workload, rates: Rates, layout: str, schedule: str) -> tuple[int, int] | None:
    """Tokens per device from which transfers hide behind compute, `(forward, backward)`; None where they never do.

    A hop computes in proportion to t squared and sends in proportion to t.
    """
    if schedule == "all_gather" or work.devices == 1:
        return None
    tokens = work.tokens(layout)
    ((leg, _, _),) = ring_moves(work, schedule, layout)
    share = float(hop_pairs(work, layout, schedule)[1:].max(1).min()) / tokens**2  # the hop that has the least to hide behind
    if share == 0:
        return None

    def threshold(per_token: int, flops: int) -> int:
        seconds = rates.wire_seconds({stream.direction: stream.size * per_token for stream in leg.streams}) / tokens
        return math.ceil(seconds * rates.flops / (flops * share))

    return threshold(work.chunk_token, work.forward_flops), threshold(work.chunk_token + work.d_chunk_token, work.backward_flops)
