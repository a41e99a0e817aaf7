"""`fuse` on a GPU: values against float64, in every shape; what it refuses there, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._fuse import subjects
from tests._fuse.subjects import SUBJECTS, layer_norm, normal, rms_norm, rotary, with_gradients
from tests.oracle import assert_as_right_as, in_float64
from xform import fuse


def check(f, argnums, *args):
    """Values, and gradients, as right as XLA's own program's."""
    found = jax.jit(with_gradients(fuse(f), argnums))(*args)
    judge = jax.jit(with_gradients(f, argnums))(*args)
    assert_as_right_as(found, judge, in_float64(with_gradients(f, argnums), *args))


@pytest.mark.parametrize("width", [257, 4096, 7168])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_subjects_are_as_right_as_a_plain_program(name, dtype, width):
    f, arguments, argnums = SUBJECTS[name]
    check(f, argnums, *arguments(width, dtype))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "rotary embedding"])
def test_rows_that_registers_do_not_hold(name, dtype, monkeypatch):
    monkeypatch.setattr(subjects, "N", 5)
    f, arguments, argnums = SUBJECTS[name]
    check(f, argnums, *arguments(65_537, dtype))


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 33), (7, 1), (1, 1), (133, 33), (2000, 128), (20_000, 8)]
)
def test_any_number_of_rows_and_any_width(rows, width):
    args = normal(0, (rows, width)), normal(1, width), normal(2, width)
    check(layer_norm, (0, 1, 2), *args)


def norm(x, w):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[None]


def norm_and_turn(x, w, cos, sin):
    """The halves that are turned are cut from a row that was computed."""
    a, b = jnp.split(norm(x, w), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


SHAPES = {
    "over columns": (lambda x: x / (1 + (x * x).sum(0, keepdims=True)), [(30, 5, 70)]),
    "over two dims": (lambda x: x - x.max((0, 2), keepdims=True), [(30, 5, 70)]),
    "sums of each dim": (lambda x: (x.sum(0), x.sum(1), x.sum(2)), [(30, 50, 70)]),
    "all of it": (lambda x: x - x.mean(), [(30, 50)]),
    "transposed": (lambda x, y: x + y.T, [(30, 50), (50, 30)]),
    "of fewer dims": (lambda x, y: (x * y[None], (y * y).sum()), [(300, 5), (5,)]),
    "a weight a head": (lambda x, w: x * w[None], [(300, 6, 16), (6, 16)]),
    "angles with gradients": (rotary, [(2, 50, 3, 16), (50, 8), (50, 8)]),
    "a computed row is cut": (norm_and_turn, [(300, 16), (16,), (300, 8), (300, 8)]),
    "weights of long rows": (norm, [(600, 9000), (9000,)]),
    "a sum of long rows": (lambda x: (2 * x, (x - x.max(-1, keepdims=True)).sum()), [(50, 9000)]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_rows_come_in(name):
    f, shapes = SHAPES[name]
    args = [normal(i, shape) for i, shape in enumerate(shapes)]
    check(f, tuple(range(len(args))), *args)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, 0)])
def test_vmap_adds_rows(dims):
    grow = lambda x, d: x if d is None else jnp.stack([x * (i + 1) for i in range(5)], axis=d)
    args = [grow(x, d) for x, d in zip((normal(0, (3, 4)), normal(1, 4)), dims, strict=True)]
    loss = lambda f: jax.value_and_grad(lambda x, w: (f(x, w) ** 3).sum(), (0, 1))
    found = jax.jit(jax.vmap(loss(fuse(norm)), dims))(*args)
    wanted = jax.vmap(loss(norm), dims)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)


def test_derivatives_of_higher_order_are_kernels():
    x, w = normal(0, (3, 4)), normal(1, 4)
    for derivative in (jax.jacfwd, jax.hessian):
        of = lambda f, d=derivative: jax.jit(d(lambda x: jnp.tanh(f(x, w)).sum()))
        np.testing.assert_allclose(of(fuse(norm))(x), of(norm)(x), rtol=1e-4, atol=1e-5)


def test_a_value_has_one_rounding():
    """Scores near 1e4 in bfloat16: beside a maximum of other roundings some would lie above it."""

    def shifted(x, scale):
        z = x * scale
        return z.astype(jnp.float32) - z.max(-1, keepdims=True).astype(jnp.float32)

    x = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, size=(64, 256)), jnp.bfloat16)
    found = jax.jit(fuse(shifted))(x, jnp.bfloat16(1e4 / 3))
    np.testing.assert_array_equal(found, shifted(x, jnp.bfloat16(1e4 / 3)))
    assert float(found.max()) == 0


def test_a_second_run_gives_the_same_bits():
    args = [normal(i, s, jnp.bfloat16) for i, s in enumerate([(3000, 1000)] * 2 + [(1000,)])]
    run = jax.jit(with_gradients(fuse(rms_norm), (0, 1, 2)))
    jax.tree.map(np.testing.assert_array_equal, run(*args), run(*args))


@pytest.mark.parametrize(
    ("f", "shape", "why"),
    [
        (lambda x: x.reshape(3, 2, 4).sum(-1) + 0 * x[:, :2], (3, 8), "along a part of a row"),
        (lambda x: x[:, ::2] + x[:, 1::2], (3, 8), "leaves elements out"),
        (lambda x: x + x.T, (4, 4), "all of a row meets all of it"),
        (lambda x: x[:, :, None] - x[:, None], (4, 5), "all of a row meets all of it"),
        (lambda x: x.astype(jnp.int8), (4, 5), "arrays of int8"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(f, shape, why):
    with pytest.raises(NotImplementedError, match=why):
        jax.jit(fuse(f))(normal(0, shape))
