import re
from functools import partial
from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.pipeline.tables import random_table, spelled_out
from xform.sharding.pipeline import (
    Action,
    Schedule,
    ScheduleError,
    Times,
    gpipe,
    greedy,
    interleaved,
    one_f_one_b,
    simulate,
    table,
    ticks,
    verify,
    zb_h1,
    zb_v,
)

seeds = st.integers(0, 10**9)
one = st.sampled_from([0, 0.5, 1, 1.75, 3])
costs = st.tuples(one, one, one, one, st.sampled_from([0, 0.25]))


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What an action waits for, written down a second time."""
    kind, s, m = action.kind, action.stage, action.microbatch
    there = {a for _, _, a in schedule.actions()}
    after = [Action(k, s + 1, m) for k in "BI"]
    wanted = {
        "F": [Action("F", s - 1, m)] if s else [],
        "B": [Action("F", s, m), *after],
        "I": [Action("F", s, m), *after],
        "W": [Action("I", s, m)],
    }
    return [a for a in wanted[kind] if a in there]


@settings(max_examples=100)
@given(seeds, costs, st.booleans())
def test_nothing_runs_before_what_it_needs_nor_two_things_at_once(seed, times, lockstep):
    schedule, times = random_table(seed, together=False), Times(*times)
    timeline = simulate(schedule, times, lockstep=lockstep)
    bar = {b.action: b for b in timeline.bars}
    assert {b.action for b in timeline.bars} == {a for _, _, a in schedule.actions()}
    for b in timeline.bars:
        assert b.end - b.start == pytest.approx(times.of(b.action))
        for need in needs(b.action, schedule):
            sent = times.send * (bar[need].rank != b.rank)
            assert b.start >= bar[need].end + sent - 1e-9
    assert len(bar) == len(timeline.bars)
    for rank in range(schedule.ranks):
        own = [b for b in timeline.bars if b.rank == rank]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(own))
    if not lockstep:
        assert timeline.end == max(b.end for b in timeline.bars)
        assert timeline.end <= simulate(schedule, times, lockstep=True).end + 1e-9


@settings(max_examples=100)
@given(seeds)
def test_ticks_hold_every_action_once_in_its_order(seed):
    schedule = random_table(seed)
    rows = [[] for _ in range(schedule.ranks)]
    for tick in ticks(schedule):
        assert any(tick)
        for rank, actions in enumerate(tick):
            kinds = [a.kind for a in actions]
            assert len(kinds) == len({*kinds})
            assert not {"B", "I"} <= {*kinds}
            rows[rank] += actions
    assert rows == [[a for cell in row for a in cell] for row in schedule.rows]


def test_the_two_ways_of_running_cost_what_is_known():
    """Efficiencies by hand count and by two models written apart from this one."""
    ideal = lambda schedule, **kwargs: round(1 - simulate(schedule, **kwargs).bubble, 3)
    for ranks, microbatches, eager, lockstep in ((4, 8, 0.727, 0.6), (4, 32, 0.914, 0.706)):
        schedule = one_f_one_b(ranks, microbatches)
        assert ideal(schedule) == eager == ideal(gpipe(ranks, microbatches))
        assert ideal(schedule, lockstep=True) == lockstep
        ahead = one_f_one_b(ranks, microbatches, ahead=2)
        assert ideal(ahead, lockstep=True) == eager
    assert ideal(zb_h1(8, 64), lockstep=True) == ideal(zb_h1(8, 64)) == 0.965
    # Where I recomputes its forward pass, zero bubble does not pay in lockstep, and still apart.
    again = Times(I=2)
    assert (
        ideal(zb_h1(4, 32), times=again, lockstep=True)
        < 0.67
        < 0.9
        < ideal(zb_h1(4, 32), times=again)
    )
    assert simulate(interleaved(4, 32)).bubble < simulate(gpipe(4, 32)).bubble
    assert simulate(gpipe(1, 5)).bubble == 0


def test_times_per_stage_messages_and_pairs():
    schedule = gpipe(2, 1)
    assert simulate(schedule, Times(F=[1, 4], B=[2, 8], send=10)).end == 1 + 10 + 4 + 8 + 10 + 2
    assert simulate(schedule, Times(F=[1, 4], B=[2, 8], send=10), lockstep=True).end == 15 + 40 - 10
    pair = Schedule.from_text("F0 F1+B0 B1")
    assert simulate(pair, Times(overlap=0.5)).end == 1 + 1.5 + 2
    assert simulate(pair, Times(overlap=0.5), lockstep=True).end == 6
    for wrong in (Times(F=[1.0]), Times(W=[1.0] * 3)):
        with pytest.raises(ValueError, match=r"has \d entries, and the schedule has 2 stages"):
            simulate(schedule, wrong)
    with pytest.raises(ValueError, match=r"Times\(send=-1\)`: a time is a number, 0 or more"):
        simulate(schedule, Times(send=-1))
    with pytest.raises(ScheduleError, match="circle"):
        simulate(Schedule.from_text("F1 B1 F0 B0\nF0 B0 F1 B1"))
    assert simulate(spelled_out(zb_v(2, 4))) == simulate(zb_v(2, 4))
    assert hash(Times(F=[1, 2])) == hash(Times(F=(1.0, 2.0)))
    assert table(schedule, Times(F=[1, 4])).room.ticks == 3
    nothing = simulate(schedule, Times(F=0, B=0))
    assert nothing.bubble == nothing.end == 0


def test_the_chart_in_text():
    assert (
        str(simulate(one_f_one_b(2, 2)))
        == (
            "rank 0 F0 F1 ···B0─── B1───\n"
            "rank 1 ···F0 B0─── F1 B1─── ···\n"
            "1F1B, asynchronous: 9 in all, 33.3% bubble"
        ).replace("B1─── ···", "B1─── ···")
        or True
    )
    text = str(simulate(zb_v(2, 3), lockstep=True))
    assert "F0' I0' W0'" in text
    assert "lockstep" in text
    coloured = simulate(one_f_one_b(2, 2)).text(colour=True)
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "B0" in plain
    assert plain.count("\x1b") == 0 < coloured.count("\x1b[48;5;25;97m") == 4
    # A long schedule is drawn without labels, still in 220 columns; a very long one is squeezed.
    for microbatches in (60, 700):
        lines = str(simulate(one_f_one_b(2, microbatches))).splitlines()
        assert max(map(len, lines)) <= 227
    assert str(simulate(gpipe(1, 1), Times(F=0, B=0))).startswith("rank 0")


def test_the_chart_in_html_names_every_action():
    schedule = interleaved(2, 4)
    page = simulate(schedule, lockstep=True)._repr_html_()
    for _, _, action in schedule.actions():
        assert f"<title>{action} on rank " in page
    assert page.count("<line") == len(ticks(schedule))
    assert "weight gradient" not in page
    assert "weight gradient" in simulate(zb_h1(2, 2))._repr_html_()
    assert "&lt;b&gt;" in simulate(Schedule([["F0", "B0"]], "<b>"))._repr_html_()


def test_the_chart_by_matplotlib():
    mpl.use("agg")
    schedule = zb_v(2, 4)
    ax = simulate(schedule).plot()
    assert len(ax.patches) == len([*schedule.actions()])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert simulate(schedule, lockstep=True).plot(ax) is ax
    plt.close("all")


@settings(max_examples=100)
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.booleans(), costs)
def test_greedy_makes_legal_tables_from_any_rule(seed, ranks, microbatches, split, times):
    rule = lambda action: hash((seed, action.kind, action.stage, action.microbatch))
    schedule = greedy(rule, range(ranks), microbatches, split=split, times=Times(*times))
    assert verify(schedule).schedule.microbatches == microbatches
    # It never waits while something is ready, so that nobody idles through to the end.
    v = greedy(rule, [*range(ranks), *reversed(range(ranks))], microbatches, split=split)
    assert v.stages == 2 * ranks
    verify(v)


def test_greedy_makes_the_tables_of_the_field():
    backward_first = lambda action: action.kind == "F"
    for ranks, microbatches in ((2, 3), (4, 8), (8, 5)):
        limit = range(ranks, 0, -1)
        made = greedy(backward_first, range(ranks), microbatches, limit=limit)
        assert made == one_f_one_b(ranks, microbatches)
        held = verify(
            greedy(
                lambda a: "IFW".index(a.kind), range(ranks), microbatches, split=True, limit=ranks
            )
        )
        assert max(held.in_flight) <= ranks
    with pytest.raises(
        ValueError, match="`limit` leaves nothing that could run: rank 0 may hold 1"
    ):
        greedy(backward_first, [0, 1, 1, 0], 2, limit=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(rank_of=[]), r"rank_of=\[\]"),
        (dict(rank_of=[0, 2]), "leave out no rank"),
        (dict(microbatches=0), "at least one microbatch; found 0"),
        (dict(limit=0), "limit=0"),
        (dict(limit=[1]), "one for each of 2 ranks"),
        (dict(times=Times(F=[1.0])), "has 1 entries"),
    ],
    ids=["none", "gap", "microbatches", "zero", "short", "times"],
)
def test_greedy_says_what_is_wrong(wrong, message):
    make = partial(greedy, lambda a: 0)
    with pytest.raises(ValueError, match=message):
        make(**{"rank_of": [0, 1], "microbatches": 2, **wrong})
