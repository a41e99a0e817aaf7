"""The table of what attention means, on a GPU."""

import dataclasses

import jax
import pytest

from tests.primitives.cases import CASES, check
from tests.primitives.test_field_reports import CASES as REPORTS


@pytest.mark.parametrize("implementation", ["blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_every_implementation_gives_the_results_and_gradients_of_the_table(name, implementation):
    assert jax.default_backend() == "gpu"
    check(CASES[name], implementation)


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_table_in_narrow_types(name):
    case = CASES[name]
    dtype = "float16" if case.dtype == "float16" else "bfloat16"
    check(dataclasses.replace(case, dtype=dtype, aux=("lse",)), None, draws=4, flash=True)


@pytest.mark.parametrize("name", REPORTS)
def test_kernels_give_what_users_reported_elsewhere_in_narrow_types(name):
    case = REPORTS[name]
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    check(dataclasses.replace(case, dtype=dtype, aux=("lse",)), None, draws=4, flash=True)
