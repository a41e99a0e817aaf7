"""Programs with attention are serialised and read back, and give the same bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.oracle import UNOPTIMISED
from xform.primitives.attention import flex_attention
from xform.primitives.cross_entropy import linear_cross_entropy
from xform.primitives.inference import decode_attention, paged_attention
from xform.primitives.masks import causal, sliding_window

pytest.importorskip("flatbuffers", reason="`jax.export` writes with it")

unoptimised = partial(jax.jit, compiler_options=UNOPTIMISED)


def loss(x, window):
    score = lambda s, b, h, q, k: s + jnp.exp(x["table"])[h, jnp.minimum(q - k, 7)]
    mask = causal() & sliding_window(window)
    out, aux = flex_attention(
        x["q"], x["k"], x["v"], score_mod=score, mask_mod=mask, sinks=x["sinks"], aux=("lse",)
    )
    return jnp.sin(out).sum() + jnp.cos(aux.lse[...]).sum()


def inputs():
    rng = np.random.default_rng(0)
    shapes = {"q": (4, 24, 4, 8), "k": (4, 24, 2, 8), "v": (4, 24, 2, 6), "sinks": (4,)}
    x = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    return x | {"table": jnp.asarray(rng.normal(size=(4, 8)), jnp.float32)}, jnp.int32(5)


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda")])
def test_a_gradient_comes_back_with_the_same_bits(platforms):
    f = unoptimised(jax.value_and_grad(loss))
    x, window = inputs()
    program = export.deserialize(export.export(f, platforms=platforms)(x, window).serialize())
    assert program.platforms == platforms
    again = unoptimised(program.call)
    for a, b in zip(*map(jax.tree.leaves, (again(x, window), f(x, window))), strict=True):
        assert np.array_equal(a, b)


def test_arrays_split_by_their_type_can_be_exported():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (AxisType.Explicit,) * 2)
    x, window = inputs()
    spec = {n: P("dp", None, "tp") for n in "qkv"} | {"sinks": P("tp")}
    at = lambda name: NamedSharding(mesh, spec.get(name, P()))
    placed = {n: jax.device_put(a, at(n)) for n, a in x.items()}
    window = jax.device_put(window, NamedSharding(mesh, P()))
    f = unoptimised(loss)
    program = export.deserialize(export.export(f)(placed, window).serialize())
    assert program.nr_devices == 8
    assert np.array_equal(unoptimised(program.call)(placed, window), f(placed, window))


def tokens():
    shapes = {"hidden": (8, 16), "weight": (16, 24), "labels": (8,)}
    return {n: jnp.ones(s, jnp.int32 if n == "labels" else jnp.float32) for n, s in shapes.items()}


def tokens_loss(x):
    return linear_cross_entropy(x["hidden"], x["weight"], x["labels"])[0].sum()


def test_arrays_that_the_partitioner_splits_can_not_and_the_error_says_what_can():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (AxisType.Auto,) * 2)
    at = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
    x, window = inputs()
    placed = {n: at(a, *(("dp",) if n in "qkv" else ())) for n, a in x.items()}
    with pytest.raises(NotImplementedError, match=r"flex_attention .*`Auto`.*`jax.shard_map`"):
        export.export(jax.jit(loss))(placed, at(window))
    some = {n: at(a, *(() if n == "weight" else ("dp",))) for n, a in tokens().items()}
    with pytest.raises(NotImplementedError, match=r"linear_cross_entropy .*AxisType.Explicit"):
        export.export(jax.jit(tokens_loss))(some)


def test_a_shard_map_over_axes_of_the_partitioner_can():
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (AxisType.Auto,) * 2)
    at = NamedSharding(mesh, P("dp", None, "tp"))
    q = jax.device_put(inputs()[0]["q"], at)
    f = jax.shard_map(
        lambda q: flex_attention(q, q, q, mask_mod=causal()),
        mesh=mesh, in_specs=at.spec, out_specs=at.spec,
    )  # fmt: skip
    program = export.deserialize(export.export(unoptimised(f))(q).serialize())
    np.testing.assert_allclose(unoptimised(program.call)(q), unoptimised(f)(q), rtol=1e-6)


B, T, D = export.symbolic_shape("b, t, d")
SYMBOLIC = {
    "flex_attention": (
        lambda q, k: flex_attention(q, k, k), {"q": (B, T, 2, 8), "k": (B, 7, 2, 8)},
        "b, t of `q`.*b of `k`|b of `k`.*b, t of `q`",
    ),
    "heads and sizes": (
        lambda q, sinks: flex_attention(q, q, q, sinks=sinks),
        {"q": (1, 8, T, D), "sinks": (T,)}, "t, d of `q`",
    ),
    "decode_attention": (
        lambda q, k: decode_attention(q, k, k, 3), {"q": (2, 1, 2, 8), "k": (2, T, 2, 8)},
        "decode_attention .*t of `k`",
    ),
    "paged_attention": (
        lambda q, pages, table: paged_attention(q, pages, pages, table, 3),
        {"q": (2, 1, 2, 8), "pages": (9, 4, 2, 8), "table": (2, T)},
        "paged_attention .*t of `page_table`",
    ),
    "linear_cross_entropy": (
        lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels),
        {"hidden": (T, 8), "weight": (8, 12), "labels": (T,)},
        "linear_cross_entropy .*t of `hidden`.*t of `labels`",
    ),
    "what a mod reads": (
        lambda q, x: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[i]),
        {"q": (1, 8, 2, 8), "x": (T,)}, "`score_mod` .*t of `array 0`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SYMBOLIC)
def test_sizes_that_are_symbols_are_refused_by_name(name):
    f, shapes, match = SYMBOLIC[name]
    whole = ("table", "labels")
    structs = [
        jax.ShapeDtypeStruct(s, jnp.int32 if n in whole else jnp.float32) for n, s in shapes.items()
    ]
    with pytest.raises(NotImplementedError, match=match):
        export.export(jax.jit(f))(*structs)
