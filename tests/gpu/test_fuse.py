"""`fuse` on a GPU: values against float64, in every shape; what it refuses there, and how."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._fuse import subjects
from tests._fuse.subjects import (
    DONATED,
    LONG,
    REFUSED,
    SHAPES,
    SUBJECTS,
    arguments_of,
    by_truth,
    layer_norm,
    norm,
    normal,
    rms_norm,
    with_gradients,
)
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


@pytest.mark.parametrize("name", [*SHAPES, *LONG])
def test_shapes_that_rows_come_in(name):
    f, shapes = (SHAPES | LONG)[name]
    check(f, tuple(range(len(shapes))), *arguments_of(shapes))


def test_more_rows_than_blocks():
    f, _ = SHAPES["a weight a head"]
    check(f, (0, 1), *arguments_of([(3000, 6, 16), (6, 16)]))
    check(norm, (0, 1), *arguments_of([(2000, 9000), (9000,)]))


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


def test_truth_values_go_in_and_out():
    x = normal(0, (5, 33))
    found, wanted = jax.jit(by_truth(fuse))(x), by_truth(lambda f: f)(x)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), wanted)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", DONATED)
def test_results_are_written_over_operands(name, dtype):
    """Where the caller gives them up, and where it does not and finds them as they were."""
    f, shapes, given, over = DONATED[name]
    args = [jnp.abs(normal(i, (2000, *s[1:]), dtype)) for i, s in enumerate(shapes)]
    if name in ("of another shape", "numbers of rows"):
        args[1] = jnp.abs(normal(1, shapes[1] if name == "of another shape" else (2000,), dtype))
    kept = [np.asarray(x) for x in args]
    truth, judge = in_float64(f, *args), jax.jit(f)(*args)
    fused = fuse(f, donate_argnums=given)
    assert_as_right_as(jax.jit(fused)(*args), judge, truth)
    jax.tree.map(np.testing.assert_array_equal, [np.asarray(x) for x in args], kept)
    if over < len(given):  # JAX warns of what is donated in vain
        return
    where = [args[i].unsafe_buffer_pointer() for i in given]
    found = jax.jit(fused, donate_argnums=given)(*args)
    assert_as_right_as(found, judge, truth)
    there = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(found)]
    assert set(where) <= set(there)


FUNCTIONS = (
    jnp.tanh, jnp.sin, jnp.tan, jnp.exp, jnp.expm1, jnp.log1p, jax.lax.erfc, jax.nn.sigmoid,
    jnp.sinh, jnp.cosh, jnp.arcsinh, jnp.arctan, jnp.cbrt, lambda x: x**5, jax.nn.silu,
    lambda x: jax.nn.softmax(x.astype(jnp.float32) * 30, axis=-1).astype(x.dtype),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_functions_of_16_bits_are_rounded_once(dtype):
    x = jnp.asarray(np.random.default_rng(0).uniform(-2.5, 2.5, (133, 257)), dtype)
    half = float(jnp.finfo(dtype).eps) / 2
    for f in FUNCTIONS:
        found = np.asarray(jax.jit(fuse(f))(x), np.float64)
        wanted = np.asarray(f(x.astype(jnp.float32)), np.float64)
        steps = 3 if f is jax.nn.silu else 1  # of which each is rounded
        np.testing.assert_allclose(found, wanted, rtol=1.02 * steps * half, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_by_name(name):
    f, shape, why = REFUSED[name]
    with pytest.raises(NotImplementedError, match=why):
        jax.jit(fuse(f))(normal(0, shape))
