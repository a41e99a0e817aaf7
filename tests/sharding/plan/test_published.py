"""Runs that others have published, as a user asks for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from xform.sharding.plan import PUBLISHED, RATES

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json
from xform.sharding import plan
found = plan.check_published()
rows = [[row.found, row.fitted, p.record(), p.bubble, error] for row, p, error in found.rows]
print(json.dumps([rows, found.mean, repr(found), found._repr_html_()]))
"""


@pytest.fixture(scope="module")
def checked():
    """Rows, the mean error, and the table; without the checker of types, which takes most of it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_published_runs_within_ten_percent_in_the_mean(checked):
    rows, mean, _, _ = checked
    errors = [abs(row[-1]) for row in rows]
    assert mean == pytest.approx(sum(errors) / len(rows))
    assert mean < 0.10
    assert max(errors) < 0.10  # and each of them, which nobody asks for


def test_those_held_out_are_no_worse(checked):
    held = [abs(error) for _, fitted, _, _, error in checked[0] if not fitted]
    assert len(held) == 10
    assert sum(held) / len(held) < 0.05


def test_llama_rows_are_the_papers(checked):
    """43, 41 and 38 % (arXiv 2407.21783, table 4)."""
    rows = [row for row in checked[0] if row[2]["device"] == "H100"]
    assert [row[0] for row in rows] == [0.43, 0.41, 0.38]
    assert [row[2]["mfu"] for row in rows] == pytest.approx([0.43, 0.41, 0.38], rel=0.03)
    # Half the microbatches double the bubble: that is what the second row loses.
    assert rows[1][3] == pytest.approx(2 * rows[0][3], rel=0.2)


def test_each_ran_and_so_fits(checked):
    assert all(row[2]["fits"] for row in checked[0])


def test_megatrons_memory_is_the_papers(checked):
    """GiB of parameters and optimiser, and of activations (arXiv 2205.05198, figure 1)."""
    papers = {
        "22B": (45.6, 9.6), "GPT-3 175B": (45.6, 12.4),
        "MT-NLG 530B": (31.6, 23.1), "1T": (33.0, 26.6),
    }  # fmt: skip
    for _, _, record, _, _ in checked[0]:
        if record["recompute"] == "attention" and record["dp"] == 1:
            states = sum(record[f"{x}_bytes"] for x in ("parameters", "gradients", "optimizer"))
            held = (states / 2**30, record["activations_bytes"] / 2**30)
            assert held == pytest.approx(papers.pop(record["model"]), rel=0.09)
    assert not papers


def test_one_number_a_device_is_fitted():
    fitted = [row for row in PUBLISHED if row.fitted]
    assert sorted(row.device for row in fitted) == ["A100", "H100"]
    assert all("fitted to" in RATES[row.device].source for row in fitted)


def test_the_table_says_all(checked):
    _, _, text, html = checked
    assert text.count("held out") == len(PUBLISHED) - 2 + 1
    assert "MT-NLG 530B   2,240 A100" in text
    assert "<table>" in html
