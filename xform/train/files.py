"""What a run trains on, read and checked before its first step: text, tokens, or files of records.

Text is small: it is read whole and becomes documents, one for each file. Tokens are not: their
files, named `.bin`, are mapped into memory, and the rows of a step are cut out of them as they are
drawn (`xform.train.tokens`). Parquet and array-record hold many documents, of text or of tokens,
and become such a file (`xform.train.records`). A folder is what is in it: all text, or all tokens.
"""

import dataclasses
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from xform.train.data import Mixture, Source, decode, encode, pack
from xform.train.records import Records, hold_tokens, is_records, read_records
from xform.train.tokens import TokenRows, read_tokens


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
"""Bytes as tokens."""


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


def fingerprint_of_tokenizer(path: Path | str | None) -> str | None:
    """Returns a short text that tells a tokenizer from others; None if its file can't be read.

    >>> fingerprint_of_tokenizer(None), fingerprint_of_tokenizer("nowhere.json")
    ('bytes', None)
    """
    if path is None:
        return "bytes"
    try:
        return f"crc32 {zlib.crc32(Path(path).read_bytes()):08x}"
    except OSError:
        return None


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """Returns the tokens of a prompt.

    Raises:
      ValueError: There are none, or it can't be encoded.

    >>> encode_prompt(BYTES, "def ").tolist()
    [100, 101, 102, 32]
    """
    try:
        tokens = tokenizer.encode(prompt.encode())
    except Exception as error:  # what the library raises has no narrower type
        raise ValueError(f"the prompt {prompt!r} can't be encoded: {error}") from None
    if not len(tokens):
        raise ValueError(
            f"the prompt is empty, read as tokens of {prompt!r}: give the model one to begin with "
            "(`--prompt`)."
        )
    return tokens


# ---- text ----------------------------------------------------------------------------------------


def read_text(
    paths: Sequence[Path], tokenizer: Tokenizer = BYTES, *, without: Sequence[Path] = ()
) -> list[np.ndarray]:
    """Returns the tokens of each text file, in order of their names.

    Args:
      paths: Files, and folders whose files are all read, but for empty and hidden ones. A file is
        read once, however many names it has.
      tokenizer: By default, bytes are tokens.
      without: Files and folders that are not read, though they are among the others.

    Raises:
      ValueError: Lists every path that is missing, empty, unreadable or not UTF-8.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("ab")
    ...     read_text([Path(folder)])
    [array([97, 98], dtype=int32)]
    """
    found, wrong, seen, empty = [], [], _real(without), []
    for path in paths:
        try:
            texts = [(file, file.read_bytes()) for file in _files(path, seen)]
            nothing = not any(text for _, text in texts) and (texts or not any(_files(path, set())))
        except OSError as error:
            wrong.append(f"`{error.filename or path}` can't be read: {error.strerror}")
            continue
        wrong += [f"`{file}` is not UTF-8 text" for file, text in texts if not _is_text(text)]
        if nothing:
            wrong.append(f"`{path}` " + ("holds no text" if path.is_dir() else "is empty"))
        found += [(file, text) for file, text in texts if text]
        empty += [file for file, text in texts if not text]
    if not found and not wrong:
        wrong.append(_ALL_HELD_OUT)
    if wrong:
        raise ValueError(
            f"data: {_some(wrong)}. Name files of UTF-8 text or `.bin` files of tokens, or folders "
            "of either."
        )
    _note_empty(empty)
    return [_encoded(tokenizer, *item) for item in found]


_ALL_HELD_OUT = "all of it is held out, and nothing is left to train on"


def _note_empty(files: Sequence[Path]) -> None:
    if files:
        names = _some([f"`{file}`" for file in files], most=3)
        warnings.warn(f"left out as empty: {names}", stacklevel=3)


def _encoded(tokenizer: Tokenizer, path: Path, text: bytes) -> np.ndarray:
    try:
        tokens = tokenizer.encode(text)
    except Exception as error:  # what the library raises has no narrower type
        raise ValueError(f"data: the tokenizer can't encode `{path}`: {error}") from None
    if not len(tokens):
        raise ValueError(f"data: the tokenizer makes no token of `{path}`")
    return tokens


def _files(path: Path, seen: set[str]) -> Iterator[Path]:
    """The file itself, or what a folder holds at any depth; nothing that was seen, by any name."""
    real = os.path.realpath(path)
    if real in seen:
        return
    seen.add(real)
    if not path.is_dir():
        yield path
    else:
        for inner in sorted(path.iterdir()):
            if not inner.name.startswith("."):
                yield from _files(inner, seen)


def _real(paths: Sequence[Path]) -> set[str]:
    """The files that some paths name, by the one name that each has without links."""
    return {os.path.realpath(file) for kind in by_kind(paths) for file in kind}


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_CHUNK = 1 << 22


def _some(items: Sequence[str], most: int = 5) -> str:
    more = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


# ---- both ------------------------------------------------------------------------------------


def read(
    paths: Sequence[Path],
    tokenizer: Tokenizer | None,
    *,
    codes: int,
    dtype: str | None = None,
    column: str | None = None,
    without: Sequence[Path] = (),
) -> Sequence[np.ndarray]:
    """Returns the tokens of each text file, or those of each file of tokens, or those of records.

    Args:
      paths: Files and folders, of text or of tokens. A file is read once, however many names it
        has, and an empty one in a folder is left out, with a warning.
      tokenizer: Of text; bytes are its tokens where there is none.
      codes: Size of the vocabulary: every token is below it.
      dtype: Of files of tokens, as in `read_tokens`; of array-record, as in `read_records`.
      column: Of Parquet files, as in `read_records`.
      without: Files and folders that are not read, though they are among the others.

    Raises:
      ValueError: Something can't be read, or text and tokens are mixed; all that is wrong at once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.array([7, 8], "<u2").tofile(Path(folder, "train.bin"))
    ...     read([Path(folder)], None, codes=10, dtype="uint16")
    [array([7, 8], dtype=uint16)]
    """
    flat, text = by_kind(paths, without, dtype=dtype, column=column)
    tokenizer = tokenizer or BYTES
    records = [path for path in (*flat, *text) if is_records(path)]
    wrong = [mixed(flat, text)] if flat and text else []
    if set(flat) - set(records) and set(flat) & set(records):
        wrong.append(
            "there are `.bin` files of tokens and files of records: name only the one or the "
            "other, or mix them, each by itself (`--mixture`)"
        )
    if not flat and not records:
        return read_text(paths, tokenizer, without=without)
    empty = [path for path in (*flat, *text) if path not in paths and _is_empty(path)]
    there = [path for path in (*flat, *text) if path not in empty]
    if records and not wrong:
        _note_empty(empty)
        found = read_records(there, tokenizer.encode, codes=codes, dtype=dtype, column=column)
        if found.left_out:
            warnings.warn(f"left out as empty: {found.left_out:,} documents", stacklevel=2)
        return found
    streams = []
    for path in (path for path in flat if path not in {*empty, *records}):
        try:
            streams.append(read_tokens(path, codes=codes, dtype=dtype))
        except ValueError as error:
            wrong.append(str(error).removesuffix("."))
    if not streams and not wrong:
        wrong.append(f"there is no token: {_some([f'`{path}` is empty' for path in empty])}")
    if wrong:
        raise ValueError(f"data: {_some(wrong)}.")
    _note_empty(empty)
    return streams


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.stat().st_size


def by_kind(
    paths: Sequence[Path],
    without: Sequence[Path] = (),
    *,
    dtype: str | None = None,
    column: str | None = None,
) -> tuple[list[Path], list[Path]]:
    """Returns the files of tokens and the others, of files and whole folders.

    Names tell them apart; of records, `hold_tokens` does, which takes `dtype` and `column`.
    What does not exist, or can't be listed, is among one of them, for whoever reads it to say so.

    >>> by_kind([Path("a.bin"), Path("b.txt")])
    ([...Path('a.bin')], [...Path('b.txt')])
    """
    found: list[Path] = []
    seen = _real(without) if without else set()
    for path in paths:
        try:
            found += list(_files(path, seen))
        except OSError:
            found.append(path)
    holds = partial(hold_tokens, dtype=dtype, column=column)
    flat = [x for x in found if x.suffix.lower() == ".bin" or (is_records(x) and holds(x))]
    return flat, [path for path in found if path not in set(flat)]


def nothing_at(paths: Sequence[Path]) -> list[str]:
    """Returns in words which paths lead to no file, for whoever misses one of a kind.

    >>> nothing_at([Path("nowhere")])
    ['`nowhere` does not exist']
    """
    missing = [f"`{path}` does not exist" for path in paths if not path.exists()]
    folders = [path for path in paths if path.is_dir() and by_kind([path]) == ([], [])]
    return missing + [f"`{path}` holds no file" for path in folders]


def mixed(flat: Sequence[Path], text: Sequence[Path]) -> str:
    """Returns in words that there are files of tokens, and others beside them.

    >>> mixed([Path("a.bin")], [Path("b.txt")])
    'there are `.bin` files of tokens (`a.bin`) and text (`b.txt`): name only the one or the other'
    """
    some = lambda paths: _some([f"`{path}`" for path in paths], most=3)
    return (
        f"there are {'files' if any(map(is_records, flat)) else '`.bin` files'} of tokens "
        f"({some(flat)}) and text ({some(text)}): name only the one or the other"
    )


def hold_out(documents: Sequence[np.ndarray]) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
    """Returns documents to train on and to validate on: every twentieth, from the first.

    Where there are fewer than twenty, it is the last twentieth of each. Files of tokens are
    one stream, whatever it was cut into, and the last twentieth of all its tokens is held out; so
    are files of records.

    >>> train, held_out = hold_out([np.arange(40)])
    >>> held_out
    [array([38, 39])]
    """
    if isinstance(documents, Records):
        return documents.split(len(documents.tokens) - len(documents.tokens) // 20)
    stream = _are_tokens(documents)
    if len(documents) >= 20 and not stream:
        return [x for i, x in enumerate(documents) if i % 20], list(documents[::20])
    sizes = np.array([len(x) for x in documents])
    cuts = sizes - sizes // 20
    if stream:
        left = sizes.sum() - sizes.sum() // 20
        cuts = np.clip(left - (np.cumsum(sizes) - sizes), 0, sizes)
    pairs = list(zip(documents, cuts, strict=True))
    return [x[:cut] for x, cut in pairs], [x[cut:] for x, cut in pairs]


def _are_tokens(documents: Sequence[np.ndarray]) -> bool:
    """Whether they are of files of tokens, which have no sign, and not of text."""
    return all(x.dtype.kind == "u" for x in documents)


def as_rows(
    documents: Sequence[np.ndarray], length: int, separator: int | None = None, name: str = ""
) -> Source:
    """Returns rows of `length` tokens: packed documents, or those of files of tokens or records.

    Args:
      documents: Their tokens.
      length: Tokens in a row.
      separator: The token that ends a document of a file of tokens, see `TokenRows`.
      name: What the data is, for the error.

    Raises:
      ValueError: There is no token, or less than one row in the files.

    >>> as_rows([np.arange(6)], length=3).tokens.tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    try:
        if isinstance(documents, Records):
            return TokenRows.of([documents.tokens], length, separator, documents.ends)
        if _are_tokens(documents):
            return TokenRows.of(documents, length, separator)
        if not any(map(len, documents)):
            raise ValueError("there is no token")
        return pack(documents, length)
    except ValueError as error:
        raise ValueError(f"too little data {name}: {error}. Give more of it.") from None


def fingerprint(rows: Source) -> str:
    """Returns a short text that tells these tokens from others, and where documents of records end.

    >>> fingerprint(pack([np.arange(6)], length=3))
    '6 tokens, crc32 ...'
    """
    crc = 0
    for block in rows.blocks:
        at_once = max(1, _CHUNK // block.shape[1])
        for start in range(0, len(block), at_once):
            crc = zlib.crc32(block[start : start + at_once].astype("<i4").tobytes(), crc)
    for part in rows.sources if isinstance(rows, Mixture) else (rows,):
        if isinstance(part, TokenRows):
            crc = zlib.crc32(part.ends.astype("<i8").tobytes(), crc)
    return f"{sum(block.size for block in rows.blocks):,} tokens, crc32 {crc:08x}"
