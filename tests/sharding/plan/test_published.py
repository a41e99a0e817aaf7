"""Runs that others have published."""

import pytest

from xform.sharding.plan import PUBLISHED, RATES, check_published


@pytest.fixture(scope="module")
def checked():
    return check_published()


def test_published_runs_within_ten_percent_in_the_mean(checked):
    assert checked.mean < 0.10
    assert max(checked.errors) < 0.10  # and each of them, which nobody asks for


def test_those_held_out_are_no_worse(checked):
    held = [abs(error) for row, _, error in checked.rows if not row.fitted]
    assert len(held) >= 8
    assert sum(held) / len(held) < 0.05


def test_llama_rows_are_the_papers(checked):
    """43, 41 and 38 % (arXiv 2407.21783, table 4)."""
    rows = [(row, plan) for row, plan, _ in checked.rows if row.unit == "MFU"]
    assert [row.found for row, _ in rows] == [0.43, 0.41, 0.38]
    assert [float(plan.mfu) for _, plan in rows] == pytest.approx([0.43, 0.41, 0.38], rel=0.03)
    # Half the microbatches double the bubble: that is what the second row loses.
    assert rows[1][1].bubble == pytest.approx(2 * rows[0][1].bubble, rel=0.2)


def test_one_number_a_device_is_fitted():
    fitted = [row for row in PUBLISHED if row.fitted]
    assert sorted(row.device for row in fitted) == ["A100", "H100"]
    assert all("fitted to" in RATES[row.device].source for row in fitted)


def test_the_table_says_all(checked):
    text = repr(checked)
    assert text.count("held out") == len(PUBLISHED) - 2 + 1
    assert "MT-NLG 530B   2,240 A100" in text
    assert "<table>" in checked._repr_html_()
