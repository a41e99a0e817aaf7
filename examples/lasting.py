"""The steps of train.py that are kept: a run goes back where one is bad, and leaves its batch out.

It goes back to its newest checkpoint, or to its beginning. `run.json` has what is left out and why,
and every process decides by the same losses and the same files, so that all go back together.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

import pipelined
from settings import Config
from steps import first_state, origin, schedule_for, training
from xform.train import processes, run
from xform.train.capture import Capture
from xform.train.checkpoint import Checkpoints, Damaged
from xform.train.clock import Clock
from xform.train.data import Source, batch
from xform.train.metrics import Metrics, entries
from xform.train.recovery import Judge, batch_number


class Lasting:
    """A run in its folder, from its newest checkpoint on.

    Args:
      config: What it is asked for.
      mesh: What it runs on.
      rows: What it trains on.
      folder: Its folder.
      checkpoints: Its checkpoints.
    """

    def __init__(
        self, config: Config, mesh: Mesh, rows: Source, folder: Path, checkpoints: Checkpoints
    ):
        self.config, self.mesh, self.rows, self.folder = config, mesh, rows, folder
        self.checkpoints, self.schedule = checkpoints, schedule_for(config)
        noted = run.read_run(folder) if (folder / "run.json").exists() else {}
        self.skips: list[dict] = list(noted.get("skipped", ()))
        """What is left out: the batch, the step that had it, and the reason."""
        begun = checkpoints.latest is not None
        self.state = first_state(replace(config, weights=None) if begun else config, mesh)
        self._like = jax.tree.map(_struct, pipelined.at_rest(self.state, self.schedule))
        self.done = 0
        """How many steps the state has seen."""
        if begun:
            self._go_back()

    @property
    def skipped(self) -> frozenset[int]:
        """The batches that are left out."""
        return frozenset(skip["batch"] for skip in self.skips)

    def at_rest(self) -> dict:
        """Returns the state as a checkpoint holds it."""
        return pipelined.at_rest(self.state, self.schedule)

    def steps(
        self, metrics: Metrics, clock: Clock, capture: Capture
    ) -> Iterator[tuple[int, int, float]]:
        """Yields number, batch and loss of the steps that are kept, until the last.

        Raises:
          FloatingPointError: More batches are bad than may be left out.
        """
        while self.done < self.config.steps:
            judge = Judge(self.config.spike, self._losses())
            steps = training(
                self.config, self.mesh, self.rows, self.state, self.done,
                skipped=self.skipped, clock=clock, capture=capture,
            )  # fmt: skip
            fault, number, loss = None, 0, 0.0
            for self.state, loss in steps:
                number = batch_number(self.done, self.skipped)
                if fault := judge.fault(loss):
                    break
                self.done += 1
                yield self.done, number, loss
            if fault:
                with clock.phase("restore"):
                    self._leave_out(number, loss, fault)
                    self._go_back()
                metrics.rewind(self.done)
                clock.lost_since(metrics.last_time)
                print(f"back at step {self.done}, without batch {number}")

    def _losses(self) -> list[float]:
        """Those of the steps done, which all processes read in the first one's file."""
        kept = (x["loss"] for x in entries(self.folder / "metrics.jsonl") if x["step"] <= self.done)
        return [loss for loss in kept if loss is not None]

    def _leave_out(self, number: int, loss: float, fault: str) -> None:
        """Notes a batch to leave out; raises where there are too many."""
        step = self.done + 1
        if len(self.skips) >= self.config.max_skips:
            raise self._ended(number, loss, f"step {step} {fault}")
        print(f"step {step} {fault}")
        self.skips.append({"batch": number, "step": step, "reason": f"step {step} {fault}"})
        if not jax.process_index() and (self.folder / "run.json").exists():
            run.note(self.folder, skipped=self.skips)

    def _go_back(self) -> None:
        """Takes the state of the newest checkpoint, or where there is none the first one."""
        self.checkpoints.wait()
        jax.tree.map(lambda x: x.delete(), self.state)  # so that there is room for the other
        if self.checkpoints.latest is None:
            self.done, self.state = 0, first_state(self.config, self.mesh)
            return
        saved = of_newest(self.checkpoints, lambda: self.checkpoints.restore(self._like))
        self.done = self.checkpoints.latest or 0
        self.state = pipelined.in_ranks(saved, self.schedule)

    def _ended(self, number: int, loss: float, words: str) -> FloatingPointError:
        """The error that ends the run; where a loss is no number, with the place of its birth."""
        c, params = self.config, self.state["params"]
        if not math.isfinite(loss):
            part = batch(self.rows, number, size=c.batch, seed=c.seed)
            words += f", and changed nothing:\n{origin(c, self.mesh, params, part)}"
        error = FloatingPointError(words)
        left = f", {len(self.skips)} batches are left out" if self.skips else ""
        error.add_note(
            f"the last step that is saved is {self.checkpoints.latest}{left}. Lower the learning "
            "rate, or look at the data."
        )
        return error


def of_newest[T](checkpoints: Checkpoints, read: Callable[[], T]) -> T:
    """Returns what is read of the newest checkpoint, or where it is damaged, of the one before it.

    What one process can't read, none goes on from: it is moved to `damaged` in the run's folder.

    Raises:
      Damaged: There is none before it.
    """
    while True:
        found, error = None, None
        try:
            found = read()
        except Damaged as damaged:
            error = damaged
        if processes.all_agree(error is None):
            return found  # pyright: ignore[reportReturnType]
        if len(checkpoints.steps) < 2:
            raise error or Damaged("another process can't read the checkpoint, and said why.")
        processes.wait("set aside")
        if not jax.process_index():
            print(f"moved to `{checkpoints.set_aside()}`: {error or 'another process said why'}")
        processes.wait("was set aside")
        checkpoints.reload()


def set_aside_unreadable(folder: Path) -> None:
    """Sees to it that the newest checkpoint of a run that goes on says what it is of."""
    if (folder / "checkpoints").is_dir():
        with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
            if checkpoints.latest is not None:
                of_newest(checkpoints, checkpoints.info)


def _struct(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
