"""What to change where a number of a known kind was born: one line for each operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xform._ops import ELEMENTWISE, MOVES
from xform._program import Node, Value

_UNSELECTED = (
    "a `where` did not take this element, but the derivative of its branch is computed all the "
    "same, and meets a zero. Mask before the operation: `where(ok, op(where(ok, x, 1)), other)`."
)

type Values = Sequence[Any]

# Operation, test of its operands' values, and what to say.
_HINTS: tuple[tuple[str, Callable[..., bool], str], ...] = (
    ("log", lambda x: x == 0, "log of 0: add a floor, or mask before the log."),
    ("log", lambda x: x < 0, "log of a negative number."),
    ("log1p", lambda x: x <= -1, "log1p of -1 or less."),
    ("sqrt", lambda x: x < 0, "sqrt of a negative number: clip it at 0 before."),
    ("rsqrt", lambda x: x <= 0, "rsqrt of 0 or less: add a small number before."),
    ("div", lambda x, y: x == 0 and y == 0, "0 / 0: mask the denominator before the division."),
    ("div", lambda x, y: y == 0, "a division by 0: mask the denominator before the division."),
    ("div", lambda x, y: math.isinf(x) and math.isinf(y), "inf / inf."),
    ("exp", lambda x: x > 0, "exp overflows: subtract the maximum before."),
    ("exp2", lambda x: x > 0, "exp2 overflows: subtract the maximum before."),
    ("pow", lambda x, y: x < 0, "a negative number to a power that is no integer."),
    ("pow", lambda x, y: x == 0, "0 to a negative power."),
    ("sub", lambda x, y: math.isinf(x) and x == y, "inf - inf: for a softmax, a row that is masked "
     "everywhere; mask it once more after."),
    ("add", lambda x, y: math.isinf(x) and math.isinf(y), "inf - inf."),
    ("convert_element_type", lambda x: math.isfinite(x), "the number is beyond the range of the "
     "narrower type."),
    ("integer_pow", lambda x: x == 0, "0 to a negative power."),
)  # fmt: skip


def hint_for(node: Node, kind: str, values: Values) -> str | None:
    """What to change, by the operation and the values that it read."""
    if node.name in ("mul", "div") and kind == "nan":
        zero = next((v for v, x in zip(node.ins, values, strict=False) if x == 0), None)
        if zero is not None and node.phase == "backward" and _selected(zero):
            return _UNSELECTED
        if node.name == "mul":
            return "0 × inf: see where the infinite operand comes from."
    if any(x is None for x in values):
        return "an index out of bounds fills in NaN." if node.name == "gather" else None
    if node.name == "div" and values[1] == 0 and (root := _root(node.ins[1])):
        return f"the derivative of `{root}` at 0 is infinite: mask before the `{root}`."
    for name, applies, words in _HINTS:
        if name == node.name and applies(*values[: 2 if len(values) > 1 else 1]):
            return words
    return None


def _root(value: Value) -> str | None:
    """The operation with an infinite derivative at 0 of which this is the result."""
    node = value.node
    return node.name if node is not None and node.name in ("sqrt", "cbrt") else None


def _selected(value: Value, steps: int = 12) -> bool:
    """Whether a value comes from a `select_n` through elementwise operations alone."""
    left = [value]
    for _ in range(steps * 4):
        if not left:
            return False
        node = left.pop().node
        if node is None:
            continue
        if node.name == "select_n":
            return True
        if node.name in ELEMENTWISE or node.name in MOVES:
            left += node.ins
    return False
