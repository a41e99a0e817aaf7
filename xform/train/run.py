"""A run from outside: the folder that it leaves, and how it is asked to stop.

    runs/2026-11-29_22-55-00/
      run.json        its config and data, and each start of it: when, how, on what
      metrics.jsonl   one line for each step
      curves.png      the same as a picture
      checkpoints/    the newest ones

This is for one process. Many of them would have to agree on the step that they stop after.
"""

import json
import linecache
import os
import platform
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from signal import Signals
from typing import Any

import jax

from xform.train.metrics import replace

_PACKAGES = ("xform-jax", "jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")

# ---- its folder ----------------------------------------------------------------------------------


def begin(
    folder: Path | str | None,
    config: Mapping,
    *,
    data: str | None = None,
    more: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Path:
    """Returns the folder of a run that begins or goes on, noted in its `run.json`.

    There, `config` and `data` are those of the last start; a start before it that had another
    config keeps its own.

    Args:
      folder: Where; None makes a new one in `runs/`, or finds the newest there.
      config: What the run is, as JSON.
      data: A fingerprint of what it is trained on.
      more: What else tells it from others, as JSON by name.
      resume: Whether it goes on.

    Raises:
      FileExistsError: It shall begin, and there is a run already.
      FileNotFoundError: It shall go on, and there is none.
      OSError: The folder can't be made or written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = begin(Path(folder) / "one", {"seed": 0}, data="six tokens")
    ...     read_run(path)["config"]
    {'seed': 0}
    """
    config = json.loads(json.dumps(dict(config)))  # as it will be read
    if resume:
        path = Path(folder or newest_run())
        run = read_run(path)
        if run["config"] != config and run["starts"]:
            run["starts"][-1].setdefault("config", run["config"])
    else:
        path = Path(folder or Path("runs", f"{datetime.now():%Y-%m-%d_%H-%M-%S}"))
        if (path / "run.json").exists():
            raise FileExistsError(
                f"`{path}` holds a run already: resume it, or choose another folder."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"`{path}` can't be made a run's folder: {error.strerror}. Choose another."
            ) from error
        run = {"starts": []}
    known = {**(more or {}), "config": config} | ({} if data is None else {"data": data})
    run = {**run, **known, "starts": [*run["starts"], _start()]}
    _write(path, run)
    return path


def note(folder: Path | str, **values: Any) -> None:
    """Adds values to a run's `run.json`, as JSON by name, and keeps all else.

    Raises:
      FileNotFoundError: There is no run in the folder.
      OSError: It can't be written to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = begin(folder, {})
    ...     note(path, skipped=[])
    ...     read_run(path)["skipped"]
    []
    """
    run = read_run(folder) | values
    _write(Path(folder), run)


def first_start(folder: Path | str) -> float | None:
    """Returns when a run was first started, in seconds since 1970; None where there is none.

    >>> first_start("nowhere") is None
    True
    """
    if not (Path(folder) / "run.json").exists():
        return None
    starts = read_run(folder)["starts"]
    return datetime.fromisoformat(starts[0]["time"]).timestamp() if starts else None


def read_run(folder: Path | str) -> dict:
    """Returns what `run.json` holds.

    Raises:
      FileNotFoundError: There is no run in the folder.
      ValueError: What is there is none.

    >>> read_run("nowhere")
    Traceback (most recent call last):
        ...
    FileNotFoundError: there is no run in `nowhere`: it has no `run.json`.
    """
    path = Path(folder) / "run.json"
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run in `{folder}`: it has no `run.json`.") from None
    except ValueError as error:
        raise ValueError(f"`{path}` is damaged: {error}. Begin a new run.") from None
    if not isinstance(found, dict) or not {"config", "starts"} <= found.keys():
        raise ValueError(f"`{path}` is of no run: it holds no config and starts. Begin a new run.")
    return found


def newest_run(root: Path | str = "runs") -> Path:
    """Returns the folder of the run in `root` that was started last.

    Raises:
      FileNotFoundError: There is none.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = begin(Path(folder) / "one", {})
    ...     newest_run(folder).name
    'one'
    """
    runs = sorted(Path(root).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise FileNotFoundError(
            f"there is no run in `{Path(root).absolute()}`: name the folder of one."
        )
    return runs[-1].parent


def differences(
    saved: Mapping,
    asked: Mapping,
    free: Collection[str] = (),
    *,
    sides: tuple[str, str] = ("there", "now"),
) -> list[str]:
    """Returns in words where two configs differ.

    Args:
      saved: That of the run or its checkpoint.
      asked: That of now.
      free: Names at the top that may differ.
      sides: What the two are called.

    >>> differences({"seed": 0, "model": {"layers": 4}}, {"seed": 1, "model": {"layers": 4}})
    ['seed is 0 there and 1 now']
    """
    left, right = (dict(_flat(config)) for config in (saved, asked))
    one, other = sides
    return [
        f"{name} is {left.get(name, 'missing')} {one} and {right.get(name, 'missing')} {other}"
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


def _write(folder: Path, run: Mapping) -> None:
    data = (json.dumps(run, indent=2) + "\n").encode()
    replace(folder / "run.json", data, durable=True)  # without it, no checkpoint is gone on from


def _start() -> dict:
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": versions(),
        "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run stands on.

    >>> sorted(versions())[:3]
    ['jax', 'jaxlib', 'numpy']
    """
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

    A second one acts at once, as without this. In a thread that is not the first, as some engines
    start a program in, Python hears no signals, and none is a request.

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
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
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


# ---- what it says when it fails ------------------------------------------------------------------


@contextmanager
def told(program: str) -> Iterator[None]:
    """Ends the process with the message alone of an error that was written for its reader.

    Such an error comes from the system, or a line of xform's or of the program beside it raises it
    by name. Any other is a fault, and has its traceback. Exit codes: 1, and 130 after Ctrl-C.

    Args:
      program: The file of the program, or any other in its folder.

    >>> with told(__file__):
    ...     print("no error, nothing told")
    no error, nothing told
    """
    try:
        yield
    except (KeyboardInterrupt, ValueError, OSError, ArithmeticError, NotImplementedError) as error:
        if not _is_for_the_reader(error, program):
            raise
        words, code = ending(error, program)
        sys.stderr.write(words)
        sys.exit(code)


def ending(error: BaseException, program: str) -> tuple[str, int]:
    """Returns what is said of an error that ends the process, and with which exit code.

    >>> ending(SystemExit(75), "train.py")
    ('', 75)
    """
    if isinstance(error, SystemExit):
        return "", error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return "\nstopped\n", 128 + signal.SIGINT
    if not _is_for_the_reader(error, program):
        return "".join(traceback.format_exception(error)), 1
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{Path(program).name}: {error}{notes}\n", 1


def _is_for_the_reader(error: BaseException, program: str) -> bool:
    if isinstance(error, KeyboardInterrupt):
        return True
    if not isinstance(error, ValueError | OSError | ArithmeticError | NotImplementedError):
        return False
    if isinstance(error, OSError) and error.strerror:
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = (Path(__file__).parents[1], Path(program).parent)
    raises = linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise ")
    return raises and any(Path(last.filename).is_relative_to(folder) for folder in ours)
