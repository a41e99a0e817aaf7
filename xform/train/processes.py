"""Several processes that share one mesh: how they find each other, wait, stop together, end apart.

Each runs the same program and has its own devices and its own copy of what the program decides. On
GPUs of one machine, `CUDA_VISIBLE_DEVICES` says which are whose.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import PartitionSpec as P

from xform._compat import put_up, texts_up, wait_at_barrier
from xform.train.run import Stop, differences, ending
from xform.train.watchdog import voice

_waited: Counter[str] = Counter()
_TO_SPEAK = 2.0  # seconds


def join(coordinator: str | None, processes: int, process: int, *, seconds: float = 300.0) -> None:
    """Has the processes find each other, and all but the first print nothing.

    Where whoever started them has done so already, that is left as it is.

    Args:
      coordinator: Where process 0 waits for the others, `host:port`; `auto` where a cluster says.
      processes: How many there are.
      process: Which one this is.
      seconds: How long to wait for the others.

    >>> join(None, 1, 0)  # there are no others
    """
    if processes == 1:
        return
    if not jax.distributed.is_initialized():
        # Of SIGTERM it would make a note that nobody reads; here it ends a process, or a step.
        jax.config.update("jax_enable_preemption_service", False)
        limit = int(seconds)
        if coordinator == "auto":
            jax.distributed.initialize(initialization_timeout=limit)
        else:
            jax.distributed.initialize(
                coordinator, processes, process, initialization_timeout=limit
            )
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def meet(processes: int) -> None:
    """Returns once it is known that all processes are there, and that all devices can add.

    Raises:
      ValueError: There are more or fewer processes.
      RuntimeError: A sum over all devices is wrong.

    >>> meet(1)
    >>> meet(2)
    Traceback (most recent call last):
        ...
    ValueError: 2 processes were asked for, and 1 are there: give ...
    """
    if jax.process_count() != processes:
        raise ValueError(
            f"{processes} processes were asked for, and {jax.process_count()} are there: give each "
            "the same `--processes` and `--coordinator`, and its own `--process`."
        )
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    ranks = np.array([d.process_index for d in mesh.devices.flat], np.int32)
    at = jax.sharding.NamedSharding(mesh, P("all"))
    own = jax.make_array_from_callback(ranks.shape, at, lambda index: ranks[index] + 1)
    add = lambda x: jax.lax.psum(x.sum(), "all")
    total = int(jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("all"), out_specs=P()))(own))
    if total != (ranks + 1).sum():
        raise RuntimeError(
            f"a sum over all {len(devices)} devices is {total} and should be {(ranks + 1).sum()}: "
            "something between them is broken."
        )


def wait(name: str, *, seconds: float = 600.0) -> None:
    """Returns when all processes have come here.

    Args:
      name: The same in all of them, for the same place in the program.
      seconds: How long to wait.

    Raises:
      TimeoutError: Not all came in time; it names the ranks that did not.

    >>> wait("begin")  # there are no others
    """
    _waited[name] += 1
    try:
        wait_at_barrier(f"xform/{name}/{_waited[name]}", seconds)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        # They follow the words "task names", one a line.
        late = re.search(r"names:((?:\s+\d+$)+)", str(error), re.MULTILINE)
        missing = sorted(map(int, late[1].split())) if late else []
        who = f"rank {', '.join(map(str, missing))}" if missing else "not all ranks"
        verb = "did not come" if missing else "came"
        raise TimeoutError(
            f"at the barrier `{name}`, {who} {verb} within {seconds:g} s to rank "
            f"{jax.process_index()}: look at what was said there."
        ) from None


def same(name: str, facts: Mapping, *, seconds: float = 600.0) -> None:
    """Returns once it is known that all processes have the same facts; no device takes part.

    Meshes and programs may be made in any order. But programs of several processes meet in their
    collectives, one after the other: where one process starts another program, or in another order,
    they take each other's numbers without a word, or wait for ever. So what programs follow from is
    compared before the first of them.

    Args:
      name: What the facts are, the same in all processes.
      facts: What all are to have, as JSON by name.
      seconds: How long to wait for the others.

    Raises:
      ValueError: In every process; it lists what ranks have otherwise than rank 0.
      TimeoutError: Not all came in time.

    >>> same("layout", {"tp": 2})  # there are no others
    """
    if jax.process_count() == 1:
        return
    rank, place = jax.process_index(), f"xform/{name}/{_waited[name]}"
    own = json.loads(json.dumps(dict(facts)))
    if not rank:
        put_up(f"{place}/first", json.dumps(own))
    wait(name, seconds=seconds)
    first = json.loads(texts_up(f"{place}/")[f"{place}/first"])
    if wrong := differences(first, own, sides=("on rank 0", f"on rank {rank}")):
        put_up(f"{place}/others/{rank}", "; ".join(wrong))
    wait(name, seconds=seconds)
    if others := texts_up(f"{place}/others/"):
        with suppress(TimeoutError, jax.errors.JaxRuntimeError):
            wait(name, seconds=seconds)  # who keeps the texts would end before all have read them
        if not rank:  # and the others end with it, whether or not they have said why
            time.sleep(_TO_SPEAK)
        words = "; ".join(list(others.values())[:8])
        words += f"; and {len(others) - 8} ranks more" if len(others) > 8 else ""
        raise ValueError(
            f"processes differ in their {name}: {words}. Their programs would wait for each other "
            "in vain: give all the same."
        )


def asked_to(stop: Stop) -> bool:
    """Returns whether any process was asked to stop, for all of them to do so after this step.

    >>> stop = Stop()
    >>> asked_to(stop)
    False
    """
    asked = bool(stop)
    if jax.process_count() == 1:
        return asked
    number = int(process_allgather(np.array(int(stop.signal or 0))).max())
    if number:  # else one may have come meanwhile, for the next time
        stop.signal = Signals(number)
    return bool(number)


def all_agree(good: bool) -> bool:
    """Returns whether it is so in all processes.

    >>> all_agree(True), all_agree(False)
    (True, False)
    """
    return bool(np.all(process_allgather(np.array(good))))


@contextmanager
def each_for_itself(program: str) -> Iterator[None]:
    """Ends the process at once where it fails and there are others.

    They wait for it in a sum or at a barrier, and it would wait for them to end together with it.
    So they learn of it, by connections that break, and nothing is tidied up. A watchdog that speaks
    already has the last word.

    Args:
      program: The file of the program, as `run.told` takes it.

    >>> with each_for_itself("train.py"):  # of one process, an error is what it was
    ...     raise ValueError("no data")
    Traceback (most recent call last):
        ...
    ValueError: no data
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1:
            raise
        words, code = ending(error, program)
        with suppress(OSError), voice:  # the disk may be full that it goes to
            os.write(2, f"rank {jax.process_index()}: {words}".encode(errors="replace"))
        os._exit(code)


def own(folder: Path) -> Path:
    """Returns where this process notes its numbers: the run's folder, or one in it.

    >>> own(Path("run")).name
    'run'
    """
    if not jax.process_index():
        return folder
    folder = folder / f"process-{jax.process_index()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
