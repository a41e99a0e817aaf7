"""Layouts that fit, best first; what can't run is refused with all reasons at once."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sharding.plan.shapes import LONG, SMALL, predict
from xform.sharding import plan
from xform.sharding.plan._layout import reasons_against
from xform.sharding.plan._search import layouts

ROOT = Path(__file__).parents[3]
EIGHT = plan.machine("H200", 8)


@pytest.fixture(scope="module")
def found():
    return plan.search(LONG, EIGHT, 64 * LONG.length, show=20, simulated=20)


def test_the_best_come_first_and_fit(found):
    seconds = [p.seconds for p in found.plans]
    assert seconds == sorted(seconds)
    assert all(p.fits for p in found.plans)
    assert found.best.seconds == seconds[0]
    assert found.tried > found.fitting >= len(found.plans) == 20


def test_no_layout_that_fits_is_faster(found):
    """All of them, simulated, on a machine of eight."""
    tokens = 64 * LONG.length
    for layout in list(layouts(LONG, EIGHT, tokens, plan.Layout()))[::23]:
        if not reasons_against(LONG, EIGHT, layout, tokens):
            one = predict(LONG, EIGHT, layout, tokens)
            assert not one.fits or one.seconds >= found.best.seconds


def test_tensor_parallelism_stays_in_a_node(found):
    assert {p.layout.tp for p in found.plans} <= {1, 2, 4, 8}
    four = plan.machine("H200", 16, node=4)
    layout = plan.Layout(tp=8, dp=2)
    assert reasons_against(LONG, four, layout, 2 * LONG.length) == [
        "tp=8 is more than the 4 devices of a node"
    ]
    assert reasons_against(LONG, four, layout, 2 * LONG.length, tp_in_node=False) == []


def test_all_reasons_at_once():
    layout = plan.Layout(dp=3, tp=16, cp=5, pp=2, microbatches=4, chunks=2)
    with pytest.raises(ValueError, match="can't run") as error:
        plan.predict(SMALL, EIGHT, layout, 2**16)
    for reason in (
        "dp=3 × pp=2 × cp=5 × tp=16 are 480 devices, and there are 8",
        "tp=16 is more than the 8 devices of a node",
        "kv_heads=8 is no multiple of tp=16",
        "length=2048 is no multiple of 10",
        "32 rows are no multiple of dp=3 × microbatches=4",
        "chunks=2 is of the schedule interleaved, not of 1f1b",
    ):
        assert reason in str(error.value)


def test_all_strange_words_at_once():
    given = dict(schedule="1f2b", precision="f8", overlap=("ep",), dp=0)
    layout = plan.Layout(**given)  # pyright: ignore[reportArgumentType]
    reasons = "; ".join(reasons_against(SMALL, EIGHT, layout, 2**16))
    for name in ("dp=0", "schedule='1f2b'", "precision='f8'", "['ep'] names no axis"):
        assert name in reasons


def test_too_much_memory_is_a_reason_part_by_part():
    with pytest.raises(ValueError, match=r"needs .* GiB on the fullest device.*optimizer 567"):
        plan.predict(plan.LLAMA_3_405B, EIGHT, plan.Layout(tp=8), 8192)


def test_search_says_why_there_is_nothing():
    with pytest.raises(ValueError, match=r"the least needs [\d.]+ GiB of 123.4"):
        plan.search(plan.LLAMA_3_405B, EIGHT, 2**20)
    with pytest.raises(ValueError, match="11 stages are more than 8 layers and two ends"):
        plan.search(SMALL, plan.machine("H200", 11), 2**16)


def test_records_table_and_picture(found):
    records = found.records()
    assert records[0]["devices"] == 8
    assert records[0]["seconds"] == found.best.seconds
    four = ("compute", "communication", "bubble", "overhead")
    parts = [records[0][f"{name}_seconds"] for name in four]
    assert sum(parts) == pytest.approx(records[0]["seconds"])
    text = repr(found)
    assert "8 × H200" in text
    assert f"{found.best.seconds:.3f}" in text
    assert "<table>" in found._repr_html_()
    assert "goodput" in repr(found.best)
    ax = found.plot()
    assert len(ax.patches) == 4 * len(found.plans)
    assert sum(p.get_width() for p in ax.patches[:: len(found.plans)]) == pytest.approx(
        found.best.seconds
    )
    assert len(found.best.plot().patches) == 4


def test_a_machine_is_refused_with_all_reasons():
    with pytest.raises(ValueError, match=r"count=0 .*; no rates are known of B200.*; .*speed"):
        plan.machine("B200", 0, speed=3)
    with pytest.raises(ValueError, match=r"product=1.5 must be a share.*launch and fill"):
        plan.machine("H200", 1, product=1.5, launch=-1.0)


def test_a_model_is_refused_with_all_reasons():
    with pytest.raises(ValueError, match=r"layers=0 must be above 0; width=-1"):
        replace(SMALL, layers=0, width=-1)
    with pytest.raises(ValueError, match=r"heads=16 is no multiple of kv_heads=3"):
        replace(SMALL, kv_heads=3)


@pytest.mark.slow
def test_at_scale_it_finds_what_llama_was_trained_with():
    """The example, as a user runs it; the checker of types would take most of the time."""
    command = [sys.executable, "examples/plan.py", "--devices", "16384"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert "16,384 × H100, 16.8 Mtokens a step" in done.stdout
    head, *rows = done.stdout.split("\n\n")[0].splitlines()[1:]
    assert head.split()[:6] == ["dp", "pp", "cp", "tp", "micro", "step"]
    found = [(*map(int, row.split()[:5]), float(row.split()[5])) for row in rows]
    trained = re.search(r"dp128 pp16 cp1 tp8 m16.*\nA step: ([\d.]+) s, MFU 40", done.stdout)
    assert trained
    # What it was trained with is within a tenth of the best.
    assert 0.9 * float(trained[1]) < found[0][-1] <= float(trained[1])
    assert all(tp in (4, 8) for _, _, _, tp, _, _ in found)
    assert [seconds for *_, seconds in found] == sorted(seconds for *_, seconds in found)
