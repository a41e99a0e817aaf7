"""What train.py reads: files of records, and mixtures; and what a run that goes on must read."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("array_record")
pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("pyarrow")
pytest.importorskip("rich")

import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

import llama
import reading
import settings
from xform.train import files, order, run
from xform.train.data import Mixture, batch, count, order_of

RNG = np.random.default_rng(0)
TINY = settings.Config(
    model=llama.Config(layers=1, width=16, heads=4, kv_heads=2, head_size=4, hidden=16),
    steps=6, batch=4, length=32, save_every=2, temperature=0.0,
)  # fmt: skip


def texts(letter: str, size: int) -> list[str]:
    """Documents of one letter, of which a row is made that tells where it comes from."""
    return [letter * int(n) for n in RNG.integers(20, 90, size=size)]


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> tuple[str, ...]:
    """Parquet of `a`s, array-record of `b`s, and a folder of text of `c`s, 1 : 2 : 1 long."""
    folder = tmp_path_factory.mktemp("three")
    pq.write_table(pa.table({"text": texts("a", 100)}), folder / "a.parquet")
    writer = ArrayRecordWriter(str(folder / "b.array_record"), "group_size:1")
    for text in texts("b", 200):
        writer.write(text.encode())
    writer.close()
    (folder / "c").mkdir()
    for i, text in enumerate(texts("c", 100)):
        (folder / "c" / f"{i}.txt").write_text(text)
    return tuple(str(folder / name) for name in ("a.parquet", "b.array_record", "c"))


def letters(rows, steps: int) -> np.ndarray:
    """How many rows of the first steps begin with each letter."""
    parts = [batch(rows, i, size=TINY.batch, seed=TINY.seed).tokens[:, 0] for i in range(steps)]
    return np.bincount(np.concatenate(parts), minlength=256)[[ord(x) for x in "abc"]]


def test_a_mixture_is_drawn_by_its_weights_and_all_data_by_its_size(three):
    plain = dataclasses.replace(TINY, data=three)
    rows, held_out = reading.data_for(plain, files.BYTES)
    found = letters(rows, count(rows) // TINY.batch)
    np.testing.assert_allclose(found / found.sum(), [0.25, 0.5, 0.25], atol=0.05)
    assert count(held_out) == pytest.approx(count(rows) / 19, rel=0.1)

    config = dataclasses.replace(plain, mixture=(6.0, 1.0, 3.0))
    rows, held_out = reading.data_for(config, files.BYTES)
    np.testing.assert_allclose(letters(rows, 25), [60, 10, 30], atol=1)
    assert isinstance(held_out, Mixture)
    assert {chr(x) for block in held_out.blocks for x in block[:, 0]} == {"a", "b", "c"}

    apart = dataclasses.replace(config, held_out=three[:1])
    with pytest.raises(ValueError, match="all of it is held out"):
        reading.data_for(apart, files.BYTES)


def test_a_run_goes_on_with_its_mixture_alone(three):
    config = dataclasses.replace(TINY, data=three, mixture=(6.0, 1.0, 3.0))

    def refused(**changed) -> str:
        now = dataclasses.replace(config, **changed)
        try:
            data = reading.data_for(now, files.BYTES)
            reading.refuse_another("the run", saved, now, reading.info_of(now, *data))
        except ValueError as error:
            return str(error)
        return ""

    saved = reading.info_of(config, *reading.data_for(config, files.BYTES))
    assert refused() == refused(dp=2, processes=2, keep=7) == ""
    words = "mixture is [6.0, 1.0, 3.0] there and [1.0, 1.0, 3.0] now"
    assert words in refused(mixture=(1.0, 1.0, 3.0))
    assert "the data was" in refused(data=three[::-1])
    rows = reading.data_for(config, files.BYTES)[0]
    assert saved["order"] == order.fingerprint(order_of(rows, 0), count(rows))
    saved["order"] = "crc32 00000000"  # as of a shuffle that does otherwise
    assert "the order of its rows was crc32 00000000 and is crc32" in refused()
    saved["random"] = {**saved["random"], "generator": "rbg"}
    assert "generator is 'rbg' there and 'threefry2x32' now" in refused()


def test_settings_of_data_that_make_no_sense_are_listed(three):
    config = dataclasses.replace(
        TINY, data=three, mixture=(1.0, -2.0), column="n", keep=0, keep_every=0
    )
    with pytest.raises(ValueError, match=r"^config: ") as error:
        settings.check(dataclasses.replace(config, data=three[1:] * 2))
    for words in (
        "mixture=(1.0, -2.0) has 2 weights for the 4 of data: needed is one for each",
        "mixture=(1.0, -2.0) must be of numbers above 0", "keep=0 must be above 0",
        "keep_every=0 must be above 0", "column=n is of Parquet files, and there is none",
    ):  # fmt: skip
        assert words in str(error.value)


@pytest.mark.slow
def test_a_run_on_a_mixture_stops_and_goes_on(three, tmp_path, capsys):
    import train

    config = dataclasses.replace(
        TINY, data=three, mixture=(6.0, 1.0, 3.0), run=str(tmp_path / "run"), keep_every=4
    )
    train.main(config)
    whole = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "6"]
    (folder / "6").rename(tmp_path / "6")
    train.main(dataclasses.replace(config, resume=True))
    again = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    loss = lambda lines: [line.split(",")[1] for line in lines]
    assert len(whole) == 6
    assert loss(whole) == loss(again)
    with train.Checkpoints(folder, read_only=True) as checkpoints:
        info = checkpoints.info()
    assert (info["step"], info["sample"]) == (6, 24)
    assert info["mesh"] == {"dp": 4, "tp": 2}
    assert run.read_run(Path(config.run or ""))["order"] == info["order"]
    assert "validation loss" in capsys.readouterr().out
