"""`fuse`: values and gradients of what models are made of, in any shape."""

import jax
import jax.numpy as jnp
import pytest

from tests._fuse.subjects import SUBJECTS, with_gradients
from tests.oracle import assert_as_right_as, in_float64
from xform import fuse


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SUBJECTS)
def test_subject_is_as_right_as_a_plain_program(name, dtype):
    f, arguments, argnums = SUBJECTS[name]
    args = arguments(257, dtype)
    found = jax.jit(with_gradients(fuse(f), argnums))(*args)
    judge = jax.jit(with_gradients(f, argnums))(*args)
    assert_as_right_as(found, judge, in_float64(with_gradients(f, argnums), *args))
