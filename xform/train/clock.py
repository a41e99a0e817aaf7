"""Where the time of a run goes: a ledger by phase that adds up to the wall time.

A process is always in one phase, so that the seconds of all phases are those that went by. What is
written with each step is what was spent since the step before; so the lines of a run's metrics add
up to its wall time as well, over any number of restarts: a process that goes on begins with what
was lost between the last line that is kept and its own start.

Phases are "start" (until the first step), "compile" (the first step of a process), "data", "step",
"save", "replay", "restore" (going back), "other" (metrics, pictures, agreeing to stop), and "lost":
steps that are not kept, and the time in which nothing ran.
"""

import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median

USEFUL = "step"


class Clock:
    """The phase that a process is in, and the seconds that it has spent in each.

    Args:
      began: When the process began, in seconds since 1970; by default, as the system knows it.

    >>> clock = Clock(began=time.time())
    >>> with clock.phase("data"):
    ...     clock.now
    'data'
    >>> clock.now
    'start'
    >>> sorted(clock.lap())
    ['data', 'start']
    """

    def __init__(self, began: float | None = None):
        self.began = process_start() if began is None else began
        self._apart = time.time() - time.monotonic()
        self.step = 0
        """The step that is worked on, from 1."""
        self.now = "start"
        """The phase."""
        self.moved = time.monotonic()
        """When it was entered; of a clock that nobody sets."""
        self._since = self.began
        self._spent: defaultdict[str, float] = defaultdict(float)

    @property
    def time(self) -> float:
        """Seconds since 1970, by the clock as it was set when this began: it may be set meanwhile.

        >>> abs(Clock().time - time.time()) < 1
        True
        """
        return self._apart + time.monotonic()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Goes on to a phase, and to a step."""
        self._settle()
        self.now, self.step = phase, self.step if step is None else step
        self.moved = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Is in a phase, then again in the one before."""
        before = self.now
        self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def lap(self) -> dict[str, float]:
        """Returns the seconds in each phase since the last lap, and begins a new one."""
        self._settle()
        spent = dict(self._spent)
        self._spent.clear()
        return spent

    def lost_before(self, since: float | None) -> None:
        """Counts as lost what went by from a point of time to the beginning of this process."""
        if since is not None and since < self.began:
            self._spent["lost"] += self.began - since

    def lost_since(self, since: float | None) -> None:
        """Counts as lost all that went by from a point of time to now."""
        self._settle()
        since = self.began if since is None else since
        self._spent.clear()
        self._spent["lost"] = max(0.0, self._since - since)

    def _settle(self) -> None:
        now = self.time
        self._spent[self.now] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Ledger:
    """The seconds of a run by phase.

    >>> print(Ledger({"start": 5.0, "step": 90.0, "lost": 5.0}))
    goodput 90% of 100 s: start 5%, lost 5%
    """

    seconds: Mapping[str, float]

    @classmethod
    def of(cls, laps: Iterable[Mapping[str, float]]) -> "Ledger":
        """Returns the sum of laps."""
        total: defaultdict[str, float] = defaultdict(float)
        for name, seconds in chain.from_iterable(lap.items() for lap in laps):
            total[name] += seconds
        return cls(dict(total))

    @property
    def wall(self) -> float:
        """All of them."""
        return sum(self.seconds.values(), 0.0)

    @property
    def goodput(self) -> float:
        """The share of steps that are kept."""
        return self.seconds.get(USEFUL, 0.0) / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        others = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = [(name, x / self.wall) for name, x in others if name != USEFUL and self.wall]
        words = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
        return f"goodput {self.goodput:.0%} of {self.wall:,.0f} s" + (f": {words}" if words else "")


class Pace:
    """Whether a step is slow, beside the median of those before it.

    Args:
      factor: How many times the median is slow.
      steps: How many steps it is the median of; as long as there are not half of them, none is.

    >>> pace = Pace(3.0, steps=4)
    >>> [pace.warning(i, {"step": x}) for i, x in enumerate([1.0, 1.2, 1.1])]
    [None, None, None]
    >>> pace.warning(4, {"step": 1.0, "data": 4.0, "save": 9.0})
    'step 4 took 5.00 s, 4.5 times the median of those before: data 4.00 s, step 1.00 s'
    """

    OF_A_STEP = ("data", "step", "other")

    def __init__(self, factor: float, steps: int = 50):
        self.factor = factor
        self._last: deque[float] = deque(maxlen=steps)

    def warning(self, step: int, seconds: Mapping[str, float]) -> str | None:
        """Returns in words that a step was slow, by its seconds in each phase; None if not."""
        if USEFUL not in seconds:  # it was compiled
            return None
        parts = {name: seconds[name] for name in self.OF_A_STEP if name in seconds}
        took, last = sum(parts.values()), list(self._last)
        self._last.append(took)
        if 2 * len(last) < (self._last.maxlen or 0) or took <= self.factor * median(last):
            return None
        parts = sorted(parts.items(), key=lambda item: -item[1])
        words = ", ".join(f"{name} {x:.2f} s" for name, x in parts)
        times = took / median(last)
        return (
            f"step {step} took {took:.2f} s, {times:.1f} times the median of those before: {words}"
        )


def process_start() -> float:
    """Returns when this process began, in seconds since 1970; where no one knows, now.

    >>> process_start() <= time.time()
    True
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
