"""Attention under every transform of JAX, by the same transform of the dense oracle, in float64."""

import collections
import contextlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from tests.oracle import once
from xform.jaxpr import trace, walk
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal, documents, prefix, sliding_window
from xform.sharding.mesh import make_mesh, shardings

DENSE = partial(flex_attention, implementation="reference")
SHORT, LONG = 24, 400  # one tile; two tiles a side


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def problem(length=SHORT, heads=4, seed=0, mapped: Mapping[str, int] = MappingProxyType({})):
    """Random operands and captures, those that are `mapped` with a leading dimension of a size."""
    kv = heads // 2
    shapes = {
        "q": (1, length, heads, 8), "k": (1, length, kv, 8), "v": (1, length, kv, 6),
        "factor": (), "slopes": (heads,), "table": (heads, 16),
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    lead = lambda name: (mapped[name],) if name in mapped else ()
    return {
        name: jnp.asarray(rng.normal(size=(*lead(name), *shape))) for name, shape in shapes.items()
    }


LOCAL = causal() & sliding_window(200)


def output(attention, x, mask=LOCAL):
    """Attention whose score mod reads a scalar, an array of heads and a table of distances."""

    def score(s, b, h, q, k):
        near = jnp.exp(x["table"])[h, jnp.minimum(jnp.abs(q - k), 15)]
        return s * jnp.tanh(x["factor"]) + near + x["slopes"][h] * (q - k) / LONG

    return attention(x["q"], x["k"], x["v"], score_mod=score, mask_mod=mask)


def loss(attention, x, *mask):
    """A scalar in which every element of the output counts differently."""
    out = output(attention, x, *mask)
    return jnp.sin(out + jnp.arange(out.size).reshape(out.shape)).sum()


def assert_same(transformed, *args):
    """Asserts that `transformed(attention)` is the same of the fused and the dense attention."""
    found, true = once(lambda *a: [transformed(f)(*a) for f in (flex_attention, DENSE)], *args)
    assert_close(found, true)


def assert_close(found, true):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(true), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.abs(y).max() > 1e-8, f"{name} is zero, and tests nothing"
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10 * np.abs(y).max(), err_msg=name)


# ---- Derivatives of every order ------------------------------------------------------------------


def dot(x, y):
    return sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (x, y)), strict=True))


ORDERS = {
    "jvp of jvp": lambda f, x, dx: jax.jvp(lambda x: jax.jvp(f, (x,), (dx,))[1], (x,), (dx,)),
    "grad of jvp": lambda f, x, dx: jax.grad(lambda x: jax.jvp(f, (x,), (dx,))[1])(x),
    "grad of grad": lambda f, x, dx: jax.grad(lambda x: dot(jax.grad(f)(x), dx))(x),
    "jvp of grad of jvp": lambda f, x, dx: jax.jvp(
        jax.grad(lambda x: jax.jvp(f, (x,), (dx,))[1]), (x,), (dx,)
    ),
}


def one_quick(name, names):
    """Parameters of which all but one are slow: each takes seconds of compilation."""
    return [n if n == name else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", one_quick("grad of grad", ORDERS))
def test_derivatives_of_derivatives(name):
    assert_same(lambda a: partial(ORDERS[name], partial(loss, a)), problem(), problem(seed=1))


def test_a_hessian_vector_product_over_empty_full_and_partial_tiles():
    def hvp(attention):
        f = lambda x: loss(attention, x, prefix(LONG // 2) | causal())
        return lambda x, dx: jax.jvp(jax.grad(f), (x,), (dx,))

    assert_same(hvp, problem(LONG, heads=2), problem(LONG, heads=2, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_derivatives_of_derivatives_over_many_tiles(name):
    x, dx = problem(LONG), problem(LONG, seed=1)
    assert_same(lambda a: partial(ORDERS[name], partial(loss, a)), x, dx)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
def test_derivatives_of_derivatives_of_the_maximum(name):
    """With ties, which share: all scores above a cap are the largest."""

    def total(attention, x):
        score = lambda s, b, h, q, k: jnp.minimum(s * x["slopes"][h], x["factor"])
        out, aux = attention(
            x["q"], x["k"], x["v"], score_mod=score, mask_mod=LOCAL, aux=("lse", "max")
        )
        return jnp.sin(out).sum() + jnp.cos(aux.lse).sum() + jnp.sin(3 * aux.max).sum()

    x, dx = (
        {n: y[n] for n in ("q", "k", "v", "slopes", "factor")} for y in (problem(), problem(seed=1))
    )
    program = lambda x, dx: [
        ORDERS[name](partial(total, f), x, dx) for f in (flex_attention, DENSE)
    ]
    found, true = jax.jit(program)(x, dx)
    assert_close(found, true)


@pytest.mark.parametrize("f", [output, pytest.param(jax.grad(loss, 1), marks=pytest.mark.slow)])
def test_whole_jacobians_in_forward_mode(f):
    """Of the output; of the gradients, which makes a Hessian."""
    jacobian = lambda attention: lambda x: jax.jacfwd(partial(f, attention))(x)
    assert_same(jacobian, problem(3, heads=2))


@pytest.mark.slow
def test_one_linearisation_serves_many_vectors():
    """`linearize` and `vjp` are each called twice, and `<ct, J dx> = <J^T ct, dx>`."""
    f = lambda x: output(flex_attention, x)

    def run(x, vectors, cts):
        out, push = jax.linearize(f, x)
        _, pull = jax.vjp(f, x)
        return out, [push(dx) for dx in vectors], [pull(ct)[0] for ct in cts]

    vectors = [problem(seed=1), problem(seed=2)]
    cts = list(normal(3, 2, 1, SHORT, 4, 6))
    out, pushed, pulled = once(run, problem(), vectors, cts)
    assert np.array_equal(out, once(f, problem()))
    for dx, image in zip(vectors, pushed, strict=True):
        for ct, back in zip(cts, pulled, strict=True):
            np.testing.assert_allclose(dot(ct, image), dot(back, dx), rtol=1e-11)


# ---- vmap ----------------------------------------------------------------------------------------

BATCHED = {
    "queries": ("q",),
    "keys": ("k",),
    "values": ("v",),
    "captures": ("factor", "slopes", "table"),
    "queries and a table": ("q", "table"),
    "everything": ("q", "k", "v", "factor", "slopes", "table"),
}


def batched(name):
    """Operands with one more dimension where they are mapped, and the axes for `vmap`."""
    x = problem(mapped=dict.fromkeys(BATCHED[name], 3))
    return x, ({key: 0 if key in BATCHED[name] else None for key in x},)


@pytest.mark.parametrize("name", one_quick("captures", BATCHED))
def test_the_gradient_of_a_vmap_sums_what_is_shared(name):
    x, axes = batched(name)
    each = lambda attention: jax.vmap(partial(loss, attention), axes)
    assert_same(lambda a: jax.grad(lambda x: each(a)(x) @ jnp.array([1.0, -2.0, 3.0])), x)


@pytest.mark.parametrize("name", one_quick("queries and a table", BATCHED))
def test_a_vmap_of_gradients_gives_one_of_each(name):
    x, axes = batched(name)
    assert_same(lambda a: jax.vmap(jax.grad(partial(loss, a)), axes), x)


def test_vmap_of_vmap_over_different_operands():
    x = problem(mapped={"q": 2, "table": 3})
    outer, inner = ({key: 0 if key == name else None for key in x} for name in ("q", "table"))

    def nested(attention):
        f = jax.vmap(jax.vmap(partial(loss, attention), (inner,)), (outer,), out_axes=1)
        return jax.value_and_grad(lambda x: (f(x) * jnp.arange(1.0, 7).reshape(3, 2)).sum())

    assert_same(nested, x)


def test_vmap_over_windows_and_documents():
    """Traced arrays of mask objects; block maps then differ along the mapped dimension."""
    ids = np.sort(np.random.default_rng(5).integers(0, 4, (2, LONG))) * [[0], [1]]
    masks = sliding_window(jnp.array([20, 400])) & documents(jnp.asarray(ids))
    each = lambda attention: jax.vmap(jax.value_and_grad(partial(loss, attention)), (None, 0))
    assert_same(each, problem(LONG, heads=2), masks)


def test_vmap_over_sinks_masks_and_dropout_keys_along_any_dimension():
    def each(attention):
        def f(q, k, v, sinks, window, key):
            out, aux = attention(
                q, k, v, sinks=sinks, mask_mod=causal() & sliding_window(window), aux=("lse",),
                dropout_rate=0.3, dropout_key=key,
            )  # fmt: skip
            return jnp.sin(out).sum() + jnp.cos(aux.lse[...]).sum()

        return jax.vmap(jax.value_and_grad(f, (0, 1, 2, 3)), (-1, None, 2, 1, 0, 0))

    x, (q, v) = problem(), normal(2, 2, 2, 1, SHORT, 4, 8)
    q, v = jnp.moveaxis(q, 0, -1), jnp.moveaxis(v[..., :2, :], 0, 2)
    sinks, windows = jnp.arange(8.0).reshape(4, 2) / 5, jnp.array([4, 30])
    assert_same(each, q, x["k"], v, sinks, windows, jax.random.split(jax.random.key(0), 2))


def operand_shapes(f, *args):
    """The shapes of what the attention in a program reads."""
    (site,) = (s for s in walk(trace(f, *args)) if s.eqn.primitive.name == "flex_attention")
    types: list = [v.aval for v in site.eqn.invars]
    return [x.shape for x in types]


def test_what_is_not_mapped_is_not_copied():
    x = problem(mapped={"q": 5})
    axes = {key: 0 if key == "q" else None for key in x}
    f = lambda x: jax.vmap(partial(output, flex_attention), (axes,))(x)
    q, *others = operand_shapes(f, x)
    assert q == (5, 1, SHORT, 4, 8)
    assert {shape[0] for shape in others} == {1}


# ---- Control flow --------------------------------------------------------------------------------


def test_a_scan_over_layers_with_a_window_each():
    """Mask objects are scanned over; the oracle is a plain loop with plain numbers."""
    windows = [30, 250, 1000]

    def layers(x, mixers):
        layer = lambda q, t: (q + output(flex_attention, {**x, "q": q}, t[0]) @ t[1], None)
        masks = causal() & sliding_window(jnp.array(windows))
        return jnp.sin(jax.lax.scan(layer, x["q"], (masks, mixers))[0]).sum()

    def by_hand(x, mixers):
        q = x["q"]
        for size, mixer in zip(windows, mixers, strict=True):
            q = q + output(DENSE, {**x, "q": q}, causal() & sliding_window(size)) @ mixer
        return jnp.sin(q).sum()

    args = problem(LONG, heads=2), normal(4, 3, 6, 8)
    found, true = once(lambda *a: [jax.value_and_grad(f)(*a) for f in (layers, by_hand)], *args)
    assert_close(found, true)


@pytest.mark.slow
def test_map_cond_and_while_loops():
    def program(attention):
        def some(x, flip):
            f = partial(loss, attention)
            return jax.lax.cond(flip, f, lambda x: 3 * f(x, ~causal()), x)

        def each(x, flips):
            return jax.lax.map(lambda t: some({**x, "q": t[0]}, t[1]), (x["q"], flips)).sum()

        def again(x):
            step = lambda c: (c[0] + 1, output(attention, {**x, "v": c[1]})[:, :, ::2])
            return jax.lax.while_loop(lambda c: c[0] < 3, step, (0, x["v"]))[1].sum()

        def run(x, dx, flips):
            one, d_one = ({**y, "q": y["q"][0]} for y in (x, dx))
            return jax.value_and_grad(each)(x, flips), jax.jvp(again, (one,), (d_one,))

        return run

    two = {"q": 2}
    x, dx = problem(mapped=two), problem(seed=1, mapped=two)
    assert_same(program, x, dx, jnp.array([True, False]))


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.dots_saveable,
    "by name": jax.checkpoint_policies.save_only_these_names("out"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize("name", one_quick("by name", POLICIES))
def test_checkpointing_changes_no_gradient(name):
    def program(attention):
        def named(x):
            out = checkpoint_name(output(attention, x), "out")
            return jnp.sin(out + jnp.arange(out.size).reshape(out.shape)).sum()

        fused = attention is flex_attention
        return jax.grad(jax.checkpoint(named, policy=POLICIES[name]) if fused else named)

    assert_same(program, problem())


@pytest.mark.parametrize(("policy", "passes"), [("nothing", 2), ("everything", 1)])
def test_a_checkpoint_policy_decides_whether_the_forward_pass_runs_again(policy, passes):
    f = jax.checkpoint(partial(loss, flex_attention), policy=POLICIES[policy])
    names = [s.eqn.primitive.name for s in walk(trace(jax.grad(f), problem()))]
    assert names.count("flex_attention") == passes
    assert names.count("tile_sum") == 1


# ---- Devices -------------------------------------------------------------------------------------


def test_shard_map_gives_values_and_gradients_of_one_device():
    """Batch over dp, heads over tp, types checked: replicated captures get summed gradients."""
    b, t, h = 4, 40, 4
    rng = np.random.default_rng(0)
    shapes = {
        "q": (b, t, h, 8), "k": (b, t, h // 2, 8), "v": (b, t, h // 2, 6),
        "slopes": (h,), "table": (16,), "factor": (),
    }  # fmt: skip
    P = jax.P
    specs = {"q": P("dp", None, "tp"), "k": P("dp", None, "tp"), "v": P("dp", None, "tp"),
             "slopes": P("tp"), "table": P(), "factor": P()}  # fmt: skip
    x = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (b, t))))

    def f(attention, x, ids):
        def score(s, b, h, q, k):
            return (
                s * x["factor"] + x["slopes"][h] * (q - k) / 40 + x["table"][jnp.minimum(q - k, 15)]
            )

        mask = causal() & documents(ids)
        out = attention(x["q"], x["k"], x["v"], score_mod=score, mask_mod=mask)
        return jnp.sin(out).sum()

    def sharded(x, ids):
        value, grads = jax.value_and_grad(partial(f, flex_attention))(x, ids)
        return jax.lax.psum(value, ("dp", "tp")), grads

    mesh = make_mesh(dp=4, tp=2)
    spread = jax.shard_map(sharded, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))
    placed = jax.device_put((x, ids), shardings(mesh, (specs, P("dp"))))
    true = once(jax.value_and_grad(partial(f, DENSE)), x, ids)
    assert_close(*jax.device_get((once(spread, *placed), true)))


# ---- Nothing is compiled twice -------------------------------------------------------------------


@contextlib.contextmanager
def compilations():
    """Counts what XLA compiles inside."""
    count = collections.Counter()

    def listen(event: str, duration_secs: float, **_):
        count["n"] += "backend_compile" in event

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def attend_with(x, table, sign=1):
    """Attention with closures made afresh."""
    add = lambda s, b, h, q, k: s + table[q - k]
    subtract = lambda s, b, h, q, k: s - table[q - k]
    mods = {"score_mod": add if sign == 1 else subtract, "mask_mod": causal()}
    return flex_attention(x["q"], x["k"], x["v"], **mods)


def test_a_fresh_closure_of_the_same_code_compiles_nothing():
    x, (one, two) = problem(), normal(1, 2, SHORT)
    run = lambda table, **sign: jax.value_and_grad(
        lambda table: attend_with(x, table, **sign).sum()
    )(table)
    first = run(one)
    with compilations() as count:
        second = run(two)
    assert count["n"] == 0
    assert not np.allclose(first[0], second[0])
    assert_close(second, jax.jit(run)(two))  # op by op means the same
    with compilations() as count:
        run(two, sign=-1)
    assert count["n"] > 0


def test_equal_code_is_one_program_however_often_it_is_traced():
    """Layers of one model share their parameters, so JAX lowers and caches them as one."""
    x, tables = problem(), normal(1, 3, SHORT)
    f = lambda x, tables, sign: [
        jax.grad(lambda t: attend_with(x, t, sign).sum())(t) for t in tables
    ]
    params = lambda sign: [
        (s.eqn.primitive, *sorted(s.eqn.params.items()))
        for s in walk(trace(partial(f, sign=sign), x, tables))
        if s.eqn.primitive.name in ("flex_attention", "tile_sum")
    ]
    once_more = [*params(1), *params(1)]
    assert len(once_more) == 12
    assert len(set(once_more)) == 2
    assert not set(once_more) & set(params(-1))


def test_attention_is_transposed_in_its_values():
    """Over several tiles, with sinks, whose factor no value decides; in nothing else."""
    rng = np.random.default_rng(0)
    q, k, v, ct = (
        jnp.asarray(rng.normal(size=s), jnp.float32)
        for s in ((1, 300, 4, 8), (1, 300, 2, 8), (1, 300, 2, 6), (1, 300, 4, 6))
    )
    score = lambda s, b, h, i, j: s * q[b, i, h, 0]

    def attend(v):
        return flex_attention(q, k, v, score_mod=score, mask_mod=causal(), sinks=jnp.ones(4))

    def both(ct):
        return jax.linear_transpose(attend, v)(ct)[0], jax.vjp(attend, v)[1](ct)[0]

    found, true = once(both, ct)
    assert np.abs(true).max() > 0.1
    np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="linear in `v`, and in no other argument"):
        jax.linear_transpose(lambda q: flex_attention(q, k, v), q)(ct)
