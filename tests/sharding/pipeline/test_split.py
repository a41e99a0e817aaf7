import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xform import causal, flex_attention
from xform._compat import varying_axes
from xform.jaxpr import trace, walk
from xform.sharding import make_mesh, shardings
from xform.sharding.pipeline import split, verify, zb_h1


def normal(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 0.3, jnp.float32)


def layer(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"].astype(x.dtype) * w["scale"][None]


LAYERS = {
    "a": normal(1, 3, 8, 16),
    "b": normal(2, 3, 16, 8).astype(jnp.float16),
    "scale": normal(3, 3, 8),
    "index": jnp.arange(3),
}


def scanned(w, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def remat_layers(w, x):
    return lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)[0]


def remat_all(w, x):
    return jax.checkpoint(scanned)(w, x)


def shared_by_layers(w, x):
    rest = {key: value for key, value in w.items() if key != "e"}
    return lax.scan(lambda x, v: (layer(v, x) + jnp.sin(x @ w["e"]), None), x, rest)[0]


def attention(w, x, ids):
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[name]) for name in "qkv")
    alibi = lambda score, b, h, i, j: score - w["slope"][h] * (i - j)
    out = flex_attention(q, k, v, mask_mod=causal(), score_mod=alibi)
    x = x + jnp.einsum("bthe,hed->btd", out, w["o"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"] * ids[..., None]


def experts(w, x):
    chances = jax.nn.softmax(x @ w["router"])
    best, index = lax.top_k(chances, 1)
    order, sizes = jnp.argsort(index[:, 0]), jnp.bincount(index[:, 0], length=3)
    up = jnp.tanh(lax.ragged_dot(x[order], w["up"], sizes))
    return x + jnp.zeros_like(x).at[order].set(lax.ragged_dot(up, w["down"], sizes)) * best


HEADS = {
    **{name: normal(i, 8, 2, 4) for i, name in enumerate("qkv")},
    "o": normal(4, 2, 4, 8),
    "up": normal(5, 8, 16),
    "down": normal(6, 16, 8),
    "slope": normal(7, 2),
}
EXPERTS = {"router": normal(1, 8, 3), "up": normal(2, 3, 8, 16), "down": normal(3, 3, 16, 8)}

# Stage, weights, x, given; how many matrix products I and W do.
CASES = {
    "dense": (lambda w, x: jnp.tanh(x @ w), normal(0, 4, 4), normal(1, 2, 4), (), (1, 1)),
    "scan": (scanned, LAYERS, normal(5, 4, 8), (), (2, 2)),
    "remat_layers": (remat_layers, LAYERS, normal(5, 4, 8), (), (3, 3)),
    "remat_all": (remat_all, LAYERS, normal(5, 4, 8), (), (4, 2)),
    "shared": (shared_by_layers, {**LAYERS, "e": normal(9, 8, 8)}, normal(5, 4, 8), (), (3, 3)),
    "attention": (attention, HEADS, normal(8, 2, 6, 8), (jnp.ones((2, 6)),), (6, 6)),
    "experts": (experts, EXPERTS, normal(4, 10, 8), (), (3, 3)),
    "tree": (
        lambda w, x: {"h": x["h"] @ w, "sum": x["sum"] + jnp.sum(x["h"] ** 2)},
        normal(0, 4, 4),
        {"h": normal(1, 2, 4), "sum": jnp.zeros(())},
        (),
        (1, 1),
    ),
    "no_weights": (lambda w, x: jnp.sin(x), {}, normal(1, 3), (), (0, 0)),
    "unused_weight": (lambda w, x: jnp.sin(x), {"w": normal(1, 3)}, normal(1, 3), (), (0, 0)),
    "identity": (lambda w, x: x, {"w": normal(1, 3)}, normal(1, 3), (), (0, 0)),
    "constant": (lambda w, x: w["w"] + 0 * x, {"w": normal(1, 3)}, normal(1, 3), (), (0, 0)),
    "branch": (
        lambda w, x: lax.cond(x[0] > 0, lambda x: x * w, jnp.sin, x),
        normal(1, 3),
        normal(2, 3),
        (),
        (0, 0),
    ),
}


def merge(a, b):
    """The tree of what is in one of two trees."""
    return jax.tree.map(lambda a, b: b if a is None else a, a, b, is_leaf=lambda x: x is None)


def floats(tree):
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


@pytest.mark.parametrize("case", CASES)
def test_passes_are_those_of_jax(case):
    stage, w, x, given, products = CASES[case]
    passes = split(stage, w, x, *given)
    y, pullback = jax.vjp(lambda f, x: stage(merge(f, w), x, *given), floats(w), x)
    g = jax.tree.map(lambda y: normal(9, *y.shape), y)
    dw, dx = pullback(g)

    @jax.jit
    def run(w, x, g):
        out, kept = passes.forward(w, x, *given)
        whole = passes.backward(w, kept, g, *given)
        dx, crossing, early = passes.input_gradient(w, kept, g, *given)
        late = [k for k, is_late in zip(kept, passes.late, strict=True) if is_late]
        dw = merge(early, passes.weight_gradient(w, late, crossing, *given))
        return out, whole, (dx, dw), kept, crossing

    out, whole, parts, kept, crossing = run(w, x, g)
    for found, true in ((out, y), (whole, (dx, dw)), (parts, (dx, dw))):
        assert jax.tree.structure(found) == jax.tree.structure(true)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    types = lambda values: [(v.shape, v.dtype) for v in values]
    assert types(kept) == types(passes.keeps)
    assert types(crossing) == types(c.type for c in passes.crossing)
    counts = str(passes).split("I: ")[1].split("; W")
    found = [int(part.split(", ")[1].split()[0]) for part in counts]
    assert tuple(found) == products
    # A product that one pass does, no other does: together as many as the whole.
    once = sum(
        name(site)
        for site in walk(trace(lambda *a: passes.backward(w, a[0], a[1], *given), kept, g))
    )
    assert once == sum(products)


def name(site) -> bool:
    return site.eqn.primitive.name in ("dot_general", "ragged_dot_general")


def test_what_depends_on_weights_alone_is_not_kept():
    """The float16 weights are kept neither as they are nor in float32, per layer or stacked."""
    passes = split(scanned, LAYERS, normal(5, 4, 8))
    assert all(t.shape[-2:] in {(4, 8), (4, 16)} for t in passes.keeps)
    assert [c.type.shape for c in passes.crossing] == [(3, 4, 8), (3, 4, 8), (3, 4, 16)]
    assert all("test_split.py" in c.line for c in passes.crossing)
    assert sum(c.bytes for c in passes.crossing) == 4 * 3 * 4 * 32
    # 4 bytes of, per layer, 4 rows: W reads x and tanh's result, I alone the latter's derivative.
    held = passes.held
    assert held.whole + held.until_input == 4 * sum(t.size for t in passes.keeps)
    assert held.between == 4 * 3 * 4 * 32
    # Of ZB-H1 on two ranks, two microbatches: one between its I and W when the other has its I.
    most = verify(zb_h1(2, 4), held=held).peak
    assert most[0] == 2 * (held.whole + held.until_input) + held.between
    # Remat keeps the inputs of layers, and what it makes again crosses.
    assert [t.shape for t in split(remat_layers, LAYERS, normal(5, 4, 8)).keeps] == [(3, 4, 8)]
    assert [t.shape for t in split(remat_all, LAYERS, normal(5, 4, 8)).keeps] == [(4, 8)]


def test_a_gradient_that_comes_with_the_inputs_does_not_cross():
    """The slope's gradient is a by-product of attention's: I gives it, W does not read it."""
    stage, w, x, given, _ = CASES["attention"]
    passes = split(stage, w, x, *given)
    _, kept = passes.forward(w, x, *given)
    _, crossing, early = passes.input_gradient(w, kept, jnp.ones_like(x), *given)
    assert {key for key, value in early.items() if value is not None} == {"slope"}
    late = [k for k, is_late in zip(kept, passes.late, strict=True) if is_late]
    assert passes.weight_gradient(w, late, crossing, *given)["slope"] is None


def test_types_are_enough_and_integers_are_refused():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    passes = split(lambda w, x: x @ w, shape(4, 4), shape(2, 4))
    assert "1 cross from I to W" in str(passes)
    with pytest.raises(TypeError, match=r"`x`, which travels .* leaves of int32: only floats"):
        split(lambda w, x: x * w, shape(4), jnp.arange(4))
    with pytest.raises(TypeError, match=r"`y`, which travels .* leaves of bool"):
        split(lambda w, x: x > 0, shape(4), shape(4))


def test_what_follows_from_where_a_device_is_is_made_again():
    """Angles of positions that a ring deals out, say: they vary along no axis of the pipeline."""
    found = []

    def local(w, x):
        angle = lambda: jnp.cos(0.1 * lax.axis_index("cp"))
        found.append(split(lambda w, x: jnp.sin(x * w) * angle(), w, x))
        y, kept = found[0].forward(w, x)
        return found[0].backward(w, kept, y)[0]

    mesh = make_mesh(pp=2, cp=4)
    f = jax.shard_map(local, mesh=mesh, in_specs=(P("pp"), P("pp", "cp")), out_specs=P("pp", "cp"))
    w, x = np.arange(1.0, 3.0, dtype=np.float32), np.ones((2, 4), np.float32)
    dx = jax.jit(f)(*jax.device_put((w[:, None], x), shardings(mesh, (P("pp"), P("pp", "cp")))))
    angle = np.cos(0.1 * np.arange(4))
    expected = w[:, None] * np.cos(w[:, None]) * np.sin(w[:, None]) * angle**2
    np.testing.assert_allclose(dx, expected, rtol=1e-5)
    assert all("pp" in varying_axes(kept) for kept in found[0].keeps)
    assert all(kept.shape == (1, 1) for kept in found[0].keeps)
