"""What a run trains on, read and checked before its first step: text, or a long file of tokens.

Text is small: it is read whole and becomes documents, one for each file. Tokens are not: their file
is mapped into memory, and the rows of a step are cut out of it as they are drawn. It is the flat
little-endian form that nanoGPT writes, or llm.c's, which has a header of 256 int32 in front.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer

from xform.train.data import NO_LABEL, Rows, Source, decode, encode, pack


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text as tokens.

    Attributes:
      codes: Every token is below this.
      encode: From UTF-8 to tokens.
      decode: From tokens to text.
    """

    codes: int
    encode: Callable[[bytes], np.ndarray]
    decode: Callable[[np.ndarray], str]


BYTES = Tokenizer(256, encode, decode)


def load_tokenizer(path: Path | str | None, codes: int) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face `tokenizer.json`, which adds no special tokens.

    Args:
      path: The file; None for bytes as tokens.
      codes: Size of the model's vocabulary.

    Raises:
      ValueError: The file can't be read or is something else, or the vocabulary is too small.

    >>> load_tokenizer(None, codes=256) is BYTES
    True
    """
    tokenizer = BYTES if path is None else _hugging_face(Path(path))
    if tokenizer.codes > codes:
        raise ValueError(
            f"{'text as bytes' if path is None else f'`{path}`'} has {tokenizer.codes} tokens, and "
            f"the vocabulary of the model ends at {codes - 1}: it needs codes={tokenizer.codes}."
        )
    return tokenizer


def _hugging_face(path: Path) -> Tokenizer:
    import tokenizers

    try:
        loaded = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # what the library raises has no narrower type
        raise ValueError(
            f"`{path}` is no tokenizer: {error}. Needed is a Hugging Face `tokenizer.json`."
        ) from None

    def to_tokens(text: bytes) -> np.ndarray:
        return np.asarray(loaded.encode(text.decode(), add_special_tokens=False).ids, np.int32)

    # A file may bring settings of inference along, which would cut documents off, and fill them up.
    loaded.no_truncation()
    loaded.no_padding()
    codes = 1 + max(loaded.get_vocab().values(), default=-1)
    if not codes:
        raise ValueError(f"`{path}` is a tokenizer without tokens.")
    return Tokenizer(codes, to_tokens, lambda tokens: loaded.decode(list(map(int, tokens))))


# ---- text ----------------------------------------------------------------------------------------


def read_text(paths: Sequence[Path], tokenizer: Tokenizer = BYTES) -> list[np.ndarray]:
    """Returns the tokens of each text file, in order of their names.

    Args:
      paths: Files, and folders whose files are all read, but for empty and hidden ones.
      tokenizer: By default, bytes are tokens.

    Raises:
      ValueError: Lists every path that is missing, empty, unreadable or not UTF-8.
    """
    found, wrong = [], []
    for path in paths:
        try:
            files = sorted(_files(path))
            texts = [(file, file.read_bytes()) for file in files]
        except OSError as error:
            wrong.append(f"`{error.filename or path}` can't be read: {error.strerror}")
            continue
        wrong += [f"`{file}` is not UTF-8 text" for file, text in texts if not _is_text(text)]
        if not any(text for _, text in texts):
            wrong.append(f"`{path}` " + ("is empty" if path.is_file() else "holds no text"))
        found += [text for _, text in texts if text]
    if wrong:
        raise ValueError(
            f"data: {_some(wrong)}. Name files of UTF-8 text, folders of them, or one `.bin` file "
            "of tokens."
        )
    return [tokenizer.encode(text) for text in found]


def _files(path: Path) -> Iterator[Path]:
    """The file itself, or what a folder holds at any depth."""
    if not path.is_dir():
        yield path
    else:
        for inner in path.iterdir():
            if not inner.name.startswith("."):
                yield from _files(inner)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _some(items: Sequence[str], most: int = 5) -> str:
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


# ---- tokens --------------------------------------------------------------------------------------

# llm.c's header begins with one of these, and its third number is the count of tokens.
_MAGIC = {20240520: "uint16", 20240801: "uint32"}
_HEADER = 256 * 4
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of one long stream of tokens, cut out as they are drawn; a `Source`.

    A last row that the stream does not fill is left out.

    Attributes:
      stream: All tokens, usually mapped from a file.
      tokens: The same as rows of equal length.
      separator: The token that ends a document, as its last one; None if all is one document.
    """

    stream: Integer[np.ndarray, "size"]
    tokens: Integer[np.ndarray, "rows length"]
    separator: int | None = None

    @classmethod
    def of(cls, stream: np.ndarray, length: int, separator: int | None = None) -> "TokenRows":
        """Returns the stream's rows of `length` tokens.

        Raises:
          ValueError: There is less than one.
        """
        rows = len(stream) // length
        if not rows:
            raise ValueError(f"a row takes {length} tokens, and there are {len(stream)} of them")
        return cls(stream, stream[: rows * length].reshape(rows, length), separator)

    def take(self, chosen: Int[np.ndarray, "some"]) -> Rows:
        """Returns the chosen rows; ids number the documents of each row from 0."""
        length = self.tokens.shape[1]
        place = np.asarray(chosen)[:, None] * length + np.arange(length + 1)
        beyond = place >= len(self.stream)
        spans = self.stream[np.minimum(place, len(self.stream) - 1)].astype(np.int32)
        ends = np.zeros(spans.shape, bool) if self.separator is None else spans == self.separator
        ids = np.cumsum(ends, axis=1, dtype=np.int32) - ends
        labels = np.where(ends[:, :-1] | beyond[:, 1:], NO_LABEL, spans[:, 1:]).astype(np.int32)
        return Rows(spans[:, :-1], ids[:, :-1].astype(np.int32), labels)


def read_tokens(path: Path, *, codes: int, dtype: str | None = None) -> np.ndarray:
    """Returns the tokens of a file, mapped into memory; all of them are checked.

    Args:
      path: A flat little-endian file, with llm.c's header or none.
      codes: Size of the vocabulary: every token is below it.
      dtype: "uint16" or "uint32"; None takes what the header says, or "uint16".

    Raises:
      ValueError: The file is missing, empty, unreadable, of another dtype or cut off, or holds a
        token outside of the vocabulary.
    """
    if dtype not in (None, "uint16", "uint32"):
        raise ValueError(f"a file of tokens is of dtype uint16 or uint32, found {dtype!r}")
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER)
            size = file.seek(0, 2)
    except OSError as error:
        raise ValueError(f"`{path}` can't be read: {error.strerror}") from None
    if head.startswith(b"\x93NUMPY"):
        raise ValueError(
            f"`{path}` is a NumPy file, not flat tokens: "
            "`np.load(path).astype('<u2').tofile('tokens.bin')` makes one."
        )
    told, offset, count = _header(head)
    if told and dtype and told != dtype:
        raise ValueError(f"`{path}` says in its header that it is {told}, asked is {dtype}")
    guessed, dtype = not (dtype or told), dtype or told or "uint16"
    item = np.dtype(dtype).itemsize
    body = size - offset
    if body < item:
        raise ValueError(f"`{path}` is empty: it holds {size} bytes and no token")
    if body % item:
        raise ValueError(
            f"`{path}` holds {body} bytes, which is no multiple of the {item} of a {dtype} token: "
            "it is cut off, or of another dtype"
        )
    if count not in (None, body // item):
        raise ValueError(
            f"`{path}` is cut off: its header promises {count} tokens, there are {body // item}"
        )
    tokens = np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r", offset)
    _check_tokens(path, tokens, codes, guessed=guessed)
    return tokens


_TELLING = 512
"""Bytes from which on it is no accident that most of them are 0."""


def _header(head: bytes) -> tuple[str | None, int, int | None]:
    """The dtype, size and count of tokens that llm.c's header gives, if this is one."""
    numbers = np.frombuffer(head, "<i4") if len(head) == _HEADER else np.zeros(3, int)
    told = _MAGIC.get(int(numbers[0]))
    return (told, _HEADER, int(numbers[2])) if told else (None, 0, None)


def _check_tokens(path: Path, tokens: np.ndarray, codes: int, *, guessed: bool) -> None:
    """Raises if a token is outside of the vocabulary, or all look like parts of longer ones.

    Halves of tokens are looked for where their dtype is a guess; quarters, of which most are 0,
    where a file is long enough to tell.
    """
    highest = np.zeros(4, np.int64)  # at every fourth place
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        outside = np.flatnonzero(chunk >= codes)
        if outside.size:
            at = int(outside[0])
            raise ValueError(
                f"`{path}` holds token {chunk[at]} at place {start + at:,}, and the vocabulary "
                f"ends at {codes - 1}. {_other_dtype(tokens, codes)}"
            )
        highest = np.maximum(highest, [chunk[i::4].max(initial=0) for i in range(4)])
    size, item = tokens.nbytes, tokens.dtype.itemsize
    low, high = highest[: 4 // item], highest[4 // item : 8 // item]
    if size % 8 == 0 and size >= _TELLING and low.any() and not (high.any() or highest[3]):
        raise ValueError(
            f"`{path}` looks like int64, and is read as {tokens.dtype.name}: most numbers are 0. "
            "`np.fromfile(path, '<i8').astype('<u4').tofile('tokens.bin')` makes a file of uint32."
        )
    even, odd = highest[::2].max(), highest[1::2].max()
    # The upper halves of uint32 tokens are tiny numbers, and every second one.
    if guessed and item == 2 and len(tokens) % 2 == 0 and odd <= codes >> 16 < even:
        raise ValueError(
            f"`{path}` looks like uint32, and is read as uint16: every second token is at most "
            f"{odd}. Say so: dtype uint32."
        )


def _other_dtype(tokens: np.ndarray, codes: int) -> str:
    """What the user may have meant, judged by the beginning of the file."""
    data = tokens[: _CHUNK // 4].tobytes()
    for name in ("<u2", "<u4", ">u2", ">u4"):
        dtype = np.dtype(name)
        whole = data[: len(data) // dtype.itemsize * dtype.itemsize]
        if dtype != tokens.dtype and np.frombuffer(whole, dtype).max(initial=0) < codes:
            order = "" if name[0] == "<" else " in big-endian order"
            return f"Read as {dtype.newbyteorder('=').name}{order}, they would all be inside."
    return "Choose the vocabulary that the file was made with, or make the file anew."


# ---- both ----------------------------------------------------------------------------------------


def read(
    paths: Sequence[Path], tokenizer: Tokenizer | None, *, codes: int, dtype: str | None = None
) -> list[np.ndarray]:
    """Returns the tokens of each text file, or of one `.bin` file, mapped into memory.

    Args:
      paths: Text files and folders of them, or the one file of tokens.
      tokenizer: Of text; bytes are its tokens where there is none.
      codes, dtype: Of a file of tokens, as in `read_tokens`.

    Raises:
      ValueError: Something can't be read, or there are several `.bin` files.
    """
    if not any(path.suffix == ".bin" for path in paths):
        return read_text(paths, tokenizer or BYTES)
    if len(paths) > 1:
        names = ", ".join(map(str, paths))
        raise ValueError(
            f"data: one `.bin` file, and nothing beside it, is a data set; found {names}"
        )
    return [read_tokens(paths[0], codes=codes, dtype=dtype)]


def hold_out(documents: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns documents to train on and to validate on: every twentieth, from the first.

    Where there are fewer than twenty, it is the last twentieth of each.

    >>> train, held_out = hold_out([np.arange(40)])
    >>> held_out
    [array([38, 39])]
    """
    if len(documents) >= 20:
        return [x for i, x in enumerate(documents) if i % 20], list(documents[::20])
    cuts = [len(x) - len(x) // 20 for x in documents]
    pairs = list(zip(documents, cuts, strict=True))
    return [x[:cut] for x, cut in pairs], [x[cut:] for x, cut in pairs]


def as_rows(documents: Sequence[np.ndarray], length: int, separator: int | None = None) -> Source:
    """Returns rows of `length` tokens: packed documents, or those of one that is a mapped file.

    Raises:
      ValueError: There is no token, or less than one row in the file.
    """
    if isinstance(documents[0], np.memmap):
        return TokenRows.of(documents[0], length, separator)
    return pack(documents, length)


def fingerprint(rows: Source) -> str:
    """Returns a short text that tells these tokens from others.

    >>> fingerprint(pack([np.arange(6)], length=3))
    '6 tokens, crc32 ...'
    """
    crc, at_once = 0, max(1, _CHUNK // rows.tokens.shape[1])
    for start in range(0, len(rows.tokens), at_once):
        crc = zlib.crc32(rows.tokens[start : start + at_once].astype("<i4").tobytes(), crc)
    return f"{rows.tokens.size:,} tokens, crc32 {crc:08x}"
