"""A rewritten function is the rewritten program: same structure, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from xform._compat import varying_axes
from xform.jaxpr import eqn_rule, inline, rewrite, run_body, trace, walk

X = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)


# A user's own transform: every sine becomes a cosine.


def cosines(f):
    return rewrite(f, {"sin": lambda x, **_: jnp.cos(x)})


with_jvp = jax.custom_jvp(lambda g, x: g(x) * 3.0, nondiff_argnums=(0,))
with_jvp.defjvp(
    lambda g, primals, tangents: (with_jvp(g, *primals), 5.0 * g(primals[0]) * tangents[0])
)


def make_vjp(g):
    """Its forward rule saves `g(x)`, its backward rule applies `g` once more."""
    f = jax.custom_vjp(lambda x: g(x) * 3.0)
    f.defvjp(lambda x: (g(x) * 3.0, g(x)), lambda saved, ct: (ct * g(saved),))
    return f


def kernel(g):
    def body(x_ref, out_ref):
        out_ref[...] = g(x_ref[...]) + pl.program_id(0).astype(jnp.float32)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((8,), jnp.float32),
        grid=(2,),
        in_specs=[pl.BlockSpec((4,), lambda i: (i,))],
        out_specs=pl.BlockSpec((4,), lambda i: (i,)),
        interpret=True,
    )


def sharded(f, **kwargs):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), **kwargs)


def solve(g):
    def f(x):
        scale = lambda y: g(jnp.float32(2)) * y
        unscale = lambda matvec, b: b / g(jnp.float32(2))
        return jax.lax.custom_linear_solve(scale, x, unscale, unscale)

    return f


def scan(g):
    def f(x):
        last, stacked = jax.lax.scan(lambda c, x: (g(c * x), c + g(x)), x[0], x)
        return last + stacked

    return f


def deep(g):
    """A cond in a scan in a remat in a jit."""

    @jax.jit
    @jax.checkpoint
    def f(x):
        step = lambda c, x: (c + jax.lax.cond(x > 0, jax.jit(g), lambda x: x, c * x), None)
        return x * jax.lax.scan(step, 0.5, x)[0]

    return f


# Programs that contain the sine given to them, by what encloses it.
PROGRAMS = {
    "plain": lambda g: lambda x: g(x) * x,
    "jit": lambda g: jax.jit(lambda x: g(x) * x),
    "scan": scan,
    "cond": lambda g: lambda x: jax.lax.cond(x[0] > 0, g, lambda x: g(g(x)), x),
    "fori": lambda g: lambda x: jax.lax.fori_loop(0, 3, lambda i, x: g(x + i), x),
    "remat": lambda g: jax.checkpoint(lambda x: g(g(x))),
    "custom_jvp": lambda g: lambda x: with_jvp(g, x),
    "custom_vjp": make_vjp,
    "nested_custom_vjp": lambda g: jax.checkpoint(scan(make_vjp(g))),
    "linear_solve": solve,
    "deep": deep,
}
LOOPS = {
    "while": lambda g: (
        lambda x: jax.lax.while_loop(
            lambda x: jnp.max(x + g(x)) < 40.0, lambda x: x * 1.5 + 20.0 + g(x), x
        )
    ),
    "pallas_call": kernel,
}


def total(f):
    return lambda x: jnp.sum(f(x) * jnp.arange(1.0, 9.0))


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@functools.partial(jax.jit, static_argnums=0)
def uses(f, x):
    """A function's value and batched gradient, in one compilation."""
    return f(x), jax.vmap(jax.grad(total(f)))(jnp.stack([x, x[::-1] * 0.7]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_rewritten_equals_the_program_written_with_the_replacement(name):
    build = PROGRAMS[name]
    got, want = uses(cosines(build(jnp.sin)), X), uses(build(jnp.cos), X)
    jax.tree.map(close, got, want)
    assert not np.allclose(want[0], build(jnp.sin)(X), atol=0.01)


def test_a_loop_without_reverse_mode_is_rewritten_too():
    want = jax.jit(LOOPS["while"](jnp.cos))(X)
    close(jax.jit(cosines(LOOPS["while"](jnp.sin)))(X), want)
    assert not np.allclose(want, jax.jit(LOOPS["while"](jnp.sin))(X), atol=0.01)


@pytest.mark.parametrize("name", ["scan", "custom_vjp"])
def test_works_op_by_op(name):
    build = PROGRAMS[name]
    close(cosines(build(jnp.sin))(X), build(jnp.cos)(X))
    close(jax.grad(total(cosines(build(jnp.sin))))(X), jax.grad(total(build(jnp.cos)))(X))


@pytest.mark.parametrize("name", ["scan", "deep", "nested_custom_vjp"])
def test_a_gradient_can_be_rewritten_in_turn(name):
    """The rule meets what autodiff made: a linear rule commutes with it."""
    double = {"sin": lambda x, **_: 2.0 * jnp.sin(x), "cos": lambda x, **_: 2.0 * jnp.cos(x)}
    f, g = PROGRAMS[name](jnp.sin), PROGRAMS[name](lambda x: 2.0 * jnp.sin(x))
    close(rewrite(jax.grad(total(f)), double)(X), jax.grad(total(g))(X))


@pytest.mark.parametrize("name", PROGRAMS | LOOPS)
def test_nothing_to_replace_gives_the_same_program(name):
    f = (PROGRAMS | LOOPS)[name](jnp.sin)
    g = rewrite(f, {"cosh": lambda x, **_: 1 / 0})
    assert str(trace(g, X)) == str(trace(f, X))
    if name in PROGRAMS:
        assert str(trace(jax.grad(total(g)), X)) == str(trace(jax.grad(total(f)), X))


@pytest.mark.parametrize("name", sorted((PROGRAMS | LOOPS).keys() - {"plain"}))
def test_what_encloses_an_equation_stays(name):
    names = lambda f: [site.eqn.primitive.name for site in walk(trace(f, X))]
    f = (PROGRAMS | LOOPS)[name](jnp.sin)
    assert len(set(names(f))) > 1
    assert names(cosines(f)) == [{"sin": "cos"}.get(p, p) for p in names(f)]


def test_shard_map_stays_a_shard_map_with_its_types():
    def local(g):
        def f(x):
            step = lambda c, x: (g(jax.lax.psum(g(c * x), "dp") * x), c)
            return jax.lax.scan(step, x[0], x)[1] + jax.lax.all_gather(g(x), "dp").sum()

        return f

    f, want = cosines(sharded(local(jnp.sin))), sharded(local(jnp.cos))
    got = jax.jit(lambda x: (f(x), jax.grad(total(f))(x)))(X)
    jax.tree.map(close, got, jax.jit(lambda x: (want(x), jax.grad(total(want))(x)))(X))
    (site,) = [s for s in walk(trace(f, X)) if s.eqn.primitive.name == "shard_map"]
    assert site.eqn.params["check_vma"]
    inside = sharded(cosines(local(jnp.sin)))
    assert [s.path for s in walk(trace(inside, X))] == [s.path for s in walk(trace(want, X))]


def test_result_that_varies_less_is_made_to_vary():
    """A constant is the same on each device; the sine that it replaces was not."""
    f = sharded(lambda x: jax.lax.scan(lambda c, x: (c + jnp.sin(x), c), jnp.sin(x[0]), x)[1])
    g = rewrite(f, {"sin": lambda x, **_: jnp.full(x.shape, 0.5, x.dtype)})
    close(g(X), 0.5)
    (eqn, *_) = [s.eqn for s in walk(trace(g, X)) if s.eqn.primitive.name == "pvary"]
    assert varying_axes(eqn.invars[0].aval) == frozenset()
    assert varying_axes(eqn.outvars[0].aval) == {"dp"}


def test_hijax_remat_is_rebuilt():
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    try:
        f = lambda g: jax.checkpoint(lambda x: g(g(x)))
        names = [s.eqn.primitive.name for s in walk(trace(cosines(f(jnp.sin)), X))]
        got = jax.grad(total(cosines(f(jnp.sin))))(X)
        want = jax.grad(total(f(jnp.cos)))(X)
    finally:
        jax.config.update("jax_remat3", before)
    assert names == ["call_hi_primitive", "cos", "cos"]
    close(got, want)


def test_declared_derivative_is_kept_unless_the_body_is_run():
    """Declared: five times the function. Derived: three times its derivative."""
    f = lambda x: with_jvp(jnp.sin, x)
    rules = {"sin": lambda x, **_: jnp.cos(x)}
    kept, derived = rewrite(f, rules), rewrite(f, rules | {"custom_jvp_call": run_body})
    close(jax.jvp(kept, (X,), (X,))[1], 5.0 * jnp.cos(X) * X)
    close(jax.jvp(derived, (X,), (X,))[1], -3.0 * jnp.sin(X) * X)


def test_run_body_serves_calls_only():
    with pytest.raises(TypeError, match=r"`run_body` can't be the rule of `scan` \(at .*test_rewr"):
        rewrite(scan(jnp.sin), {"scan": run_body})(X)


def test_signature_is_kept():
    def f(params, x, *, scale):
        return {"out": jnp.sin(params["w"] * x) * scale, "scale": scale, "none": None}

    got = cosines(f)({"w": X}, 2.0, scale=np.float64(3.0))
    assert got["none"] is None
    assert isinstance(got["scale"], jax.Array)
    assert got["out"].dtype == got["scale"].dtype == jnp.float32
    close(got["out"], 3.0 * jnp.cos(2.0 * X))


@pytest.mark.parametrize("outer", [jax.jit, jax.grad, jax.vmap, jax.checkpoint])
def test_function_may_close_over_traced_values(outer):
    def f(x):
        g = cosines(lambda y: jnp.sin(jax.lax.fori_loop(0, 2, lambda _, y: jnp.sin(y) * x, y)))
        return jnp.sum(g(2.0))

    def want(x):
        return jnp.sum(jnp.cos(jnp.cos(jnp.cos(2.0) * x) * x))

    x = X if outer is jax.vmap else 0.3
    close(outer(f)(x), outer(want)(x))


def test_works_in_a_scanned_step():
    f = jax.grad(total(cosines(scan(jnp.sin))))
    g = jax.grad(total(scan(jnp.cos)))
    run = lambda f: jax.jit(
        lambda x: jax.lax.scan(lambda x, _: (x - 0.01 * f(x), None), x, length=3)[0]
    )
    close(run(f)(X), run(g)(X))


def test_rule_may_capture_concrete_arrays_in_a_loop():
    """They become constants of the body, which autodiff and batching must carry."""
    table = np.linspace(0.0, 1.0, 7, dtype=np.float32)
    bump = lambda x: x + jnp.asarray(table).sum() * table[3]
    f = rewrite(scan(jnp.sin), {"sin": lambda x, **_: bump(x)})
    jax.tree.map(close, uses(f, X), uses(scan(bump), X))


def test_rule_that_captures_traced_values_in_a_loop_is_refused():
    def f(scale):
        return rewrite(scan(jnp.sin), {"sin": lambda x, **_: x * scale})(X)

    with pytest.raises(ValueError, match=r"a rule captures traced values \(float32\[\]\)"):
        jax.jit(f)(2.0)


def test_equal_calls_share_the_rebuilt_bodies():
    """Op by op, a scan with a new body on each call would be compiled on each call."""
    f = cosines(scan(jnp.sin))
    bodies = [trace(f, X).eqns for _ in range(2)]
    first, second = ([e.params["jaxpr"] for e in eqns if "jaxpr" in e.params] for eqns in bodies)
    assert first
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_most_specific_key_wins():
    rules = {
        "jit": lambda *xs, **_: 1 / 0,
        ("jit", "clip"): lambda x, low, high, **_: [x * 10.0],
        jnp.sin: None,
    }
    close(rewrite(lambda x: jnp.clip(x, 0.0, 1.0), rules)(X), 10.0 * X)


def test_key_may_be_the_primitive_and_rule_may_take_the_equation():
    (eqn,) = trace(jnp.sin, X).eqns
    assert isinstance(eqn.primitive, Primitive)
    f = rewrite(scan(jnp.sin), {eqn.primitive: eqn_rule(lambda eqn, x: x * len(eqn.invars))})
    close(f(X), scan(lambda x: x)(X))


def test_wrong_dtype_is_refused_with_the_users_line():
    def f(x):
        return jax.lax.map(lambda x: jnp.sin(x), x)

    with pytest.raises(
        TypeError,
        match=r"rule of `sin` returned bfloat16\[\] where the equation gives float32\[\] "
        r"\(at .*test_rewrite.py:\d+ \(.*f.*\)",
    ):
        rewrite(f, {"sin": lambda x, **_: x.astype(jnp.bfloat16)})(X)


def test_wrong_number_of_results_is_refused():
    with pytest.raises(ValueError, match=r"rule of `scan` returned 1 results where .* has 2"):
        rewrite(scan(jnp.sin), {"scan": lambda *xs, **_: [xs[0]]})(X)


def test_rewritten_equations_keep_the_users_line():
    f = PROGRAMS["remat"](jnp.sin)
    lines = lambda f: [s.line for s in walk(trace(f, X)) if s.eqn.primitive.name in ("sin", "cos")]
    assert lines(cosines(f)) == lines(f)
    assert all("test_rewrite.py" in line for line in lines(f))


def test_inline_brings_inner_constants_to_the_top():
    table = np.linspace(0.0, 1.0, 8, dtype=np.float32)
    f = lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) + jnp.asarray(table))(x)
    nested = trace(f, X)
    assert nested.consts == []
    flat = inline(nested)
    assert [e.primitive.name for e in flat.eqns] == ["sin", "add"]
    np.testing.assert_array_equal(flat.consts[0], table)
    close(jaxpr_as_fun(flat)(X)[0], f(X))


def test_inline_keeps_weak_types():
    weak = trace(jax.jit(lambda x: x * 2.0), 1.0)
    assert inline(weak).in_avals == weak.in_avals
    assert inline(weak).in_avals != trace(lambda x: x, np.float32(1.0)).in_avals


def test_a_batching_rule_that_would_stay_behind_is_refused():
    @jax.custom_batching.custom_vmap
    def wave(x):
        return jnp.sin(x)

    wave.def_vmap(lambda size, batched, x: (jnp.sin(x), True))
    to_cos = {"sin": lambda x, **_: jnp.cos(x)}
    with pytest.raises(NotImplementedError, match="batching rule of a `custom_vmap` function"):
        rewrite(wave, to_cos)(1.0)
    rewritten = jax.vmap(rewrite(wave, {**to_cos, "custom_vmap_call": run_body}))
    np.testing.assert_allclose(rewritten(jnp.arange(3.0)), jnp.cos(jnp.arange(3.0)), rtol=1e-6)
