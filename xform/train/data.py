"""Text as rows of tokens: bytes as tokens, packing with document ids, batches addressed by step.

Documents are laid end to end and the stream is cut into rows, so that no position is wasted. What
keeps documents apart is data, not layout: `ids` says which document each token belongs to (the
attention mask reads it), and `labels` is `NO_LABEL` where the next token is another document's.

The samples of a run are numbered from 0 over all of its epochs, and which row each of them is
follows from the seed alone (`xform.train.order`): step `i` takes the `size` samples from `i · size`
on. So a run that stops needs no loader state to go on, and reads the same samples in the same order
on any number of devices and processes.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Int, Int32, Integer

from xform.train.order import Order, order

NO_LABEL = -1
"""The label of a position that has nothing to predict."""


class Rows(NamedTuple):
    """Rows of packed tokens.

    Attributes:
      tokens: The tokens; 0 where a row is padded.
      ids: The document of each token, from 0; one past the last where a row is padded.
      labels: The token to predict at each position, or `NO_LABEL`.
    """

    tokens: Int32[np.ndarray, "rows length"]
    ids: Int32[np.ndarray, "rows length"]
    labels: Int32[np.ndarray, "rows length"]

    @property
    def blocks(self) -> tuple[Int32[np.ndarray, "rows length"]]:
        """The tokens, as one array."""
        return (self.tokens,)

    def take(self, chosen: Int[np.ndarray, "some"]) -> "Rows":
        """Returns the chosen rows."""
        return Rows(*(x[chosen] for x in self))


@runtime_checkable
class Source(Protocol):
    """Rows to draw from: `Rows` in memory, or in files of tokens."""

    @property
    def blocks(self) -> Sequence[Integer[np.ndarray, "rows length"]]:
        """The tokens of all rows in order, in one array or in several."""
        ...

    def take(self, chosen: Int[np.ndarray, "some"]) -> Rows:
        """Returns the chosen rows."""
        ...


def count(rows: Source) -> int:
    """Returns how many rows there are.

    >>> count(pack([np.arange(6)], length=2))
    3
    """
    return sum(map(len, rows.blocks))


def encode(text: str | bytes) -> Int32[np.ndarray, "size"]:
    """Returns the UTF-8 bytes of `text` as tokens below 256.

    >>> encode("né")
    array([110, 195, 169], dtype=int32)
    """
    data = text.encode() if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.int32)


def decode(tokens: Int[np.ndarray, "size"]) -> str:
    """Returns the text of byte tokens; what is no UTF-8 or no byte becomes U+FFFD.

    >>> decode(encode("né"))
    'né'
    """
    # No UTF-8 has a byte of 255.
    data = np.where((tokens >= 0) & (tokens < 256), tokens, 255).astype(np.uint8)
    return data.tobytes().decode(errors="replace")


def pack(documents: Sequence[Int[np.ndarray, "_"]], length: int, *, multiple: int = 1) -> Rows:
    """Returns the documents as rows of `length` tokens, padded at the end.

    A document that crosses the end of a row goes on in the next, where attention can't reach back
    to its beginning. Every token of a document but its first is a label exactly once.

    Args:
      documents: The tokens of each document, in order; a document may be empty.
      length: Tokens in a row, at least 1.
      multiple: The number of rows is padded to a multiple of this, at least 1.

    Returns:
      As many rows as are needed.

    Raises:
      ValueError: `length` or `multiple` is less than 1, or there is no token at all.

    >>> rows = pack([np.array([5, 6, 7]), np.array([8, 9])], length=4)
    >>> rows.ids
    array([[0, 0, 0, 1],
           [1, 2, 2, 2]], dtype=int32)
    >>> rows.labels
    array([[ 6,  7, -1,  9],
           [-1, -1, -1, -1]], dtype=int32)
    """
    if length < 1 or multiple < 1:
        raise ValueError(f"`pack` needs sizes of at least 1, found {length=} and {multiple=}")
    sizes = [len(document) for document in documents]
    if not sum(sizes):
        raise ValueError(f"`pack` needs at least one token, found none in {len(sizes)} documents")
    padding = -sum(sizes) % (length * multiple)
    tokens = np.concatenate([*documents, np.zeros(padding)]).astype(np.int32)
    ids = np.repeat(np.arange(len(sizes) + 1, dtype=np.int32), [*sizes, padding])
    follows = (ids[:-1] == ids[1:]) & (ids[1:] < len(sizes))
    labels = np.append(np.where(follows, tokens[1:], NO_LABEL), NO_LABEL).astype(np.int32)
    return Rows(*(x.reshape(-1, length) for x in (tokens, ids, labels)))


# ---- samples -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Rows of several sources, each of which gives its share of the samples; a `Source`.

    Rows are numbered through all of them. A source that is too short for its share begins anew, in
    another order, as often as need be.

    Attributes:
      sources: What is mixed; their rows have one length.
      weights: How many samples each gives, in proportion; above 0.

    Raises:
      ValueError: There is no source, or not one weight for each, or one is not above 0; or their
        rows differ in length.

    >>> few, many = (pack([np.full(n, n)], length=2) for n in (4, 99))
    >>> part = batch(Mixture((few, many), (1.0, 2.0)), 0, size=12, seed=0)
    >>> part.tokens[:, 0].tolist()
    [4, 99, 99, 4, 99, 99, 4, 99, 99, 4, 99, 99]
    """

    sources: tuple[Source, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        wrong = [w for w in self.weights if not 0 < w < float("inf")]
        if wrong or not self.sources or len(self.weights) != len(self.sources):
            raise ValueError(
                f"a `Mixture` of {len(self.sources)} sources needs as many weights, at least one, "
                f"each a number above 0; found {self.weights}"
            )
        lengths = [block.shape[1] for block in self.blocks]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"a `Mixture` needs rows of one length, found {sorted(set(lengths))}: make all of "
                "them with the same `length`"
            )

    @property
    def blocks(self) -> tuple[Integer[np.ndarray, "rows length"], ...]:
        """The tokens of all rows, of one source after another."""
        return tuple(chain(*(source.blocks for source in self.sources)))

    def take(self, chosen: Int[np.ndarray, "some"]) -> Rows:
        """Returns the chosen rows."""
        length = self.sources[0].blocks[0].shape[1]
        found = Rows(*np.zeros((3, len(chosen), length), np.int32))
        for source, start in zip(self.sources, self._starts(), strict=True):
            mine = (chosen >= start) & (chosen < start + count(source))
            for whole, part in zip(found, source.take(chosen[mine] - start), strict=True):
                whole[mine] = part
        return found

    def first(self, size: int) -> Int[np.ndarray, "some"]:
        """Returns the numbers of about `size` rows: of each source, the first, in its share."""
        shares = np.ceil(size * np.array(self.weights) / sum(self.weights)).astype(int)
        pairs = zip(self.sources, self._starts(), shares, strict=True)
        return np.concatenate([at + np.arange(min(n, count(source))) for source, at, n in pairs])

    def _starts(self) -> Int[np.ndarray, "sources"]:
        return np.cumsum([0, *map(count, self.sources)])[:-1]


def first(rows: Source, size: int) -> Int[np.ndarray, "some"]:
    """Returns the numbers of the first rows, `size` of them if there are; see `Mixture.first`.

    >>> first(pack([np.arange(12)], length=2), 4)
    array([0, 1, 2, 3])
    """
    return rows.first(size) if isinstance(rows, Mixture) else np.arange(min(size, count(rows)))


def order_of(rows: Source, seed: int) -> Order:
    """Returns which row each sample is, by its number from the beginning of training on.

    Args:
      rows: The rows to draw from: each once in an epoch, in an order of its own.
      seed: Seed of the order, from 0 to 2**32 - 1.

    >>> order = order_of(pack([np.arange(12)], length=2), seed=0)
    >>> [order[number] for number in range(12)]
    [5, 3, 1, 0, 4, 2, 3, 5, 4, 1, 0, 2]
    """
    if isinstance(rows, Mixture):
        return order(tuple(map(count, rows.sources)), rows.weights, seed)
    return order((count(rows),), (1.0,), seed)


def batch(
    rows: Source, step: int, *, size: int, seed: int, here: Bool[np.ndarray, "size"] | None = None
) -> Rows:
    """Returns the rows of one step: the samples from number `step * size` on.

    Args:
      rows: The rows to draw from.
      step: Number of the step since the start of training, from 0.
      size: Rows in the batch, over all devices and processes.
      seed: Seed of the order, see `order_of`.
      here: Which rows of the batch this process needs, see `rows_here`: others are not read, and
        come as zeros. By default, all.

    Raises:
      ValueError: There are fewer rows than `size`.

    >>> rows = pack([np.arange(12)], length=2)
    >>> [batch(rows, step, size=2, seed=0).tokens[:, 0].tolist() for step in range(4)]
    [[10, 6], [2, 0], [8, 4], [6, 10]]
    """
    if count(rows) < size:
        raise ValueError(
            f"`batch` needs at least size={size} rows, found {count(rows)}: "
            "use more text, shorter rows or smaller batches"
        )
    samples, numbers = order_of(rows, seed), np.arange(step * size, (step + 1) * size)
    if here is None or here.all():
        return rows.take(_rows(samples, numbers))
    part = rows.take(_rows(samples, numbers[here]))
    whole = Rows(*np.zeros((3, size, part.tokens.shape[1]), np.int32))
    for x, y in zip(whole, part, strict=True):
        x[here] = y
    return whole


def _rows(samples: Order, numbers: Int[np.ndarray, "some"]) -> Int[np.ndarray, "some"]:
    return np.array([samples[int(number)] for number in numbers], int)


def rows_here(sharding: jax.sharding.Sharding, shape: tuple[int, int]) -> Bool[np.ndarray, "size"]:
    """Returns which rows of a batch the devices of this process hold, at least in part.

    Args:
      sharding: How the batch is split.
      shape: Of the batch: rows, and tokens in a row.

    >>> rows_here(jax.sharding.SingleDeviceSharding(jax.devices()[0]), (3, 8))
    array([ True,  True,  True])
    """
    found = np.zeros(shape[0], bool)
    for index in sharding.addressable_devices_indices_map(shape).values():
        if index is not None:
            found[index[0]] = True
    return found


def batches(
    rows: Source,
    first: int = 0,
    *,
    ahead: int = 2,
    number: Callable[[int], int] = int,
    **options,
) -> Generator[Rows]:
    """Yields what `batch` returns, step after step; the next ones are read in the background.

    Args:
      rows: The rows to draw from.
      first: The step to begin with.
      ahead: How many steps are read before they are asked for, at least 1.
      number: Which batch a step has, where some are left out.
      options: Those of `batch`.

    >>> from contextlib import closing
    >>> from itertools import islice
    >>> rows = pack([np.arange(12)], length=2)
    >>> with closing(batches(rows, 1, size=2, seed=0)) as parts:
    ...     [part.tokens[:, 0].tolist() for part in islice(parts, 2)]
    [[2, 0], [8, 4]]
    """
    import grain

    steps = grain.MapDataset.range(first, np.iinfo(np.int64).max)
    steps = steps.map(lambda step: batch(rows, number(step), **options))
    read = grain.ReadOptions(num_threads=1, prefetch_buffer_size=ahead)
    reader = iter(steps.to_iter_dataset(read))
    try:
        yield from reader
    finally:
        reader.close()
