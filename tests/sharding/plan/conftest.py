import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def as_users_run_them():
    """JAX's default, where `x * scale` broadcasts; the package itself is held to less."""
    with jax.numpy_rank_promotion("allow"):
        yield
