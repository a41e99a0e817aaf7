"""Documents out of files of records: Parquet, of which one column is read, and array-record.

A record is a document: a text, which the tokenizer encodes, or a list of tokens. In Parquet the
column's type tells which; in array-record, records are UTF-8 texts unless the type of their tokens
is named. Records are read once, from the first to the last, and their tokens laid end to end in a
temporary file that is mapped into memory: rows can then be drawn in any order, and the host's
memory holds 8 bytes for each document.
"""

import dataclasses
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from jaxtyping import Int, Integer

# Those of Parquet are tried in this order where a file has several that hold documents.
COLUMNS = ("text", "tokens", "input_ids")
_AT_ONCE = 1024
_MOST = 1 << 16  # codes that two bytes hold


@dataclasses.dataclass(frozen=True)
class Records(Sequence[np.ndarray]):
    """Documents laid end to end; by number, the tokens of one.

    Attributes:
      tokens: Their tokens.
      ends: The place behind the last token of each document, in order; none is empty.
      left_out: How many documents were empty.
    """

    tokens: Integer[np.ndarray, "size"]
    ends: Int[np.ndarray, "documents"]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = range(len(self))[index]
        return self.tokens[self.ends[end - 1] if end else 0 : self.ends[end]]

    def split(self, place: int) -> tuple["Records", "Records"]:
        """Returns what lies before and behind a place; a document that lies across is cut."""
        before, behind = self.ends[self.ends < place], self.ends[self.ends > place] - place
        cut = np.array([place] if place else [], int)
        return (
            Records(self.tokens[:place], np.concatenate([before, cut])),
            Records(self.tokens[place:], behind),
        )


def is_records(path: Path) -> bool:
    """Returns whether a file is of records, by its name: shards of array-record are numbered.

    >>> [is_records(Path(name)) for name in ("a.parquet", "b.array_record-00000-of-00002", "c.txt")]
    [True, True, False]
    """
    return _is_parquet(path) or ".array_record" in path.name or ".arrayrecord" in path.name


def hold_tokens(path: Path, *, dtype: str | None = None, column: str | None = None) -> bool:
    """Returns whether the documents of a file of records are tokens, and not text.

    Args:
      path: The file. Of one that can't be read, its reader says so.
      dtype, column: As in `read_records`.

    >>> hold_tokens(Path("a.array_record"), dtype="uint16"), hold_tokens(Path("a.array_record"))
    (True, False)
    """
    if not _is_parquet(path):
        return dtype is not None
    try:
        return _is_tokens(_column(path, column).type)
    except (OSError, ValueError):
        return False


def read_records(
    paths: Sequence[Path],
    encode: Callable[[bytes], np.ndarray],
    *,
    codes: int,
    dtype: str | None = None,
    column: str | None = None,
) -> Records:
    """Returns the documents of files of records, and of files of text, each of which is one.

    Args:
      paths: The files.
      encode: From UTF-8 to tokens, of texts.
      codes: Size of the vocabulary: every token is below it.
      dtype: What tokens are in records of array-record, "uint16" or "uint32"; None for UTF-8 texts.
      column: The column of Parquet files; None for the one that holds texts or lists of integers,
        of several that which is called `text`, `tokens` or `input_ids`.

    Raises:
      ValueError: Lists every file that can't be read, with the reason.
      OSError: There is no room for the tokens.

    >>> import tempfile, pyarrow as pa, pyarrow.parquet as pq
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(pa.table({"text": ["ab", "c"]}), path := Path(folder, "a.parquet"))
    ...     found = read_records([path], lambda text: np.frombuffer(text, np.uint8), codes=256)
    >>> [document.tolist() for document in found]
    [[97, 98], [99]]
    """

    def of_text(text: bytes) -> np.ndarray:
        text.decode()  # a tokenizer of bytes would take whatever it is given
        return encode(text)

    item, wrong, sizes = np.dtype("<u2" if codes <= _MOST else "<u4"), [], []
    with tempfile.TemporaryFile() as file:
        for path in paths:
            try:
                for tokens, of_part in _documents(path, of_text, dtype, column):
                    _check_range(path, tokens, codes)
                    file.write(tokens.astype(item).tobytes())
                    sizes.append(of_part)
            except OSError as error:
                raise OSError(
                    f"the tokens of `{path}` find no room in `{tempfile.gettempdir()}`: "
                    f"{error.strerror}. Make room there, or name another place (TMPDIR)."
                ) from None
            except ValueError as error:
                wrong.append(str(error).removesuffix("."))
        every = np.concatenate([np.zeros(0, int), *sizes])
        if not wrong and not every.any():
            names = ", ".join(f"`{path}`" for path in paths)
            wrong.append(f"{names} have no token in {len(every)} documents")
        if wrong:
            raise ValueError(f"data: {'; '.join(wrong)}.")
        file.flush()
        # The mapping keeps what was written, though the file has no name and is closed.
        tokens = np.memmap(file, item, "r")
    kept = every[every > 0]
    return Records(tokens, np.cumsum(kept), len(every) - len(kept))


def _check_range(path: Path, tokens: np.ndarray, codes: int) -> None:
    outside = np.flatnonzero((tokens < 0) | (tokens >= codes))
    if len(outside):
        raise ValueError(
            f"`{path}` holds token {tokens[outside[0]]}, and the vocabulary ends at {codes - 1}: "
            "choose the one that the file was made with, or make the file anew"
        )


# ---- one file ------------------------------------------------------------------------------------


type Part = tuple[np.ndarray, np.ndarray]  # the tokens of some documents, and how many each has


def _documents(
    path: Path, encode: Callable[[bytes], np.ndarray], dtype: str | None, column: str | None
) -> Iterator[Part]:
    try:
        if _is_parquet(path):
            yield from _of_parquet(path, encode, column)
        elif is_records(path):
            decode = encode if dtype is None else lambda record: _of_bytes(record, dtype)
            yield from _encoded(path, _of_array_record(path), decode)
        else:
            yield from _encoded(path, [[path.read_bytes()]], encode)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error).strip()
        raise ValueError(f"`{path}` can't be read: {reason}") from None


def _encoded(path: Path, parts: Iterable[Sequence[bytes]], encode: Callable) -> Iterator[Part]:
    """The parts of a file, document by document; one that can't be encoded is named."""
    done = 0
    for part in parts:
        tokens = [np.zeros(0, np.int64)]
        for i, document in enumerate(part):
            try:
                tokens.append(np.asarray(encode(document)).astype(np.int64))
            except Exception as error:  # what a tokenizer raises has no narrower type
                raise ValueError(
                    f"document {done + i} of `{path}` can't be read: {error}. Needed is UTF-8 "
                    "text; of tokens, say what type they are (`--token-dtype`)"
                ) from None
        done += len(part)
        yield np.concatenate(tokens), np.array(list(map(len, tokens[1:])), int)


def _of_bytes(record: bytes, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    if len(record) % size:
        raise ValueError(f"its {len(record)} bytes are no multiple of the {size} of a {dtype}")
    return np.frombuffer(record, np.dtype(dtype).newbyteorder("<"))


def _of_array_record(path: Path) -> Iterator[Sequence[bytes]]:
    import grain

    if not path.is_file():  # the library would end the process
        raise FileNotFoundError(2, os.strerror(2))
    try:
        source: Any = grain.sources.ArrayRecordDataSource([str(path)])
        for start in range(0, len(source), _AT_ONCE):
            yield source.__getitems__(range(start, min(start + _AT_ONCE, len(source))))
    except Exception as error:  # the library raises what its C++ said
        raise ValueError(f"`{path}` is no array-record file: {str(error)[:200]}") from None


# ---- Parquet -------------------------------------------------------------------------------------


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _of_parquet(path: Path, encode: Callable, column: str | None) -> Iterator[Part]:
    field = _column(path, column)
    parts = _batches(path, field.name)
    if not _is_tokens(field.type):
        yield from _encoded(path, map(_utf8, parts), encode)
        return
    for part in parts:
        tokens = part.flatten()
        if tokens.null_count:
            raise ValueError(f"`{path}` has tokens that are null in its column `{field.name}`")
        sizes = part.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        yield tokens.to_numpy(zero_copy_only=False), sizes.astype(int)


def _utf8(texts) -> list[bytes]:
    """Texts as their bytes, whatever they are; one that is null has none."""
    import pyarrow as pa

    texts = texts.dictionary_decode() if isinstance(texts, pa.DictionaryArray) else texts
    return [x or b"" for x in texts.cast(pa.large_binary()).to_pylist()]


def _batches(path: Path, name: str) -> Iterator:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for part in file.iter_batches(batch_size=_AT_ONCE, columns=[name]):
                yield part.column(name)  # a dotted name also finds what is inside of others
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"`{path}` is damaged: {str(error)[:200]}") from None


def _column(path: Path, name: str | None):
    """The field that holds documents; a file without one is refused."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except pa.ArrowException as error:
        raise ValueError(f"`{path}` is no Parquet file: {str(error)[:200]}") from None
    fit = {field.name: field for field in schema if _is_tokens(field.type) or _is_text(field.type)}
    twice = [name for name, times in Counter(schema.names).items() if times > 1 and name in fit]
    known = [x for x in COLUMNS if x in fit][:1]
    found = (known or list(fit)) if name is None else [x for x in fit if x == name]
    if len(found) != 1 or found[0] in twice:
        asked = "" if name is None else f" called `{name}`"
        has = ", ".join(f"`{field.name}` of {field.type}" for field in schema)
        raise ValueError(
            f"`{path}` has {'several columns' if found else 'no column'} of texts or of lists of "
            f"integers{asked}: it has {has}. Name one (`--column`)"
        )
    return fit[found[0]]


def _is_tokens(kind) -> bool:
    from pyarrow import types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return lists and types.is_integer(kind.value_type)


def _is_text(kind) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    text = (types.is_string, types.is_large_string, types.is_string_view)
    return any(f(kind) for f in (*text, types.is_binary, types.is_large_binary))
