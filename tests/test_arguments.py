"""Every refusal names the offending values and what to do instead."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of, ring_mesh
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring_attention import (
    BlockSizes,
    ChunkStats,
    Positions,
    SegmentIds,
    attention_chunk_grads,
    attention_chunk_stats,
    ring_attention,
)

B, T, S, N, K, H = 2, 8, 12, 4, 2, 8


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


QUERY, KEY, VALUE = zeros(B, T, N, H), zeros(B, S, K, H), zeros(B, S, K, H)


def chunk_grads(query, key, value, *args, **options):
    rows = jnp.zeros(query.shape[:-1])
    d_output = jnp.zeros((*query.shape[:-1], np.shape(value)[-1]), query.dtype)
    return attention_chunk_grads(query, key, value, d_output, rows, rows, *args, **options)


FUNCTIONS = pytest.mark.parametrize(
    "attend", [ring_attention, attention_chunk_stats, chunk_grads], ids=["ring_attention", "chunk_stats", "chunk_grads"]
)


def refuses(message: str, call, *args, error: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        call(*args, **options)


# Shapes and dtypes of query, key and value.


@pytest.mark.fast
@pytest.mark.parametrize("shape", [(), (8,), (1, 2, 8, 4, 8)], ids=str)
def test_query_of_wrong_rank(shape):
    for attend in (ring_attention, attention_chunk_stats):
        message = rf"query has shape {shape}, rank {len(shape)}; it must be (T, H), (T, N, H) or (B, T, N, H), batch first"
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            attend(zeros(*shape), KEY, VALUE)
        assert message in str(caught.value)


@pytest.mark.fast
@FUNCTIONS
def test_ranks_that_differ(attend):
    refuses(r"key\w* has shape \(12, 2, 8\), rank 3, but query has rank 4; .* all be \(T, H\)", attend, QUERY, KEY[0], VALUE)
    refuses(r"value\w* has shape \(12, 8\), rank 2, but query has rank 3", attend, QUERY[0], KEY[0], VALUE[0, :, 0])


@pytest.mark.fast
@FUNCTIONS
@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        (zeros(B, T, 5, H), KEY, VALUE, r"5 query heads cannot share 2 key/value heads evenly; N must be a multiple of K\.$"),
        (
            zeros(B, 4, T, H),
            zeros(B, 3, S, H),
            zeros(B, 3, S, H),
            r"8 query heads cannot share 12 .*look like \(B, heads, T, H\)",
        ),
        (QUERY, zeros(B, S, K, 16), VALUE, r"query head dim 8 and key head dim 16 must be equal \(only value's may differ\)"),
        (
            QUERY,
            zeros(3, S, K, H),
            VALUE,
            r"batch sizes differ: query \(2, 8, 4, 8\), key \(3, 12, 2, 8\), .*axis 0 must be equal",
        ),
        (QUERY, KEY, zeros(1, S, K, H), r"batch sizes differ: .*value \(1, 12, 2, 8\)"),
        (QUERY, KEY, zeros(B, 11, K, H), r"key \(2, 12, 2, 8\) and value \(2, 11, 2, 8\) must agree in length \(axis 1\)"),
        (QUERY, KEY, zeros(B, S, 1, H), r"must agree in length \(axis 1\) and number of heads \(axis 2\)"),
        (QUERY, zeros(B, 0, K, H), zeros(B, 0, K, H), r"key has shape \(2, 0, 2, 8\), which holds nothing; every axis needs"),
        (zeros(B, T, 0, H), KEY, VALUE, r"query has shape \(2, 8, 0, 8\), which holds nothing"),
    ],
    ids=["N % K", "BNTH", "head dim", "key batch", "value batch", "lengths", "value heads", "no keys", "no heads"],
)
def test_shapes_that_do_not_fit(attend, query, key, value, message):
    refuses(message, attend, query, key, value)


@pytest.mark.fast
@FUNCTIONS
def test_dtypes_that_differ(attend):
    message = r"query, key and value have dtypes float32, bfloat16, float32; cast them to one dtype, for example key\.astype"
    refuses(message, attend, QUERY, KEY.astype(jnp.bfloat16), VALUE)


@FUNCTIONS
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn], ids=lambda d: jnp.dtype(d).name)
def test_dtypes_without_attention(attend, dtype):
    cast = [x.astype(dtype) for x in (QUERY, KEY, VALUE)]
    message = rf"query has dtype {jnp.dtype(dtype).name}; use one of bfloat16, float16, float32, float64"
    refuses(message, attend, *cast)


# Options.


@pytest.mark.fast
@FUNCTIONS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": jnp.ones(2)}, r"scale=.*must be a Python number; .*multiply query by it and pass scale=1\.0"),
        ({"logits_soft_cap": 0.0}, r"logits_soft_cap=0\.0 must be a positive Python number, or None for no cap"),
        ({"logits_soft_cap": -30}, r"logits_soft_cap=-30 must be a positive"),
        ({"logits_soft_cap": float("nan")}, r"logits_soft_cap=nan must be a positive"),
        ({"logits_soft_cap": float("inf")}, r"logits_soft_cap=inf must be a positive"),
        ({"logits_soft_cap": np.ones(4)}, r"logits_soft_cap=array\(.*must be a positive Python number"),
        ({"is_causal": 1}, r"is_causal=1 must be True or False"),
        ({"is_causal": "yes"}, r"is_causal='yes' must be True or False"),
        ({"deterministic": 1}, r"deterministic=1 must be True or False"),
        ({"local_window_size": -1}, r"local_window_size=-1 must hold ints >= 0: .*None on either side means unbounded"),
        ({"local_window_size": (2, -1)}, r"local_window_size=\(2, -1\) must hold ints >= 0"),
        ({"local_window_size": 2.5}, r"local_window_size=2\.5 must hold ints >= 0"),
        ({"local_window_size": True}, r"local_window_size=True must hold ints >= 0"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size=\(1, 2, 3\) must be \(left, right\) or one int for both"),
        ({"block_sizes": 0}, r"block_sizes=\(0, 0\) must be BlockSizes\(block_q, block_kv\), a pair or one int, each at least 1"),
        ({"block_sizes": BlockSizes(4, -4)}, r"block_sizes=BlockSizes\(block_q=4, block_kv=-4\) must be"),
        ({"block_sizes": (4, 4, 4)}, r"block_sizes=\(4, 4, 4\) must be BlockSizes"),
        ({"block_sizes": 4.0}, r"block_sizes=4\.0 must be BlockSizes"),
        ({"block_sizes": True}, r"block_sizes=True must be BlockSizes"),
        (
            {"implementation": "cudnn"},
            r"implementation='cudnn' is unknown; choose one of 'mosaic_gpu', .*'xla', .*or None to take the first",
        ),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()).replace(" ", "") if isinstance(x, dict) else "",
)
def test_options_out_of_range(attend, options, message):
    refuses(message, attend, QUERY, KEY, VALUE, **options)


@FUNCTIONS
@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_numbers_that_are_traced(attend, name):
    @jax.jit
    def traced(x):
        return attend(QUERY, KEY, VALUE, **{name: x})

    refuses(rf"{name}=.*must be a .*Python number", traced, 2.0)


@pytest.mark.fast
@FUNCTIONS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": jnp.ones((T, S), jnp.int32)}, r"mask has dtype int32; it must be bool, .*additive.*bias.*mask\.astype\(bool\)"),
        ({"mask": jnp.ones((T, S))}, r"mask has dtype float32; it must be bool"),
        ({"bias": jnp.ones((T, S), bool)}, r"bias has dtype bool; it must be floating point\. Boolean masks go into mask"),
        ({"bias": jnp.ones((T, S), jnp.int32)}, r"bias has dtype int32; it must be floating point"),
        (
            {"mask": jnp.ones((S, T), bool)},
            r"mask has shape \(12, 8\), which does not broadcast to \(B, N, T, S\) = \(2, 4, 8, 12\)",
        ),
        (
            {"mask": jnp.ones((B, T, S), bool)},
            r"mask has shape \(2, 8, 12\), which does not broadcast.*S the keys of the whole ring",
        ),
        ({"bias": zeros(1, K, T, S)}, r"bias has shape \(1, 2, 8, 12\), which does not broadcast"),
        ({"bias": zeros(1, 1, 1, T, S)}, r"bias has shape \(1, 1, 1, 8, 12\), which does not broadcast"),
        ({"segment_ids": zeros(B, T)}, r"segment_ids is one array but query has 8 tokens and key 12; pass SegmentIds\(query="),
        ({"positions": jnp.arange(T)}, r"positions is one array but query has 8 tokens and key 12; pass Positions\(query="),
        (
            {"segment_ids": (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))},
            r"segment_ids must be one array for query and key alike, or SegmentIds\(query, key_value\); got tuple",
        ),
        (
            {"positions": SegmentIds(jnp.arange(T), jnp.arange(S))},
            r"positions must be one array .*or Positions\(.*got SegmentIds",
        ),
        (
            {"segment_ids": SegmentIds(jnp.zeros((B, T), jnp.int32))},
            r"segment_ids=SegmentIds\(query, key_value\) needs both sides; use zeros for one document",
        ),
        (
            {"segment_ids": SegmentIds(zeros(B, T), jnp.zeros((B, S), jnp.int32))},
            r"segment_ids of the query has dtype float32; it must hold integers",
        ),
        (
            {"segment_ids": SegmentIds(jnp.zeros((B, T), jnp.int32), jnp.zeros((B, T), jnp.int32))},
            r"segment_ids of key and value has shape \(2, 8\); it must be \(12,\) or \(2, 12\), in stored order",
        ),
        (
            {"positions": Positions(jnp.zeros((3, T), jnp.int32))},
            r"positions of the query has shape \(3, 8\); it must be \(8,\) or",
        ),
        ({"positions": Positions(None, zeros(S))}, r"positions of key and value has dtype float32; it must hold integers"),
    ],
    ids=[
        "int mask",
        "float mask",
        "bool bias",
        "int bias",
        "mask swapped",
        "mask rank 3",
        "bias kv heads",
        "bias rank 5",
        "one segment array",
        "one position array",
        "plain tuple",
        "wrong pair",
        "half a pair",
        "float segments",
        "segment length",
        "position rows",
        "float positions",
    ],
)
def test_per_token_and_dense_arrays_that_do_not_fit(attend, options, message):
    refuses("(?i)" + message, attend, QUERY, KEY, VALUE, **options)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_that_do_not_fit(name):
    refuses(
        rf"{name} has shape \(3,\); it must be \(2,\), the number of real", ring_attention, QUERY, KEY, VALUE, **{name: [1, 2, 3]}
    )
    refuses(rf"{name} has shape \(\); it must be \(2,\)", ring_attention, QUERY, KEY, VALUE, **{name: 4})
    refuses(rf"{name} has dtype float32; it must hold integers", ring_attention, QUERY, KEY, VALUE, **{name: zeros(B)})


@pytest.mark.fast
def test_sinks_that_do_not_fit():
    for sinks in (zeros(K), zeros(1, N), 0.0):
        message = r"sinks has shape \(.*\) and dtype float32; it must be \(4,\) floats, a logit per head"
        refuses(message, ring_attention, QUERY, KEY, VALUE, sinks=sinks)
    refuses(
        r"sinks has shape \(4,\) and dtype int32; it must be", ring_attention, QUERY, KEY, VALUE, sinks=jnp.zeros(N, jnp.int32)
    )


# Names.


@pytest.mark.fast
@FUNCTIONS
def test_keywords_that_do_not_exist(attend):
    call = functools.partial(refuses, error=TypeError)
    for name, value in (("dropout_rate", 0.1), ("dropout_rng", None)):
        call(
            rf"has no argument '{name}' \(got {value}\)\. .*leave it out, or apply dropout to",
            attend,
            QUERY,
            KEY,
            VALUE,
            **{name: value},
        )
    renamed = {
        "causal": "is_causal",
        "window_size": "local_window_size",
        "sm_scale": "scale",
        "softcap": "logits_soft_cap",
        "attn_mask": "mask",
        "attn_bias": "bias",
    }
    for name, ours in renamed.items():
        call(rf"has no argument '{name}' \(got 3\)\. Use {ours}\.", attend, QUERY, KEY, VALUE, **{name: 3})
    call(r"has no argument 'colour' \(got 'red'\)\.$", attend, QUERY, KEY, VALUE, colour="red")


@pytest.mark.fast
def test_unknown_layout_and_schedule():
    refuses(
        r"layout='zagzig' is unknown; choose one of 'contiguous', 'zigzag', 'striped'",
        ring_attention,
        QUERY,
        KEY,
        VALUE,
        layout="zagzig",
    )
    refuses(
        r"schedule='torus' is unknown; choose one of 'ring', 'bidirectional', 'all_gather'",
        ring_attention,
        QUERY,
        KEY,
        VALUE,
        schedule="torus",
    )


# What an implementation cannot do.


@pytest.mark.fast
@FUNCTIONS
def test_autodiff_refuses_block_sizes(attend):
    message = r"implementation='autodiff' refuses: it has no blocks.*leave block_sizes out or use implementation='xla'"
    refuses(message, attend, QUERY, KEY, VALUE, implementation="autodiff", block_sizes=4, error=NotImplementedError)


@pytest.mark.fast
def test_chunk_gradients_need_a_kernel_with_a_backward_pass():
    message = r"implementation='autodiff' has no backward kernel: differentiate attention_chunk_stats.*implementation='xla'"
    refuses(message, chunk_grads, QUERY, KEY, VALUE, implementation="autodiff", error=NotImplementedError)


def along_query(query):
    return jax.jvp(lambda query: ring_attention(query, KEY, VALUE), (query,), (query,))


@pytest.mark.fast
def test_forward_mode_names_the_way_out():
    message = r"forward mode alone \(jvp, jacfwd\).*reverse mode twice use implementation='autodiff'"
    refuses(message, along_query, QUERY, error=NotImplementedError)


def test_forward_mode_under_jit_is_refused_too():
    # JAX finds out only when it lowers the program, outside of this library, so it is JAX's own message.
    with pytest.raises((NotImplementedError, TypeError), match="forward-mode"):
        jax.jit(along_query)(QUERY)


# Carries and cotangents of the chunk functions.


@pytest.mark.fast
def test_carries_that_do_not_fit():
    carry = ChunkStats(zeros(B, T, N, H), zeros(B, T, N), zeros(B, T, N))
    for field, x, message in (
        ("output", zeros(B, T, N, 4), r"carry\.output has shape \(2, 8, 4, 4\); it must be \(2, 8, 4, 8\) here"),
        ("output", zeros(T, N, H), r"carry\.output has shape \(8, 4, 8\), rank 3, but query has rank 4"),
        ("sum", zeros(B, N, T), r"carry\.sum has shape \(2, 4, 8\); it must be \(2, 8, 4\) here"),
        ("max", zeros(B, T), r"carry\.max has shape \(2, 8\); it must be \(2, 8, 4\) here"),
    ):
        refuses(message, attention_chunk_stats, QUERY, KEY, VALUE, carry=carry._replace(**{field: x}))
    grads = (QUERY, KEY, VALUE)
    refuses(r"carry has 2 gradients but this call returns 3", chunk_grads, QUERY, KEY, VALUE, carry=grads[:2])
    refuses(r"carry has 3 gradients but this call returns 4", chunk_grads, QUERY, KEY, VALUE, zeros(T, S), carry=grads)
    refuses(
        r"carry d_key has shape \(2, 8, 4, 8\); it must be \(2, 12, 2, 8\)", chunk_grads, QUERY, KEY, VALUE, carry=(QUERY,) * 3
    )


@pytest.mark.fast
def test_rows_and_cotangents_that_do_not_fit():
    rows, d_output = zeros(B, T, N), zeros(B, T, N, H)
    for bad, message in (
        ((zeros(B, T, N, 3), rows, rows), r"d_output has shape \(2, 8, 4, 3\); it must be \(2, 8, 4, 8\) here"),
        ((zeros(T, N, H), rows, rows), r"d_output has shape \(8, 4, 8\), rank 3, but query has rank 4"),
        ((d_output, zeros(B, N, T), rows), r"lse has shape \(2, 4, 8\); it must be \(2, 8, 4\) here"),
        ((d_output, rows, zeros(B, T)), r"delta has shape \(2, 8\); it must be \(2, 8, 4\) here"),
    ):
        refuses(message, attention_chunk_grads, QUERY, KEY, VALUE, *bad)


# Lists of chunks.


@pytest.mark.fast
def test_lists_of_chunks_that_do_not_fit():
    halves = [KEY[:, :5], KEY[:, 5:]]
    for key, value, message in (
        (halves, VALUE, r"key is a list and value a \w+: pass both as lists of chunks or both as arrays"),
        (KEY, tuple(halves), r"key is a \w+ and value a tuple: pass both as lists"),
        (halves, halves[:1], r"got 2 key chunks and 1 value chunks; give at least one, and as many of each"),
        ([], [], r"got 0 key chunks and 0 value chunks; give at least one"),
        (halves, halves[::-1], r"key\[0\] has 5 tokens and value\[0\] 7; they must be equal"),
        (halves, [halves[0], halves[1][0]], r"value\[1\] has shape \(7, 2, 8\), rank 3, but query has rank 4"),
        (
            [halves[0], zeros(B, 7, 1, H)],
            [halves[0], zeros(B, 7, 1, H)],
            r"key\[1\] is float32\(2, 7, 1, 8\) but key\[0\].*length \(axis 1\) only",
        ),
        (halves, [halves[0], halves[1].astype(jnp.bfloat16)], r"value\[1\] is bfloat16\(2, 7, 2, 8\) but value\[0\] float32"),
        ([halves[0], zeros(B, 0, K, H)], [halves[0], zeros(B, 0, K, H)], r"\[1\].*\(2, 0, 2, 8\)"),
    ):
        refuses(message, ring_attention, QUERY, key, value)


@pytest.mark.fast
def test_ring_arguments_have_no_meaning_with_lists():
    for name, given in (
        ("axis_name", "seq"),
        ("axis_name", ()),
        ("mesh", ring_mesh(1)),
        ("spec", P(None, "seq")),
        ("layout", "zigzag"),
        ("schedule", "all_gather"),
    ):
        message = rf"{name}=.* has no meaning with lists of chunks, which one device folds in order; pass arrays"
        refuses(message, ring_attention, QUERY, [KEY], [VALUE], **{name: given})


# Meshes and specs.


MESH = {"data": 2, "seq": 2, "tensor": 2}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": P("data", "ring")}, r"axis 'ring' is not in the mesh, which has axes \('data', 'seq', 'tensor'\)"),
        ({"axis_name": "ring"}, r"axis 'ring' is not in the mesh, which has axes"),
        (
            {},
            r"nothing says how the sequence is sharded over the mesh axes .*pass spec, for example P\('data', 'seq'.*axis_name",
        ),
        ({"spec": P("data", "seq", None, "tensor")}, r"the head dim is sharded over \('tensor',\); shard heads \(N\) instead"),
        ({"spec": P("seq", "seq")}, r"axis 'seq' stands for more than one of B \('seq',\), T \('seq',\), N \(\)"),
        ({"spec": P("data", ("seq", "tensor"), "tensor")}, r"axis 'tensor' stands for more than one of B"),
        ({"spec": P("data", "seq", "tensor", None, None)}, r"spec=.* has 5 entries; it is the PartitionSpec of \(B, T, N, H\)"),
        (
            {"spec": P("data", "seq"), "axis_name": "tensor"},
            r"axis_name=\('tensor',\) but the T entry of spec=.* is \('seq',\); give one",
        ),
        (
            {"spec": P(("data", "tensor"), "seq")},
            r"batch size 2 is no multiple of 4, the size of the mesh axes \('data', 'tensor'\); pad",
        ),
        (
            {"spec": P(None, "seq", ("data", "tensor"))},
            r"4 query heads and 2 key/value heads cannot both be split over 4 devices .*leave that axis out",
        ),
    ],
    ids=[
        "spec axis",
        "axis_name",
        "no spec",
        "head dim",
        "axis twice",
        "axis in two entries",
        "five entries",
        "spec against axis_name",
        "batch",
        "heads",
    ],
)
def test_meshes_that_do_not_fit(options, message):
    refuses(message, ring_attention, QUERY, KEY, VALUE, mesh=mesh_of(**MESH), **options)
    with jax.set_mesh(mesh_of(**MESH)):
        refuses(message, ring_attention, QUERY, KEY, VALUE, **options)


@pytest.mark.fast
@pytest.mark.parametrize("options", [{"axis_name": "seq"}, {"spec": P(None, "seq")}], ids=["axis_name", "spec"])
def test_an_axis_without_a_mesh(options):
    message = r"axis_name=.* and spec=.* need a mesh, and there is none in context: pass mesh=\.\.\., or call under jax\.set_mesh"
    refuses(message, ring_attention, QUERY, KEY, VALUE, **options)


@pytest.mark.fast
def test_explicit_arrays_that_no_ring_axis_shards():
    mesh = ring_mesh(2, AxisType.Explicit)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, P())) for x in (QUERY, KEY, VALUE)]
        refuses(
            r"nothing says how the sequence is sharded over the mesh axes \('seq',\).*reshard the arrays over the ring axis",
            ring_attention,
            *arrays,
        )
        by_dim = [jax.device_put(x, NamedSharding(mesh, P(None, None, None, "seq"))) for x in (QUERY, KEY, VALUE)]
        refuses(r"the head dim is sharded over \('seq',\); shard heads", ring_attention, *by_dim, axis_name=())


def in_shard_map(attend, length: int = T, size: int = 2, **sizes: int):
    """Trace `attend(query, key, value)` inside `shard_map` over a ring of `size`; `length` tokens a shard."""
    mesh = mesh_of(**sizes) if sizes else ring_mesh(size)
    spec = P(None, "seq")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    x = jax.ShapeDtypeStruct((B, length * size, N, H), jnp.float32)
    return jax.eval_shape(mapped, x, x, x)


@pytest.mark.fast
def test_inside_shard_map_the_ring_must_be_named():
    message = r"called inside shard_map over \('seq',\): name the ring, axis_name=\.\.\., or pass axis_name=\(\)"
    refuses(message, in_shard_map, ring_attention)


@pytest.mark.fast
def test_inside_shard_map_mesh_and_spec_are_refused():
    for options in ({"mesh": ring_mesh(2)}, {"spec": P(None, "seq")}):
        attend = functools.partial(ring_attention, axis_name="seq", **options)
        message = r"axis_name='seq' is a manual axis here \(inside shard_map\), .*leave out mesh and spec"
        refuses(message, in_shard_map, attend)


@pytest.mark.fast
def test_inside_shard_map_a_ring_over_manual_axes_cannot_be_entered_again():
    message = r"axis 'seq' is already manual here \(inside shard_map over \('seq',\)\).*name it by axis_name"
    refuses(message, in_shard_map, functools.partial(ring_attention, mesh=ring_mesh(2), spec=P(None, "seq")))


def test_inside_shard_map_an_unknown_axis_is_named():
    message = r"axis 'ring' is not in the mesh, which has axes \('seq',\)"
    refuses(message, in_shard_map, functools.partial(ring_attention, axis_name="ring"))


@pytest.mark.fast
def test_zigzag_shards_of_odd_length():
    message = (
        r"layout='zigzag' stores 2 pieces per shard, but this device's query has 5 tokens on a ring of 2: the global length 10 "
        r"is no multiple of 4\. Pad the sequence, or call ring_attention on global arrays"
    )
    refuses(message, in_shard_map, functools.partial(ring_attention, axis_name="seq", layout="zigzag", is_causal=True), length=5)


@pytest.mark.fast
def test_inside_shard_map_dense_arrays_span_the_keys_of_the_whole_ring():
    attend = functools.partial(ring_attention, axis_name="seq", bias=zeros(T, T))
    message = (
        r"bias has shape \(8, 8\), which does not broadcast to \(B, N, T, S\) = \(2, 4, 8, 16\).*S the keys of the whole ring"
    )
    refuses(message, in_shard_map, attend)
