"""The table of what attention means, on a GPU."""

import dataclasses

import jax
import pytest

from tests.primitives.cases import CASES, check


@pytest.mark.parametrize("implementation", ["blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_every_implementation_gives_the_results_and_gradients_of_the_table(name, implementation):
    assert jax.default_backend() == "gpu"
    check(CASES[name], implementation)


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_table_in_narrow_types(name):
    case = CASES[name]
    dtype = "float16" if case.dtype == "float16" else "bfloat16"
    check(dataclasses.replace(case, dtype=dtype, aux=("lse",)), None, flash=True)
