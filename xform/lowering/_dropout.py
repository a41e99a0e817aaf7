"""Dropout whose bits belong to a place in the attention matrix, not to a program.

Each weight is kept or dropped by a hash of the key and its own (b, h, q, k): threefry-2x32 with 20
rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the generator of
`jax.random`, once for the head and once for the pair. So forward, backward and jvp drop the same
weights however the matrix is cut into tiles, and nothing is stored. It is spelled out here in
integer arithmetic, since a kernel has no primitive for it.
"""

import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def kept(key, rate: float, b, h, q, k):
    """What a weight is multiplied by: 0 with probability `rate`, else `1 / (1 - rate)`.

    Args:
      key: uint32 `[2]`, the data of a threefry key.
      rate: at least 0 and below 1.
      b, h, q, k: int32 scalars.
    """
    word = lambda x: jnp.asarray(x).astype(jnp.uint32)
    head = threefry((key[0], key[1]), (word(b), word(h)))
    bits, _ = threefry(head, (word(q), word(k)))
    threshold = jnp.uint32(min(2**32 - 1, round(rate * 2**32)))
    return jnp.where(bits < threshold, 0.0, 1 / (1 - rate)).astype(jnp.float32)


def threefry(key, counter):
    """Two uint32 words from two of a key and two of a counter."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(r)) | (y >> jnp.uint32(32 - r)))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y
