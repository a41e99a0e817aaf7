"""What faults leave of the time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xform.sharding.plan import FAULTS, Faults


def test_llama_3_kept_more_than_nine_tenths():
    """One fault in about three hours, over 90 % effective (arXiv 2407.21783, section 3.3.4)."""
    assert FAULTS.mtbf(16_384) / 3600 == pytest.approx(3.1, abs=0.1)
    assert 0.9 < FAULTS.goodput(16_384) < 1


@given(st.floats(1e3, 1e7), st.floats(1, 300), st.floats(0, 1000))
def test_the_interval_is_about_the_best(mtbf, save, restart):
    faults = Faults(mtbf, save, restart)
    best = faults.goodput(1)
    assert 0 <= best <= 1
    if save < mtbf / 50:
        others = [faults.goodput(1, faults.interval(1) * x) for x in (0.5, 0.8, 1.25, 2)]
        assert best >= max(others) * (1 - 1e-3)


def test_goodput_is_what_a_run_with_faults_has():
    """A million seconds of work, faults drawn at random, counted event by event."""
    faults, rng = Faults(2000.0, save=20, restart=60), np.random.default_rng(0)
    tau, clock, done = faults.interval(1), 0.0, 0.0
    fault = rng.exponential(2000.0)
    while done < 1e6:
        if fault - clock >= tau + faults.save:
            clock, done = clock + tau + faults.save, done + tau
            continue
        clock = fault
        fault = clock + rng.exponential(2000.0)
        while fault < clock + faults.restart:  # a fault while it restarts
            clock, fault = fault, fault + rng.exponential(2000.0)
        clock += faults.restart
    assert faults.goodput(1) == pytest.approx(done / clock, rel=0.02)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_devices_never_have_more_goodput(a, b):
    a, b = sorted((a, b))
    assert FAULTS.goodput(b) <= FAULTS.goodput(a) + 1e-9


def test_young_where_faults_are_rare():
    assert Faults(1e9, save=10).interval(1) == pytest.approx((2 * 10 * 1e9) ** 0.5, rel=1e-3)


def test_refuses_numbers_that_mean_nothing():
    with pytest.raises(ValueError, match=r"device_mtbf=0, save=-1, restart=-2"):
        Faults(0, -1, -2)
