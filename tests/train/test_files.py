"""What a run reads: every file that is fine means what it says, every other one is refused."""

import os

import numpy as np
import pytest

from xform.train.data import pack
from xform.train.files import (
    TokenRows,
    as_rows,
    fingerprint,
    hold_out,
    load_tokenizer,
    read_text,
    read_tokens,
)

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1000, size=4001)
END = 7


def llm_c(tokens, dtype="<u2", magic=20240520, count=None):
    """A file as llm.c writes it."""
    head = np.zeros(256, "<i4")
    head[:3] = magic, 1, len(tokens) if count is None else count
    return head.tobytes() + np.asarray(tokens).astype(dtype).tobytes()


@pytest.fixture
def write(tmp_path):
    def write(data: bytes, name="tokens.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return write


# ---- tokens --------------------------------------------------------------------------------------


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
def test_every_form_of_a_token_file_is_read(write, data, dtype):
    tokens = read_tokens(write(data), codes=1000, dtype=dtype)
    assert isinstance(tokens, np.memmap)
    np.testing.assert_array_equal(tokens, TOKENS)


def test_rows_of_a_file_are_those_of_its_documents_packed(write):
    stream = np.where(RNG.random(700) < 0.1, END, RNG.integers(8, 60, 700))
    documents = np.split(stream, np.flatnonzero(stream == END) + 1)
    tokens = read_tokens(write(stream.astype("<u2").tobytes()), codes=60)
    rows, packed = as_rows([tokens], 9, END), pack(documents, 9)
    assert isinstance(rows, TokenRows)
    assert len(rows.tokens) == 700 // 9 < len(packed.tokens)
    chosen = RNG.permutation(len(rows.tokens))
    found, expected = rows.take(chosen), packed.take(chosen)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.ids, expected.ids - expected.ids[:, :1])
    assert all(x.dtype == np.int32 for x in found)


def test_without_a_separator_a_file_is_one_document():
    rows = TokenRows.of(np.arange(10, dtype="<u2"), 5).take(np.array([1, 0]))
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
        (SHORT.astype("<u4").tobytes(), None, r"looks like uint32.*Say so: dtype uint32"),
        (SHORT.astype("<i8").tobytes(), None, r"looks like int64, and is read as uint16.*'<u4'"),
        (SHORT.astype("<i8").tobytes(), "uint32", r"looks like int64, and is read as uint32"),
        (SHORT.astype("<u2").tobytes(), "uint32", r"Read as uint16, they would all be inside"),
        (SHORT.astype(">u2").tobytes(), None, r"Read as uint16 in big-endian order"),
        (outside(3210, 1000), None, r"token 1000 at place 3,210, and the vocabulary ends at 999"),
        (llm_c(TOKENS, count=5000), None, r"header promises 5000 tokens, there are 4001"),
        (llm_c(TOKENS), "uint32", r"says in its header that it is uint16, asked is uint32"),
        (b"\x93NUMPY\x01\x00v\x00", None, r"is a NumPy file.*astype\('<u2'\)\.tofile"),
        (TOKENS.astype("<u2").tobytes(), "int16", r"uint16 or uint32, found 'int16'"),
    ],
)  # fmt: skip
def test_every_other_file_is_refused(write, data, dtype, message):
    with pytest.raises(ValueError, match=message):
        read_tokens(write(data), codes=1000, dtype=dtype)


def test_a_dtype_that_is_said_is_believed(write):
    tokens = np.array([5, 0] * 500)
    read = read_tokens(write(tokens.astype("<u2").tobytes()), codes=1000, dtype="uint16")
    np.testing.assert_array_equal(read, tokens)


def test_a_token_outside_is_found_beyond_the_first_chunk(write, monkeypatch):
    monkeypatch.setattr("xform.train.files._CHUNK", 512)
    with pytest.raises(ValueError, match="token 60000 at place 4,000"):
        read_tokens(write(outside(4000, 60000)), codes=1000)


def test_a_file_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.bin` can't be read: No such file"):
        read_tokens(tmp_path / "none.bin", codes=9)
    with pytest.raises(ValueError, match=r"can't be read: Is a directory"):
        read_tokens(tmp_path, codes=9)


def test_a_file_shorter_than_a_row_is_refused():
    with pytest.raises(ValueError, match=r"a row takes 16 tokens, and there are 15"):
        TokenRows.of(np.arange(15), 16)


# ---- text ----------------------------------------------------------------------------------------


def test_a_folder_is_read_at_any_depth_in_order(write, tmp_path):
    write(b"two", "b/deep/x.txt")
    write(b"one", "a.py")
    write(b"", "b/empty.py")
    write(b"\xff\xfe", ".git/object")
    write("né".encode(), "c.txt")
    texts = [bytes(x.astype(np.uint8)).decode() for x in read_text([tmp_path])]
    assert texts == ["one", "two", "né"]


def test_all_that_is_wrong_with_text_is_listed(write, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    paths = [
        write(b"", "empty"),
        write(b"a\xff", "latin"),
        tmp_path / "folder",
        tmp_path / "broken",
    ]
    with pytest.raises(ValueError, match=r"data: ") as error:
        read_text([*paths, write(b"fine", "fine.txt")])
    for words in (
        "empty` is empty",
        "latin` is not UTF-8 text",
        "folder` holds no text",
        "broken` can't be read: No such file",
    ):
        assert words in str(error.value)
    assert "fine.txt" not in str(error.value)


def test_a_file_that_the_system_does_not_give_is_refused(write):
    path = write(b"secret", "secret.txt")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ValueError, match=r"secret.txt` can't be read: Permission denied"):
        read_text([path])


@pytest.mark.parametrize("sizes", [[10] * 25, [100], [41, 3, 60]])
def test_a_twentieth_is_held_out_and_nothing_is_lost(sizes):
    documents = [np.full(n, i) for i, n in enumerate(sizes)]
    train, held_out = hold_out(documents)
    everything = np.concatenate([*train, *held_out])
    assert sorted(everything) == sorted(np.concatenate(documents))
    assert 0 < sum(map(len, held_out)) <= 0.1 * len(everything)


def test_a_fingerprint_knows_the_tokens_and_not_where_they_are(write):
    tokens = read_tokens(write(TOKENS.astype("<u2").tobytes()), codes=1000)
    text = fingerprint(as_rows([tokens], 10))
    assert text == fingerprint(as_rows([TOKENS[:4000]], 10)) != fingerprint(as_rows([TOKENS], 10))
    assert text.startswith("4,000 tokens, crc32 ")


# ---- tokenizers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    """A byte-level BPE of 300 tokens, trained on a few words; its file cuts and fills texts."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["the tokens of the text are those of the text"] * 9, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=64)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path, made.get_vocab_size()


def test_a_tokenizer_is_read_and_used(tokenizer_json, write):
    path, codes = tokenizer_json
    assert codes > 256
    tokenizer = load_tokenizer(path, codes=codes)
    text = "the text né\n"
    (tokens,) = read_text([write(text.encode(), "a.txt")], tokenizer)
    assert tokens.dtype == np.int32
    assert len(tokens) < len(text.encode())
    assert tokens.max() < tokenizer.codes == codes
    assert tokenizer.decode(tokens) == text


def test_a_vocabulary_that_is_too_small_is_refused(tokenizer_json):
    path, codes = tokenizer_json
    message = rf"has {codes} tokens, .* ends at {codes - 2}: it needs codes={codes}"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path, codes=codes - 1)
    with pytest.raises(ValueError, match=r"text as bytes has 256 tokens.*needs codes=256"):
        load_tokenizer(None, codes=255)


def test_what_is_no_tokenizer_is_refused(write, tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"x.json` is no tokenizer: .*tokenizer.json"):
        load_tokenizer(write(b"{}", "x.json"), codes=9)
    with pytest.raises(ValueError, match=r"no.json` is no tokenizer: .*No such file"):
        load_tokenizer(tmp_path / "no.json", codes=9)
