from functools import partial

import pytest

from xform.sharding.pipeline import (
    BUILDERS,
    Times,
    build,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    verify,
    zb_h1,
    zb_v,
)

ALL = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b_ahead": partial(one_f_one_b, ahead=2),
    **{f"interleaved_{n}": partial(interleaved, chunks=n) for n in (1, 2, 3)},
    "zb_h1": zb_h1,
    "zb_h2": partial(zb_h1, ahead=2),
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}


@pytest.mark.parametrize("name", ALL)
def test_every_table_is_legal_and_complete(name):
    """Fewer microbatches than ranks, as many, no multiple of them."""
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 13, 16, 17):
            schedule = ALL[name](ranks, microbatches)
            proof = verify(schedule)
            assert (schedule.ranks, schedule.microbatches) == (ranks, microbatches)
            chunks = schedule.stages // ranks
            assert {len(own) for own in schedule.stages_of} == {chunks}
            assert max(proof.in_flight) <= chunks * microbatches


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_memory_is_what_the_papers_say(ranks):
    held = lambda schedule: verify(schedule).in_flight
    for microbatches in (2 * ranks + 1, 4 * ranks):
        down = range(ranks, 0, -1)
        assert held(gpipe(ranks, microbatches)) == (microbatches,) * ranks
        assert held(one_f_one_b(ranks, microbatches)) == tuple(down)
        assert held(one_f_one_b(ranks, microbatches, ahead=2)) == tuple(2 * r - 1 for r in down)
        assert held(zb_h1(ranks, microbatches)) == (ranks,) * ranks
        assert held(zb_h1(ranks, microbatches, ahead=2)) == (2 * ranks - 1,) * ranks
        assert held(zb_v(ranks, microbatches)) == (2 * ranks,) * ranks
        assert held(dualpipe_v(ranks, microbatches)) == (2 * ranks + 1,) * ranks
        first = held(interleaved(ranks, 4 * ranks))[0]
        assert first == min(2 * (ranks - 1) + ranks + 1, 8 * ranks)


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 2, 1), (1.5, 1.75, 1.25)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubbles_are_what_the_papers_say(ranks, times):
    f, i, w = times
    costs = Times(F=f, I=i, W=w)
    wait = lambda schedule: simulate(schedule, costs).end - max(simulate(schedule, costs).busy)
    m = 4 * ranks
    assert wait(gpipe(ranks, m)) == pytest.approx((ranks - 1) * (f + i + w))
    assert wait(one_f_one_b(ranks, m)) == pytest.approx((ranks - 1) * (f + i + w))
    # A chunk is half of a stage's work, and so is the bubble of two.
    assert wait(interleaved(ranks, m)) == pytest.approx((ranks - 1) * (f + i + w))
    assert wait(zb_h1(ranks, m)) == pytest.approx((ranks - 1) * (f + i - w))
    if f == i == w:
        assert wait(zb_v(ranks, m)) == pytest.approx(ranks - 1)
        assert wait(zb_v(ranks, m)) < wait(dualpipe_v(ranks, m)) < wait(gpipe(ranks, m))


def test_names_and_bad_numbers():
    for name, builder in BUILDERS.items():
        assert build(name, 2, 5) == builder(2, 5)
    assert build("interleaved", 2, 4, chunks=3).stages == 6
    with pytest.raises(ValueError, match="no schedule is called `2f2b`: choose one of gpipe, 1f1b"):
        build("2f2b", 2, 4)
    for name in BUILDERS:
        with pytest.raises(ValueError, match="at least 1; found ranks=0, microbatches=-1"):
            build(name, 0, -1)
    with pytest.raises(ValueError, match="found chunks=0"):
        interleaved(2, 2, chunks=0)
    with pytest.raises(ValueError, match="found ahead=0"):
        zb_h1(2, 2, ahead=0)
