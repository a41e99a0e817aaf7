"""Which row each sample of a run is: a shuffle anew for each epoch, and sources mixed by weight.

Samples are numbered from 0 over the whole run. Which row a sample is, is computed from its number
(grain's index shuffle, a small block cipher), and nothing that has as many entries as there are
rows is kept. Grain mixes sources as evenly as whole numbers allow, in shares that are right to
within 1 % of the smallest.
"""

import zlib
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol, cast, runtime_checkable

import numpy as np


@runtime_checkable
class Order(Protocol):
    """The row of each sample, by its number; rows are numbered through all sources."""

    def __getitem__(self, number: int, /) -> int:
        """Returns the row of one sample."""
        ...


@lru_cache(maxsize=8)
def order(counts: tuple[int, ...], weights: tuple[float, ...], seed: int) -> Order:
    """Returns the row of each sample of one source, or of several that are mixed.

    Args:
      counts: Rows in each source, from 1 to 2**31.
      weights: How many samples each gives, in proportion.
      seed: From 0 to 2**32 - 1.

    >>> rows = order((4, 2), (1.0, 1.0), seed=0)
    >>> [rows[number] for number in range(8)]
    [2, 5, 3, 4, 1, 4, 0, 5]
    """
    import grain

    if not all(1 <= count <= 2**31 for count in counts):
        raise ValueError(f"an order of samples needs from 1 to 2**31 rows in a source: {counts=}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"an order of samples needs a seed from 0 to 2**32 - 1: {seed=}")
    parts = [
        grain.MapDataset.range(start, end).shuffle(seed=_seed(seed, i)).repeat()
        for i, (start, end) in enumerate(pairwise(accumulate(counts, initial=0)))
    ]
    return cast(Order, parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights))


def _seed(seed: int, source: int) -> int:
    """A seed of a source's own: grain counts from it, one for each epoch."""
    return int(np.random.SeedSequence((seed, source)).generate_state(1)[0])


def fingerprint(order: Order, rows: int) -> str:
    """Returns a short text that tells an order from others: of another seed, mixture or shuffle.

    Args:
      order: Which row each sample is.
      rows: How many there are.

    >>> fingerprint(order((4,), (1.0,), seed=0), 4) == fingerprint(order((4,), (1.0,), seed=1), 4)
    False
    """
    some = [*range(16), *range(rows, rows + 16)]  # of two epochs
    return f"crc32 {zlib.crc32(np.array([order[i] for i in some], '<i8').tobytes()):08x}"
