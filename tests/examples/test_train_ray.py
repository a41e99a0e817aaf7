"""Ray Train runs train.py in workers on this machine, and starts them again when one is killed."""

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
    return {child: commands[child] for child in found}


def run(script: str, folder: Path, *flags: str) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, f"examples/{script}", f"--run={folder}", *CONFIG, *flags]
    out = (folder.parent / f"{folder.name}.txt").open("w")
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again_and_the_losses_are_those_of_no_ray(tmp_path):
    assert run("train.py", tmp_path / "plain").wait(300) == 0
    folder, end = tmp_path / "ray", time.monotonic() + 400
    driver = run("train_ray.py", folder, "--workers=2")
    try:
        while len(losses(folder)) < 12:
            assert driver.poll() is None, (tmp_path / "ray.txt").read_text()[-4000:]
            assert time.monotonic() < end
            time.sleep(0.05)
        workers = [p for p, command in descendants(driver.pid).items() if "TrainWorker" in command]
        assert len(workers) == 2
        os.kill(workers[-1], signal.SIGKILL)
        assert driver.wait(300) == 0, (tmp_path / "ray.txt").read_text()[-4000:]
    finally:
        for pid in sorted(descendants(driver.pid), reverse=True):
            os.kill(pid, signal.SIGKILL)
    starts = json.loads((folder / "run.json").read_text())["starts"]
    assert len(starts) == 2
    assert len(losses(folder)) == STEPS
    np.testing.assert_allclose(losses(folder), losses(tmp_path / "plain"), rtol=0, atol=1e-5)
