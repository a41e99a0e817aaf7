"""Programs compiled for a device that this machine lacks."""

import jax
import jax.numpy as jnp
import pytest

from xform._hlo import compile_for

MIB = 2**20


def test_compiles_for_a_gpu_that_is_not_there():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    compiled = compile_for("H200", lambda x: x @ x.T, x)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * MIB
    assert "fusion" in compiled.as_text()


def test_names_the_targets_it_knows():
    with pytest.raises(ValueError, match=r"`target` may be 'H200'; found 'H2000'"):
        compile_for("H2000", lambda x: x, jax.ShapeDtypeStruct((), jnp.float32))
