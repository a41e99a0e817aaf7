"""The product of numbers of 8 bits: its values in the interpreter, and which calls take it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xform import precision
from xform._compat import found_races
from xform._hlo import lower_for
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._scaled import misfits, scaled_product
from xform.primitives import scaled_product as own

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
STRUCT = jax.ShapeDtypeStruct


def operands(rows, cols, size, kinds=(E4M3, E4M3)):
    keys = jax.random.split(jax.random.key(0))
    of = lambda i, n: jax.random.normal(keys[i], (n, size)).astype(kinds[i])
    return of(0, rows), of(1, cols)


@pytest.mark.parametrize(
    ("sizes", "kinds", "dtype"),
    [
        ((136, 264, 256), (E4M3, E5M2), jnp.bfloat16),
        pytest.param((264, 8, 384), (E5M2, E4M3), jnp.float16, marks=pytest.mark.slow),
    ],
)
def test_values_in_the_interpreter(sizes, kinds, dtype):
    rows, cols, size = sizes
    x, y = operands(rows, cols, size, kinds)
    params = plgpu.InterpretGPUParams(detect_races=True)
    found = scaled_product(x, y, jnp.float32(0.3), dtype, interpret=params)
    wide = lambda v: np.asarray(v, np.float64)
    exact = wide(x) @ wide(y).T * np.float32(0.3)
    assert not found_races()
    np.testing.assert_allclose(wide(found), exact, rtol=jnp.finfo(dtype).eps, atol=1e-5)


@pytest.fixture
def on_a_hopper(monkeypatch):
    """Programs are traced as on an H200."""
    monkeypatch.setattr(own, "default_device", partial(own.Device, "cuda", "9.0", "NVIDIA H200"))


def test_a_policy_has_a_kernel_for_each_product(on_a_hopper):
    """Forward, and both of the backward pass; a batch under `vmap` is rows."""
    f = precision(lambda x, w: (x @ w).sum(), "fp8")
    x, w = STRUCT((128, 256), jnp.float32), STRUCT((256, 384), jnp.float32)
    names = lambda f, *args: str(jax.make_jaxpr(f)(*args)).count("= scaled_product[")
    assert names(f, x, w) == 1
    assert names(jax.grad(f, (0, 1)), x, w) == 3
    assert "mosaic_gpu" in lower_for("H200", jax.grad(f, (0, 1)), x, w).as_text()


def test_what_the_kernel_does_not_take_is_xlas(on_a_hopper):
    assert misfits((128, 256), (64, 256)) == []
    assert len(misfits((129, 250), (3, 250))) == 3
    odd = STRUCT((129, 250), jnp.float32), STRUCT((250, 3), jnp.float32)
    text = str(jax.make_jaxpr(precision(jnp.matmul, "fp8"))(*odd))
    assert "scaled_product[" not in text


def test_here_it_is_the_plain_product_with_its_derivatives():
    x, y = operands(16, 24, 128)
    scale = jnp.float32(0.3)
    f = partial(own.scaled_product, dtype=jnp.bfloat16)
    plain = partial(own._plain, dtype=jnp.bfloat16)
    assert jnp.array_equal(jax.jit(f)(x, y, scale), plain(x, y, scale))
    many = jnp.stack([x, x[::-1]])
    assert jnp.array_equal(jax.vmap(f, (0, None, None))(many, y, scale)[1], f(x[::-1], y, scale))
    assert jnp.array_equal(
        jax.vmap(f, (0, None, 0))(many, y, jnp.ones(2))[1], f(x[::-1], y, jnp.float32(1))
    )
    slope = jax.grad(lambda s: f(x, y, s).astype(jnp.float32).sum())
    wanted = jax.grad(lambda s: plain(x, y, s).astype(jnp.float32).sum())
    assert slope(scale) == wanted(scale)


def test_on_devices_that_have_rows_of_their_own():
    x, y = operands(16, 24, 128)
    f = partial(own.scaled_product, dtype=jnp.bfloat16)
    wanted = f(x, y, jnp.float32(0.3))
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    manual = jax.shard_map(f, mesh=mesh, in_specs=(P("dp"), P(), P()), out_specs=P("dp"))
    assert jnp.array_equal(manual(x, y, jnp.float32(0.3)), wanted)
    split = jax.device_put(x, jax.NamedSharding(mesh, P("dp")))
    assert jnp.array_equal(jax.jit(f)(split, y, jnp.float32(0.3)), wanted)
