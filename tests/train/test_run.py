import os
import signal
import time

import pytest

from xform.train import run


def test_a_run_knows_how_it_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--seed", "1"])
    folder = run.begin(tmp_path / "a", {"seed": 1, "data": ("a",)}, data="9 tokens")
    run.begin(folder, {"seed": 1, "data": ("a",)}, resume=True)
    saved = run.read_run(folder)
    assert saved["config"] == {"seed": 1, "data": ["a"]}
    assert saved["data"] == "9 tokens"
    assert len(saved["starts"]) == 2
    for start in saved["starts"]:
        assert start["versions"]["jax"].startswith("0.")
        assert start["command"].endswith(" train.py --seed 1")
        assert start["devices"]
        assert "config" not in start, "it is that of the run"


def test_a_run_describes_its_last_start_and_forgets_no_other(tmp_path):
    """Which may be on another mesh, or before any checkpoint was saved."""
    configs = [{"dp": 1}, {"dp": 2}, {"dp": 2}, {"dp": 4}]
    for i, config in enumerate(configs):
        run.begin(tmp_path, config, data=f"{i}", resume=i > 0)
    saved = run.read_run(tmp_path)
    assert (saved["config"], saved["data"]) == ({"dp": 4}, "3")
    own = [start.get("config", "the next one's") for start in saved["starts"]]
    assert own == [{"dp": 1}, "the next one's", {"dp": 2}, "the next one's"]


def test_what_is_no_run_is_named(tmp_path):
    (tmp_path / "run.json").write_text('{"config": {')
    with pytest.raises(ValueError, match=r"run.json` is damaged: .*Begin a new run"):
        run.begin(tmp_path, {}, resume=True)
    for text in ("[]", "{}", '{"config": {}}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run.json` is of no run: it holds no config and st"):
            run.read_run(tmp_path)
    with pytest.raises(OSError, match=r"run.json/x` can't be made a run's folder: Not a directory"):
        run.begin(tmp_path / "run.json" / "x", {})


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
        "seed is 0 there and 1 now",
        "model.width is 8 there and 9 now",
        "new is missing there and None now",
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


def raises(error):
    raise error


@pytest.mark.parametrize(
    ("f", "code", "words"),
    [
        (
            lambda: run.read_run("no folder"),
            1,
            "train.py: there is no run in `no folder`: it has no `run.json`.\n",
        ),
        (lambda: raises(OSError(28, "Full", "a")), 1, "train.py: [Errno 28] Full: 'a'\n"),
        (lambda: raises(KeyboardInterrupt()), 130, "\nstopped\n"),
    ],
    ids=["of xform's", "of the system", "Ctrl-C"],
)
def test_an_error_for_its_reader_has_no_traceback(capsys, f, code, words):
    with pytest.raises(SystemExit) as end, run.told("examples/train.py"):
        f()
    assert (end.value.code, capsys.readouterr().err) == (code, words)


def test_what_else_goes_wrong_has_one():
    with pytest.raises(ValueError, match="invalid literal"), run.told("examples/train.py"):
        int("no number")
    with pytest.raises(ValueError, match="of others"), run.told("examples/train.py"):
        raises(ValueError("of others"))


def test_what_is_to_be_said_with_an_error_is(capsys):
    def fails():
        error = FloatingPointError("step 3 is not finite")
        error.add_note("the last step that is saved is 2")
        raise error

    with pytest.raises(SystemExit), run.told(__file__):
        fails()
    words = "test_run.py: step 3 is not finite\nthe last step that is saved is 2\n"
    assert capsys.readouterr().err == words
