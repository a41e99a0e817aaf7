"""Ray Train runs train.py in workers on this machine, and starts them again when one is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.train")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tyro")

ROOT = Path(__file__).parents[2]
STEPS = 60
PATIENCE = 900  # Ray alone takes minutes to start on a busy machine
CONFIG = [
    *("--batch=8", "--length=32", "--dp=8", "--tp=1", f"--steps={STEPS}", "--save-every=5"),
    *("--model.layers=1", "--model.width=16", "--model.heads=4", "--model.kv-heads=2"),
    *("--model.head-size=4", "--model.hidden=16", f"--data={ROOT}/README.md", "--temperature=0"),
]


def losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def descendants(pid: int) -> dict[int, str]:
    """The command of each process that descends from one."""
    parents, commands = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands[child] for child in found if child in commands}


def run(script: str, folder: Path, *flags: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["RAY_raylet_start_wait_time_s"] = "120"
    command = [sys.executable, f"examples/{script}", f"--run={folder}", *CONFIG, *flags]
    with words_of(folder).open("a") as out:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)


def words_of(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.txt"


def until(driver: subprocess.Popen, folder: Path, steps: int) -> None:
    """Returns once a run has made so many steps."""
    end = time.monotonic() + PATIENCE
    while len(losses(folder)) < steps:
        assert driver.poll() is None, words_of(folder).read_text()[-4000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def end(driver: subprocess.Popen) -> None:
    """Kills a driver, and all that Ray started for it, as a machine does that goes away."""
    for pid in sorted(descendants(driver.pid), reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.wait()


@pytest.mark.slow
def test_workers_that_are_killed_go_on_as_many_or_fewer_with_the_losses_of_no_ray(tmp_path):
    assert run("train.py", tmp_path / "plain").wait(PATIENCE) == 0
    folder = tmp_path / "ray"
    driver = run("train_ray.py", folder, "--workers=2")
    try:
        until(driver, folder, 8)
        workers = [p for p, command in descendants(driver.pid).items() if "TrainWorker" in command]
        assert len(workers) == 2
        os.kill(workers[-1], signal.SIGKILL)
        until(driver, folder, 24)  # Ray has started them again
    finally:
        end(driver)
    before = len(losses(folder))
    driver = run("train_ray.py", folder, "--workers=1")
    try:
        assert driver.wait(PATIENCE) == 0, words_of(folder).read_text()[-4000:]
    finally:
        end(driver)
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert [start.get("config", {}).get("processes") for start in starts] == [2, 2, None]
    assert before < STEPS == len(losses(folder))
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "plain"), rtol=0, atol=1e-5)
