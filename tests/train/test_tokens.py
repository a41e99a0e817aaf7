"""Files of tokens: every form that is right is read, and whatever else is found is named."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("grain")
pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from xform.train.data import batch, count, pack
from xform.train.files import as_rows, fingerprint, hold_out, read
from xform.train.tokens import TokenRows, read_tokens

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1000, size=4001)
END = 7


def llm_c(tokens, dtype="<u2", magic=20240520, count=None):
    """A file as llm.c writes it."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, len(tokens) if count is None else count
    return head.tobytes() + np.asarray(tokens).astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (TOKENS.astype("<u2").tobytes(), None),
        (TOKENS.astype("<u4").tobytes(), "uint32"),
        (llm_c(TOKENS), None),
        (llm_c(TOKENS, "<u4", 20240801), None),
        (llm_c(TOKENS), "uint16"),
    ],
)
def test_every_form_of_a_token_file_is_read(write, data, dtype, monkeypatch):
    path = write(data)
    for small, kind in ((0, np.memmap), (9999, np.ndarray)):
        monkeypatch.setattr("xform.train.tokens._SMALL", 2 * small)
        tokens = read_tokens(path, codes=1000, dtype=dtype)
        assert type(tokens) is kind
        np.testing.assert_array_equal(tokens, TOKENS)


def test_rows_of_a_file_are_those_of_its_documents_packed(write):
    stream = np.where(RNG.random(700) < 0.1, END, RNG.integers(8, 60, 700))
    documents = np.split(stream, np.flatnonzero(stream == END) + 1)
    tokens = read_tokens(write(stream.astype("<u2").tobytes()), codes=60)
    rows, packed = as_rows([tokens], 9, END), pack(documents, 9)
    assert isinstance(rows, TokenRows)
    assert count(rows) == 700 // 9 < count(packed)
    chosen = RNG.permutation(count(rows))
    found, expected = rows.take(chosen), packed.take(chosen)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.ids, expected.ids - expected.ids[:, :1])
    assert all(x.dtype == np.int32 for x in found)


def test_without_a_separator_a_file_is_one_document():
    rows = TokenRows.of([np.arange(10, dtype="<u2")], 5).take(np.array([1, 0]))
    np.testing.assert_array_equal(rows.labels, [[6, 7, 8, 9, -1], [1, 2, 3, 4, 5]])
    assert not rows.ids.any()


def outside(place, token):
    tokens = TOKENS.copy()
    tokens[place] = token
    return tokens.astype("<u2").tobytes()


SHORT = TOKENS[:-1]


@pytest.mark.parametrize(
    ("data", "dtype", "message"),
    [
        (b"", None, r"is empty: it holds 0 bytes and no token"),
        (llm_c([]), None, r"is empty: it holds 1024 bytes and no token"),
        (TOKENS.astype("<u2").tobytes()[:-1], None, r"8001 bytes, .* multiple of the 2 of"),
        (SHORT.astype("<u4").tobytes()[:-2], "uint32", r"15998 bytes, .* multiple of the 4 of"),
        (SHORT.astype("<u4").tobytes(), None, r"looks like uint32.*Say so: `--token-dtype uint32`"),
        (SHORT.astype("<i8").tobytes(), None, r"looks like int64: .*'<u4'.*`--token-dtype uint16`"),
        (SHORT.astype("<u2").tobytes(), "uint32", r"Read as uint16, they would all be inside"),
        (SHORT.astype(">u2").tobytes(), None, r"Read as uint16 in big-endian order"),
        (outside(3210, 1000), None, r"1000 at place 3,210, read as uint16, .* ends at 999"),
        (llm_c(TOKENS, count=5000), None, r"is cut off: .* promises 5000 tokens, there are 4001"),
        (llm_c(TOKENS, count=40), None, r"longer than .* promises 40 tokens, there are 4001"),
        (llm_c(TOKENS), "uint32", r"says in its header that it is uint16, asked is uint32"),
        (b"\x93NUMPY\x01\x00v\x00", None, r"is a NumPy file.*astype\('<u2'\)\.tofile"),
        (b"\x93NUMPY\x01\x00v\x00", "uint16", r"is a NumPy file.*astype\('<u2'\)\.tofile"),
        (b"PK\x03\x04" + bytes(60), None, r"is a zip archive, .* PyTorch.*not flat tokens"),
        (b"\x1f\x8b\x08\x00" + bytes(60), None, r"is a gzip archive, not flat tokens"),
        (b"\x80\x04\x95\x10" + bytes(60), None, r"is a pickle, not flat tokens"),
        ((SHORT - 1).astype("<i2").tobytes(), None, r"token 65535 \(-1, if it has a sign\)"),
        (TOKENS.astype("<u2").tobytes(), "int16", r"uint16 or uint32, found 'int16'"),
    ],
)  # fmt: skip
def test_every_other_file_is_refused(write, data, dtype, message):
    with pytest.raises(ValueError, match=message):
        read_tokens(write(data), codes=1000, dtype=dtype)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("zeros", [1, 3])
def test_a_dtype_that_is_said_is_believed(write, dtype, zeros):
    """Though most numbers are 0."""
    tokens = np.array(([5] + [0] * zeros) * 500)
    read = read_tokens(write(tokens.astype(dtype).tobytes()), codes=1000, dtype=dtype)
    np.testing.assert_array_equal(read, tokens)


def test_a_token_outside_is_found_beyond_the_first_chunk(write, monkeypatch):
    monkeypatch.setattr("xform.train.tokens._CHUNK", 512)
    with pytest.raises(ValueError, match="token 60000 at place 4,000"):
        read_tokens(write(outside(4000, 60000)), codes=1000)


def test_a_file_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.bin` can't be read: No such file"):
        read_tokens(tmp_path / "none.bin", codes=9)
    with pytest.raises(ValueError, match=r"can't be read: Is a directory"):
        read_tokens(tmp_path, codes=9)


def test_files_that_are_shorter_than_a_row_together_are_refused():
    with pytest.raises(ValueError, match=r"a row takes 16 tokens, and there are 15"):
        TokenRows.of([np.arange(7), np.arange(8)], 16)


def test_a_fingerprint_knows_the_tokens_and_not_where_they_are(write):
    tokens = read_tokens(write(TOKENS.astype("<u2").tobytes()), codes=1000)
    text = fingerprint(as_rows([tokens], 10))
    assert text == fingerprint(as_rows([TOKENS[:4000]], 10)) != fingerprint(as_rows([TOKENS], 10))
    assert text.startswith("4,000 tokens, crc32 ")


# ---- what a flat file does not say ---------------------------------------------------------------

ZIPF = 1 / np.arange(1, 50_001)
FLOATS = RNG.normal(size=4000)
TEXT = b"What is written here are letters, and neither tokens nor anything else. " * 30


def some_tokens(codes, dtype="<u2", size=20_000):
    """As of text: the lower, the more frequent."""
    return RNG.choice(codes, size=size, p=ZIPF[:codes] / ZIPF[:codes].sum()).astype(dtype)


@pytest.mark.parametrize("codes", [50_257, 65_536])
@pytest.mark.parametrize("kind", ["like text", "uniform"])
@pytest.mark.parametrize("highest", [5, 256, 1000, 20_000, 50_000])
@pytest.mark.parametrize("size", [40, 600, 20_000])
def test_tokens_of_any_vocabulary_look_like_tokens(write, codes, kind, highest, size):
    uniform = RNG.integers(highest, size=size).astype("<u2")
    tokens = some_tokens(highest, size=size) if kind == "like text" else uniform
    np.testing.assert_array_equal(read_tokens(write(tokens.tobytes()), codes=codes), tokens)


SURE = [
    (TEXT, r"looks like text"),
    (FLOATS.astype("<f4").tobytes(), r"looks like float32"),
    (some_tokens(20_000, "<f4").tobytes(), r"looks like float32"),
    (FLOATS.astype("<f8").tobytes(), r"looks like float64"),
    (np.abs(np.round(8 * FLOATS)).astype("<f8").tobytes(), r"looks like (float64|int64|uint32)"),
    (some_tokens(50_000, ">u4").tobytes(), r"looks like uint32 in big-endian.*'>u4'"),
    ((some_tokens(50_000, "<i4") - 1).tobytes(), r"looks like int32 with negative numbers"),
]
MAYBE = [
    (some_tokens(256, "u1", 60_000).tobytes(), r"looks like uint8, .*'u1'"),
    (FLOATS.astype("<f2").tobytes(), r"looks like float16"),
    (np.maximum(FLOATS, 0).astype("<f2").tobytes(), r"looks like float16"),
    (np.asarray(FLOATS, jnp.bfloat16).tobytes(), r"looks like bfloat16"),
    (some_tokens(50_000, ">u2").tobytes(), r"looks like uint16 in big-endian.*'>u2'"),
    (RNG.integers(1024, 25_000, 4000).astype("<u2").tobytes(), r"looks like float16"),
    ((RNG.integers(800, size=8000) * 64).astype("<u2").tobytes(), r"looks like uint16 in big-en"),
]


@pytest.mark.parametrize(
    ("data", "message", "sure"),
    [*((*x, True) for x in SURE), *((*x, False) for x in MAYBE)],
    ids=lambda x: None if isinstance(x, str) else "",
)
def test_what_looks_otherwise_is_told_unless_the_dtype_is_said(write, data, message, sure):
    """All of these numbers are inside of a vocabulary of 65,536; what may be tokens is read."""
    path = write(data)
    message += r".*read as uint16; if that is right, say so \(`--token-dtype"
    said = pytest.raises(ValueError, match=message) if sure else pytest.warns(match=message)
    with said:
        assert len(read_tokens(path, codes=65_536)) == len(data) // 2
    assert len(read_tokens(path, codes=65_536, dtype="uint16")) == len(data) // 2


@pytest.mark.filterwarnings("ignore:.*looks like:UserWarning")
@pytest.mark.parametrize("least", [0, 1024, 8192, 14_000, 15_000, 16_200, 17_000, 30_000, 48_000])
@pytest.mark.parametrize("size", [50, 300, 2000, 8192])
@pytest.mark.parametrize("step", [1, 64])
def test_tokens_of_any_range_are_accepted(write, least, size, step):
    """Codes of images and sounds are alike frequent, and may begin anywhere."""
    tokens = least + RNG.integers(-(-size // step), size=9000) * step
    read = read_tokens(write(tokens.astype("<u2").tobytes()), codes=65_536)
    np.testing.assert_array_equal(read, tokens)


def test_a_vocabulary_that_needs_it_makes_uint32_of_a_flat_file(write):
    tokens = np.append(TOKENS, 100_000)
    path = write(tokens.astype("<u4").tobytes())
    np.testing.assert_array_equal(read_tokens(path, codes=128_256), tokens)
    path = write(TOKENS.astype("<u2").tobytes()[:-2])
    with pytest.raises(ValueError, match=r"read as uint32.*Read as uint16, they would all be"):
        read_tokens(path, codes=128_256)
    path = write(FLOATS.astype("<f4").tobytes())
    with pytest.raises(ValueError, match=r"read as uint32.*It looks like float32"):
        read_tokens(path, codes=128_256)


# ---- several -------------------------------------------------------------------------------------


def parts(write, folder="data"):
    """Three files of tokens, one of them too short for a row of 20, and their names."""
    streams = [TOKENS[:1000], TOKENS[1000:1015], TOKENS[1015:]]
    names = ("a.bin", "b/B.BIN", "c.bin")
    pairs = zip(streams, names, strict=True)
    return [write(x.astype("<u2").tobytes(), f"{folder}/{name}") for x, name in pairs]


def test_a_folder_of_token_files_is_one_data_set(write, tmp_path):
    paths = parts(write)
    write(b"", "data/.hidden")
    streams = read([tmp_path / "data"], None, codes=1000)
    assert [len(x) for x in streams] == [1000, 15, 2986]
    for x, path in zip(streams, paths, strict=True):
        np.testing.assert_array_equal(x, np.fromfile(path, "<u2"))
    rows = as_rows(streams, 20, END)
    assert isinstance(rows, TokenRows)
    assert (count(rows), rows.left) == (4001 // 20, 1)
    assert sum(map(len, rows.blocks)) == count(rows)
    assert fingerprint(rows) == fingerprint(TokenRows.of([TOKENS], 20))
    train, held_out = (as_rows(x, 20, END) for x in hold_out(streams))
    assert (count(train), count(held_out)) == (3801 // 20, 200 // 20)
    assert batch(train, 3, size=4, seed=0).tokens.shape == (4, 20)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 16))
def test_files_of_any_size_are_packed_as_documents(sizes, length):
    """None is lost, and no label crosses from one to the next."""
    streams = np.split(TOKENS[: sum(sizes)].astype("<u2"), np.cumsum(sizes)[:-1])
    if sum(sizes) < length:
        return
    rows = TokenRows.of(streams, length)
    packed = pack([x.astype(int) for x in streams], length)
    whole = np.arange(sum(sizes) // length)
    assert rows.left == sum(sizes) % length
    np.testing.assert_array_equal(np.concatenate(rows.blocks), packed.tokens[whole])
    assert {x.dtype for x in rows.blocks} == {np.dtype("<u2")}
    found, expected = rows.take(whole), packed.take(whole)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.labels, expected.labels)
    edges = lambda x: np.diff(x.ids, axis=1) > 0
    np.testing.assert_array_equal(edges(found), edges(expected))


@given(st.lists(st.integers(0, 90), min_size=1, max_size=30))
def test_the_tail_of_all_files_is_held_out(sizes):
    streams = np.split(TOKENS[: sum(sizes)], np.cumsum(sizes)[:-1])
    parts = hold_out([x.astype("<u2") for x in streams])
    train, held_out = (np.concatenate(x) for x in parts)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), TOKENS[: sum(sizes)])
    assert len(held_out) == sum(sizes) // 20


def test_text_beside_tokens_is_refused_and_both_are_named(write, tmp_path):
    parts(write)
    write(b"import numpy", "data/prepare.py")
    message = r"tokens \(`.*a.bin`; .*\) and text \(`.*prepare.py`\): name only the one or the"
    for paths in ([tmp_path / "data"], [tmp_path / "data" / "a.bin", tmp_path / "data/prepare.py"]):
        with pytest.raises(ValueError, match=message.replace("; .*", ".*")):
            read(paths, None, codes=1000)


def test_all_that_is_wrong_with_token_files_is_listed(write, tmp_path):
    parts(write)
    empty = write(b"", "data/empty.bin")
    write(b"123", "data/odd.bin")
    (tmp_path / "data" / "broken.bin").symlink_to(tmp_path / "nowhere")
    write(np.array([1, 1000], "<u2").tobytes(), "data/outside.bin")
    with pytest.raises(ValueError, match=r"^data: ") as error:
        read([empty, tmp_path / "data", tmp_path / "none.bin"], None, codes=1000)
    for words in (
        "empty.bin` is empty",
        "odd.bin` holds 3 bytes, which is no multiple of the 2",
        "broken.bin` can't be read: No such file",
        "outside.bin` holds token 1000 at place 1",
        "none.bin` can't be read: No such file",
    ):
        assert words in str(error.value)
    assert "a.bin" not in str(error.value)


def test_empty_files_of_a_folder_and_those_held_out_are_left_out(write, tmp_path):
    first, *_ = parts(write)
    folder = tmp_path / "data"
    write(b"", "data/empty.bin")
    with pytest.warns(UserWarning, match=r"left out as empty: `.*empty.bin`$"):
        streams = read([folder, first], None, codes=1000, without=[folder / "c.bin"])
    np.testing.assert_array_equal(np.concatenate(streams), TOKENS[:1015])
    with pytest.raises(ValueError, match=r"all of it is held out"):
        read([folder], None, codes=1000, without=[folder])
    write(b"", "other/empty.bin")
    with pytest.raises(ValueError, match=r"there is no token: `.*other/empty.bin` is empty\.$"):
        read([tmp_path / "other"], None, codes=1000)
