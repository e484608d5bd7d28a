"""Layers of flax and equinox on a ring equal the frameworks' own attention, with the same weights and in both directions.

The tolerance is earned: against the framework's own layer in float64, the ring may make a small multiple of the error that the
own layer makes in float32.
"""

from __future__ import annotations

import functools
import inspect
import io
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import mesh_of, ring_mesh
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ring_attention import Positions, SegmentIds, from_layout, to_layout
from jax_ring_attention.integrations import TokenMask, flax_linen, flax_nnx
from jax_ring_attention.integrations.common import RING_OPTIONS
from jax_ring_attention.integrations.equinox import RingMultiheadAttention
from jax_ring_attention.testing import relative_error

FRAMEWORKS = ("linen", "nnx", "equinox")
WIDTH, HEADS = 24, 4
QUICK = {"xla_backend_optimization_level": 0}  # compiling is most of what a reference costs


class Layer(NamedTuple):
    """Parameters and `apply(params, query, memory, mask)` of one attention layer, batched."""

    params: Any
    apply: Any


def linen_layer(ring: dict | None = None, **fields) -> Layer:
    layer = linen.MultiHeadDotProductAttention(num_heads=HEADS, bias_init=linen.initializers.normal(0.5), **fields)
    params = layer.init(jax.random.key(0), jnp.ones((1, 1, WIDTH)))["params"]
    if ring is not None:
        layer = layer.clone(attention_fn=flax_linen.ring_attention_fn(**ring))
    return Layer(params, lambda params, x, memory, mask: layer.apply({"params": params}, x, memory, mask=mask))


def nnx_layer(ring: dict | None = None, **fields) -> Layer:
    if ring is not None:
        fields["attention_fn"] = flax_nnx.ring_attention_fn(**ring)
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, bias_init=nnx.initializers.normal(0.5), decode=False, rngs=nnx.Rngs(0), **fields)
    graph, params = nnx.split(layer)
    return Layer(params, lambda params, x, memory, mask: nnx.merge(graph, params)(x, memory, mask=mask))


def equinox_attention(**options) -> eqx.nn.MultiheadAttention:
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    return eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0), **biases, **options)


def equinox_layer(ring: dict | None = None) -> Layer:
    layer = equinox_attention()
    if ring is not None:
        layer = RingMultiheadAttention.from_attention(layer, **ring)
    params, static = eqx.partition(layer, eqx.is_array)

    def apply(params, x, memory, mask):
        attention = eqx.combine(params, static)
        if ring is not None:
            return attention(x, memory, memory, mask)
        if mask is None:
            return jax.vmap(attention)(x, memory, memory)
        mask = jnp.broadcast_to(mask, (len(x), HEADS, x.shape[1], memory.shape[1])).astype(bool)
        return jax.vmap(attention)(x, memory, memory, mask)

    return Layer(params, apply)


LAYERS = {"linen": linen_layer, "nnx": nnx_layer, "equinox": equinox_layer}


def by_projection(gradients) -> dict[str, np.ndarray]:
    """One vector per projection: on its own the key's bias has gradient 0 but for rounding, which no ratio can judge."""
    groups: dict[str, list] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(gradients):
        groups.setdefault(str(path[0]), []).append(np.ravel(np.asarray(x, np.float64)))
    return {name: np.concatenate(parts) for name, parts in groups.items()}


def run(layer: Layer, arrays, d_out, mask, compiler_options=None) -> dict[str, np.ndarray]:
    """The output and all gradients, under one `jax.jit`."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def both(params, arrays, d_out, mask):
        out, pull = jax.vjp(lambda params, arrays: layer.apply(params, *arrays, mask), params, arrays)
        return out, pull(d_out)

    out, (d_params, d_arrays) = both(layer.params, arrays, d_out, mask)
    results = {"out": out} | {f"input {i}": x for i, x in enumerate(d_arrays)} | by_projection(d_params)
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


def check_layer(own: Layer, ring: Layer, seen=None, mask=None, *, lengths=(24, 24), batch=2) -> None:
    """`ring` with `mask` equals `own` with the dense mask `seen`, given the same parameters and inputs."""
    assert jax.tree.structure(jax.tree.leaves(own.params)) == jax.tree.structure(jax.tree.leaves(ring.params))
    ring = ring._replace(params=jax.tree.unflatten(jax.tree.structure(ring.params), jax.tree.leaves(own.params)))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(batch, length, WIDTH)).astype(np.float32) for length in lengths]
    d_out = rng.normal(size=arrays[0].shape).astype(np.float32)
    have = run(ring, arrays, d_out, mask)
    plain = run(own, arrays, d_out, seen, QUICK)
    with jax.enable_x64(True):
        double, *exact_inputs = jax.tree.map(lambda x: np.asarray(x).astype(np.float64), (own.params, arrays, d_out))
        want = run(own._replace(params=double), *exact_inputs, seen, QUICK)
    assert have.keys() == want.keys()
    for name in want:
        allowed = max((2 if name == "out" else 3) * relative_error(plain[name], want[name]), np.finfo(np.float32).eps / 2)
        error = relative_error(have[name], want[name])
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


SEQ = {"spec": P(None, "seq")}
CAUSAL = np.tril(np.ones((1, 1, 24, 24), bool))


@pytest.mark.fast
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_causal_attention_equals_the_layers_own_with_a_causal_mask(framework):
    make = LAYERS[framework]
    check_layer(make(), make({"mesh": ring_mesh(8), **SEQ, "is_causal": True}), CAUSAL)


@pytest.mark.parametrize("framework", ["linen", "equinox"])
def test_a_dense_mask_as_the_framework_makes_it(framework):
    tokens = np.arange(24) < np.asarray([[24], [17]])
    if framework == "equinox":
        mask = CAUSAL & tokens[:, None, None, :]
    else:  # floats, as flax's helpers return them by default
        mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(np.ones_like(tokens), tokens))
        assert mask.dtype == jnp.float32
    make = LAYERS[framework]
    check_layer(make(), make({"mesh": ring_mesh(8), **SEQ}), mask, mask)


@pytest.mark.fast
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_packed_documents_in_zigzag_order_as_integers_per_token(framework):
    documents = np.sort(np.random.default_rng(1).integers(0, 4, (2, 24)), axis=1)
    seen = CAUSAL & (documents[:, None, :, None] == documents[:, None, None, :])
    options = {"mesh": mesh_of(data=2, seq=4), "spec": P("data", "seq"), "is_causal": True, "layout": "zigzag"}
    make = LAYERS[framework]
    ring = make(options)

    def apply(params, x, memory, mask):
        x, memory = (to_layout(a, "zigzag", 4) for a in (x, memory))
        return from_layout(ring.apply(params, x, memory, mask), "zigzag", 4)

    check_layer(make(), ring._replace(apply=apply), seen, TokenMask(segment_ids=to_layout(documents, "zigzag", 4)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_padded_cross_attention_of_lengths_that_nothing_divides(framework):
    real = np.asarray([13, 7])
    seen = (np.arange(13) < real[:, None])[:, None, None, :]
    make = LAYERS[framework]
    ring = make({"mesh": mesh_of(data=2, seq=4), "spec": P("data", "seq")})
    check_layer(make(), ring, seen, TokenMask(key_value_seq_lengths=real), lengths=(19, 13))


@pytest.mark.fast
@pytest.mark.parametrize("is_causal", [False, True])
def test_nnx_grouped_heads_normalized_and_causal_by_the_call(is_causal):
    def at_call(layer):
        graph, params = nnx.split(layer)
        return Layer(params, lambda params, x, memory, mask: nnx.merge(graph, params)(x, memory, mask=mask, is_causal=is_causal))

    fields = {"num_kv_heads": 2, "normalize_qk": True, "decode": False}
    ring = flax_nnx.ring_attention_fn(mesh=ring_mesh(8), **SEQ)
    own, ring = (
        nnx.MultiHeadAttention(HEADS, WIDTH, rngs=nnx.Rngs(0), **fields, **more) for more in ({}, {"attention_fn": ring})
    )
    check_layer(at_call(own), at_call(ring))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_parameters_interchange(framework):
    make = LAYERS[framework]
    own, ring = make().params, make({"mesh": ring_mesh(8), **SEQ}).params
    if framework != "equinox":
        assert jax.tree.structure(own) == jax.tree.structure(ring)
        return
    # Another class, so another tree, but leaf by leaf the same names, in files too.
    paths = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] for tree in (own, ring)]
    assert paths[0] == paths[1]
    layer = equinox_attention()
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    other = RingMultiheadAttention(HEADS, WIDTH, key=jax.random.key(7), **biases, mesh=ring_mesh(8), **SEQ)
    read = eqx.tree_deserialise_leaves(file, other)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(layer), jax.tree.leaves(read), strict=True))
    assert not np.array_equal(other.query_proj.weight, read.query_proj.weight)
    assert read.ring_options == other.ring_options


class Stack(linen.Module):
    """Two residual layers, scanned and rematerialized, as linen users write them."""

    attention_fn: Any

    @linen.compact
    def __call__(self, x, mask):
        class Block(linen.Module):
            attention_fn: Any

            @linen.compact
            def __call__(self, x, mask):
                return x + linen.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention_fn)(x, mask=mask), None

        layers = linen.scan(linen.remat(Block), {"params": 0}, split_rngs={"params": True}, in_axes=(linen.broadcast,), length=2)
        return layers(self.attention_fn, name="layers")(x, mask)[0]


def test_integers_per_token_go_through_a_model_that_scans_and_rematerializes():
    documents = np.sort(np.random.default_rng(1).integers(0, 4, (2, 24)), axis=1)
    seen = CAUSAL & (documents[:, None, :, None] == documents[:, None, None, :])
    models = Stack(linen.dot_product_attention), Stack(flax_linen.ring_attention_fn(mesh=ring_mesh(8), **SEQ, is_causal=True))
    params = models[0].init(jax.random.key(0), jnp.ones((1, 24, WIDTH)), CAUSAL)["params"]
    own, ring = (Layer(params, functools.partial(lambda m, p, x, _, mask: m.apply({"params": p}, x, mask), m)) for m in models)
    check_layer(own, ring, seen, TokenMask(segment_ids=documents))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_explicit_axis_types_tell_the_mesh_and_the_spec(framework):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24, WIDTH)), jnp.float32)
    make = LAYERS[framework]
    own, ring = make(), make({"is_causal": True})
    want = own.apply(own.params, x, x, CAUSAL)
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, seq=4)):
        x = jax.device_put(x, P("data", "seq"))
        out = jax.jit(ring.apply)(ring.params, x, x, None)
    assert out.sharding.spec == P("data", "seq", None)
    assert relative_error(out, want) < 1e-6


# The functions themselves: flax's arguments, one by one.

FUNCTIONS = {"linen": flax_linen.ring_attention_fn, "nnx": flax_nnx.ring_attention_fn}
OWN = {"linen": linen.dot_product_attention, "nnx": nnx.dot_product_attention}


def heads(*batch: int, length: int = 16, seed: int = 0, dtype=jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(*batch, length, HEADS, 8)), dtype) for _ in range(3)]


@pytest.mark.fast
@pytest.mark.parametrize("framework", FUNCTIONS)
def test_every_argument_of_flax_is_in_the_signature(framework):
    """Linen drops what the signature lacks without a word."""
    own, ours = (inspect.signature(f).parameters for f in (OWN[framework], FUNCTIONS[framework]()))
    assert set(own) <= set(ours)
    for name, parameter in own.items():
        assert parameter.default == ours[name].default, name
    assert set(list(ours)[: len(own)]) <= set(own) | {"promote_dtype"}


def test_what_the_layers_pass_is_what_the_tests_know():
    """A keyword that a newer flax passes shows up here before it reaches anybody."""
    passed: dict[str, set[str]] = {}

    def spy(framework, query, key, value, **keywords):
        passed[framework] = set(keywords)
        return query

    names = inspect.signature(flax_linen.ring_attention_fn()).parameters
    known = functools.partial(spy, "linen")
    known.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in names.values()])  # type: ignore[attr-defined]
    linen_layer(None, attention_fn=known)
    layer = nnx_layer(None, attention_fn=functools.partial(spy, "nnx"))
    layer.apply(layer.params, jnp.ones((1, 2, WIDTH)), jnp.ones((1, 2, WIDTH)), None)
    for framework, make in FUNCTIONS.items():
        assert passed[framework]
        assert passed[framework] <= set(inspect.signature(make()).parameters)


@pytest.mark.parametrize(
    ("framework", "batch", "keeps"),
    [("linen", (), (0, 2)), ("nnx", (2,), (0, 1)), ("linen", (2, 3), (0, 1, 2)), ("nnx", (2, 1, 2), (1, 3))],
)
def test_any_number_of_batch_axes(framework, batch, keeps):
    """Masks and biases that have the axes from `keep` on, and broadcast over those before."""
    arrays = heads(*batch)
    attend = FUNCTIONS[framework](mesh=ring_mesh(2), **SEQ)
    full = (*batch, HEADS, 16, 16)
    rng = np.random.default_rng(3)
    for keep in keeps:
        shape = tuple(n if i >= keep else 1 for i, n in enumerate(full))
        mask = jnp.asarray(rng.random(shape) < 0.7).at[..., 0].set(True)
        bias = jnp.asarray(rng.normal(size=shape[max(keep - 1, 0) :]), jnp.float32)
        want = linen.dot_product_attention(*arrays, bias=bias, mask=mask)
        assert relative_error(attend(*arrays, bias=bias, mask=mask), want) < 1e-6


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_integers_per_token_with_two_batch_axes(framework):
    arrays = heads(2, 3)
    documents = np.sort(np.random.default_rng(4).integers(0, 3, (2, 3, 16)), axis=-1)
    real = np.random.default_rng(5).integers(1, 17, (2, 3))
    place = np.random.default_rng(6).permutation(16)
    dense = np.random.default_rng(7).random((2, 1, 1, 16, 16)) < 0.8
    seen = documents[..., None, :, None] == documents[..., None, None, :]
    seen = seen & dense & (np.arange(16) < real[..., None])[..., None, None, :] & (place[:, None] >= place)
    mask = TokenMask(segment_ids=documents, positions=place, key_value_seq_lengths=real, mask=dense)
    out = FUNCTIONS[framework](mesh=ring_mesh(8), **SEQ, is_causal=True)(*arrays, mask=mask)
    sees = np.broadcast_to(seen.any(-1), (2, 3, HEADS, 16))
    want = jnp.where(jnp.moveaxis(sees, 2, 3)[..., None], linen.dot_product_attention(*arrays, mask=seen), 0)
    assert not sees.all()
    assert relative_error(out, want) < 1e-6


@pytest.mark.fast
@pytest.mark.parametrize("framework", FUNCTIONS)
@pytest.mark.parametrize(
    "asked", ["highest", jax.lax.Precision.HIGHEST, ("highest", jax.lax.Precision.HIGHEST), "float32"], ids=str
)
def test_precision_reaches_every_matmul_of_both_directions(framework, asked):
    attend = FUNCTIONS[framework](mesh=ring_mesh(2), **SEQ)

    def loss(arrays, precision):
        return attend(*arrays, precision=precision).sum()

    def precisions(precision):
        text = str(jax.make_jaxpr(jax.grad(functools.partial(loss, precision=precision)))(heads(1)))
        return text.count("dot_general"), text.count("Precision.HIGHEST")

    count, _ = precisions(None)
    assert precisions(None) == (count, 0)
    assert precisions(asked) == (count, 2 * count)
    assert count >= 5
    with jax.default_matmul_precision("highest"):
        assert precisions(None) == (count, 2 * count)


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_dtypes_are_promoted_as_flax_does(framework):
    query, key, value = heads(1)
    attend = FUNCTIONS[framework](mesh=ring_mesh(2), **SEQ)
    mixed = attend(query.astype(jnp.bfloat16), key, value)
    assert mixed.dtype == OWN[framework](query.astype(jnp.bfloat16), key, value).dtype == jnp.float32
    forced = attend(query, key, value, dtype=jnp.bfloat16)
    assert forced.dtype == OWN[framework](query, key, value, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_nnx_promote_dtype_is_called():
    calls = []

    def promote(arrays, *, dtype):
        calls.append(dtype)
        return tuple(x.astype(jnp.float16) for x in arrays)

    assert flax_nnx.ring_attention_fn()(*heads(1), promote_dtype=promote, dtype=jnp.bfloat16).dtype == jnp.float16
    assert calls == [jnp.bfloat16]


@pytest.mark.parametrize("force", [False, True])
def test_linen_force_fp32_for_softmax_gives_the_dtype_that_flax_gives(force):
    arrays = heads(1, dtype=jnp.bfloat16)
    own, ring = (f(*arrays, force_fp32_for_softmax=force) for f in (linen.dot_product_attention, flax_linen.ring_attention_fn()))
    assert own.dtype == ring.dtype == (jnp.float32 if force else jnp.bfloat16)


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_shards_inside_a_shard_map(framework):
    arrays = heads(2)
    attend = FUNCTIONS[framework](axis_name="seq", is_causal=True)
    sharded = jax.shard_map(attend, mesh=ring_mesh(8), in_specs=(P(None, "seq"),) * 3, out_specs=P(None, "seq"))
    want = linen.dot_product_attention(*arrays, mask=np.tril(np.ones((16, 16), bool)))
    assert relative_error(jax.jit(sharded)(*arrays), want) < 1e-6


def linen_decoder(attention_fn):
    layer = linen.MultiHeadDotProductAttention(HEADS, decode=True, attention_fn=attention_fn)
    variables = layer.init(jax.random.key(0), jnp.ones((2, 16, WIDTH)))
    cache = variables["cache"]

    def step(token):
        nonlocal cache
        out, changed = layer.apply({"params": variables["params"], "cache": cache}, token, mutable=["cache"])
        cache = changed["cache"]
        return out

    return step


def nnx_decoder(attention_fn):
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, attention_fn=attention_fn, rngs=nnx.Rngs(0))
    layer.init_cache((2, 16, WIDTH))
    return layer


DECODERS = {"linen": linen_decoder, "nnx": nnx_decoder}


@pytest.mark.parametrize("framework", DECODERS)
def test_decoding_with_flaxs_cache(framework):
    tokens = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, WIDTH)), jnp.float32)
    own = DECODERS[framework](OWN[framework])
    ring = DECODERS[framework](FUNCTIONS[framework](mesh=ring_mesh(8), **SEQ))
    for i in range(5):
        assert relative_error(ring(tokens[:, i : i + 1]), own(tokens[:, i : i + 1])) < 1e-6


@pytest.mark.fast
@pytest.mark.parametrize("framework", DECODERS)
@pytest.mark.parametrize("option", [{"is_causal": True}, {"local_window_size": 0}], ids=str)
def test_a_causal_layer_refuses_to_decode(framework, option):
    """Its one query would count as the first token and see the first key only."""
    step = DECODERS[framework](FUNCTIONS[framework](mesh=ring_mesh(8), **SEQ, **option))
    with pytest.raises(ValueError, match=rf"{next(iter(option))}=.* 1 queries and 16 keys .*decode=True.*positions"):
        step(jnp.ones((2, 1, WIDTH)))


@pytest.mark.parametrize("framework", DECODERS)
def test_a_token_mask_does_not_decode(framework):
    mask = TokenMask(segment_ids=jnp.zeros((2, 1), int))
    if framework == "linen":
        layer = linen.MultiHeadDotProductAttention(HEADS, decode=True, attention_fn=flax_linen.ring_attention_fn())
        variables = layer.init(jax.random.key(0), jnp.ones((2, 16, WIDTH)))
        step = functools.partial(layer.apply, variables, mutable=["cache"])
    else:
        step = nnx_decoder(flax_nnx.ring_attention_fn())
    with pytest.raises(AttributeError, match=r"TokenMask does not combine .*decode=True: .*dense mask to a layer that decodes"):
        step(jnp.ones((2, 1, WIDTH)), mask=mask)


@pytest.mark.parametrize("framework", FUNCTIONS)
def test_a_causal_layer_decodes_where_positions_are_given(framework):
    (query, _, _), (_, key, value) = heads(1, length=1), heads(1)
    attend = FUNCTIONS[framework](mesh=ring_mesh(8), **SEQ, is_causal=True)
    mask = TokenMask(positions=Positions(np.asarray([9]), np.arange(16)))
    want = linen.dot_product_attention(query, key, value, mask=np.arange(16) <= 9)
    assert relative_error(attend(query, key, value, mask=mask), want) < 1e-6


@pytest.mark.fast
@pytest.mark.parametrize(
    ("frameworks", "keywords", "message"),
    [
        ("linen nnx", {"dropout_rate": 0.1, "dropout_rng": 0}, r"dropout_rate=0.1 .* output, or pass deterministic=True"),
        ("linen nnx", {"module": object()}, r"sow_weights=True \(module=object\).*own dot_product_attention"),
        ("linen nnx", {"precision": ("high", "highest")}, r"precision=\('high', 'highest'\) differs.*pass one"),
        ("linen", {"einsum_dot_general": jax.lax.dot_general}, r"einsum_dot_general=.*kernels' own"),
        ("linen", {"qk_attn_weights_einsum": jnp.einsum}, r"qk_attn_weights_einsum=.*qk_attn_weights_einsum_cls"),
        ("linen", {"attn_weights_value_einsum": jnp.einsum}, r"attn_weights_value_einsum=.*kernels' own"),
        ("nnx", {"input_positions": np.arange(16)}, r"input_positions .*rotates nothing.*TokenMask\(positions"),
        ("linen nnx", {"bias": np.zeros((3, 16, 16), np.float32)}, r"bias has shape \(3, 16, 16\)"),
    ],
)
def test_refusals_name_the_argument_and_the_remedy(frameworks, keywords, message):
    for framework in frameworks.split():
        with pytest.raises(ValueError, match=message):
            FUNCTIONS[framework]()(*heads(1), **keywords)


def test_unused_dropout_is_no_reason_to_refuse():
    arrays = heads(1)
    for make in FUNCTIONS.values():
        out = make()(*arrays, dropout_rate=0.5, deterministic=True, dropout_rng=jax.random.key(0), broadcast_dropout=False)
        assert np.array_equal(out, make()(*arrays))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": np.ones((2, 2), bool)}, ValueError, r"mask=.*belongs to a call"),
        ({"bias": np.ones((2, 2))}, ValueError, r"bias=.*belongs to a call"),
        ({"return_residual": True}, ValueError, r"return_residual=True.*one output.*ring_attention"),
        ({"causal": True}, TypeError, r"no argument 'causal'.* Use is_causal"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_are_checked_when_the_layer_is_built(options, error, message):
    makers = (*FUNCTIONS.values(), functools.partial(RingMultiheadAttention.from_attention, equinox_attention()))
    for make in makers:
        with pytest.raises(error, match=message):
            make(**options)


def test_an_option_given_twice_is_refused():
    attend = flax_linen.ring_attention_fn(segment_ids=jnp.zeros(16, int))
    with pytest.raises(ValueError, match="segment_ids was given when the layer was built and again in TokenMask"):
        attend(*heads(1), mask=TokenMask(segment_ids=SegmentIds(jnp.zeros(16, int), jnp.zeros(16, int))))


@pytest.mark.parametrize("module", [flax_linen.ring_attention_fn, flax_nnx.ring_attention_fn])
def test_the_docstrings_list_every_ring_option(module):
    assert all(name in inspect.getdoc(module) for name in RING_OPTIONS)


# Equinox: what its layer takes besides.


def ring_of(attention, **options) -> RingMultiheadAttention:
    return RingMultiheadAttention.from_attention(attention, mesh=ring_mesh(8), **SEQ, **options)


def sequence(*batch: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).normal(size=(*batch, 16, WIDTH)), jnp.float32)


@pytest.mark.fast
def test_equinox_unbatched_mapped_and_batched_calls_agree():
    own, x = equinox_attention(), sequence(2)
    documents = np.sort(np.random.default_rng(1).integers(0, 3, (2, 16)), axis=1)
    ring = ring_of(own)

    def one(x, documents):
        return ring(x, x, x, TokenMask(segment_ids=documents))

    want = [own(a, a, a, d[:, None] == d) for a, d in zip(x, documents, strict=True)]
    assert relative_error(eqx.filter_jit(one)(x[0], documents[0]), want[0]) < 1e-6
    assert relative_error(eqx.filter_jit(jax.vmap(one))(x, documents), jnp.stack(want)) < 1e-6
    assert relative_error(eqx.filter_jit(one)(x, documents), jnp.stack(want)) < 1e-6


def test_equinox_masks_per_head_and_process_heads():
    own, x = equinox_attention(), sequence()
    mask = jnp.asarray(np.random.default_rng(0).random((HEADS, 16, 16)) < 0.7).at[..., 0].set(True)
    rotary = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)

    def rotate(query, key, value):
        return jax.vmap(rotary, 1, 1)(query), jax.vmap(rotary, 1, 1)(key), value

    want = own(x, x, x, mask, process_heads=rotate)
    assert relative_error(ring_of(own)(x, x, x, mask, process_heads=rotate), want) < 1e-6
    assert relative_error(ring_of(own)(x[None], x[None], x[None], mask, process_heads=rotate), want[None]) < 1e-6
    with pytest.raises(ValueError, match="process_heads must keep shapes"):
        ring_of(own)(x, x, x, process_heads=lambda q, k, v: (q[:1], k, v))


def test_equinox_projections_of_other_sizes_and_replaced_ones():
    own = eqx.nn.MultiheadAttention(HEADS, WIDTH, 10, 12, 14, 6, 5, key=jax.random.key(0))
    own = eqx.tree_at(lambda m: m.query_proj, own, eqx.nn.MLP(WIDTH, HEADS * 6, 8, 1, key=jax.random.key(1)))
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(n, d)), jnp.float32) for n, d in ((16, WIDTH), (11, 10), (11, 12)))
    ring = ring_of(own)
    assert eqx.tree_equal(ring.query_proj, own.query_proj)
    assert relative_error(ring(query, key, value), own(query, key, value)) < 1e-6


@pytest.mark.fast
def test_equinox_dropout_is_refused_where_it_is_on():
    own, x = equinox_attention(dropout_p=0.2), sequence()
    ring = ring_of(own)
    for layer, keywords in ((ring, {}), (eqx.nn.inference_mode(ring), {"inference": False})):
        with pytest.raises(ValueError, match=r"dropout_p=0.2 with inference=False.*inference=True"):
            layer(x, x, x, key=jax.random.key(0), **keywords)
    want = own(x, x, x, inference=True)
    assert relative_error(ring(x, x, x, key=jax.random.key(0), inference=True), want) < 1e-6
    assert relative_error(eqx.nn.inference_mode(ring)(x, x, x), want) < 1e-6
    with pytest.warns(DeprecationWarning, match="in favour of inference"):
        assert relative_error(ring(x, x, x, deterministic=True), want) < 1e-6


@pytest.mark.fast
def test_equinox_refusals():
    ring, x = ring_of(equinox_attention()), sequence()
    with pytest.raises(ValueError, match=r"shapes \(16, 24\), \(2, 16, 24\).*batch axis in front"):
        ring(x, sequence(2), x)
    with pytest.raises(ValueError, match=r"unhashable segment_ids=.*TokenMask"):
        RingMultiheadAttention(HEADS, WIDTH, key=jax.random.key(0), segment_ids=jnp.zeros(16, int))
    with pytest.raises(TypeError, match="no_such_option"):
        RingMultiheadAttention(HEADS, WIDTH, key=jax.random.key(0), no_such_option=1)
    with pytest.raises(ValueError, match="mask has dtype float32"):
        ring(x, x, x, jnp.ones((16, 16)))
