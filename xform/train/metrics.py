"""The numbers of a run: a line of JSON for each step, and a picture that is redrawn as it grows.

TensorBoard gets the same numbers, if it is asked for.
"""

import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

# A picture takes some tenths of a second; drawing must not be what a run spends its time on.
_SECONDS_BETWEEN = 30.0
_LARGEST_SHARE = 0.01
_POINTS = 1000


class Metrics:
    """`metrics.jsonl` and `curves.png` in a run's folder.

    Use it in a `with` block, at whose end the picture is drawn for the last time.

    Args:
      folder: The run's folder, which exists.
      panels: What is drawn, one above the other: names of values, and what to call them.
      done: Steps that a resumed run goes on from, as in `rewind`.
      tensorboard: Whether to write what TensorBoard reads, too, to a folder of that name.

    Raises:
      ModuleNotFoundError: matplotlib is not installed; or tensorboardX, and TensorBoard is asked
        for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Metrics(folder, {"loss": "loss in nats"}) as metrics:
    ...         metrics.write(1, loss=5.5)
    ...         metrics.write(2, loss=5.25)
    ...     print((Path(folder) / "metrics.jsonl").read_text(), end="")
    {"step": 1, "loss": 5.5}
    {"step": 2, "loss": 5.25}
    """

    def __init__(
        self,
        folder: Path | str,
        panels: Mapping[str, str],
        *,
        done: int = 0,
        tensorboard: bool = False,
    ):
        # Now: it takes seconds on a machine that is new, and may be missing.
        from matplotlib.figure import Figure  # without a window, on any machine

        self._figure = Figure
        self.path = Path(folder) / "metrics.jsonl"
        self.picture = Path(folder) / "curves.png"
        self._last: dict = {}
        self._drawn: list[tuple] = []
        self._panels = dict(panels)
        self._file: io.RawIOBase | None = None
        self._events: SummaryWriter | None = None
        self._tensorboard = tensorboard
        self._next = time.monotonic() + _SECONDS_BETWEEN
        self.rewind(done)

    @property
    def last_time(self) -> float | None:
        """The time that the last line notes; None if there is no line, or it notes none."""
        return self._last.get("time")

    def rewind(self, done: int) -> None:
        """Drops the lines of steps after those done, and a last line that was cut off."""
        self._close()
        kept = [entry for entry in entries(self.path) if entry["step"] <= done]
        self._drawn = [self._point(entry) for entry in kept]
        self._last = kept[-1] if kept else {}
        text = "".join(json.dumps(entry) + "\n" for entry in kept)
        replace(self.path, text.encode())
        # One line, one write: what is killed leaves whole lines, and nothing is left to flush.
        self._file = self.path.open("ab", buffering=0)
        if self._tensorboard:
            self._events = _events(self.path.with_name("tensorboard"), done)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._close()
        if error is None:
            self.draw()

    def write(self, step: int, **values: Any) -> None:
        """Adds the values of a step, as JSON by name; None where there is none.

        TensorBoard has those that are numbers, and numbers by name under both names.

        Raises:
          OSError: The line could not be written, for want of space for example.
        """
        entry = {"step": step, **values}
        line = json.dumps(entry).encode() + b"\n"
        assert self._file is not None, "metrics are closed"
        try:
            while line:  # a disk that is nearly full takes a part
                line = line[self._file.write(line) :]
        except OSError as error:
            raise OSError(
                f"the metrics of step {step} could not be written to `{self.path}`: "
                f"{error.strerror}. Make room, then resume."
            ) from error
        self._drawn.append(self._point(entry))
        self._last = entry
        if self._events is not None:
            for name, value in _numbers(values):
                self._events.add_scalar(name, value, step)
        if time.monotonic() > self._next:
            start = time.monotonic()
            self.draw()
            end = time.monotonic()
            self._next = end + max(_SECONDS_BETWEEN, (end - start) / _LARGEST_SHARE)

    def draw(self) -> None:
        """Draws the picture anew."""
        figure = self._figure(figsize=(7, 2.5 * len(self._panels)), layout="constrained")
        columns = np.array(self._drawn, float).reshape(-1, 1 + len(self._panels)).T
        steps, *curves = (_thinned(x) for x in columns)
        axes = figure.subplots(len(self._panels), sharex=True, squeeze=False)[:, 0]
        for ax, curve, name in zip(axes, curves, self._panels.values(), strict=True):
            ax.plot(steps, curve, linewidth=1)
            ax.set_ylabel(name)
            ax.grid(alpha=0.3)
        axes[-1].set_xlabel("step")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120)
        replace(self.picture, picture.getvalue())

    def _close(self) -> None:
        for file in (self._file, self._events):
            if file is not None:
                file.close()
        self._file = self._events = None

    def _point(self, entry: Mapping[str, float | int | None]) -> tuple:
        return (entry["step"], *(entry.get(name) for name in self._panels))


def replace(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes a file so that at any time it has its old contents or its new ones.

    Args:
      path: The file.
      data: Its new contents.
      durable: Whether that also holds of a machine that loses its power; it takes a disk's time.

    Raises:
      OSError: It could not be written, for want of space for example; the old contents are there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace(Path(folder) / "run.json", b"{}")
    ...     (Path(folder) / "run.json").read_text()
    '{}'
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        reason = error.strerror or error
        raise OSError(
            f"`{path}` could not be written: {reason}. Mend that, then resume."
        ) from error


def entries(path: Path) -> list[dict]:
    """Returns the lines of a `metrics.jsonl`, up to one that was cut off or is no line of it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "metrics.jsonl")
    ...     _ = path.write_text('{"step": 1}' + chr(10) + '{"st')
    ...     entries(path)
    [{'step': 1}]
    """
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:  # also of what is no UTF-8
            break
        if not isinstance(entry, dict) or "step" not in entry:
            break
        found.append(entry)
    return found


def _events(folder: Path, done: int) -> "SummaryWriter":
    """What writes for TensorBoard, which is told to forget what it knows of later steps."""
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "what TensorBoard reads is written by tensorboardX, which is not installed: add "
            "`--extra tensorboard`, or do without."
        ) from None
    # By its own name, two files of one second would be one.
    number = len(list(folder.glob("*")))
    purge = done + 1 if done else None
    return SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{number}")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The values that are numbers, also those inside of others."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", x) for inner, x in _numbers(value))
        elif isinstance(value, int | float):
            yield name, float(value)


def _thinned(x: np.ndarray) -> np.ndarray:
    """Means of neighbours, where there are more points than can be seen."""
    group = -(-len(x) // _POINTS)
    whole = len(x) // group * group if group else 0
    return x[:whole].reshape(-1, group).mean(1) if group > 1 else x
