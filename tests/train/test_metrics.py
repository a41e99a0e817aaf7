import json
from contextlib import contextmanager

import pytest

pytest.importorskip("matplotlib")

from xform.train.metrics import _POINTS, Metrics, _thinned, replace

PANELS = {"loss": "loss", "rate": "tokens per second"}


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_drops_what_was_not_saved_and_what_was_cut_off(tmp_path):
    with Metrics(tmp_path, PANELS) as metrics:
        for step in range(1, 8):
            metrics.write(step, loss=1 / step, rate=None if step == 1 else 9.5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    with Metrics(tmp_path, PANELS, done=5) as metrics:
        assert [x["step"] for x in lines(tmp_path)] == [1, 2, 3, 4, 5]
        metrics.write(6, loss=0.5, rate=8.0)
    assert lines(tmp_path)[-2:] == [
        {"step": 5, "loss": 0.2, "rate": 9.5},
        {"step": 6, "loss": 0.5, "rate": 8.0},
    ]


def test_the_picture_is_redrawn_as_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("xform.train.metrics._SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("xform.train.metrics._LARGEST_SHARE", 1e9)
    picture = tmp_path / "curves.png"
    with Metrics(tmp_path, PANELS) as metrics:
        metrics.write(1, loss=3.0, rate=None)
        first = picture.read_bytes()
        metrics.write(2, loss=1.0, rate=2.0)
        assert picture.read_bytes() != first
    assert first.startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "metrics.jsonl"}


def test_many_points_are_thinned_to_means():
    import numpy as np

    assert _thinned(np.arange(5.0)).tolist() == [0, 1, 2, 3, 4]
    thinned = _thinned(np.arange(3.0 * _POINTS))
    assert thinned[:2].tolist() == [1, 4]
    assert len(thinned) == _POINTS


@contextmanager
def files_of(size):
    """No file may grow beyond it: writes fail as they do on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    with Metrics(tmp_path, PANELS) as metrics:
        metrics.write(1, loss=1.0, rate=None)
        message = r"step 2 could not .*jsonl`: File too large.*resume"
        with files_of(50), pytest.raises(OSError, match=message):
            metrics.write(2, loss=1.0, rate=None)
        message = r"curves.png` could not be written: File too large.*resume"
        with files_of(900), pytest.raises(OSError, match=message):
            metrics.draw()
    assert not (tmp_path / "metrics.jsonl").read_text().endswith("\n"), "a part of it is there"
    with Metrics(tmp_path, PANELS, done=1):
        assert [x["step"] for x in lines(tmp_path)] == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"curves.png", "metrics.jsonl"}


def test_a_file_that_can_not_be_written_keeps_its_contents(tmp_path):
    path = tmp_path / "run.json"
    replace(path, b"old")
    with files_of(50), pytest.raises(OSError, match=r"run.json` could not be written: File too"):
        replace(path, b"new" * 99)
    assert [(x.name, x.read_bytes()) for x in tmp_path.iterdir()] == [("run.json", b"old")]


def test_tensorboard_has_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    parse = event_pb2.Event.FromString  # pyright: ignore[reportAttributeAccessIssue]

    seconds = {"data": 0.25, "step": 0.5}
    with Metrics(tmp_path, PANELS, tensorboard=True) as metrics:
        for step in (1, 2):
            metrics.write(step, loss=1 / step, rate=None, seconds=seconds, note="text")
        metrics.rewind(1)
        metrics.write(2, loss=0.25, rate=7.0)
    found, forgotten = [], []
    for path in sorted((tmp_path / "tensorboard").iterdir(), key=lambda x: x.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:  # length, its check, the event, its check
            size = int.from_bytes(data[:8], "little")
            event, data = parse(data[12 : 12 + size]), data[16 + size :]
            found += [(event.step, x.tag, x.simple_value) for x in event.summary.value]
            forgotten += [event.step] if event.session_log.status else []
    assert {(1, "loss", 1.0), (2, "loss", 0.5), (2, "loss", 0.25), (2, "rate", 7.0)} <= {*found}
    assert {(1, "seconds/data", 0.25), (2, "seconds/step", 0.5)} <= {*found}
    assert forgotten == [2]
