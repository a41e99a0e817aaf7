"""Rotary position embeddings (Su et al., arXiv:2104.09864): pairs of numbers turned by position.

A pair turns by an angle that grows with the position, and slower from pair to pair. A model that
was trained on short texts reads longer ones once its pairs turn slower (`scaled`): all of them
(Chen et al., arXiv:2306.15595), or, as Llama 3.1 has it, only those that turn less than a few times
in a short text, with a blend between.
"""

import math

import jax.numpy as jnp

type Scaling = tuple[float, ...]
"""`()` for none, `(factor,)` for all pairs, or Llama 3.1's `(factor, low, high, length)`."""


def wrong(scaling: Scaling) -> list[str]:
    """Returns in words why a scaling makes no sense."""
    if len(scaling) not in (0, 1, 4) or not all(0 < x < math.inf for x in scaling):
        return [
            f"model.rope_scaling={scaling} must be (factor,) or (factor, low, high, length), of "
            "numbers above 0"
        ]
    if len(scaling) == 4 and scaling[1] >= scaling[2]:
        return [f"model.rope_scaling={scaling} must have low={scaling[1]} below high={scaling[2]}"]
    return []


def scaled(frequencies, scaling: Scaling):
    """Returns frequencies, in radians per position, as a scaling changes them.

    Args:
      frequencies: Those of a model without it.
      scaling: What they are divided by, `factor`. Llama 3.1 leaves pairs that turn more than `high`
        times in a text of `length` positions, and divides those that turn less than `low` times.

    >>> scaled(jnp.array([1.0, 1e-4]), (8.0, 1.0, 4.0, 8192.0)).tolist()
    [1.0, 1.2499...e-05]
    """
    if not scaling:
        return frequencies
    if len(scaling) == 1:
        return frequencies / scaling[0]
    factor, low, high, length = scaling
    turns = length * frequencies / (2 * jnp.pi)
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotations(positions_T, head_size: int, base: float, scaling: Scaling = ()):
    """Returns the cosines and sines of the angles, each [T, 1, D/2]."""
    frequencies = base ** -jnp.linspace(0, 1, head_size // 2, endpoint=False)
    angles = positions_T[:, None, None] * scaled(frequencies, scaling)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHD, rotation):
    """Turns the pairs (i, i + D/2) of each head by an angle that grows with the position."""
    cos, sin = rotation
    a, b = jnp.split(x_BTHD, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x_BTHD.dtype)
