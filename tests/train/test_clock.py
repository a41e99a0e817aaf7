import os
import time

import pytest

from xform.train.clock import Clock, Ledger, Pace, process_start


def test_a_process_knows_when_it_began():
    began = process_start()
    assert began < time.time()
    assert time.time() - began >= time.process_time() / (os.cpu_count() or 1) - 0.05


@pytest.fixture
def at(monkeypatch):
    """Sets the time."""

    def at(seconds):
        for clock in ("time.time", "time.monotonic"):
            monkeypatch.setattr(clock, lambda: float(seconds))

    return at


def test_phases_add_up_to_the_time_that_went_by(at):
    at(10)
    clock = Clock(began=7.0)
    clock.enter("data", 1)
    at(11)
    clock.enter("step")
    at(15)
    with clock.phase("save"):
        at(22)
    at(23)
    assert clock.lap() == {"start": 3, "data": 1, "step": 5, "save": 7}
    at(24)
    assert clock.lap() == {"step": 1}
    assert (clock.now, clock.step) == ("step", 1)


@pytest.mark.parametrize("set_to", [2.0, 4000.0], ids=["back", "ahead"])
def test_what_goes_by_is_counted_though_the_systems_clock_is_set(at, monkeypatch, set_to):
    at(10)
    clock = Clock(began=7.0)
    at(11)
    monkeypatch.setattr("time.time", lambda: set_to)
    assert clock.lap() == {"start": 4}
    clock.lost_since(10.5)
    assert clock.lap() == {"lost": 0.5, "start": 0}
    assert clock.time == 11


def test_what_is_not_kept_is_lost_and_still_adds_up(at):
    """A run of 100 s, whose lines tell of all of them, over a restart and a step back."""
    laps = []
    at(3)
    clock = Clock(began=0.0)
    clock.enter("step", 1)
    at(5)
    laps.append(clock.lap())  # the line of step 1, at 5
    at(9)
    clock.lap()  # of step 2, which is not saved; the process dies
    at(40)
    clock = Clock(began=30.0)
    clock.lost_before(5.0)
    clock.enter("step", 2)
    at(50)
    laps.append(clock.lap())  # of step 2, at 50
    at(60)
    clock.lap()  # of step 3
    at(70)
    clock.lost_since(50.0)  # back at step 2
    at(75)
    clock.enter("data", 3)
    at(100)
    laps.append(clock.lap())
    assert laps == [
        {"start": 3, "step": 2},
        {"lost": 25, "start": 10, "step": 10},
        {"lost": 20, "step": 5, "data": 25},
    ]
    ledger = Ledger.of(laps)
    assert ledger.wall == 100
    assert ledger.goodput == pytest.approx(0.17)
    assert str(ledger) == "goodput 17% of 100 s: lost 45%, data 25%, start 13%"
    assert str(Ledger({})) == "goodput 0% of 0 s"


def test_only_a_slow_step_is_named():
    pace = Pace(2.0, steps=10)
    seen = [pace.warning(i, {"step": 1.0, "data": 0.5}) for i in range(5)]
    assert seen == [None] * 5
    assert pace.warning(6, {"compile": 90.0}) is None
    assert pace.warning(7, {"step": 1.0, "save": 60.0}) is None, "that is asked for"
    assert pace.warning(8, {"step": 1.0, "data": 2.0}) is None, "twice is allowed"
    assert pace.warning(9, {"step": 1.0, "data": 2.6}) == (
        "step 9 took 3.60 s, 2.4 times the median of those before: data 2.60 s, step 1.00 s"
    )
