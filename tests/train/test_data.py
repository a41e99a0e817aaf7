from functools import partial

import numpy as np
import pytest

pytest.importorskip("grain")
pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from xform.train.data import NO_LABEL, Rows, batch, decode, encode, pack

# Tokens of 0 as well, since rows are padded with it.
documents = st.lists(
    st.lists(st.integers(0, 255), max_size=20).map(partial(np.array, dtype=int)), max_size=8
).filter(lambda docs: any(len(doc) for doc in docs))


@given(st.text())
def test_text_survives_encoding(text):
    tokens = encode(text)
    assert tokens.dtype == np.int32
    assert decode(tokens) == text


def test_what_is_no_utf8_is_kept_as_tokens_and_shown_as_a_replacement():
    assert encode(b"\xff!").tolist() == [255, 33]
    assert decode(np.array([255, 33])) == "\ufffd!"
    assert decode(np.array([33, 256 + 33, 65_536, -1, 33])) == "!\ufffd\ufffd\ufffd!"


@given(documents, st.integers(1, 12), st.integers(1, 4))
def test_packing_loses_no_token_and_labels_stay_inside_documents(docs, length, multiple):
    rows = pack(docs, length, multiple=multiple)
    tokens, ids, labels = (x.reshape(-1) for x in rows)
    total = sum(map(len, docs))
    assert all(x.dtype == np.int32 and x.shape[1] == length for x in rows)
    assert len(rows.tokens) % multiple == 0
    assert total <= tokens.size < total + length * multiple
    for i, doc in enumerate(docs):
        mine = ids == i
        np.testing.assert_array_equal(tokens[mine], doc)
        # Each token is the label of the one before it; the last one has none.
        np.testing.assert_array_equal(labels[mine], [*doc[1:], NO_LABEL][: len(doc)])
    padding = ids == len(docs)
    assert padding.sum() == tokens.size - total
    assert (labels[padding] == NO_LABEL).all()
    assert not tokens[padding].any()


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=8)  # the shuffle of few rows takes milliseconds for each
def test_an_epoch_visits_each_row_once_and_the_next_in_another_order(count, size, seed):
    rows = pack([np.arange(count * 2)], length=2)
    if count < size:
        with pytest.raises(ValueError, match=rf"at least size={size} rows, found {count}"):
            batch(rows, 0, size=size, seed=seed)
        return
    steps = -(-2 * count // size)
    parts = [batch(rows, step, size=size, seed=seed) for step in range(steps)]
    seen = np.concatenate([part.tokens[:, 0] // 2 for part in parts])[: 2 * count]
    for epoch in (seen[:count], seen[count:]):  # the last batch of one goes on in the next
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))
    if count > 12:
        assert (seen[:count] != seen[count:]).any()
        assert (seen[:count] != np.arange(count)).any()
    again = batch(rows, steps - 1, size=size, seed=seed)
    for x, y in zip(again, parts[-1], strict=True):
        np.testing.assert_array_equal(x, y)


def test_rows_of_a_batch_keep_their_ids_and_labels():
    rng = np.random.default_rng(0)
    rows = pack([rng.integers(256, size=n) for n in (5, 70, 3, 40)], length=8)
    where = {row.tobytes(): i for i, row in enumerate(rows.tokens)}
    part = batch(rows, 3, size=4, seed=1)
    for tokens, ids, labels in zip(*part, strict=True):
        i = where[tokens.tobytes()]
        np.testing.assert_array_equal(ids, rows.ids[i])
        np.testing.assert_array_equal(labels, rows.labels[i])
    assert isinstance(part, Rows)


def test_pack_refuses_what_makes_no_row():
    with pytest.raises(ValueError, match=r"found length=0 and multiple=1"):
        pack([np.array([1])], 0)
    with pytest.raises(ValueError, match=r"found length=4 and multiple=-2"):
        pack([np.array([1])], 4, multiple=-2)
    with pytest.raises(ValueError, match=r"found none in 2 documents"):
        pack([np.array([], int), np.array([], int)], 4)
