"""Real processes, real signals: what stops a run loses nothing, and it goes on as if unbroken."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

for package in ("matplotlib", "optax", "orbax.checkpoint", "rich", "tyro"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
STEPS = 40
MODEL = "layers=1 width=16 heads=4 kv-heads=2 head-size=4 hidden=16"
CONFIG = [
    *(f"--{x}" for x in ("batch=4", "length=32", "dp=4", "tp=2", f"steps={STEPS}", "save-every=1")),
    *(f"--model.{x}" for x in MODEL.split()),
    *(f"--data={ROOT}/README.md", "--temperature=0"),
]

# Runs train.py on the CPU alone, where other platforms may be installed, and hears every signal,
# where whoever runs the tests may ignore some: a shell in the background does.
START = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "examples")!r}]
from xform.sharding import cpu_devices
cpu_devices(8)
import jax
jax.config.update("jax_platforms", "cpu")
import train
train.main(train.from_command_line())
"""


def start(folder: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-c", START, f"--run={folder}", *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def wait_for(process: subprocess.Popen, condition) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, process.communicate()[0][-2000:]
        assert time.monotonic() < end
        time.sleep(0.001)


def half_saved(folder: Path):
    return any(folder.glob("checkpoints/*.orbax-checkpoint-tmp"))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    process = start(folder, *CONFIG)
    out, _ = process.communicate(timeout=480)
    assert process.returncode == 0, out[-2000:]
    assert len(losses(folder)) == STEPS
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.parametrize("when", ["step", "save"])
def test_a_run_that_is_stopped_goes_on_as_if_unbroken(unbroken, tmp_path, name, when):
    folder, number = tmp_path / "run", signal.Signals[name]
    process = start(folder, *CONFIG)
    wait_for(process, lambda: len(losses(folder)) >= 5)
    if when == "save":
        wait_for(process, lambda: half_saved(folder))
    process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    done = len(losses(folder))
    assert 5 <= done < STEPS
    assert losses(folder) == unbroken[:done]
    if name == "SIGKILL":
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"{name}: this step is finished and saved; once more to stop at once" in out
        assert (
            f"stopped after step {done}, which is saved; to go on: --run {folder} --resume" in out
        )
        assert not half_saved(folder)
        assert (folder / "checkpoints" / str(done)).is_dir()
    process = start(folder, "--resume")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out[-2000:]
    assert losses(folder) == unbroken


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_loses_no_checkpoint(unbroken, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, *CONFIG)
    wait_for(process, lambda: len(losses(folder)) >= 5)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    process.communicate(timeout=120)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    process = start(folder, "--resume")
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out[-2000:]
    assert losses(folder) == unbroken
