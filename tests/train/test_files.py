"""The text that a run reads: what is fine means what it says, all else is refused."""

import os

import numpy as np
import pytest

from xform.train.files import encode_prompt, hold_out, load_tokenizer, read, read_text


def test_a_folder_is_read_at_any_depth_in_order(write, tmp_path):
    write(b"two", "b/deep/x.txt")
    write(b"one", "a.py")
    write(b"", "b/empty.py")
    write(b"\xff\xfe", ".git/object")
    write("né".encode(), "c.txt")
    with pytest.warns(UserWarning, match=r"left out as empty: `.*b/empty.py`$"):
        texts = texts_in(tmp_path)
    assert texts == ["one", "two", "né"]


def texts_in(*paths, without=()):
    return [bytes(x.astype(np.uint8)).decode() for x in read_text(paths, without=without)]


def test_each_file_is_read_once_by_whatever_name(write, tmp_path):
    one, two = write(b"one", "d/one.txt"), write(b"two", "d/e/two.txt")
    for i in range(2):  # each leads back to where it is
        (one.parent / f"l{i}").symlink_to(".")
        (two.parent / f"l{i}").symlink_to(one.parent)
    (tmp_path / "again").symlink_to(one)
    assert texts_in(tmp_path / "again", one.parent, one, two.parent) == ["one", "two"]
    assert texts_in(one.parent, without=[two]) == ["one"]
    assert texts_in(one, one.parent, without=[tmp_path / "again"]) == ["two"]
    with pytest.raises(ValueError, match=r"data: all of it is held out, and nothing is left"):
        texts_in(one.parent, without=[tmp_path])


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


def test_what_a_tokenizer_can_not_encode_is_named(write, tmp_path):
    """A vocabulary of whole words, with no token for any other."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = load_tokenizer(tmp_path / "words.json", codes=2)
    assert read([write(b"a b a", "fine.txt")], tokenizer, codes=2)[0].tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match=r"can't encode `.*other.txt`: .*Missing"):
        read([write(b"a c", "other.txt")], tokenizer, codes=2)
    with pytest.raises(ValueError, match=r"makes no token of `.*blank.txt`"):
        read([write(b"  \n", "blank.txt")], tokenizer, codes=2)
    with pytest.raises(ValueError, match=r"the prompt 'c' can't be encoded: .*Missing"):
        encode_prompt(tokenizer, "c")
    for prompt in ("", "  "):
        with pytest.raises(ValueError, match=r"the prompt is empty, read as tokens of '.*--prompt"):
            encode_prompt(tokenizer, prompt)
    with pytest.raises(ValueError, match=r"can't be encoded: .*surrogates not allowed"):
        encode_prompt(tokenizer, "\udcff")
