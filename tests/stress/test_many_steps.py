"""Eight virtual devices on a busy machine: the loop must neither hang nor abort."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optax")
pytest.importorskip("rich")

ROOT = Path(__file__).parents[2]

# A fresh process, since an abort takes the whole process with it.
LOOP = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/examples"]
from xform.sharding import cpu_devices
cpu_devices(8)
import llama, numpy as np, train
from xform.train.data import pack
model = llama.Config(layers=1, width=16, heads=4, kv_heads=2, head_size=4, hidden=16)
config = train.Config(model=model, steps={steps}, batch=4, length=8, dp=4, tp=2)
rows = pack([np.random.default_rng(0).integers(256, size=999)], config.length)
losses = [loss for _, loss in train.training(config, train.mesh_for(config), rows)]
assert np.isfinite(losses).all()
print(len(losses))
"""


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_small_steps_beside_two_busy_processes(steps):
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        code = LOOP.format(root=str(ROOT), steps=steps)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=600
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert done.stdout == f"{steps}\n", done.stderr[-2000:]
