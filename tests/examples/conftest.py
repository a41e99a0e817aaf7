"""The examples are programs: their tests import them as they import each other."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def as_users_run_them():
    """JAX's default, where `x * scale` broadcasts; the package itself is held to less."""
    with jax.numpy_rank_promotion("allow"):
        yield
