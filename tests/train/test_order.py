"""Samples have numbers: any split of the devices, and any step to go on from, reads the same."""

from itertools import islice

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("grain")

from xform.sharding import make_mesh, place, shardings
from xform.train.data import Mixture, Rows, batch, batches, count, first, order_of, pack, rows_here
from xform.train.order import fingerprint, order

SIZE, SEED, LENGTH = 8, 3, 4
ROWS = pack([np.arange(300 * LENGTH)], LENGTH)
OPTIONS: dict = dict(size=SIZE, seed=SEED)


def numbers(part: Rows) -> np.ndarray:
    """The row that each sample is, by its first token."""
    return np.asarray(part.tokens)[:, 0] // LENGTH


def read(steps: range, **options) -> np.ndarray:
    return np.concatenate([numbers(batch(ROWS, i, **{**OPTIONS, **options})) for i in steps])


def test_the_sequence_is_that_of_any_batch_size_and_of_any_step_to_go_on_from():
    whole = read(range(60))  # into the second epoch
    np.testing.assert_array_equal(read(range(30), size=16), whole)
    rng = np.random.default_rng(0)
    for step in rng.integers(60, size=5):
        np.testing.assert_array_equal(read(range(step, 60)), whole[step * SIZE :])
    np.testing.assert_array_equal(np.sort(whole[:300]), np.arange(300))
    assert (read(range(37), seed=SEED + 1) != whole[: 37 * SIZE]).any()


class Watched:
    """Rows that note which of them are read."""

    blocks = ROWS.blocks

    def __init__(self):
        self.read: list[int] = []

    def take(self, chosen) -> Rows:
        self.read += chosen.tolist()
        return ROWS.take(chosen)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_read_their_own_part_of_one_sequence(processes):
    """Whose devices are whose is made up: a part of the mesh's `dp` for each."""
    here = np.arange(SIZE).reshape(processes, -1)
    rows, found = [Watched() for _ in here], []
    for step in range(5):
        parts = [
            batch(source, step, here=np.isin(np.arange(SIZE), mine), **OPTIONS)
            for source, mine in zip(rows, here, strict=True)
        ]
        found += [numbers(part)[mine] for part, mine in zip(parts, here, strict=True)]
        for part, mine in zip(parts, here, strict=True):
            others = np.delete(part.tokens, mine, axis=0)
            assert not others.any()
    whole = read(range(5))
    np.testing.assert_array_equal(np.concatenate(found), whole)
    assert sorted(x for source in rows for x in source.read) == sorted(whole)
    assert all(len(source.read) == 5 * SIZE // processes for source in rows)


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_devices_of_any_mesh_have_one_sequence(dp):
    mesh = make_mesh(
        dp=dp, cp=2 if dp < 8 else 1, devices=jax.devices("cpu")[: dp * 2 if dp < 8 else 8]
    )
    placed = shardings(mesh, P("dp", "cp"))
    here = rows_here(placed, (SIZE, LENGTH))
    assert here.all()  # all devices are of this process
    parts = [place(batch(ROWS, i, here=here, **OPTIONS), placed) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate([numbers(x) for x in parts]), read(range(3)))
    shard = np.asarray(parts[1].tokens.addressable_shards[0].data)
    np.testing.assert_array_equal(shard[:, 0] // LENGTH, read(range(1, 2))[: SIZE // dp])


def test_rows_here_are_those_of_the_devices_of_this_process():
    class Two(jax.sharding.SingleDeviceSharding):
        """Of four devices that split rows, as a process sees it that has two of them."""

        def addressable_devices_indices_map(self, global_shape):
            del global_shape
            return {0: (slice(4, 8), slice(None)), 1: (slice(12, 16), slice(None))}

    found = rows_here(Two(jax.devices()[0]), (16, 3))
    np.testing.assert_array_equal(np.flatnonzero(found), [4, 5, 6, 7, 12, 13, 14, 15])


def test_reading_ahead_changes_nothing_and_ends_with_its_reader():
    reader = batches(ROWS, 7, ahead=3, **OPTIONS)
    found = np.concatenate([numbers(part) for part in islice(reader, 12)])
    reader.close()
    np.testing.assert_array_equal(found, read(range(7, 19)))


def mixture(*weights: float) -> Mixture:
    """Sources of 30, 40 and 200 rows, tokens of which tell them apart."""
    sizes = (30, 40, 200)[: len(weights)]
    starts = np.cumsum([0, *sizes]) * LENGTH
    sources = [
        pack([start + np.arange(n * LENGTH)], LENGTH)
        for start, n in zip(starts, sizes, strict=False)
    ]
    return Mixture(tuple(sources), weights)


@pytest.mark.parametrize("weights", [(1.0, 2.0, 5.0), (0.25, 0.25, 0.5), (3.0, 1.0)])
def test_a_mixture_has_its_shares_in_every_stretch(weights):
    rows = mixture(*weights)
    samples = order_of(rows, SEED)
    drawn = np.array([samples[i] for i in range(480)])
    ends = np.cumsum([count(source) for source in rows.sources])
    source = np.searchsorted(ends, drawn, side="right")
    shares = np.array(weights) / sum(weights)
    for start in range(0, 480, 80):
        found = np.bincount(source[start : start + 80], minlength=len(weights))
        np.testing.assert_allclose(found, 80 * shares, atol=2)
    for i, end in enumerate(ends):  # each source in epochs of its own, that go on and on
        mine, n = drawn[source == i], count(rows.sources[i])
        for epoch in range(len(mine) // n):
            every = np.sort(mine[epoch * n : (epoch + 1) * n])
            np.testing.assert_array_equal(every, np.arange(end - n, end))


def test_a_mixture_takes_and_counts_as_its_sources_do():
    rows = mixture(1.0, 2.0, 5.0)
    assert count(rows) == 270
    chosen = np.random.default_rng(0).permutation(270)
    part = rows.take(chosen)
    np.testing.assert_array_equal(numbers(part), chosen)
    np.testing.assert_array_equal(part.labels[:, :-1], part.tokens[:, 1:])
    reader = batches(rows, 3, **OPTIONS)
    np.testing.assert_array_equal(numbers(next(reader)), numbers(batch(rows, 3, **OPTIONS)))
    reader.close()
    head = first(rows, 80)
    np.testing.assert_array_equal(head, [*range(10), *range(30, 50), *range(70, 120)])
    np.testing.assert_array_equal(first(ROWS, 7), np.arange(7))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, float("nan")), (1.0, -2.0)])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(
        ValueError, match=r"a `Mixture` of 2 sources needs as many weights, at least"
    ):
        Mixture((ROWS, ROWS), weights)


def test_sources_that_make_no_mixture_are_refused():
    with pytest.raises(
        ValueError, match=r"a `Mixture` of 0 sources needs as many weights, at least"
    ):
        Mixture((), ())
    wide = pack([np.arange(12)], length=6)
    narrow = pack([np.arange(12)], length=4)
    with pytest.raises(ValueError, match=r"needs rows of one length, found \[4, 6\]: make all"):
        Mixture((wide, narrow), (1.0, 1.0))


def test_an_order_is_known_by_what_it_is():
    of = lambda *args: fingerprint(order(*args), sum(args[0]))
    told = of((300,), (1.0,), 3)
    assert told == of((300,), (1.0,), 3)
    others = {of((150, 150), (1.0, x), 3) for x in (1.0, 2.0)}
    assert len({told, of((300,), (1.0,), 4), *others}) == 4
    # Data of a run that goes on is read in this order for ever; another grain must not change it.
    assert told == "crc32 eb12ea17"


def test_an_order_takes_no_memory_and_no_time_before_its_first_sample():
    samples = order((2**31, 2**20), (1.0, 1.0), 0)
    some = [samples[i] for i in range(10**12, 10**12 + 100)]
    assert len(set(some)) == 100
    assert max(some) > 2**30
    with pytest.raises(ValueError, match=r"from 1 to 2\*\*31 rows in a source"):
        order((2**31 + 1,), (1.0,), 0)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"a seed from 0 to 2\*\*32 - 1: seed={seed}"):
            order((4,), (1.0,), seed)
