"""Parquet and array-record: every form that holds documents is read, and whatever else is named."""

import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grain")
pytest.importorskip("pyarrow")
pytest.importorskip("array_record")

import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

from xform.train.data import NO_LABEL, count, encode, pack
from xform.train.files import BYTES, as_rows, by_kind, fingerprint, hold_out, read
from xform.train.records import Records, hold_tokens
from xform.train.tokens import TokenRows

RNG = np.random.default_rng(0)
TEXTS = ["né", "", "some text", "x" * 3000, "another\n", *["few words"] * 3]
TOKENS = [RNG.integers(1000, size=n).tolist() for n in (5, 1, 0, 2500, 40)]


def parquet(path, table, **options):
    table = table if isinstance(table, pa.Table) else pa.table(table)
    pq.write_table(table, path, row_group_size=3, **options)
    return path


def records(path, documents):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for document in documents:
        writer.write(document)
    writer.close()
    return path


def read_quietly(*paths, codes=1000, tokenizer=None, **options) -> Records:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"left out as empty: 1 documents")
        found = read(paths, tokenizer, codes=codes, **options)
    assert isinstance(found, Records)
    return found


def documents_of(found) -> list[list[int]]:
    return [x.tolist() for x in found]


TEXT_TYPES = {
    "string": pa.string(), "large": pa.large_string(), "binary": pa.binary(),
    "view": pa.string_view(), "dictionary": pa.dictionary(pa.int32(), pa.string()),
}  # fmt: skip
TOKEN_TYPES = {
    "list": pa.list_(pa.uint16()), "large": pa.large_list(pa.int64()),
    "narrow": pa.list_(pa.int32()),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT_TYPES)
def test_texts_of_parquet_are_documents(tmp_path, name):
    column = pa.array([*TEXTS[:1], *TEXTS[2:]]).cast(TEXT_TYPES[name])
    found = read_quietly(parquet(tmp_path / "a.parquet", {"id": np.arange(7), "text": column}))
    expected = [encode(text).tolist() for text in TEXTS if text]
    assert documents_of(found) == expected
    assert found.tokens.dtype == np.uint16


@pytest.mark.parametrize("name", TOKEN_TYPES)
def test_tokens_of_parquet_are_documents(tmp_path, name):
    column = pa.array([*TOKENS[:2], *TOKENS[3:]], TOKEN_TYPES[name])
    path = parquet(tmp_path / "a.parquet", {"input_ids": column, "length": [5, 1, 2500, 40]})
    assert documents_of(read_quietly(path)) == [x for x in TOKENS if x]
    assert by_kind([path]) == ([path], [])
    assert hold_tokens(path)


def test_array_record_is_of_texts_or_of_tokens_of_a_type(tmp_path):
    texts = [text.encode() for text in TEXTS]
    path = records(tmp_path / "a.array_record-00000-of-00001", texts)
    assert documents_of(read_quietly(path)) == [list(text) for text in texts if text]
    assert by_kind([path]) == ([], [path])
    path = records(tmp_path / "b.array_record", [np.array(x, "<u4").tobytes() for x in TOKENS])
    assert documents_of(read_quietly(path, dtype="uint32")) == [x for x in TOKENS if x]
    assert by_kind([path], dtype="uint32") == ([path], [])


def test_documents_without_a_token_are_left_out_and_counted(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"text": ["", "some", None, "text"]})
    with pytest.warns(UserWarning, match=r"^left out as empty: 2 documents$"):
        found = read([path], None, codes=256)
    assert documents_of(found) == [list(b"some"), list(b"text")]


def test_files_of_all_kinds_of_text_are_one_stream(tmp_path, write):
    folder = tmp_path / "all"
    folder.mkdir()
    parquet(folder / "a.parquet", {"text": ["from", "parquet"]})
    records(folder / "b.array_record", [b"from array-record"])
    write(b"from a file", "all/c.txt")
    found = read_quietly(folder, codes=256)
    texts = [b"from", b"parquet", b"from array-record", b"from a file"]
    assert documents_of(found) == [list(text) for text in texts]


def test_rows_are_those_of_the_documents_packed(tmp_path):
    documents = [RNG.integers(1, 1000, size=n) for n in RNG.integers(1, 30, size=60)]
    path = parquet(tmp_path / "a.parquet", {"tokens": [x.tolist() for x in documents]})
    rows, packed = as_rows(read_quietly(path), 9), pack(documents, 9)
    assert isinstance(rows, TokenRows)
    chosen = RNG.permutation(count(rows))
    found, expected = rows.take(chosen), packed.take(chosen)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.ids, expected.ids - expected.ids[:, :1])
    assert (found.labels == NO_LABEL).sum() > 20
    # Where documents end is a part of what the data is.
    joined = parquet(tmp_path / "b.parquet", {"tokens": [np.concatenate(documents).tolist()]})
    assert fingerprint(as_rows(read_quietly(joined), 9)) != fingerprint(rows)
    assert fingerprint(as_rows(read_quietly(path), 9)) == fingerprint(rows)


def test_the_last_twentieth_is_held_out(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"tokens": [[i] * 7 for i in range(100)]})
    whole = read_quietly(path)
    train, held_out = hold_out(whole)
    assert isinstance(train, Records)
    assert isinstance(held_out, Records)
    assert len(held_out.tokens) == 35
    assert documents_of(train) + documents_of(held_out) == documents_of(whole)
    before, behind = whole.split(10)
    assert documents_of(before) == [[0] * 7, [1] * 3]
    assert documents_of(behind)[:2] == [[1] * 4, [2] * 7]


def test_all_that_is_wrong_with_files_is_listed(tmp_path, write):
    paths = [
        write(b"no such thing", "text.parquet"),
        write(b"PAR1 cut", "cut.parquet"),
        parquet(tmp_path / "columns.parquet", {"a": ["x"], "b": ["y"], "n": [1]}),
        parquet(tmp_path / "numbers.parquet", {"n": [1], "floats": [[0.5]]}),
        tmp_path / "missing.parquet",
        tmp_path / "missing.array_record",
        write(b"no such thing" * 99, "none.array_record"),
        records(tmp_path / "bytes.array_record", [b"text", b"\xff\xff"]),
        write(b"\xff\xfe", "latin.txt"),
    ]
    with pytest.raises(ValueError, match=r"^data: ") as error:
        read(paths, None, codes=1000)
    for words in (
        r"text.parquet` is no Parquet file: ", "cut.parquet` is no Parquet file: ",
        "columns.parquet` has several columns of texts or of lists of integers: it has "
        "`a` of string, `b` of string, `n` of int64. Name one (`--column`)",
        "numbers.parquet` has no column of texts or of lists of integers: it has `n` of int64",
        "missing.parquet` can't be read: No such file",
        "none.array_record` is no array-record file",
        "missing.array_record` can't be read: No such file",
        "document 1 of", "bytes.array_record` can't be read: 'utf-8' codec", "(`--token-dtype`)",
        "document 0 of",
    ):  # fmt: skip
        assert words in str(error.value)
    path = paths[2]
    assert documents_of(read_quietly(path, column="b")) == [[ord("y")]]
    with pytest.raises(ValueError, match=r"has no column .* of integers called `n`: it has `a` of"):
        read([path], None, codes=1000, column="n")


def test_a_column_is_found_by_its_whole_name_and_once(tmp_path):
    table = pa.table({"a": [{"b": 1}], "a.b": ["x"]})
    assert documents_of(read_quietly(parquet(tmp_path / "a.parquet", table))) == [[ord("x")]]
    twice = pa.table([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    with pytest.raises(ValueError, match="has several columns of texts"):
        read([parquet(tmp_path / "b.parquet", twice)], None, codes=1000)


@pytest.mark.parametrize("checked", [True, False])
def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path, checked):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {i} " * 9 for i in range(400)]})
    options: dict[str, Any] = dict(compression="none", use_dictionary=False)
    pq.write_table(table, path, write_page_checksum=checked, **options)
    whole = path.read_bytes()
    place = whole.index(b"text 200")
    # Without a checksum, only what is no text shows that it is damaged.
    path.write_bytes(whole[:place] + (b"next" if checked else b"\xff" * 4) + whole[place + 4 :])
    words = "a.parquet` is damaged: .*checksum" if checked else "document 200 of .*a.parquet` can't"
    with pytest.raises(ValueError, match=words):
        read([path], None, codes=1000)


def test_tokens_that_are_none_are_refused(tmp_path, write):
    high = parquet(tmp_path / "high.parquet", {"tokens": [[1, 2], [3, 1000]]})
    below = parquet(tmp_path / "below.parquet", {"tokens": [[-1]]})
    null = parquet(tmp_path / "null.parquet", {"tokens": [[1, None]]})
    odd = records(tmp_path / "odd.array_record", [b"abc"])
    with pytest.raises(ValueError, match=r"^data: ") as error:
        read([high, below, null, odd], None, codes=1000, dtype="uint16")
    for words in (
        "high.parquet` holds token 1000, and the vocabulary ends at 999",
        "below.parquet` holds token -1", "null.parquet` has tokens that are null in its column",
        "its 3 bytes are no multiple of the 2 of a uint16",
    ):  # fmt: skip
        assert words in str(error.value)
    empty = parquet(tmp_path / "empty.parquet", {"tokens": pa.array([[], []], TOKEN_TYPES["list"])})
    with pytest.raises(ValueError, match=r"empty.parquet` have no token in 2 documents"):
        read([empty], None, codes=1000)
    flat = write(np.arange(600, dtype="<u2").tobytes())
    with pytest.raises(ValueError, match=r"`.bin` files of tokens and files of records: name only"):
        read([flat, high], None, codes=2000)
    text = write(b"text", "a.txt")
    with pytest.raises(
        ValueError, match=r"files of tokens \(`.*high.parquet`\) and text \(`.*a.txt"
    ):
        read([high, text], BYTES, codes=2000)


def test_no_room_for_the_tokens_is_an_error_that_says_where(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    path = parquet(tmp_path / "a.parquet", {"text": ["x" * 100_000] * 9})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"tokens of `.*a.parquet` find no room in `.*`: File too"
        ):
            read([path], None, codes=256)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
