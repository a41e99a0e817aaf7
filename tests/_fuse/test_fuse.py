"""`fuse`: what becomes a kernel, what is refused and how, and every transform of JAX on top."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests._fuse.subjects import (
    SHAPES,
    arguments_of,
    layer_norm,
    norm,
    normal,
    rms_norm,
    softmax,
    with_gradients,
)
from xform import FusionError, fuse, fuse_rule, precision, remat
from xform._compat import Primitive
from xform._fuse._region import region_of
from xform.jaxpr import trace, walk
from xform.lowering import row_blocks


@pytest.fixture
def small(monkeypatch):
    """Blocks of few rows, for small arrays to have many."""
    monkeypatch.setattr(row_blocks, "ELEMENTS", 64)


def kernels(f, *args) -> list:
    """The regions of a program, in its order."""
    eqns = (site.eqn for site in walk(trace(f, *args)))
    return [region_of(e.params["call_jaxpr"]) for e in eqns if e.primitive.name == "fused"]


def rows_of(f, *args) -> list[int]:
    (region,) = kernels(fuse(f), *args)
    return [region.sizes[k] for k in region.rows]


def assert_close(found, wanted, **tolerance):
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5, **tolerance), found, wanted
    )


# ---- what rows are -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "shapes", "rows"),
    [
        (lambda x: x * 2, [(3, 5, 7)], [3, 5, 7]),
        (lambda x: x / x.sum(0, keepdims=True), [(3, 5, 7)], [5, 7]),
        (lambda x: x - x.max((0, 2), keepdims=True), [(3, 5, 7)], [5]),
        (lambda x: x.sum(1), [(3, 5, 7)], [3, 5, 7]),
        (lambda x: x.sum(-1), [(3, 5, 7)], [3, 5]),
        (lambda x: x - x.mean(), [(3, 5)], []),
        (lambda x, w: x * w[None], [(3, 5), (5,)], [3, 5]),
        (lambda x: x.reshape(3, 2, 4) / x.reshape(3, 2, 4).sum(-1, keepdims=True), [(3, 8)], [3]),
        (lambda x: x[:, ::2] + x[:, 1::2], [(3, 8)], [3]),
        (lambda x, y: x + y.T, [(3, 5), (5, 3)], [3, 5]),
        (lambda x: x + x.T, [(4, 4)], []),
        (lambda x: x[:, :, None] - x[:, None], [(4, 5)], [4]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("small")
def test_rows_follow_from_the_program(f, shapes, rows):
    args = [normal(i, shape) for i, shape in enumerate(shapes)]
    assert rows_of(f, *args) == rows
    assert_close(jax.jit(fuse(f))(*args), f(*args))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("small")
def test_shapes_that_rows_come_in(name):
    f, shapes = SHAPES[name]
    args, all_of_them = arguments_of(shapes), tuple(range(len(shapes)))
    found = jax.jit(with_gradients(fuse(f), all_of_them))(*args)
    assert_close(found, jax.jit(with_gradients(f, all_of_them))(*args))


@pytest.mark.parametrize(("rows", "width"), [(0, 33), (1, 33), (7, 1), (133, 33)])
@pytest.mark.usefixtures("small")
def test_any_number_of_rows_and_any_width(rows, width):
    x, w, b = normal(0, (rows, width)), normal(1, width), normal(2, width)
    both = lambda f: jax.value_and_grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))
    assert_close(jax.jit(both(fuse(layer_norm)))(x, w, b), jax.jit(both(layer_norm))(x, w, b))


@pytest.mark.parametrize("width", [7168, pytest.param(65_537, marks=pytest.mark.slow)])
def test_long_rows(width):
    x = normal(0, (3, width))
    assert_close(fuse(softmax)(x), softmax(x))
    loss = lambda f, x: (f(x) * jnp.sin(x)).sum()
    assert_close(jax.grad(partial(loss, fuse(softmax)))(x), jax.grad(partial(loss, softmax))(x))


# ---- the contract --------------------------------------------------------------------------------


def test_forward_and_backward_are_one_kernel_each():
    x, w = normal(0, (9, 8)), normal(1, 8)
    pullback = lambda x, r, w: jax.vjp(fuse(rms_norm), x, r, w)[1]((x, r))
    forward, backward = kernels(pullback, x, x, w)
    assert (len(forward.sums), len(backward.sums)) == (0, 1)
    # What the backward pass reads: a number of each row beside arguments, results, cotangents.
    kept = [v.aval.shape for v in backward.body.invars]
    assert sorted(kept) == sorted([(9, 8)] * 3 + [(9, 1), (8,)])


def test_a_value_has_one_rounding():
    """Scores near 1e4 in bfloat16: beside a maximum of other roundings some would lie above it."""

    def shifted(x, scale):
        z = x * scale
        return z.astype(jnp.float32) - z.max(-1, keepdims=True).astype(jnp.float32)

    x = np.random.default_rng(0).uniform(-1, 1, size=(64, 256))
    x, scale = jnp.asarray(x, jnp.bfloat16), jnp.bfloat16(1e4 / 3)
    found = jax.jit(fuse(shifted))(x, scale)
    np.testing.assert_array_equal(found, shifted(x, scale))  # operation by operation
    assert float(found.max()) == 0
    assert float(jax.jit(shifted)(x, scale).max()) > 1  # XLA's own, on a CPU


def test_a_result_is_written_once_and_an_argument_not_at_all():
    def f(x):
        y = x * 2
        return y, y, x, 1.0

    (region,) = kernels(fuse(f), normal(0, (3, 4)))
    assert len(region.results) == 1
    x = normal(0, (3, 4))
    assert_close(fuse(f)(x), f(x))


# ---- refusals ------------------------------------------------------------------------------------


def test_segment_softmax_is_refused_by_its_scatter():
    ids = jnp.arange(12) // 5

    def segment_softmax(x):
        top = jax.ops.segment_max(x, ids, num_segments=3)
        e = jnp.exp(x - top[ids])
        return e / jax.ops.segment_sum(e, ids, num_segments=3)[ids]

    with pytest.raises(
        FusionError, match=r"`scatter-max` at .*test_fuse.py:\d+ .*segment_softmax\)"
    ) as e:
        fuse(segment_softmax)(normal(0, 12))
    assert "`scatter-add` at" in str(e.value)
    assert "Nearest legal split: fuse what leads to it" in str(e.value)


def test_an_outer_sum_is_refused_by_its_large_temporary():
    a, b, c = (normal(i, (40, 30)) for i in range(3))

    def outer_sum(a, b, c):
        phase = jnp.exp(1j * (c[:, None, :] - c[:, :, None]))
        return (a[:, :, None] * b[:, None, :].conj() * phase).sum(0)

    with pytest.raises(FusionError, match=r"complex64\[40,30,30\] of 288,000 bytes, is larger"):
        fuse(outer_sum)(a, b, c)


def test_an_operation_inside_of_a_function_of_jax_is_at_the_line_that_calls_it():
    def own(logits, labels):
        picked = jnp.take_along_axis(jax.nn.silu(logits), labels[:, None], axis=-1)
        return jax.nn.silu(picked)

    with pytest.raises(FusionError, match=r"`gather` at .*test_fuse.py:\d+ .*own\)") as e:
        fuse(own)(normal(0, (3, 4)), jnp.arange(3))
    assert "unknown" not in str(e.value)


def test_what_has_nothing_in_common_is_refused():
    with pytest.raises(
        FusionError, match=r"float32\[3\], float32\[4\].*fuse each of them by itself"
    ):
        fuse(lambda x, y: (x + 1, y + 1))(normal(0, 3), normal(1, 4))


def test_the_backward_pass_is_refused_where_it_is_no_kernel():
    f = lambda x: jnp.sort(x, axis=-1) * 2
    with pytest.raises(FusionError, match="`sort` at"):
        fuse(f)(normal(0, (3, 4)))


def test_a_primitive_of_ones_own_has_a_rule():
    double_p = Primitive("fuse_test_double")
    double_p.def_impl(lambda x: 2 * x)
    double_p.def_abstract_eval(lambda x: x)
    with pytest.raises(FusionError, match="fuse_rule"):
        kernels(fuse(double_p.bind), normal(0, (3, 4)))

    @fuse_rule("fuse_test_double")
    def rule(relations, eqn):
        (x,), (y,) = eqn.invars, eqn.outvars
        relations.each([(i, i) for i in range(y.aval.ndim)], x, y)

    assert len(kernels(fuse(double_p.bind), normal(0, (3, 4)))) == 1


# ---- under every transform -----------------------------------------------------------------------


def test_derivatives_of_higher_order_are_kernels():
    x, w = normal(0, (3, 4)), normal(1, 4)
    loss = lambda f, x, w: jnp.tanh(f(x, w)).sum()
    with jax.enable_x64(True):
        x, w = (np.asarray(a, np.float64) for a in (x, w))
        for derivative in (
            jax.jacfwd,
            jax.hessian,
            lambda f: jax.grad(lambda x, w: jax.grad(f)(x, w).sum()),
        ):
            found = jax.jit(derivative(partial(loss, fuse(norm))))(x, w)
            wanted = jax.jit(derivative(partial(loss, norm)))(x, w)
            np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, 0)])
@pytest.mark.usefixtures("small")
def test_vmap_adds_rows(dims):
    size = 5
    grow = lambda x, d: x if d is None else jnp.stack([x * (i + 1) for i in range(size)], axis=d)
    x, w = (grow(x, d) for x, d in zip((normal(0, (3, 4)), normal(1, 4)), dims, strict=True))
    mapped = lambda f: jax.vmap(jax.value_and_grad(lambda x, w: (f(x, w) ** 3).sum(), (0, 1)), dims)
    assert_close(jax.jit(mapped(fuse(norm)))(x, w), mapped(norm)(x, w))


def test_scan_checkpoint_and_unused_results():
    x, w = normal(0, (3, 4)), normal(1, (6, 4))

    def loss(f, x, w):
        layer = jax.checkpoint(lambda x, w: (f(x, x, w)[0], f(x, x, w)[1]))
        return jax.lax.scan(layer, x, w)[0].sum()

    found = jax.jit(jax.grad(partial(loss, fuse(rms_norm)), (0, 1)))(x, w)
    assert_close(found, jax.jit(jax.grad(partial(loss, rms_norm), (0, 1)))(x, w))


def test_a_policy_of_precision_keeps_kernels():
    f = precision(lambda x, w: fuse(norm)(x @ jnp.eye(4), w), "bf16")
    (region,) = kernels(f, normal(0, (3, 4)), normal(1, 4))
    assert region.body.invars[0].aval.dtype == jnp.bfloat16


def test_shard_map_runs_on_each_devices_rows():
    mesh = jax.make_mesh((4,), ("dp",), (AxisType.Explicit,))
    x, w = normal(0, (8, 6)), normal(1, 6)
    local = lambda f: jax.shard_map(
        lambda x, w: f(x, w), mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp")
    )
    with jax.set_mesh(mesh):
        loss = lambda f, x, w: (local(f)(x, w) ** 3).sum()
        found = jax.jit(jax.grad(partial(loss, fuse(norm)), (0, 1)))(jax.reshard(x, P("dp")), w)
    assert_close(found, jax.grad(lambda x, w: (norm(x, w) ** 3).sum(), (0, 1))(x, w))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_that_a_mesh_splits_stay_where_they_are(types):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (types,) * 2)
    at = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    x, w = normal(0, (8, 6)), normal(1, 6)
    loss = lambda f, x, w: (f(x, w) ** 3).sum()
    wanted = jax.grad(partial(loss, norm), (0, 1))(x, w)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(partial(loss, fuse(norm)), (0, 1)))
        args = at(x, "dp"), at(w)
        assert_close(step(*args), wanted)
        text = str(step.lower(*args).compile().as_text())
    assert "all-gather" not in text
    assert "all-to-all" not in text


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_vmap_of_a_shard_map_and_jacrev_inside_of_one(types):
    mesh = jax.make_mesh((4,), ("dp",), (types,))
    x, w = normal(0, (3, 8, 6)), normal(1, 6)
    local = lambda f, spec: jax.shard_map(f, mesh=mesh, in_specs=(P("dp"), P()), out_specs=spec)
    by_row = jax.vmap(jax.jacrev(lambda x, w: fuse(norm)(x[None], w)[0]), (0, None))
    with jax.set_mesh(mesh):
        place = lambda *spec: jax.device_put(x[0] if len(spec) == 1 else x, P(*spec))
        found = jax.jit(jax.vmap(local(fuse(norm), P("dp")), (0, None)))(place(None, "dp"), w)
        slopes = jax.jit(local(by_row, P("dp")))(place("dp"), w)
    assert_close(found, jax.vmap(norm, (0, None))(x, w))
    assert_close(slopes, jax.vmap(jax.jacrev(lambda x: norm(x[None], w)[0]))(x[0]))


def test_remat_keeps_kernels():
    """Of a budget as of none: what it computes again is a kernel again."""
    x, w = normal(0, (9, 8)), normal(1, 8)
    loss = lambda f, x, w: jnp.sum(jnp.sin(f(f(x, w), w)))
    wanted = jax.grad(partial(loss, norm), (0, 1))(x, w)
    for budget in ("none", 0.0, "all"):
        step = jax.grad(remat(partial(loss, fuse(norm)), budget=budget), (0, 1))
        assert_close(jax.jit(step)(x, w), wanted)
        assert len(kernels(step, x, w)) >= 4
    step = jax.grad(jax.checkpoint(partial(loss, fuse(norm))), (0, 1))
    assert_close(jax.jit(step)(x, w), wanted)


def test_a_shape_is_traced_once():
    traced = []

    def f(x):
        traced.append(x.shape)
        return softmax(x)

    step = jax.jit(fuse(f))
    for shape in ((3, 4), (3, 4), (5, 4), (3, 4)):
        step(normal(0, shape))
    assert traced == [(3, 4), (5, 4)]


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_that_a_mesh_cuts_are_refused(types):
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (types,) * 2)
    x = jax.device_put(normal(0, (8, 6)), NamedSharding(mesh, P(None, "tp")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(Exception, match="splits an operand within a row, over tp"),
    ):
        jax.jit(fuse(softmax))(x)
