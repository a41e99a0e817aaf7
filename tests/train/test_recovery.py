import math

import pytest

from xform.train.recovery import Judge, batch_number, skipped_of


def test_steps_before_what_is_left_out_keep_their_batches():
    before = [batch_number(step, {5}) for step in range(20)]
    after = [batch_number(step, {5, 9}) for step in range(20)]
    assert before[:8] == after[:8] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert after == [n for n in range(22) if n not in (5, 9)]
    assert [batch_number(step, {9, 5}) for step in range(20)] == after
    assert [batch_number(step, ()) for step in range(3)] == [0, 1, 2]


def test_a_run_notes_what_it_leaves_out():
    assert skipped_of({"skipped": [{"batch": 5, "step": 6}, {"batch": 9}]}) == {5, 9}
    assert skipped_of({}) == frozenset()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_no_number_is_no_loss(loss):
    assert Judge(None).fault(loss) == "is not finite"


def test_only_a_jump_up_is_a_fault():
    noise = [3.0 + 0.1 * ((7 * i) % 5 - 2) for i in range(40)]
    judge = Judge(6.0, noise)
    assert judge.fault(3.5) is None
    assert judge.fault(0.1) is None, "a fall"
    assert "above the median of the steps before, 3.000" in (judge.fault(5.0) or "")
    assert judge.fault(5.0), "it did not count"
    assert Judge(None, noise).fault(5.0) is None
    assert Judge(6.0, noise[:10]).fault(5.0) is None, "too few to know"


def test_losses_that_are_all_the_same_may_rise_a_little():
    assert Judge(10.0, [2.0] * 40).fault(2.1) is None
    assert Judge(10.0, [2.0] * 40).fault(2.3)


def test_what_was_learned_before_a_restart_is_judged_alike():
    losses = [5 - 0.05 * i for i in range(80)]
    one = Judge(5.0)
    for loss in losses:
        assert one.fault(loss) is None
    other = Judge(5.0, losses)
    assert one.fault(9.0) == other.fault(9.0)
