"""The table of what attention means, on a GPU."""

import jax
import pytest

from tests.primitives.cases import CASES, check


@pytest.mark.parametrize("implementation", ["blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_every_implementation_gives_the_results_and_gradients_of_the_table(name, implementation):
    assert jax.default_backend() == "gpu"
    check(CASES[name], implementation)
