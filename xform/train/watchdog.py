"""A thread that ends a process which hangs, and says where: its rank, its step and its phase.

In a collective, a process waits for the others for as long as it takes, and nothing in it notices.
So each has a watchdog that reads its clock. Of several processes, each also leaves a sign of life
in a file now and then; whoever hangs reads those of the others, twice, and names the ranks that
give none any more, or that are elsewhere. They speak before any of them ends, since the first one's
end breaks the connections of all.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from xform.train.clock import Clock
from xform.train.metrics import replace

HUNG = 75
"""The exit code: `EX_TEMPFAIL` of sysexits.h, which says that another try may succeed."""

PATIENCE: dict[str, float] = dict.fromkeys(("start", "compile", "replay", "restore", "end"), 10.0)
"""How many times longer than others phases may take that compile programs or read much."""


voice = threading.Lock()
"""Held by a watchdog from its first word on, until the process ends."""


class Watchdog:
    """Ends the process, with exit code 75, once its clock has stood in one phase for too long.

    Use it in a `with` block.

    Args:
      clock: The clock of the process.
      seconds: How long it may stand in one phase; phases in `PATIENCE`, longer.
      rank: Which process this is.
      ranks: How many there are.
      folder: Where several leave their signs of life, one folder for all.
      leave: What ends the process.
    """

    def __init__(
        self,
        clock: Clock,
        seconds: float,
        *,
        rank: int = 0,
        ranks: int = 1,
        folder: Path | None = None,
        leave: Callable[[int], object] = os._exit,
    ):
        self.clock, self.seconds, self.leave = clock, seconds, leave
        self.rank, self.ranks = rank, ranks
        self.folder = folder / "alive" if folder and ranks > 1 else None
        self._every = min(5.0, seconds / 10)
        self._main = threading.get_ident()
        self._end = threading.Event()
        self._beat, self._spoken = 0, False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(self._every):
            self._sign()
            clock = self.clock
            limit = self.seconds * PATIENCE.get(clock.now, 1.0)
            if time.monotonic() - clock.moved > limit:
                with voice:
                    self._report(limit)
                    self._hear_out()
                    self.leave(HUNG)
                return

    def _sign(self) -> None:
        """Leaves a sign of life: where the clock stands, and that the process runs."""
        self._beat += 1
        if self.folder:
            sign = {"beat": self._beat, "step": self.clock.step, "phase": self.clock.now}
            sign |= {"spoken": self._spoken}
            try:
                self.folder.mkdir(exist_ok=True)
                replace(self.folder / f"{self.rank}.json", json.dumps(sign).encode())
            except OSError:
                return  # a full disk is no reason to stop watching

    def _report(self, limit: float) -> None:
        place = f"at step {self.clock.step} in phase `{self.clock.now}`"
        words = [f"rank {self.rank} hangs: for {limit:.1f} s it was {place}."]
        words += self._others()
        frame = sys._current_frames().get(self._main)
        words += ["Its main thread is here:", *_lines(frame)] if frame else []
        # Not `print`: the main thread may hold its lock. And the disk may be full that it goes to.
        with suppress(OSError):
            os.write(2, ("\n" + "\n".join(words) + "\n").encode(errors="replace"))

    def _others(self) -> list[str]:
        """What the other ranks do, in words, once it is known which of them are alive."""
        if not self.folder:
            return []
        before = signs(self.folder, self.ranks)
        for _ in range(4):
            time.sleep(self._every)
            self._sign()
        return blamed(self.rank, before, signs(self.folder, self.ranks))

    def _hear_out(self) -> None:
        """Waits until all others have spoken; not for ever, since some may be gone."""
        if not self.folder:
            return
        self._spoken = True
        for _ in range(4):
            self._sign()
            if all(sign.get("spoken") for sign in signs(self.folder, self.ranks).values()):
                break
            time.sleep(self._every)
        # All are connected to rank 0, and would end with it, by another code.
        time.sleep(0 if self.rank else 2 * self._every)


def signs(folder: Path, ranks: int) -> dict[int, dict]:
    """Returns the last sign of life of each rank.

    >>> signs(Path("nowhere"), 1)
    {0: {'beat': 0, 'step': 0, 'phase': 'start'}}
    """
    found = {}
    for rank in range(ranks):
        try:
            found[rank] = json.loads((folder / f"{rank}.json").read_text())
        except (OSError, ValueError):
            found[rank] = {"beat": 0, "step": 0, "phase": "start"}
    return found


def blamed(rank: int, before: Mapping[int, dict], after: Mapping[int, dict]) -> list[str]:
    """Returns in words which other ranks give no sign of life, or else are elsewhere.

    Args:
      rank: Who asks.
      before: The signs of all ranks.
      after: Those of a little later.

    >>> at = lambda beat, step, phase: {"beat": beat, "step": step, "phase": phase}
    >>> before = {0: at(7, 3, "step"), 1: at(7, 3, "step"), 2: at(5, 3, "data")}
    >>> blamed(0, before, {**before, 1: at(9, 3, "step")})
    ['rank 2 gives no sign of life: it was last seen at step 3 in phase `data`.']
    >>> blamed(0, before, {1: at(9, 3, "step"), 2: at(9, 3, "data")})
    ['rank 2 is alive, at step 3 in phase `data`.']
    """
    place = lambda sign: f"at step {sign['step']} in phase `{sign['phase']}`"
    others = {r: sign for r, sign in sorted(before.items()) if r != rank}
    silent = [r for r, sign in others.items() if after.get(r, sign)["beat"] == sign["beat"]]
    if silent:
        return [
            f"rank {r} gives no sign of life: it was last seen {place(others[r])}." for r in silent
        ]
    here = before.get(rank, {})
    where = lambda sign: (sign.get("step"), sign.get("phase"))
    away = {r: sign for r, sign in after.items() if r != rank and where(sign) != where(here)}
    return [f"rank {r} is alive, {place(sign)}." for r, sign in sorted(away.items())] or [
        "All other ranks are alive and in the same place: their communication hangs."
    ][: len(others)]


def _lines(frame) -> list[str]:
    return [line.rstrip() for line in traceback.format_stack(frame)[-4:]]
