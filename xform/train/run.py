"""A run from outside: the folder that it leaves, and how it is asked to stop.

    runs/2026-11-29_22-55-00/
      run.json        its config, and each start of it: when, how, with which versions, on what
      metrics.jsonl   one line for each step
      curves.png      the same as a picture
      checkpoints/    the newest ones

This is for one process. Many of them would have to agree on the step that they stop after.
"""

import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from signal import Signals

import jax

from xform.train.metrics import replace

_PACKAGES = ("xform-jax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")

# ---- its folder ----------------------------------------------------------------------------------


def begin(folder: Path | str | None, config: Mapping, *, resume: bool = False) -> Path:
    """Returns the folder of a run that begins or goes on, noted in its `run.json`.

    Args:
      folder: Where; None makes a new one in `runs/`, or finds the newest there.
      config: What the run is, as JSON.
      resume: Whether it goes on.

    Raises:
      FileExistsError: It shall begin, and there is a run already.
      FileNotFoundError: It shall go on, and there is none.
    """
    if resume:
        path = Path(folder or newest_run())
        run = read_run(path)
    else:
        path = Path(folder or Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}"))
        if (path / "run.json").exists():
            raise FileExistsError(
                f"`{path}` holds a run already: resume it, or choose another folder."
            )
        path.mkdir(parents=True, exist_ok=True)
        run = {"config": dict(config), "starts": []}
    run["starts"].append(_start())
    replace(path / "run.json", (json.dumps(run, indent=2) + "\n").encode())
    return path


def read_run(folder: Path | str) -> dict:
    """Returns what `run.json` holds.

    Raises:
      FileNotFoundError: There is no run in the folder.
    """
    try:
        return json.loads((Path(folder) / "run.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run in `{folder}`: it has no `run.json`.") from None


def newest_run(root: Path | str = "runs") -> Path:
    """Returns the folder of the run in `root` that was started last.

    Raises:
      FileNotFoundError: There is none.
    """
    runs = sorted(Path(root).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise FileNotFoundError(
            f"there is no run in `{Path(root).absolute()}`: name the folder of one."
        )
    return runs[-1].parent


def differences(saved: Mapping, asked: Mapping, free: Collection[str] = ()) -> list[str]:
    """Returns in words where two configs differ.

    Args:
      saved: That of the checkpoint.
      asked: That of now.
      free: Names at the top that may differ.

    >>> differences({"seed": 0, "model": {"layers": 4}}, {"seed": 1, "model": {"layers": 4}})
    ['seed is 0 in the checkpoint and 1 now']
    """
    left, right = (dict(_flat(config)) for config in (saved, asked))
    return [
        f"{name} is {left.get(name, 'missing')} in the checkpoint and "
        f"{right.get(name, 'missing')} now"
        for name in left | right
        if name.split(".")[0] not in free and left.get(name) != right.get(name)
    ]


def _flat(config: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value as text, under its dotted name."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, repr(list(value) if isinstance(value, tuple) else value)


def _start() -> dict:
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": versions(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run stands on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# ---- its end -------------------------------------------------------------------------------------

# A terminal that goes away is as good a reason as the others, unless `nohup` says that it is none.
_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Stop:
    """Whether a signal asks the run to stop: true from then on.

    Attributes:
      signal: The signal, or None.
    """

    signal: Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stopping() -> Iterator[Stop]:
    """Makes Ctrl-C, SIGTERM and SIGHUP a request, for a loop that ends when its step is done.

    A second one acts at once, as without this.

    >>> with stopping() as stop:
    ...     for step in range(10):
    ...         if step == 3:
    ...             signal.raise_signal(signal.SIGTERM)
    ...         if stop:
    ...             break
    >>> step, stop.signal.name
    (3, 'SIGTERM')
    """
    stop = Stop()
    before = {s: signal.getsignal(s) for s in _SIGNALS if signal.getsignal(s) != signal.SIG_IGN}

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number, frame):
        del frame
        stop.signal = Signals(number)
        restore()
        # Not `print`: the signal may have come in the middle of another one.
        words = (
            f"\n{stop.signal.name}: this step is finished and saved; once more to stop at once\n"
        )
        os.write(2, words.encode())

    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()
