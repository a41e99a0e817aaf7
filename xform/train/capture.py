"""A profile of some steps of a run, by JAX's profiler, for XProf or Perfetto to open."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


class Capture:
    """Records the steps from the first to the last of two numbers, once.

    A run that goes on from between them records those that are left.

    Use it in a `with` block, whose end closes what is still open.

    Args:
      folder: Where the profile goes.
      steps: The two numbers, from 1; None records nothing.
    """

    def __init__(self, folder: Path | str, steps: tuple[int, int] | None):
        self.folder, self.steps = Path(folder), steps
        self._open = False

    def __enter__(self) -> "Capture":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Names a step in the profile, and begins and ends that where its number says so."""
        if self.steps and not self._open and self.steps[0] <= number <= self.steps[1]:
            jax.profiler.start_trace(self.folder)
            self._open = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if self._open and self.steps and number >= self.steps[1]:
            self._close()
            self.steps = None

    def _close(self) -> None:
        if self._open:
            jax.profiler.stop_trace()
            self._open = False
