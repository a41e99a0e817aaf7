"""The table of what attention means, on the implementations of this machine."""

import pytest

from tests.primitives.cases import CASES, check

SLOW = {
    "hidden infinity", "five to one", "more keys than queries", "one query", "odd sizes",
    "bfloat16", "float64", "a batch without a key", "no queries and no keys",
    "all scores near minus 100", "more queries than keys", "hidden minus infinity", "no batch",
    "heads of no size", "no visible pair", "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES]
)
def test_every_implementation_gives_the_results_and_gradients_of_the_table(name):
    check(CASES[name], "blockwise", "reference")
