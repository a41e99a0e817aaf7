"""The decoding kernel on a GPU: what the loop over parts gives, and close to the truth."""

import itertools

import jax
import numpy as np
import pytest

from tests.lowering.mosaic_gpu.test_decode import MODS, problem
from xform import which

SIZES = {
    "128": {"size": 128}, "64": {"size": 64}, "256": {"size": 256}, "96": {"size": 96},
    "every head its own keys": {"size": 128, "kv_heads": 8},
}  # fmt: skip


# All sizes with all mods, each with some number of queries and some pages.
PAIRS = list(itertools.product(SIZES, MODS))
CASES = [(*pair, (1, 3, 128)[n % 3], (0, 16, 256, 0)[n % 4]) for n, pair in enumerate(PAIRS)]


@pytest.mark.parametrize(("sizes", "mods", "new", "page"), CASES)
def test_gives_what_parts_give(sizes, mods, new, page):
    """Texts that end early or are empty, NaN behind, pages in any order, holes; the same again."""
    attend, args = problem(new, page, **SIZES[sizes], keys=4096)
    run = jax.jit(lambda *x: attend(*x, aux="lse", implementation="mosaic_gpu", **MODS[mods]))
    (out, aux), again = run(*args), run(*args)[0]
    assert "kept_attention" in str(jax.make_jaxpr(run)(*args))
    assert np.array_equal(out.view("uint16"), again.view("uint16"))
    true, true_aux = jax.jit(
        lambda *x: attend(*x, aux="lse", splits=1, implementation="blockwise", **MODS[mods])
    )(*args)
    assert np.array_equal(np.isneginf(aux.lse), np.isneginf(true_aux.lse))
    seen = ~np.isneginf(aux.lse)
    np.testing.assert_allclose(aux.lse[seen], true_aux.lse[seen], atol=1e-4)
    out, true = (np.asarray(x, np.float32) for x in (out, true))
    np.testing.assert_allclose(out, true, atol=1.6e-2)


def test_which_says_so():
    q, k = (jax.numpy.ones((1, n, 8, 64), "bfloat16") for n in (1, 4096))
    assert "the decoding kernel" in which(q, k, k).why
