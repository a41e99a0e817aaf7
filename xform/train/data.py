"""Text as rows of tokens: bytes as tokens, packing with document ids, batches addressed by step.

Documents are laid end to end and the stream is cut into rows, so that no position is wasted. What
keeps documents apart is data, not layout: `ids` says which document each token belongs to (the
attention mask reads it), and `labels` is `NO_LABEL` where the next token is another document's.

The batch of a step is a function of seed and step alone, so a run that stops and goes on needs no
loader state.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, Integer

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


def batch(rows: Source, step: int, *, size: int, seed: int) -> Rows:
    """Returns the rows of one step, drawn anew for each epoch without repeats.

    Rows that are too few for a last batch are left out of their epoch.

    Args:
      rows: The rows to draw from.
      step: Number of the step since the start of training, from 0.
      size: Rows in the batch.
      seed: Seed of the order.

    Raises:
      ValueError: There are fewer rows than `size`.

    >>> rows = pack([np.arange(12)], length=2)
    >>> [batch(rows, step, size=2, seed=0).tokens[:, 0].tolist() for step in range(4)]
    [[6, 4], [10, 8], [0, 2], [2, 8]]
    """
    there = count(rows)
    if not there // size:
        raise ValueError(
            f"`batch` needs at least size={size} rows, found {there}: "
            "use more text, shorter rows or smaller batches"
        )
    epoch, index = divmod(step, there // size)
    return rows.take(_order(there, seed, epoch)[index * size : (index + 1) * size])


@lru_cache(maxsize=1)
def _order(count: int, seed: int, epoch: int) -> Int[np.ndarray, "count"]:
    """The order of an epoch's rows; of millions of them it takes longer to draw than a step."""
    return np.random.default_rng((seed, epoch)).permutation(count)
