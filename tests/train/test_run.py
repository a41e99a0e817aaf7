import os
import signal
import time

import pytest

from xform.train import run


def test_a_run_knows_how_it_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--seed", "1"])
    folder = run.begin(tmp_path / "a", {"seed": 1})
    run.begin(folder, {"seed": 2}, resume=True)
    saved = run.read_run(folder)
    assert saved["config"] == {"seed": 1}
    assert len(saved["starts"]) == 2
    for start in saved["starts"]:
        assert start["versions"]["jax"].startswith("0.")
        assert start["command"].endswith(" train.py --seed 1")
        assert start["devices"]


def test_the_newest_run_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no run in `.*runs`"):
        run.newest_run()
    one = run.begin(None, {})
    assert one.parent.name == "runs"
    two = run.begin("runs/other", {})
    for path, age in ((one, 0), (two, 60)):
        os.utime(path / "run.json", (time.time() - age, time.time() - age))
    assert run.newest_run() == one
    run.begin(two, {}, resume=True)
    assert run.newest_run() == two


def test_runs_are_neither_overwritten_nor_made_up(tmp_path):
    run.begin(tmp_path, {})
    with pytest.raises(FileExistsError, match=r"holds a run already: resume it, or choose another"):
        run.begin(tmp_path, {})
    with pytest.raises(FileNotFoundError, match=r"no run in `.*nothing`: it has no `run.json`"):
        run.begin(tmp_path / "nothing", {}, resume=True)


def test_every_difference_is_listed():
    saved = {"seed": 0, "dp": 4, "data": ["a"], "model": {"layers": 4, "width": 8}}
    asked = {"seed": 1, "dp": 8, "data": ("a",), "model": {"layers": 4, "width": 9}, "new": None}
    assert run.differences(saved, asked, free={"dp"}) == [
        "seed is 0 in the checkpoint and 1 now",
        "model.width is 8 in the checkpoint and 9 now",
        "new is missing in the checkpoint and None now",
    ]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_asks_once_and_the_next_one_acts(name, capfd):
    number = signal.Signals[name]
    acted = []
    before = signal.signal(number, lambda *_: acted.append(name))
    try:
        with run.stopping() as stop:
            assert not stop
            os.kill(os.getpid(), number)
            assert stop
            assert stop.signal is number
            assert not acted
            os.kill(os.getpid(), number)
            assert acted == [name]
        os.kill(os.getpid(), number)
        assert acted == [name] * 2
    finally:
        signal.signal(number, before)
    assert f"{name}: this step is finished and saved; once more to stop" in capfd.readouterr().err


def test_what_is_ignored_stays_ignored():
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with run.stopping() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)
