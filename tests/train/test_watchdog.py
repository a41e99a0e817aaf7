import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from xform.train.clock import Clock
from xform.train.watchdog import HUNG, PATIENCE, Watchdog, blamed, signs

ROOT = Path(__file__).parents[2]


class Left:
    """Where a process would end, an event that knows its code."""

    def __init__(self):
        self.event, self.code = threading.Event(), None

    def __call__(self, code):
        self.code = code
        self.event.set()


def test_a_hang_is_named_and_ends_the_process(capfd):
    clock, left = Clock(), Left()
    clock.enter("data", 7)
    with Watchdog(clock, 0.05, leave=left):
        left.event.wait(10)
    assert left.code == HUNG == 75
    said = capfd.readouterr().err
    assert "rank 0 hangs: for 0.1 s it was at step 7 in phase `data`." in said
    assert "left.event.wait(10)" in said, "where the main thread is"


def test_what_goes_on_does_not_hang():
    clock, left = Clock(), Left()
    with Watchdog(clock, 0.3, leave=left):
        for step in range(30):
            clock.enter("step", step)
            time.sleep(0.02)
        clock.enter("compile")
        time.sleep(0.5)
    assert left.code is None
    assert PATIENCE["compile"] > 1


def test_the_ranks_that_are_not_there_are_named(tmp_path, capfd):
    """Three ranks: this one waits in a step, one is in its data, one runs no more."""
    (tmp_path / "alive").mkdir()
    sign = '{"beat": 9, "step": 3, "phase": "step"}'
    (tmp_path / "alive" / "2.json").write_text(sign)
    mine, other, left = Clock(), Clock(), Left()
    mine.enter("step", 4)
    other.enter("data", 4)
    with Watchdog(other, 60.0, rank=1, ranks=3, folder=tmp_path, leave=print) as alive:
        alive._every = 0.01
        with Watchdog(mine, 0.2, rank=0, ranks=3, folder=tmp_path, leave=left):
            while not left.event.wait(0.01):
                alive._sign()
    said = capfd.readouterr().err
    assert "rank 0 hangs" in said
    assert "rank 2 gives no sign of life: it was last seen at step 3 in phase `step`." in said
    assert "rank 1" not in said
    assert signs(tmp_path / "alive", 3)[1]["phase"] == "data"


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(4, "step"), (4, "data")], ["rank 1 is alive, at step 4 in phase `data`."]),
        ([(4, "step")], []),
        (
            [(4, "step"), (4, "step")],
            ["All other ranks are alive and in the same place: their communication hangs."],
        ),
    ],
)
def test_of_ranks_that_live_those_elsewhere_are_named(places, words):
    at = lambda beat: {
        rank: {"beat": beat, "step": step, "phase": phase}
        for rank, (step, phase) in enumerate(places)
    }
    assert blamed(0, at(1), at(2)) == words


# Whose connections are locks that a process holds as long as it lives. As under JAX, an end that is
# noticed in a sum is an error, and the end of rank 0 ends a process from below.
HANGS = """
import fcntl, os, sys, time
from pathlib import Path
from xform.train.clock import Clock
from xform.train.watchdog import Watchdog, voice

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
files = [folder / f"{other}.lock" for other in range(3)]
own = files[rank].open("w")
fcntl.flock(own, fcntl.LOCK_EX)
(folder / f"{rank}.here").touch()
while len(list(folder.glob("*.here"))) < 3:
    time.sleep(0.01)
if rank == int(sys.argv[3]):
    time.sleep(600)

def gone(other):
    with files[other].open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

clock = Clock()
clock.enter("step", 4)
time.sleep(0.1 * rank)
with Watchdog(clock, 1.0, rank=rank, ranks=3, folder=folder):
    while True:
        if rank and gone(0):
            os._exit(6)
        if any(gone(other) for other in range(3) if other != rank):
            with voice:
                os._exit(1)
        time.sleep(0.005)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
@pytest.mark.parametrize("stuck", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_who_hang_speak_before_the_first_of_them_ends(tmp_path, stuck):
    start = [sys.executable, "-c", HANGS, str(tmp_path)]
    running = [
        subprocess.Popen(
            [*start, str(rank), str(stuck)], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for rank in range(3)
    ]
    try:
        for rank in {0, 1, 2} - {stuck}:
            said = running[rank].communicate(timeout=300)[1]
            assert running[rank].returncode == HUNG, said
            assert f"rank {rank} hangs: for 1.0 s it was at step 4 in phase `step`" in said
            assert f"rank {stuck} gives no sign of life: it was last seen at step 0" in said
    finally:
        for process in running:
            process.kill()
            process.communicate()
