"""Into how many parts XLA splits the sum of a product on an NVIDIA GPU.

A product of few rows and columns fills few multiprocessors. XLA then splits what it sums over,
writes one product for each part, in float32, and adds them up in another kernel. It decides by
arithmetic, repeated here: openxla/xla, xla/backends/gpu/transforms/splitk_rewriter.cc, whose
weights are fitted to measured times, so that their unit is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_TILE = 128
_MOST = 2048


@dataclass(frozen=True)
class Gpu:
    """What the decision goes by.

    Attributes:
      cores: multiprocessors.
      compute, memory, adding, launch: weights of a FLOP of one tile, of a byte of the product, of a
        byte of the sum over parts, and of its launch.
    """

    cores: int
    compute: float
    memory: float
    adding: float
    launch: float


_HOPPER = Gpu(132, 100.0, 0.194136, 193.1384, 4.36e7)
GPUS = {
    "A100": Gpu(108, 100.0, 0.0666955, 467.815, 5.65307e7),
    "B200": Gpu(148, 100.0, 0.0848863, 189.711, 1.21563e8),
    **dict.fromkeys(("H100", "H200", "gpu", "cuda"), _HOPPER),
}


@dataclass(frozen=True)
class Product:
    """A product of matrices: b of them, m × k by k × n; bytes of an element of each and of sums."""

    b: int
    m: int
    n: int
    k: int
    left: int
    right: int
    out: int
    sums: int


def parts(p: Product, gpu: Gpu) -> int:
    """Returns in how many parts the sum is made: the cheapest power of two.

    >>> parts(Product(1, 256, 512, 512, 4, 4, 4, 4), GPUS["H200"])
    4
    """
    if not p.b * p.m * p.n * p.k:
        return 1
    return min((2**i for i in range(_MOST.bit_length())), key=lambda s: _price(p, s, gpu))


def _price(p: Product, s: int, gpu: Gpu) -> float:
    rows, columns = min(p.m, _TILE), min(p.n, _TILE)
    tiles = s * p.b * math.ceil(p.m / _TILE) * math.ceil(p.n / _TILE)
    at_once = gpu.cores * _TILE**2 / (rows * columns)
    compute = 2 * rows * columns * math.ceil(p.k / s) * max(1.0, tiles / at_once) * gpu.compute
    written = s * p.b * p.m * p.n * (p.sums if s > 1 else p.out)
    read = p.b * p.k * (p.m * p.left + p.n * p.right)
    product = max(compute, (read + written) * gpu.memory)
    if s == 1:
        return product
    return product + gpu.launch + (written + p.b * p.m * p.n * p.out) * gpu.adding
