"""Rows out of files of tokens, which are long, and so are mapped into memory and not read.

A file is flat and little-endian, as nanoGPT writes it, or llm.c's, which has a header of 256 int32
in front. A flat file does not say of what type it is: uint16 is assumed, or uint32 for a vocabulary
that needs it; what certainly is something else is refused, and what may be told, unless the type is
named. Every token is compared with the vocabulary before the first one is used.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer

from xform.train.data import NO_LABEL, Rows

# llm.c's header begins with one of these, and its third number is the count of tokens.
_MAGIC = {20240520: "uint16", 20240801: "uint32"}
_HEADER = 256 * 4
_CHUNK = 1 << 22
_SMALL = 1 << 20
"""Bytes of a file up to which it is read, and not mapped into memory."""
_NOWHERE = np.zeros(0, int)


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of one long stream of tokens, cut out as they are drawn; a `Source`.

    The files of the stream are laid end to end, and each begins a document, so that no file is too
    short. A last row that the stream does not fill is left out. Inside a file documents end behind
    a separator, or where `ends` says.

    Attributes:
      streams: All tokens, in parts that are usually mapped from files; none is empty.
      first: The place of each part in the stream, and last the size of the stream.
      length: Tokens in a row.
      separator: The token that ends a document, as its last one; None if each part is one document.
      ends: The places in the stream behind the last tokens of documents, in order.
      blocks: The tokens of all rows in order: views of the parts, and copies of rows that cross
        from one part to the next.
    """

    streams: tuple[Integer[np.ndarray, "_"], ...]
    first: Int[np.ndarray, "parts"]
    length: int
    separator: int | None = None
    ends: Int[np.ndarray, "_"] = dataclasses.field(default_factory=lambda: _NOWHERE)
    blocks: tuple[Integer[np.ndarray, "_ length"], ...] = ()

    @classmethod
    def of(
        cls,
        streams: Sequence[np.ndarray],
        length: int,
        separator: int | None = None,
        ends: Int[np.ndarray, "_"] = _NOWHERE,
    ) -> "TokenRows":
        """Returns the rows of `length` tokens of some streams, one behind the other.

        Raises:
          ValueError: There is less than one.
        """
        streams = tuple(x for x in streams if len(x))
        first = np.cumsum([0, *map(len, streams)])
        if first[-1] < length:
            raise ValueError(f"a row takes {length} tokens, and there are {first[-1]} of them")
        rows = cls(streams, first, length, separator, ends)
        return dataclasses.replace(rows, blocks=tuple(rows._blocks()))

    @property
    def left(self) -> int:
        """How many tokens at the end of the stream fill no row."""
        return int(self.first[-1]) % self.length

    def _blocks(self) -> Iterator[np.ndarray]:
        length, dtype, done = self.length, np.result_type(*self.streams), 0
        crossing = lambda to: self.take(np.arange(done, to)).tokens.astype(dtype)
        for stream, start in zip(self.streams, self.first, strict=False):
            # Its rows that lie in it as a whole.
            begin, end = -(-start // length), (start + len(stream)) // length
            if begin < end:
                if done < begin:
                    yield crossing(begin)
                yield stream[begin * length - start : end * length - start].reshape(-1, length)
                done = end
        if done < (rows := self.first[-1] // length):
            yield crossing(rows)

    def take(self, chosen: Int[np.ndarray, "some"]) -> Rows:
        """Returns the chosen rows; ids number the documents of each row from 0."""
        spans = np.zeros((len(chosen), self.length + 1), np.int32)
        ends = np.zeros(spans.shape, bool)
        for row, span, end in zip(chosen, spans, ends, strict=True):
            place = int(row) * self.length
            self._copy(place, span, end)
            inside = np.searchsorted(self.ends, [place + 1, place + len(span) + 1])
            end[self.ends[slice(*inside)] - place - 1] = True
        if self.separator is not None:
            ends |= spans == self.separator
        ids = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        labels = np.where(ends[:, :-1], NO_LABEL, spans[:, 1:]).astype(np.int32)
        return Rows(spans[:, :-1], ids[:, :-1].astype(np.int32), labels)

    def _copy(self, place: int, span: np.ndarray, ends: np.ndarray) -> None:
        """Fills a span from a place on, and notes where a part of the stream ends in it."""
        part, at = int(np.searchsorted(self.first, place, side="right")) - 1, 0
        while at < len(span) and part < len(self.streams):
            start = place + at - self.first[part]
            found = self.streams[part][start : start + len(span) - at]
            span[at : at + len(found)] = found
            at += len(found)
            ends[at - 1] = start + len(found) == len(self.streams[part])
            part += 1


# ---- a file --------------------------------------------------------------------------------------


def read_tokens(path: Path, *, codes: int, dtype: str | None = None) -> np.ndarray:
    """Returns the tokens of a file, mapped into memory if it is long; all of them are checked.

    Args:
      path: A flat little-endian file, with llm.c's header or none.
      codes: Size of the vocabulary: every token is below it.
      dtype: "uint16" or "uint32"; None takes what the header says, or else assumes "uint16", for a
        vocabulary above 65,536 "uint32".

    Raises:
      ValueError: The file is missing, empty, unreadable or cut off, is or looks like something
        else, or holds a token outside of the vocabulary.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "train.bin"
    ...     np.arange(6, dtype="<u2").tofile(path)
    ...     read_tokens(path, codes=8, dtype="uint16").tolist()
    [0, 1, 2, 3, 4, 5]
    """
    if dtype not in (None, "uint16", "uint32"):
        raise ValueError(f"a file of tokens is of dtype uint16 or uint32, found {dtype!r}")
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER)
            size = file.seek(0, 2)
    except OSError as error:
        raise ValueError(f"`{path}` can't be read: {error.strerror}") from None
    if kind := next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None):
        raise ValueError(f"`{path}` is {kind}, not flat tokens. {_AS_FLAT}.")
    told, offset, count = _header(head)
    if told and dtype and told != dtype:
        raise ValueError(f"`{path}` says in its header that it is {told}, asked is {dtype}")
    guessed = not (dtype or told)
    dtype = dtype or told or ("uint16" if codes <= 1 << 16 else "uint32")
    item = np.dtype(dtype).itemsize
    body = size - offset
    if body < item:
        raise ValueError(f"`{path}` is empty: it holds {size} bytes and no token")
    if body % item:
        raise ValueError(
            f"`{path}` holds {body} bytes, which is no multiple of the {item} of a {dtype} token: "
            "it is cut off, or of another dtype"
        )
    if count not in (None, there := body // item):
        how = "cut off" if there < count else "longer than it says"
        raise ValueError(
            f"`{path}` is {how}: its header promises {count} tokens, there are {there}"
        )
    flat = np.dtype(dtype).newbyteorder("<")
    # Each mapped file stays open, and a system allows some hundreds of those.
    tokens = (
        np.memmap(path, flat, "r", offset)
        if body > _SMALL
        else np.fromfile(path, flat, offset=offset)
    )
    highest = _check_range(path, tokens, codes)
    if not guessed:
        return tokens
    read = f"No header says what it is, so it is read as {dtype}; if that is right, say so"
    if doubt := _int64(tokens, highest) or _doubt(tokens, codes, highest):
        raise ValueError(f"`{path}` looks like {doubt}. {read} (`--token-dtype {dtype}`).")
    # What tokens may look like, too: those of an image, or of pairs of bytes.
    if doubt := _like_narrow_numbers(tokens):
        warnings.warn(f"`{path}` looks like {doubt}. {read} (`--token-dtype`).", stacklevel=3)
    return tokens


# How files begin that are something else.
_KINDS = {
    b"\x93NUMPY": "a NumPy file",
    b"PK\x03\x04": "a zip archive, as NumPy's `.npz` and PyTorch's files are",
    b"\x1f\x8b\x08": "a gzip archive",
    b"\x28\xb5\x2f\xfd": "a zstandard archive",
    b"\x80\x04\x95": "a pickle",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
}
_AS_FLAT = "Of an array, `np.asarray(x).astype('<u2').tofile('tokens.bin')` makes a file of tokens"


def _header(head: bytes) -> tuple[str | None, int, int | None]:
    """The dtype, size and count of tokens that llm.c's header gives, if this is one."""
    numbers = np.frombuffer(head, "<i4") if len(head) == _HEADER else np.zeros(3, int)
    told = _MAGIC.get(int(numbers[0]))
    return (told, _HEADER, int(numbers[2])) if told else (None, 0, None)


def _check_range(path: Path, tokens: np.ndarray, codes: int) -> np.ndarray:
    """Returns the highest token at every fourth place; raises if one is outside."""
    highest = np.zeros(4, np.int64)
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        outside = np.flatnonzero(chunk >= codes)
        if outside.size:
            at = int(outside[0])
            signed = " (-1, if it has a sign)" if chunk[at] == np.iinfo(chunk.dtype).max else ""
            raise ValueError(
                f"`{path}` holds token {chunk[at]}{signed} at place {start + at:,}, read as "
                f"{tokens.dtype.name}, and the vocabulary ends at {codes - 1}. "
                f"{_other_dtype(tokens, codes)}"
            )
        highest = np.maximum(highest, [chunk[i::4].max(initial=0) for i in range(4)])
    return highest


# ---- what a file looks like ----------------------------------------------------------------------

_TELLING = 512
"""Bytes from which on it is no accident that most of them are 0, or that all are letters."""
_SAMPLE = 1 << 16


def _int64(tokens: np.ndarray, highest: np.ndarray) -> str | None:
    """Three of four quarters of the numbers are 0, in a file long enough to tell."""
    size, item = tokens.nbytes, tokens.dtype.itemsize
    low, high = highest[: 4 // item], highest[4 // item : 8 // item]
    if size % 8 or size < _TELLING or not low.any() or high.any() or highest[3]:
        return None
    cure = "`np.fromfile(path, '<i8').astype('<u4').tofile('tokens.bin')` makes a file of uint32"
    return f"int64: most numbers are 0. {cure}"


def _doubt(tokens: np.ndarray, codes: int, highest: np.ndarray) -> str | None:
    """What a file is rather than what was assumed, and the cure; None unless that is certain."""
    data = _sampled(tokens)
    if name := _like_text(data) or _like_floats(data):
        return f"{name}. {_AS_FLAT}"
    if tokens.dtype.itemsize > 2 or tokens.nbytes < _TELLING or len(tokens) % 2:
        return None
    even, odd = highest[::2].max(), highest[1::2].max()
    upper = (codes - 1) >> 16
    # The upper halves of uint32 tokens are tiny numbers, and every second one.
    if odd <= upper < even:
        return f"uint32: every second number is at most {odd}. Say so: `--token-dtype uint32`"
    if even <= upper < odd:
        return f"uint32 in big-endian order. {_turned('>u4', '<u4')}"
    if set(np.frombuffer(data, "<u2")[1::2]) == {0, 0xFFFF}:
        return "int32 with negative numbers, which are no tokens"
    return None


def _like_narrow_numbers(tokens: np.ndarray) -> str | None:
    """What a file of 16-bit tokens may be, too, as far as one can tell."""
    data = _sampled(tokens)
    if tokens.dtype.itemsize > 2:
        return None
    name = next((x for x in ("bfloat16", "float16") if _usual(data, x) > 0.99), None)
    return f"{name}. {_AS_FLAT}" if name else _like_bytes(data)


def _turned(of: str, to: str) -> str:
    return f"`np.fromfile(path, '{of}').astype('{to}').tofile('tokens.bin')` makes a file of tokens"


def _sampled(tokens: np.ndarray) -> bytes:
    """Bytes of the beginning, the middle and the end, cut where 8 of them begin anew."""
    whole = tokens[: len(tokens) // 4 * 4]
    middle = len(whole) // 8 * 4
    parts = (whole[:_SAMPLE], whole[middle : middle + _SAMPLE], whole[-_SAMPLE:])
    return b"".join(x.tobytes() for x in parts[: 1 if len(whole) <= _SAMPLE else 3])


def _like_text(data: bytes) -> str | None:
    """Letters, and no control characters, of many kinds: bytes of tokens are of all, or of few."""
    strange = set(data) & (
        set(range(32)) - set(b"\t\n\r\f") | {127, *range(0xF5, 0x100), 0xC0, 0xC1}
    )
    few = min(len(set(data[::2])), len(set(data[1::2]))) < 4
    text = len(data) >= _TELLING and not strange and not few and _mostly_utf8(data)
    return "text" if text else None


def _mostly_utf8(data: bytes) -> bool:
    """Whether all but the cut ends of the samples is UTF-8."""
    return data.decode(errors="replace").count("\ufffd") <= 8


def _like_floats(data: bytes) -> str | None:
    """Wide floats of everyday size, which are none once their halves are those of two of them.

    Tokens that are would be so from any place on.
    """
    for dtype in ("float64", "float32"):
        if _usual(data, dtype) > 0.99 and _usual(data[2:], dtype) < 0.5:
            return dtype
    return None


def _usual(data: bytes, dtype: str) -> float:
    """The share of numbers of everyday size: read as floats, tokens are tiny, huge or none."""
    kind = jnp.dtype(dtype)
    with np.errstate(invalid="ignore"):
        x = np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], kind)
        x = np.abs(x.astype(np.float64))
    x = np.where(np.isfinite(x), x, np.inf)[x != 0]
    if x.size < 64 or len(np.unique(x)) <= 16:
        return 0.0
    usual = (x > 2.0**-14) & (x < 2.0**10)
    if dtype in ("float32", "float64"):  # of narrow floats, all large ones are whole numbers
        usual |= (x == np.floor(x)) & (x < 2.0**24)
    return float(usual.mean())


def _like_bytes(data: bytes) -> str | None:
    """Halves that are alike are bytes; a first one with less in it than the second is the upper."""
    halves = np.frombuffer(data, np.uint8).reshape(-1, 2).T
    shares = np.stack([np.bincount(x, minlength=256) for x in halves]) / max(1, halves.shape[1])
    # How far apart two samples of one distribution are found, and each from an even one.
    noise = 0.56 * np.sqrt(shares.mean(0)).sum() / np.sqrt(max(1, halves.shape[1]))
    apart = np.abs(shares[0] - shares[1]).sum() / 2
    uneven = np.abs(shares.mean(0) - 1 / 256).sum() / 2
    if (shares > 0).sum(1).min() > 2 and noise < 0.15 and apart < 2 * noise and uneven > 4 * noise:
        return f"uint8, both bytes of its numbers alike. {_turned('u1', '<u2')}"
    bits = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(1)
    if halves.size >= 4 * _TELLING and bits[0] + 1 < bits[1]:
        return (
            "uint16 in big-endian order: the first byte of its numbers varies less than the "
            f"second. {_turned('>u2', '<u2')}"
        )
    return None


def _other_dtype(tokens: np.ndarray, codes: int) -> str:
    """What the user may have meant, judged by the beginning of the file."""
    if name := _like_text(data := _sampled(tokens)) or _like_floats(data):
        return f"It looks like {name}. {_AS_FLAT}."
    data = tokens[: _CHUNK // 4].tobytes()
    for name in ("<u4", ">u4", "<u2", ">u2"):
        dtype = np.dtype(name)
        whole = data[: len(data) // dtype.itemsize * dtype.itemsize]
        if dtype != tokens.dtype and np.frombuffer(whole, dtype).max(initial=0) < codes:
            order = "" if name[0] == "<" else " in big-endian order"
            read = dtype.newbyteorder("=").name
            cure = f" Say so: `--token-dtype {read}`." if not order else ""
            return f"Read as {read}{order}, they would all be inside.{cure}"
    return "Choose the vocabulary that the file was made with, or make the file anew."
