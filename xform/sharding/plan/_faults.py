"""What faults leave of the time: checkpoints, restarts, and the steps that are done twice.

Sources: Young (doi:10.1145/361147.361115) and Daly (doi:10.1016/j.future.2004.11.016). Faults come
at random, at a constant rate, to checkpoints and restarts too. Of a run that computes for τ between
checkpoints that take δ, with a mean time M between faults and R to restart, Daly's expected time is

    M · exp(R / M) · (exp((τ + δ) / M) - 1)      for each τ

which counts what is rolled back, and faults on the way back. τ is Daly's approximation of the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from xform.sharding.pipeline._times import Real


@dataclass(frozen=True)
class Faults:
    """How often devices fail, and what that takes.

    Attributes:
      device_mtbf: mean seconds between faults of one device, with its share of host and network.
      save: seconds that training stands still for a checkpoint.
      restart: seconds from a fault until training goes on: to notice, to replace, to load.

    Raises:
      ValueError: a number that is not above 0 (`restart` may be 0).

    >>> FAULTS.mtbf(16384) / 3600  # hours
    3.09...
    """

    device_mtbf: Real
    save: Real = 10.0
    restart: Real = 600.0

    def __post_init__(self):
        wrong = [
            f"{name}={value!r}"
            for name, value in (("device_mtbf", self.device_mtbf), ("save", self.save))
            if not value > 0
        ]
        wrong += [] if self.restart >= 0 else [f"restart={self.restart!r}"]
        if wrong:
            raise ValueError(f"`Faults` needs seconds above 0; found {', '.join(wrong)}.")

    def mtbf(self, devices: int) -> Real:
        """Mean seconds between faults of so many devices."""
        return self.device_mtbf / devices

    def interval(self, devices: int) -> Real:
        """Returns the best seconds of work between two checkpoints.

        >>> round(Faults(device_mtbf=1e6, save=50).interval(1)) # Young: √(2 · 50 · 10⁶) = 10,000
        9967
        """
        m = self.mtbf(devices)
        if self.save >= 2 * m:
            return m
        x = self.save / (2 * m)
        return math.sqrt(2 * self.save * m) * (1 + math.sqrt(x) / 3 + x / 9) - self.save

    def goodput(self, devices: int, interval: Real | None = None) -> Real:
        """Returns the share of the time in which steps are done that stay done.

        Args:
          devices: how many.
          interval: seconds of work between two checkpoints; by default the best.
        """
        m, work = self.mtbf(devices), interval or self.interval(devices)
        # What is too large for a float has no share left.
        exponent = (work + self.save) / m
        if self.restart / m + exponent > 500:
            return 0.0
        return work / (m * math.exp(self.restart / m) * math.expm1(exponent))


FAULTS = Faults(device_mtbf=16384 * 54 * 86400 / 419)
"""Llama 3's 54 days on 16,384 GPUs: 419 faults nobody had planned (arXiv 2407.21783, table 5)."""
