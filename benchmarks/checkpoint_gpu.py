"""What a checkpoint costs a training loop: time that it stands still, and memory of the host.

    python benchmarks/checkpoint_gpu.py [--folder checkpoints] [--interval 100] [--tiny]

A model of 1.1 billion parameters is trained by AdamW in float32, 13.2 GB in all, on every device
there is; parameters and moments are split over them. Intervals of steps with one save and without
any take turns in one process, and the shortest of each counts. The stall is what an interval with a
save takes longer, of which `save` itself, which returns once the state is copied to the host, is
printed beside it. Memory is what the process holds at most while it saves, over what it held
before; on a CPU that is beside the state, which is in the host's memory there.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import jax  # noqa: E402
import numpy as np  # noqa: E402

import llama  # noqa: E402
import parallel  # noqa: E402
import train  # noqa: E402
import updates  # noqa: E402
from xform.sharding import cpu_devices, settle  # noqa: E402
from xform.train.checkpoint import Checkpoints  # noqa: E402
from xform.train.data import Rows  # noqa: E402

LARGE = llama.Config(
    codes=32_000, layers=22, width=2048, heads=32, kv_heads=4, head_size=64, hidden=5632
)
SMALL = llama.Config(layers=2, width=64, heads=4, kv_heads=2, head_size=16, hidden=128)


def step_of(config: train.Config) -> tuple[dict, Callable[[dict], dict]]:
    """Returns the first state and a step of training on random tokens."""
    mesh, shape = train.mesh_for(config), (config.batch, config.length)
    tokens, labels = np.random.default_rng(0).integers(config.model.codes, size=(2, *shape))
    rows = Rows(*(np.asarray(x, np.int32) for x in (tokens, 0 * tokens, labels)))
    rows = parallel.place_rows(rows, mesh)
    grads_of = train.gradients_for(config, mesh)
    update = updates.update_of(train.optimizer_for(config))

    def step(state: dict) -> dict:
        loss, grads = settle(grads_of(state["params"], rows))
        return settle(update(state, loss, grads)[0])

    return train.first_state(config, mesh), step


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """Has the largest resident size since its beginning, in bytes, as its last entry."""
    most, end = [_resident()], threading.Event()

    def watch():
        while not end.wait(0.005):
            most.append(max(most[-1], _resident()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        end.set()
        thread.join()


def _resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def interval(
    step: Callable, state: dict, steps: int, save: Callable[[dict], None]
) -> tuple[dict, float, float]:
    """Returns the state after some steps, seconds of all of them, and of the save before them."""
    jax.block_until_ready(state)
    start = time.perf_counter()
    save(state)
    saved = time.perf_counter() - start
    for _ in range(steps):
        state = step(state)
    jax.block_until_ready(state)
    return state, time.perf_counter() - start, saved


def main() -> None:
    """Prints a line for each round, and the stall and the memory at the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", help="where checkpoints go; by default, a temporary one")
    parser.add_argument("--interval", type=int, default=100, help="steps to a save")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    asked = parser.parse_args()
    tiny = asked.tiny
    config = train.Config(
        model=SMALL if tiny else LARGE, precision="bf16", tp=1, steps=10**6,
        layout=parallel.Layout(fsdp=True), batch=8 if tiny else asked.batch,
        length=64 if tiny else asked.length,
    )  # fmt: skip
    state, step = step_of(config)
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    count = sum(x.size for x in jax.tree.leaves(state["params"]))
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    print(f"{count / 1e6:,.1f} million parameters, {size / 1e9:.3f} GB, {devices}")
    not_saved = lambda state: None
    state = interval(step, state, 3, not_saved)[0]  # compiles
    with TemporaryDirectory() as own, Checkpoints(asked.folder or own) as checkpoints:
        checkpoints.save(0, state, {})  # what is loaded and pinned once
        checkpoints.wait()
        times: dict[str, list[float]] = {"without": [], "with": [], "save": [], "memory": []}
        for i in range(1, asked.rounds + 1):
            state, seconds, _ = interval(step, state, asked.interval, not_saved)
            times["without"].append(seconds)
            save = lambda state, i=i: checkpoints.save(i, state, {})
            with watched_memory() as most:
                state, seconds, saved = interval(step, state, asked.interval, save)
                checkpoints.wait()
            times["with"].append(seconds)
            times["save"].append(saved)
            times["memory"].append((most[-1] - most[0]) / size)
            print("  ".join(f"{name} {values[-1]:.3f}" for name, values in times.items()))
    best = {name: min(values) for name, values in times.items()}
    stall = best["with"] - best["without"]
    print(
        f"{asked.interval} steps take {best['without']:.2f} s; a save adds {stall:.3f} s to them, "
        f"{stall / best['without']:.2%} ({best['save']:.3f} s in `save`), and takes at most "
        f"{max(times['memory']):.2f}× the state of the host's memory"
    )


if __name__ == "__main__":
    cpu_devices(8)
    main()
