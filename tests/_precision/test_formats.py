"""Formats of 8 and 4 bits, with the element types of ml_dtypes as the judge, bit by bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xform import FORMATS, native, quantise

E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
F32 = np.float32


def blocks_of(x, block):
    padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // block) * block), F32)
    padded[..., : x.shape[-1]] = x
    return padded.reshape(*x.shape[:-1], -1, block)


def judge_mx(x, dtype, exponent):
    """OCP Microscaling: the scale is a power of two, by the exponent of the largest."""
    blocks = blocks_of(x, 32)
    size = np.abs(blocks).max(-1)
    power = np.where(size > 0, np.floor(np.log2(np.where(size > 0, size, 1))) - exponent, -127)
    scales = np.exp2(np.clip(power, -127, 127)).astype(E8M0)
    top = float(ml_dtypes.finfo(dtype).max)
    elements = np.clip(blocks / scales.astype(F32)[..., None], -top, top).astype(dtype)
    return elements.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scales


def judge_nv(x):
    blocks = blocks_of(x, 16)
    size = np.abs(blocks).max(-1)
    tensor = F32(size.max() * (F32(1) / F32(6 * 448))) if size.max() > 0 else F32(1)
    scales = np.clip(size * (F32(1) / F32(6)) / tensor, -448, 448).astype(E4M3)
    wide = (scales.astype(F32) * tensor)[..., None]
    ratio = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0)
    elements = np.clip(ratio, -6, 6).astype(E2M1)
    return elements.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], scales, tensor


def some(shape, seed=0, spread=3.0):
    """Numbers of many sizes, with zeros and a block of zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * np.exp2(rng.normal(size=shape) * spread)).astype(F32)
    x[rng.uniform(size=shape) < 0.1] = 0
    x[0] = 0
    return x


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a).astype(F32), np.asarray(b).astype(F32))
    np.testing.assert_array_equal(np.signbit(np.asarray(a).astype(F32)), np.signbit(b.astype(F32)))


@pytest.mark.parametrize("shape", [(4, 64), (3, 50), (2, 3, 7), (2, 1)])
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4"])
def test_blocks_are_those_of_the_definition(name, shape):
    x, kind = some(shape), FORMATS[name]
    q = jax.jit(lambda x: quantise(x, name))(x)
    if name == "nvfp4":
        elements, scales, tensor = judge_nv(x)
        assert q.scale == tensor
    else:
        elements, scales = judge_mx(x, np.dtype(kind.dtype), kind.exponent)
        assert q.scale == 1
    assert q.elements.dtype == kind.dtype
    same_bits(q.elements, elements)
    same_bits(q.scales, scales)
    wide = np.repeat(scales.astype(F32), kind.block, -1)[..., : shape[-1]]
    want = elements.astype(F32) * wide * np.asarray(q.scale)
    np.testing.assert_array_equal(q.dequantise(), want)


def test_every_midpoint_of_e2m1_goes_to_the_even_one():
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
    middle = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(middle, F32(s), dtype=F32) for s in (-9, 9)]
    x = np.concatenate([grid, middle, *near, -middle, [6]]).astype(F32)
    x = np.pad(x, (0, 64 - len(x)))
    x[63] = x[31] = 6  # the scale of both blocks is 1
    q = quantise(jnp.asarray(x), "mxfp4")
    assert np.asarray(q.scales).astype(F32).tolist() == [1, 1]
    same_bits(q.elements, x.astype(E2M1))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_a_tensor_has_one_scale(name):
    x, kind = some((6, 50)), FORMATS[name]
    q = jax.jit(lambda x: quantise(x, name))(x)
    scale = F32(np.abs(x).max() * (F32(1) / F32(kind.largest)))
    assert q.scale == scale
    same_bits(q.elements, np.clip(x / scale, -kind.largest, kind.largest).astype(kind.dtype))
    assert np.abs(np.asarray(q.elements).astype(F32)).max() == kind.largest
    given = quantise(jnp.asarray([1.0, 1e6]), name, scale=2.0)
    np.testing.assert_array_equal(given.dequantise(), [1, 2 * kind.largest])


@pytest.mark.parametrize("name", FORMATS)
def test_errors_are_half_a_step(name):
    """A relative half unit of the element, of the block's largest or of one's own size."""
    x, kind = some((8, 96), spread=0.5), FORMATS[name]
    got = np.asarray(quantise(jnp.asarray(x), name).dequantise())
    info = ml_dtypes.finfo(kind.dtype)
    block = kind.block or x.size
    flat = blocks_of(x.reshape(1, -1) if not kind.block else x, block)
    size = np.broadcast_to(np.abs(flat).max(-1, keepdims=True), flat.shape)
    size = size.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]] if kind.block else size.max()
    # Largest elements saturate by at most a quarter of the block's size.
    step = np.maximum(np.abs(x) * 2.0**-info.nmant / 2, size * 2.0**-kind.exponent)
    bound = np.where(np.abs(x) > 0.7 * size, 0.26 * size, step + 0.08 * np.abs(x))
    assert (np.abs(got - x) <= bound).all()
    assert np.abs(got - x).max() > 0


def test_another_dimension_and_a_batch():
    x = jnp.asarray(some((64, 6)))
    along = quantise(x, "nvfp4", dim=0).dequantise()
    np.testing.assert_array_equal(along, quantise(x.T, "nvfp4").dequantise().T)
    batched = jax.vmap(lambda row: quantise(row, "mxfp4").dequantise())(x)
    np.testing.assert_array_equal(batched, quantise(x, "mxfp4").dequantise())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(name, bad):
    x = some((2, 64))
    x[1, 40] = bad
    got = np.asarray(quantise(jnp.asarray(x), name).dequantise())
    assert not np.isfinite(got[1, 40]) or (name in ("e4m3", "e5m2") and np.isinf(bad))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_tiny_numbers(name):
    np.testing.assert_array_equal(quantise(jnp.zeros((2, 32)), name).dequantise(), 0)
    tiny = jnp.full((1, 32), 1e-30)
    got = quantise(tiny, name).dequantise()
    np.testing.assert_allclose(got, tiny, rtol=0.26)


@pytest.mark.parametrize(("shape", "dim"), [((), -1), ((2, 3), 5), ((2, 3), -3)])
def test_a_dimension_that_there_is_not(shape, dim):
    with pytest.raises(ValueError, match=f"`dim` is {dim}; `x` has {len(shape)} dimensions"):
        quantise(jnp.ones(shape), "mxfp4", dim=dim)


def test_a_format_that_there_is_not():
    with pytest.raises(ValueError, match=r"`format` is 'fp4'; there is 'e4m3'"):
        quantise(jnp.ones(3), "fp4")


class Device:
    def __init__(self, platform, kind, capability=None):
        self.platform, self.device_kind = platform, kind
        if capability:
            self.compute_capability = capability


def test_native_or_emulated_is_said():
    assert native("e4m3", Device("gpu", "NVIDIA H200", "9.0")).native
    assert not native("e4m3", Device("gpu", "NVIDIA A100", "8.0")).native
    assert "needs 8.9" in native("e4m3", Device("gpu", "NVIDIA A100", "8.0")).why
    assert "scale per block" in native("nvfp4", Device("gpu", "NVIDIA B200", "10.0")).why
    for name in FORMATS:
        assert native(name, Device("cpu", "cpu")).why.startswith("emulated")
