"""Some of what benchmarks/fault_campaign.py does at length."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")
pytest.importorskip("tyro")

from benchmarks.fault_campaign import FAULTS, HUNG, ROOT, Campaign, Life, lines_in, live, own_port


def test_a_process_killed_before_it_commits_loses_nothing(tmp_path):
    campaign = Campaign(tmp_path, steps=10)
    campaign.undisturbed()
    kinds = ["killed before it commits"]
    assert [life.fault for life, _ in campaign.faults(kinds)] == kinds


@pytest.mark.slow
def test_three_faults_lose_nothing(tmp_path):
    kinds = ["killed", "stopped", "killed before it commits"]
    campaign = Campaign(tmp_path, steps=14, hang=8.0)
    campaign.undisturbed()
    assert [life.fault for life, _ in campaign.faults(kinds)] == kinds


@pytest.mark.slow
def test_twenty_faults_of_every_kind_lose_nothing(tmp_path):
    campaign = Campaign(tmp_path, seed=1)
    campaign.undisturbed()
    kinds = [*FAULTS, *FAULTS]
    assert len(kinds) == 20
    assert [life.fault for life, _ in campaign.faults(kinds)] == kinds


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_of_three_processes_one_is_stopped_and_the_others_name_it_and_end(tmp_path, rank):
    Campaign(tmp_path).write_tokens()
    with own_port() as port:
        life = Life(tmp_path / "run", 3, port, "stopped", step=4, rank=rank, hang=20.0)
        outcome = live(life)
    del outcome.codes[rank], outcome.said[rank]
    assert outcome.codes == [HUNG, HUNG], outcome.said
    for words in outcome.said:
        assert re.search(r"rank \d hangs: for 20.0 s it was at step [345] in phase", words), words
        # Signs are left every two seconds, in which a run with compiled programs takes many steps.
        named = rf"rank {rank} gives no sign of life: it was last seen at step [0-5] in phase"
        assert re.search(named, words), words
        assert words.count("gives no sign of life") == 1, words


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["whole", "split"])
def test_a_process_that_comes_40_s_late_is_waited_for(tmp_path, fsdp):
    """Gloo waits 30 s where gradients are scattered, but parameters are gathered before that."""
    Campaign(tmp_path).write_tokens()
    with own_port() as port:
        life = Life(tmp_path / "run", 2, port, "slow", 4, 1, steps=8, pause=40.0, fsdp=fsdp)
        outcome = live(life)
    assert outcome.finished, outcome.said
    lines = lines_in(life.folder)
    assert len(lines) == 8
    assert sum(lines[3]["seconds"].values()) > 38, "of step 4"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_in_one_process_ends_it_while_the_other_waits(tmp_path, rank):
    """The first save, which is written as the disk fills, and that nothing else notices."""
    Campaign(tmp_path).write_tokens()
    with own_port() as port:
        outcome = live(Life(tmp_path / "run", 2, port, "full disk", step=3, rank=rank))
    assert outcome.codes[rank] == 1, outcome.said
    assert HUNG not in outcome.codes


def states(mark: str) -> dict[int, str]:
    """The state of each process that has this in its environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_text(errors="replace"):
                found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return {pid: state for pid, state in found.items() if state != "Z"}


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, true
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked up in /proc")
def test_nothing_outlives_a_campaign_that_is_ended(tmp_path):
    """Neither who trains, nor who is stopped meanwhile, nor who sees to them."""
    mark = f"OF_THE_CAMPAIGN_IN={tmp_path}"
    flags = ["--kinds", "stopped", "--faults=4", "--at-once=2", "--hang=60", f"--folder={tmp_path}"]
    campaign = subprocess.Popen(
        [sys.executable, "benchmarks/fault_campaign.py", *flags],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), **dict([mark.split("=")])},
    )  # fmt: skip
    try:
        until(lambda: "T" in states(mark).values(), 300)
        campaign.terminate()
        until(lambda: not states(mark), 20)
    finally:
        for pid in states(mark):
            os.kill(pid, signal.SIGKILL)
    assert campaign.wait(10) == -signal.SIGTERM
