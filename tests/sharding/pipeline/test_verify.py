from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.pipeline.tables import mutant, random_table, spelled_out
from xform.sharding.pipeline import (
    Action,
    Held,
    Schedule,
    ScheduleError,
    gpipe,
    one_f_one_b,
    verify,
    zb_h1,
)


def problems(text: str) -> list[str]:
    with pytest.raises(ScheduleError) as error:
        verify(Schedule.from_text(text))
    return [str(problem) for problem in error.value.problems]


few_or_all = pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.slow)])


@few_or_all
def test_a_thousand_legal_tables_pass(count):
    for seed in range(count):
        schedule = random_table(seed)
        proof = verify(schedule)
        assert max(proof.in_flight) >= 1
        if seed % 4 == 0:
            verify(spelled_out(schedule))


@few_or_all
def test_a_thousand_mutants_are_refused_and_the_cell_is_named(count):
    kinds = Counter()
    for seed in range(count):
        schedule = random_table(
            seed, 1 + seed % 4, 2 + seed % 5, chunks=1 + (seed // 8) % 2, together=seed % 3 == 0
        )
        kind, spoilt, cells = mutant(seed, schedule)
        kinds[kind] += 1
        with pytest.raises(ScheduleError) as error:
            verify(spoilt)
        named = {(p.rank, p.step, p.action) for p in error.value.problems}
        if kind == "circle" and "circle" in str(error.value):
            assert_a_circle(spoilt, error.value.problems)
        else:
            assert named & cells, (seed, kind, named, cells)
    assert min(kinds.values()) >= count // 50, kinds


def assert_a_circle(schedule: Schedule, found) -> None:
    """Each cell waits for one that stands at or after the cell that the next rank waits in."""
    cell = {problem.rank: problem for problem in found}
    for problem in found:
        need = next(a for _, _, a in schedule.actions() if f"waits for `{a}` of" in problem.why)
        rank = next(r for r, _, a in schedule.actions() if a == need)
        step = next(i for i, c in enumerate(schedule.rows[rank]) if need in c)
        assert rank in cell
        assert step >= cell[rank].step
        assert need.microbatch == problem.action.microbatch
        assert problem.action in schedule.rows[problem.rank][problem.step]


def test_mutants_of_messages_are_refused():
    for seed in range(300):
        out = spelled_out(random_table(seed, 2 + seed % 3, 3, chunks=1 + seed % 2))
        rows = [list(row) for row in out.rows]
        places = [
            (r, i)
            for r, row in enumerate(rows)
            for i, cell in enumerate(row)
            if len(cell[0].kind) > 1
        ]
        if not places:
            continue
        rank, step = places[seed * 7 % len(places)]
        (action,) = rows[rank].pop(step)
        with pytest.raises(ScheduleError, match=f"`{action}` is missing"):
            verify(Schedule(rows))
        rows[rank].insert(0, (action,))
        rows[rank].insert(0, (action,))
        with pytest.raises(ScheduleError, match=f"rank {rank}, step 1: `{action}` is done twice"):
            verify(Schedule(rows))


def test_messages_must_arrive_as_they_are_sent():
    text = (
        "F0 SEND_F0 F1 SEND_F1 RECV_B1 B1 RECV_B0 B0\nRECV_F1 RECV_F0 F1 B1 SEND_B1 F0 B0 SEND_B0"
    )
    assert problems(text) == [
        "rank 1, step 0: `1RECV_F1` is received where rank 0 sends what `1RECV_F0` receives"
    ]
    assert problems("F0 SEND_F0 B0\nRECV_F0 F0 B0 SEND_B0") == [
        "rank 0: `0RECV_B0` is missing: spell all messages or none"
    ]
    assert problems("F0 SEND_F0 SEND_B0 B0") == [
        "rank 0, step 1: `0SEND_F0` is no message between two ranks",
        "rank 0, step 2: `0SEND_B0` is no message between two ranks",
    ]
    late = "F0 SEND_F0 RECV_B0 B0\nF0 RECV_F0 B0 SEND_B0"
    assert problems(late) == [
        "rank 1, step 0: `1F0` needs `1RECV_F0`, which comes after it, at step 1"
    ]


def test_each_kind_of_fault_is_told_with_its_cell():
    assert problems("F0 B0 F1\nF0 B0 F1 B1") == [
        "rank 0: `0B1` is missing, or the two parts of it, I and W"
    ]
    assert problems("F0 I0\n") == ["rank 0: `0W0` is missing, to go with `0I0`"]
    assert problems("F0 B0 B1") == ["rank 0: `0F1` is missing, and `0B1` there"]
    assert problems("F0 B0 W0") == ["rank 0, step 2: `0W0` and `0B0`: B is I and W in one"]
    assert problems("F0 F0 B0") == [
        "rank 0, step 1: `0F0` is done twice: it is on rank 0, step 0, already"
    ]
    assert problems("0F0 0B0 0F1 0B1\n0F1 1F0 1B0 1F1 1B1")[0] == (
        "rank 1, step 0: `0F1` is on another rank than the rest of stage 0, rank 0"
    )
    assert problems("F0 B0 F1 B1 F2 B9 B2") == [
        "rank 0, step 5: `0B9` is of a microbatch, 9, that has hardly any other"
    ]
    assert problems("0F0 0B0 0F1 0B1 2B1") == [
        "rank 0, step 4: `2B1` is of a stage, 2, that does hardly anything else"
    ]
    assert problems("W0 F0 I0") == [
        "rank 0, step 0: `0W0` needs `0I0`, which comes after it, at step 2"
    ]
    assert problems("B0+F0") == [
        "rank 0, step 0: `0B0` needs `0F0`, which comes after it, at step 0"
    ]


def test_a_circle_of_ranks_is_drawn():
    text = "F1 B1 F0 B0\nF0 B0 F1 B1\n"
    assert problems(text) == [
        "rank 0, step 1: `0B1` waits for `1B1` of rank 1, and so in a circle",
        "rank 1, step 0: `1F0` waits for `0F0` of rank 0, and so in a circle",
    ]
    three = "F0 F1 B0 B1\nF0 F1 B0 B1\nF0 B0 F1 B1"
    verify(Schedule.from_text(three))
    # Cells that run together wait for what both need.
    assert problems("F0 F1+B0 B1\nF0 F1+B0 B1") == [
        "rank 0, step 1: `0B0` waits for `1B0` of rank 1, and so in a circle",
        "rank 1, step 1: `1F1` waits for `0F1` of rank 0, and so in a circle",
    ]


def test_stages_that_are_not_there():
    assert problems("0F0 0B0 2F0 2B0") == [
        "no rank: `1F0` is missing",
        "no rank: `1B0` is missing, or the two parts of it, I and W",
    ]
    with pytest.raises(ScheduleError, match="has no action"):
        verify(Schedule([[], []]))
    with pytest.raises(ScheduleError, match="and 30 more"):
        verify(Schedule([[f"F{m}" for m in range(40)]]))


def test_memory_is_counted_and_bounded():
    held = Held(whole=10, until_input=5, between=2)
    # F0 holds 15, I0 makes that 17 and gives back 5, F1 makes it 27, I1 29.
    schedule = Schedule.from_text("F0 I0 F1 I1 W0 W1")
    assert verify(schedule, held=held).peak == (29,)
    assert verify(schedule).in_flight == (2,)
    assert verify(gpipe(2, 3), held=[Held(1), Held(4)]).peak == (3, 12)
    with pytest.raises(ScheduleError, match=r"rank 0, step 2: `0F1` makes the rank hold 27, .* 26"):
        verify(schedule, held=held, limit=26)
    verify(one_f_one_b(4, 8), limit=[4, 3, 2, 1])
    with pytest.raises(ScheduleError) as error:
        verify(one_f_one_b(4, 8), limit=2)
    assert [(p.rank, p.step, str(p.action)) for p in error.value.problems] == [
        (0, 2, "0F2"),
        (1, 2, "1F2"),
    ]
    with pytest.raises(ValueError, match="`limit` has 2 entries, and there are 4"):
        verify(one_f_one_b(4, 8), limit=[1, 1])
    with pytest.raises(ValueError, match="`held` has 1 entries, and there are 4"):
        verify(one_f_one_b(4, 8), held=[Held()])


@settings(max_examples=100)
@given(st.integers(0, 10**9))
def test_peaks_are_those_of_a_count_by_hand(seed):
    schedule = random_table(seed)
    proof = verify(schedule)
    for rank, row in enumerate(schedule.rows):
        now = most = 0
        for action in (a for cell in row for a in cell):
            now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
        assert now == 0
        assert proof.in_flight[rank] == most
    assert proof.messages == 2 * schedule.microbatches * sum(
        a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False)
    )


small = st.integers(0, 2)
kinds = st.sampled_from(["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"])
cell = st.lists(st.tuples(kinds, small, small), min_size=1, max_size=2)


@settings(max_examples=300)
@given(st.lists(st.lists(cell, max_size=5), min_size=1, max_size=3))
def test_any_table_is_proved_or_refused(table):
    """Whatever it holds, no other error, and none without a cell."""
    schedule = Schedule([[[Action(*a) for a in cell] for cell in row] for row in table])

    def outcome():
        try:
            return verify(schedule).in_flight
        except ScheduleError as error:
            return error.problems

    assert outcome()


def test_a_proof_prints():
    assert str(verify(zb_h1(2, 4), held=Held(1.5))) == (
        "ZB-H1: legal, 8 messages\n  rank 0: 2 in flight, holds 3\n  rank 1: 2 in flight, holds 3"
    )
    assert Action("F", 0, 0) < Action("F", 0, 1)
