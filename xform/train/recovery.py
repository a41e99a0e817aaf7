"""Steps that are not kept: losses that are no numbers, and losses that jump.

A run goes back from them to its newest checkpoint and leaves their batch out for good. Which batch
a step has is a function of its number and of what is left out, and that is noted in `run.json`: so
a run that stops and goes on leaves out the same ones, and steps before them have what they had.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import median


def batch_number(step: int, skipped: Collection[int]) -> int:
    """Returns which batch a step has, both from 0, where some batches are left out.

    >>> [batch_number(step, {1, 3}) for step in range(4)]
    [0, 2, 4, 5]
    """
    for number in sorted(skipped):
        step += number <= step
    return step


def skipped_of(run: Mapping) -> frozenset[int]:
    """Returns the batches that a run leaves out, by its `run.json`.

    >>> sorted(skipped_of({"skipped": [{"batch": 5, "step": 6, "reason": "a jump"}]}))
    [5]
    """
    return frozenset(skip["batch"] for skip in run.get("skipped", ()))


class Judge:
    """Whether a loss is one to go on from, beside those before it.

    A loss jumps that is above their median by more than `spreads` times their spread: the median
    distance from it, as a standard deviation, and at least a hundredth of it. Losses that fall
    don't, nor does any as long as there are few of them.

    Args:
      spreads: How far is too far; None asks for numbers alone.
      losses: Those of the steps so far.
      steps: Of how many of the last steps the median is.

    >>> judge = Judge(spreads=10.0, losses=[2.0, 2.1, 1.9, 2.0] * 8)
    >>> judge.fault(2.2), judge.fault(float("nan"))
    (None, 'is not finite')
    >>> judge.fault(9.0)
    'has loss 9.000, above the median of the steps before, 2.000, by 47 times their spread'
    """

    FEWEST = 20

    def __init__(self, spreads: float | None, losses: Iterable[float] = (), steps: int = 64):
        self.spreads = spreads
        self._last: deque[float] = deque(losses, maxlen=steps)

    def fault(self, loss: float) -> str | None:
        """Returns in words why a step is not kept; None if it is, and counts from now on."""
        if not math.isfinite(loss):
            return "is not finite"
        if self.spreads is not None and len(self._last) >= self.FEWEST:
            middle = median(self._last)
            spread = max(1.4826 * median(abs(x - middle) for x in self._last), abs(middle) / 100)
            if loss - middle > self.spreads * spread:
                return (
                    f"has loss {loss:.3f}, above the median of the steps before, {middle:.3f}, by "
                    f"{(loss - middle) / spread:.0f} times their spread"
                )
        self._last.append(loss)
        return None
