"""Several processes that share one mesh: how they find each other, stop together and keep apart.

Each runs the same program and has its own devices and its own copy of what the program decides. On
GPUs of one machine, `CUDA_VISIBLE_DEVICES` says which are whose.
"""

import os
import sys
from pathlib import Path
from signal import Signals

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

from xform.train.run import Stop


def join(coordinator: str | None, processes: int, process: int) -> None:
    """Has the processes find each other, and all but the first print nothing.

    Args:
      coordinator: Where process 0 waits for the others, `host:port`; `auto` where a cluster says.
      processes: How many there are.
      process: Which one this is.
    """
    if processes == 1:
        return
    if coordinator == "auto":
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(coordinator, processes, process)
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def wait() -> None:
    """Returns when all processes have come here."""
    if jax.process_count() > 1:
        sync_global_devices("several.wait")


def asked_to(stop: Stop) -> bool:
    """Returns whether any process was asked to stop, for all of them to do so after this step."""
    asked = bool(stop)
    if jax.process_count() == 1:
        return asked
    number = int(process_allgather(np.array(int(stop.signal or 0))).max())
    stop.signal = Signals(number) if number else None
    return bool(number)


def own(folder: Path) -> Path:
    """Returns where this process notes its numbers: the run's folder, or one in it."""
    if not jax.process_index():
        return folder
    folder = folder / f"process-{jax.process_index()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
