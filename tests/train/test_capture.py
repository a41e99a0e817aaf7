"""Which steps are recorded; what a profile holds, tests of whole runs see."""

import jax
import pytest

from xform.train.capture import Capture


@pytest.mark.parametrize(
    ("first", "recorded"), [(1, [3, 4, 5]), (4, [4, 5]), (5, [5]), (6, [])], ids=str
)
def test_steps_between_two_numbers_are_recorded_once(monkeypatch, tmp_path, first, recorded):
    """Also by a run that goes on from between them, or goes back behind them."""
    open_, seen = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", open_.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", open_.clear)
    with Capture(tmp_path, (3, 5)) as capture:
        for number in (*range(first, 8), *range(2, 8 if recorded else 0)):
            with capture.step(number):
                seen += [number] * len(open_)
    assert seen == recorded
    assert not open_


def test_what_is_open_is_closed_with_the_run(monkeypatch, tmp_path):
    open_ = []
    monkeypatch.setattr(jax.profiler, "start_trace", open_.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", open_.clear)
    with Capture(tmp_path, (1, 9)) as capture:
        with capture.step(1):
            assert open_ == [tmp_path]
        assert open_ == [tmp_path]
    assert not open_
