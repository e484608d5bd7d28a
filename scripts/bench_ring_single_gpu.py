"""What a ring costs one of its devices, measured on one GPU, and from which shard on its transfers hide.

Claims under test, for implementation="mosaic_gpu", bfloat16, 16 heads, forward and backward:

* chunking: 8192 queries that fold 8 chunks of 8192 keys one at a time take as long as one call over 65536 keys;
* balance: one rank of a causal zigzag ring of 8 does, over all hops, half of the work without a mask. Its positions are given as
  arrays, so block lists are made on the device, as in a ring; the gradients that travel are not added to one another here;
* hiding: the average hop of that rank takes longer than its transfer. A hop sends key and value, backward their float32 gradients
  too. Link speeds are nominal, per direction: 450 GB/s NVLink 4, 50 GB/s InfiniBand NDR; no link is measured here.

Every measurement runs in a process of its own with a time limit; results of chunks are compared with those of one call before
anything is timed. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys

import jax
import jax.numpy as jnp
from bench_chunk import HEADS, OURS, about_this_device, both_directions, check, gradient, in_own_process

from jax_ring_attention import Positions, ring_attention
from jax_ring_attention.layouts import shard_positions

RING = 8
LINKS = {"NVLink": 450e9, "InfiniBand": 50e9}
attend = functools.partial(ring_attention, implementation=OURS)


def arrays(length, dim):
    """query, all keys, all values, d_out; and the same with keys and values as a list of chunks, arrays of their own."""
    random = jax.random.split(jax.random.key(1), 4)
    lengths = (length, RING * length, RING * length, length)
    whole = [jax.random.normal(key, (1, n, HEADS, dim), jnp.bfloat16) for key, n in zip(random, lengths, strict=True)]
    query, key, value, d_out = whole
    return whole, [query, jnp.split(key, RING, axis=1), jnp.split(value, RING, axis=1), d_out]


def check_chunks(attention, whole, chunks):
    """Chunks must give what one call gives."""
    out, (d_query, *d_chunks) = gradient(attention)(*chunks)
    check((out, (d_query, *(jnp.concatenate(d, axis=1) for d in d_chunks))), gradient(attention)(*whole))


def chunking(length, head_dim):
    """Chunks one at a time against one call over all keys."""
    whole, chunks = arrays(length, head_dim)
    check_chunks(attend, whole, chunks)
    return both_directions({"chunks": (attend, chunks), "one call": (attend, whole)})


def rank_of_a_ring(length, head_dim, rank=3):
    """All hops of one rank, in the order in which the chunks arrive, causal zigzag and without a mask."""
    whole, chunks = arrays(length, head_dim)
    query_position = shard_positions("zigzag", rank, RING, length)
    arriving = [shard_positions("zigzag", (rank - hop) % RING, RING, length) for hop in range(RING)]
    positions = Positions(query_position, jnp.concatenate(arriving))

    causal = functools.partial(attend, is_causal=True, positions=positions)
    check_chunks(causal, whole, chunks)
    return both_directions({"causal": (causal, chunks), "full": (attend, chunks)})


MEASUREMENTS = {"chunking": chunking, "rank_of_a_ring": rank_of_a_ring}


def hop_bytes(length, head_dim, direction):
    """Bytes that one device sends per hop."""
    numbers = 2 * length * HEADS * head_dim
    return numbers * (2 if direction == "forward" else 2 + 4)


def report_chunking(result, length, head_dim):
    rows = []
    for direction, taken in result["chunks"].items():
        flops = (4 if direction == "forward" else 10) * HEADS * RING * length**2 * head_dim
        rows.append(
            {"direction": direction, "tflops": flops / taken / 1e12, "over_one_call": result["one call"][direction] / taken}
        )
        print(
            f"{RING} chunks of {length} D{head_dim} {direction:9s} {rows[-1]['tflops']:5.0f} TFLOP/s, "
            f"{rows[-1]['over_one_call']:.3f} of one call",
            flush=True,
        )
    return rows


def report_rank(result, length, head_dim):
    rows = []
    for direction, taken in result["causal"].items():
        hop, sent = taken / RING, hop_bytes(length, head_dim, direction)
        hidden = {link: hop / (sent / speed) for link, speed in LINKS.items()}
        half = result["full"][direction] / 2 / taken
        rows.append(
            {
                "direction": direction,
                "hop_seconds": hop,
                "hop_bytes": sent,
                "over_half_of_full": half,
                "hop_over_transfer": hidden,
            }
        )
        links = ", ".join(f"{ratio:.1f} x its transfer by {link}" for link, ratio in hidden.items())
        print(
            f"T/P={length} D{head_dim} {direction:9s} {half:.3f} of half of full; a hop takes {hop * 1e6:.0f} us, {links}",
            flush=True,
        )
    return rows


def hiding_shards(ranks):
    """For each link and direction the shortest measured shard from which on every hop outlasts its transfer."""
    found = {}
    for link in LINKS:
        for direction in ("forward", "backward"):
            shortest = None
            for length in sorted(ranks, reverse=True):
                row = next(row for row in ranks[length] if row["direction"] == direction)
                if row["hop_over_transfer"][link] < 1:
                    break
                shortest = length
            found[f"{link} {direction}"] = shortest
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--chunk-length", type=int, default=8192, help="tokens of query and of each chunk for the cost of chunking"
    )
    parser.add_argument(
        "--shards", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192], help="T/P of the ranks; none leaves them out"
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--limit", type=float, default=400, help="seconds for each measurement")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        work = json.loads(options.one)
        print(json.dumps(MEASUREMENTS[work.pop("name")](**work) if work else about_this_device()))
        return
    about = in_own_process(__file__, {}, options.limit)
    if "failed" in about:
        raise SystemExit(f"this needs a Hopper GPU: {about['failed']}")
    print(f"{about['device']}, jax {about['jax']}; bfloat16 matmul {about['matmul_tflops']:.0f} TFLOP/s", flush=True)

    def run(name, length, report):
        result = in_own_process(__file__, {"name": name, "length": length, "head_dim": options.head_dim}, options.limit)
        if "failed" in result:
            print(f"{name} {length} not measured: {result['failed']}", flush=True)
            return None
        return report(result, length, options.head_dim)

    chunks = run("chunking", options.chunk_length, report_chunking)
    ranks = {length: rows for length in options.shards if (rows := run("rank_of_a_ring", length, report_rank))}
    hiding = hiding_shards(ranks)
    for what, length in hiding.items():
        print(f"{what}: hidden from {'none of these shards' if length is None else f'T/P = {length}'} on", flush=True)
    print(json.dumps({"script": "bench_ring_single_gpu", **about, "chunking": chunks, "ranks": ranks, "hidden_from": hiding}))


if __name__ == "__main__":
    sys.exit(main())
