"""One of several processes that makes meshes and programs in an order of its own.

    python -m tests.train.orders PORT PROCESSES PROCESS PLATFORM

Each prints, as JSON, whether every program is right, and how it was refused to start them in an
order of its own too: numbers would be mixed up, or all wait for ever.
"""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from xform.sharding import cpu_devices, make_mesh, place, shardings
from xform.train import processes

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240
X = np.random.default_rng(0).integers(0, 100, (8, 8)).astype(np.int32)
SIZES = {
    2: [dict(dp=2), dict(tp=2), dict(dp=2, tp=1), dict(cp=1, tp=2)],
    8: [dict(ep=8), dict(dp=2, tp=4), dict(dp=4, cp=2), dict(dp=2, cp=2, tp=2)],
}


def meshes(devices: list) -> dict[str, tuple[dict[str, int], list]]:
    """Axes and devices of each mesh, by name: of devices in order, and every second time turned."""
    return {
        " ".join(f"{axis}={n}" for axis, n in axes.items()): (axes, devices[:: (-1) ** i])
        for i, axes in enumerate(SIZES[len(devices)])
    }


def exchange(x, axes: tuple[str, ...]):
    """What all kinds of collective make of `x`, axis after axis, and its sum over all."""
    for axis in axes:
        n = lax.axis_size(axis)
        x = lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])
        whole = lax.all_gather(x, axis, tiled=True)
        x = x + lax.psum_scatter(whole * (1 + lax.axis_index(axis)), axis, tiled=True)
    return x, lax.psum(x.sum(), axes)


def program(axes: dict[str, int], devices: list):
    """A program over a mesh, and what it is given."""
    mesh, names = make_mesh(**axes, devices=devices), tuple(axes)
    f = jax.shard_map(
        lambda x: exchange(x, names), mesh=mesh, in_specs=P(names), out_specs=(P(names), P())
    )
    return jax.jit(f), place(X, shardings(mesh, P(names)))


def by_hand(axes: dict[str, int]) -> np.ndarray:
    """What `exchange` makes of all parts.

    Along each axis of n they move on by one, and then have what they had and 1 + 2 + ... + n times
    that.
    """
    shape = tuple(axes.values())
    x = X.reshape(*shape, -1, 8)
    for i, n in enumerate(shape):
        x = np.roll(x, 1, axis=i) * (1 + n * (n + 1) // 2)
    return x.reshape(X.shape)


def is_right(axes: dict[str, int], found) -> bool:
    """Whether this process has its parts of what all is to be."""
    (x, total), right = found, by_hand(axes)
    parts = [bool(np.array_equal(part.data, right[part.index])) for part in x.addressable_shards]
    return all(parts) and int(total.addressable_data(0)) == int(right.sum())


def work(port: str, count: int, rank: int, platform: str) -> None:
    """Makes all in an own order, starts all in one order, and is refused an own one."""
    jax.config.update("jax_platforms", platform)
    if platform == "cpu":
        cpu_devices(8 // count)
    processes.join(f"localhost:{port}", count, rank, seconds=60)
    said = sys.__stdout__
    asked = meshes(jax.devices())
    names = list(asked)
    own = random.Random(rank).sample(names, len(names))
    made = {name: program(*asked[name]) for name in own}
    processes.same("programs", {"order": names}, seconds=60)
    right = {name: is_right(asked[name][0], made[name][0](made[name][1])) for name in names}
    try:
        processes.same("programs", {"order": own}, seconds=60)
        refused = None
    except ValueError as error:
        refused = str(error)
    print(json.dumps({"right": right, "refused": refused}), file=said, flush=True)
    processes.wait("end", seconds=60)
    os._exit(0)


def start(count: int, platform: str, devices: Sequence[str] = ()) -> list[dict]:
    """What each of so many processes printed; one GPU is visible to each where there are any."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    more = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "tests.train.orders", port, str(count)]
    running = [
        subprocess.Popen(
            [*command, str(rank), platform], text=True, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | more | ({"CUDA_VISIBLE_DEVICES": devices[rank]} if devices else {}),
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * count, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
