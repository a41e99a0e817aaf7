"""Numbers of 8 and 4 bits, and their scales: what each format is, to the bit.

A format has elements, and scales by which they are multiplied:

* e4m3, e5m2: one float32 scale for a whole tensor, which brings its largest element to the
  format's.
* mxfp8, mxfp4 (OCP Microscaling 1.0): a power of two for each 32 elements,
  2^(floor(log2 m) - e), where m is the block's largest size and e the largest exponent of an
  element.
* nvfp4 (NVIDIA, Blackwell): an e4m3 scale for each 16 elements, m / 6 divided by the tensor's own
  float32 scale M / (6 · 448), where M is the tensor's largest size.

Divisions by constants are products with their float32 inverses, as compilers make of them anyway:
so the bits are the same everywhere.

Elements are rounded to nearest, ties to even, and saturate. A block of which an element is not
finite has a scale of NaN; so has a tensor, but in e4m3 and e5m2, whose elements keep NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      dtype: of its elements.
      largest: the largest finite element.
      exponent: the largest exponent of an element.
      block: how many elements share a scale; 0 for the whole tensor.
      scale: dtype of a block's scale.
      capability: the compute capability from which NVIDIA's matrix units take it.
    """

    dtype: Any
    largest: float
    exponent: int
    block: int = 0
    scale: Any = jnp.float32
    capability: float = 8.9


FORMATS = {
    "e4m3": Format(jnp.float8_e4m3fn, 448.0, 8),
    "e5m2": Format(jnp.float8_e5m2, 57344.0, 15),
    "mxfp8": Format(jnp.float8_e4m3fn, 448.0, 8, 32, jnp.float8_e8m0fnu, 10.0),
    "mxfp8_e5m2": Format(jnp.float8_e5m2, 57344.0, 15, 32, jnp.float8_e8m0fnu, 10.0),
    "mxfp4": Format(jnp.float4_e2m1fn, 6.0, 2, 32, jnp.float8_e8m0fnu, 10.0),
    "nvfp4": Format(jnp.float4_e2m1fn, 6.0, 2, 16, jnp.float8_e4m3fn, 10.0),
}
"""Formats of 8 and 4 bits, by name; those with blocks have a scale for each."""


class Quantised(NamedTuple):
    """An array in a format.

    `x = elements · scales · scale`, each scale of a block of elements along one dimension.
    """

    elements: jax.Array
    """In the format's dtype, in the shape of the array."""
    scales: jax.Array | None
    """In the format's dtype, one for each block; None where the tensor has one scale only."""
    scale: jax.Array
    """float32, one for the tensor; 1 where blocks have all."""
    dim: int
    """The dimension along which blocks lie."""
    block: int
    """Elements of a block; 0 if the tensor is one."""

    def dequantise(self, dtype: Any = jnp.float32) -> jax.Array:
        """Returns the array, rounded to `dtype` once."""
        x = _times_block_scales(self).astype(jnp.float32) * self.scale
        return x.astype(dtype)


def quantise(x: Float[Array, ...], format: str, *, dim: int = -1, scale: Any = None) -> Quantised:
    """Returns an array in a format of 8 or 4 bits.

    Args:
      x: an array of floating-point numbers.
      format: a name of `xform.FORMATS`: "e4m3", "e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4".
      dim: along which blocks lie. The last one may be smaller than the others.
      scale: for e4m3 and e5m2, the tensor's scale, by which elements are multiplied to get `x`
        back; by default that which brings the largest element to the format's.

    Returns:
      Elements and scales, to the bit as the format's definition has them, on every device.

    Raises:
      ValueError: on a format that there is not, or a dimension that there is not.

    >>> import jax.numpy as jnp
    >>> from xform import quantise
    >>> x = jnp.array([0.1, 0.5, -6.0, 2.4])
    >>> quantise(x, "mxfp4").dequantise()
    Array([ 0. ,  0.5, -6. ,  2. ], dtype=float32)
    """
    kind = format_of(format)
    wide = x.astype(jnp.float32)
    if not kind.block:
        scale = scale_of(jnp.max(jnp.abs(wide), initial=0.0), kind) if scale is None else scale
        return Quantised(encode(wide / scale, kind), None, jnp.float32(scale), 0, 0)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"`dim` is {dim}; `x` has {x.ndim} dimensions, and blocks lie along one")
    dim %= x.ndim
    blocks = _blocks(wide, dim, kind.block)
    size = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
    if kind.scale == jnp.float8_e8m0fnu:
        tensor = jnp.float32(1)
        scales = power_of_two(size, kind.exponent)
    else:
        whole = jnp.max(size, initial=0.0)
        tensor = jnp.where(whole > 0, whole * _inverse(kind.largest * 448.0), 1.0)
        scales = encode(size * _inverse(kind.largest) / tensor, FORMATS["e4m3"])
    wide_scales = _scale_value(scales) * tensor
    # A block of zeros has a scale of 0, and elements of 0.
    elements = jnp.where(wide_scales == 0, 0.0, blocks / wide_scales)
    elements = _unblocked(encode(elements, kind), dim, x.shape)
    return Quantised(elements, jnp.squeeze(scales, dim + 1), tensor, dim, kind.block)


def format_of(name: str) -> Format:
    """A format by its name."""
    if name not in FORMATS:
        raise ValueError(f"`format` is {name!r}; there is {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def scale_of(largest: Any, kind: Format) -> Any:
    """The scale of a tensor whose largest size is known; 1 for a tensor of zeros."""
    finite = (largest > 0) & (largest < jnp.inf)
    # Not below the least normal number, whose inverse is finite.
    scale = jnp.maximum(largest * _inverse(kind.largest), np.float32(2.0**-126))
    return jnp.where(finite, scale, 1.0).astype(jnp.float32)


def _inverse(x: float) -> np.float32:
    return np.float32(1) / np.float32(x)


def encode(x: Any, kind: Format) -> Any:
    """Elements of a format: to the nearest, ties to even, saturated."""
    return jnp.clip(x, -kind.largest, kind.largest).astype(kind.dtype)


def power_of_two(size: Any, exponent: int) -> Any:
    """`2^(floor(log2 size) - exponent)` in e8m0, by its exponent's bits; NaN if not finite."""
    bits = lax.bitcast_convert_type(size, jnp.uint32)
    own = (bits >> 23).astype(jnp.int32) & 0xFF
    code = jnp.where(own == 255, 255, jnp.clip(own - exponent, 0, 254))
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)


def _scale_value(scales: Any) -> Any:
    """Scales as float32. Those of e8m0 by their bits: 2^-127 is a subnormal number."""
    if scales.dtype != jnp.float8_e8m0fnu:
        return scales.astype(jnp.float32)
    code = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(code == 0, np.uint32(1 << 22), code << 23)
    bits = jnp.where(code == 255, np.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _times_block_scales(q: Quantised) -> Any:
    """Elements times their blocks' scales, in float32: exact."""
    x = q.elements.astype(jnp.float32)
    if q.scales is None:
        return x
    scales = jnp.expand_dims(_scale_value(q.scales), q.dim + 1)
    blocks = _blocks(x, q.dim, q.block) * scales
    return _unblocked(blocks, q.dim, x.shape)


def _blocks(x: Any, dim: int, block: int) -> Any:
    """The dimension as two, blocks and what is in them; zeros fill up the last one."""
    size = x.shape[dim]
    count = -(-size // block)
    pads = [(0, count * block - size if d == dim else 0, 0) for d in range(x.ndim)]
    x = lax.pad(x, np.zeros((), x.dtype), pads) if count * block != size else x
    return x.reshape(*x.shape[:dim], count, block, *x.shape[dim + 1 :])


def _unblocked(x: Any, dim: int, shape: tuple[int, ...]) -> Any:
    count, block = x.shape[dim : dim + 2]
    x = x.reshape(*x.shape[:dim], count * block, *x.shape[dim + 2 :])
    return lax.slice_in_dim(x, 0, shape[dim], axis=dim)


class Native(NamedTuple):
    """Whether a device multiplies in a format, and how that is known."""

    native: bool
    why: str


def native(format: str, device: Any = None) -> Native:
    """Returns whether products in a format run in the device's own matrix units here.

    Elsewhere they are *emulated*: the same elements and scales, to the bit, are multiplied as the
    wider numbers that they stand for. Formats with a scale per block are emulated everywhere so
    far: their operands are multiplied as bfloat16 numbers, which hold them exactly.

    Args:
      format: a name of `xform.FORMATS`.
      device: a `jax.Device`; by default the first.

    >>> from xform import native
    >>> native("nvfp4").native
    False
    """
    kind = format_of(format)
    device = jax.devices()[0] if device is None else device
    name = getattr(device, "device_kind", device.platform)
    if kind.block:
        return Native(False, f"emulated: {format} has a scale per block, and is multiplied as bf16")
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        return Native(False, f"emulated: nothing is known of {format} in matrix units of {name}")
    if float(capability) < kind.capability:
        return Native(False, f"emulated: {name} has compute capability {capability}, and {format} "
                      f"needs {kind.capability}")  # fmt: skip
    return Native(True, f"native: {name} has compute capability {capability}")


jax.tree_util.register_pytree_node(
    Quantised,
    lambda q: ((q.elements, q.scales, q.scale), (q.dim, q.block)),
    lambda aux, children: Quantised(*children, *aux),
)
