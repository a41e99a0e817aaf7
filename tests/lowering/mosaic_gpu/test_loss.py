"""Linear cross entropy's kernels without a GPU: in the interpreter, and compiled for one."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.oracle import assert_as_right_as
from xform import linear_cross_entropy
from xform._compat import found_races
from xform._hlo import lower_for
from xform.lowering import chunked
from xform.lowering._loss_fn import IGNORED, Chunks, CrossEntropy, LossSpec
from xform.lowering._tile_fn import Jvp, Transpose
from xform.lowering.mosaic_gpu import _loss
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.primitives import cross_entropy
from xform.primitives._choose import Device

ROOT = Path(__file__).parents[3]
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "bias, smoothing": {"biased": True, "smooth": True},
    "everything": {"softcap": 2.0, "biased": True, "smooth": True},
}


def spec_of(dtype, vocab_dim=1, softcap=None, biased=False, smooth=False):
    chunks = Chunks((64, 256), (64, 256))
    return LossSpec(jnp.dtype(dtype), softcap, biased, smooth, 1, vocab_dim, chunks)


def problem(spec, t, d, v):
    """Operands, labels (some ignored, some no entry) and a cotangent for each sum."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), spec.dtype)
    w = normal(d, v) / d**0.5
    operands = [normal(t, d), w if spec.vocab_dim else w.T]
    operands += [jnp.asarray(rng.normal(size=v), jnp.float32)] * spec.biased
    labels = jnp.asarray(rng.integers(v, size=t), jnp.int32).at[::5].set(IGNORED).at[1].set(-1)
    cts = [jnp.asarray(rng.normal(size=t), jnp.float32) for _ in CrossEntropy(spec).results]
    return operands, labels, cts


def backward(spec, operands, labels, top, cts, run):
    """The gradients of hidden states and weights, by `run`, a tile sum."""
    h, *columns = operands
    n = 2 + len(columns)
    nonzero = (True, False, True, *[False] * spec.biased)
    shapes = spec.tail("row", h.shape), spec.tail("col", columns[0].shape)
    fn = Transpose(Jvp(CrossEntropy(spec), nonzero), (False,) * n + (True,) * 2, shapes)
    assert _loss.differentiates(fn)
    ct = [jnp.where(labels == IGNORED, 0, x) for x in cts]
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:2]]
    return run(fn, 0, outs, [h, top, *columns, *ct], [labels])


@pytest.mark.parametrize(
    ("options", "vocab_dim", "sizes", "dtype"),
    [
        ("everything", 0, (70, 72, 301), "float16"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("plain", 1, (140, 72, 520), "bfloat16"),
                ("softcap", 0, (140, 72, 521), "bfloat16"),
                ("bias, smoothing", 1, (300, 136, 264), "bfloat16"),
            )
        ],
    ],
)
def test_sums_and_gradients_in_the_interpreter(options, vocab_dim, sizes, dtype):
    spec = spec_of(dtype, vocab_dim, **OPTIONS[options])
    operands, labels, cts = problem(spec, *sizes)
    params = plgpu.InterpretGPUParams(detect_races=True)
    found = _loss.forward(spec, 0, operands, labels, interpret=params)
    run = lambda *args: _loss.gradients(*args, interpret=params, entries=256)
    grads = backward(spec, operands, labels, found[0], cts, run)
    assert not found_races()

    judge = chunked.forward(spec, 0, None, operands, labels, "cpu")
    by_chunks = partial(chunked.tile_sum, platform="cpu")
    judge_grads = backward(spec, operands, labels, judge[0], cts, by_chunks)
    with jax.enable_x64(True):
        wide = spec_of("float64", vocab_dim, **OPTIONS[options])
        up = lambda xs: [jnp.asarray(np.asarray(x, np.float64)) for x in xs]
        true = chunked.forward(wide, 0, None, up(operands), labels, "cpu")
        # Exponentials are relative to the maximum that each found: L and its gradients scale.
        true_grads = backward(wide, up(operands), labels, true[0], up(cts), by_chunks)
        seen = np.asarray(labels != IGNORED)
        lse = lambda xs: [np.asarray(x)[seen] for x in (xs[0] + jnp.log(xs[1]), *xs[2:])]
        name = lambda xs: {str(n): np.asarray(x, np.float64) for n, x in enumerate(xs)}
        assert_as_right_as(name(lse(found)), name(lse(judge)), name(lse(true)))
        assert_as_right_as(name(grads), name(judge_grads), name(true_grads))
    assert not np.asarray(grads[0], np.float32)[~seen].any()


@pytest.mark.slow
def test_an_ignored_token_may_be_anything():
    spec = spec_of("bfloat16")
    operands, labels, cts = problem(spec, 70, 72, 264)
    params = plgpu.InterpretGPUParams()

    def results(h):
        sums = _loss.forward(spec, 0, [h, operands[1]], labels, interpret=params)
        run = lambda *args: _loss.gradients(*args, interpret=params, entries=256)
        return [*sums, *backward(spec, [h, operands[1]], labels, sums[0], cts, run)]

    spoilt = operands[0].at[5, 3].set(jnp.nan).at[10].set(jnp.inf)
    assert labels[5] == labels[10] == IGNORED
    for x, y in zip(results(operands[0]), results(spoilt), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("vocab_dim", "options"),
    [
        (1, {}),
        pytest.param(0, {}, marks=pytest.mark.slow),
        pytest.param(1, {"softcap": 30.0, "label_smoothing": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_compiles_for_an_h200_within_the_memory_that_it_says(vocab_dim, options, tmp_path):
    """At the size of a large model: kernels, spills, and 5 % of what float32 logits would take."""
    program = f"""
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from xform import linear_cross_entropy
from xform._hlo import compile_for
T, V, D = 8192, 128256, 4096
h = jax.ShapeDtypeStruct((T, D), jnp.bfloat16)
w = jax.ShapeDtypeStruct((D, V) if {vocab_dim} else (V, D), jnp.bfloat16)
labels = jax.ShapeDtypeStruct((T,), jnp.int32)
def loss(h, w, labels):
    return linear_cross_entropy(
        h, w, labels, vocab_dim={vocab_dim}, implementation="mosaic_gpu", **{options}
    )[0].mean()
for f in (loss, jax.value_and_grad(loss, argnums=(0, 1))):
    compiled = compile_for("H200", f, h, w, labels)
    part = compiled.memory_analysis().temp_size_in_bytes / (4 * T * V)
    kernels = compiled.as_text().count('custom_call_target="mosaic_gpu')
    print("part:", part, "kernels:", kernels)
"""
    dump = {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, **dump, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    found = re.findall(r"part: (\S+) kernels: (\d+)", printed)
    parts = [float(part) for part, _ in found]
    # The backward pass is there twice, for hidden states that are finite and for others; once more
    # each for the last entries.
    assert [int(kernels) for _, kernels in found] == [1, 9]
    assert parts[0] < 0.02
    assert parts[1] < 0.05
    reports = [f.read_text() for f in tmp_path.glob("*.ptxas")]
    spills = [int(n) for r in reports for n in re.findall(r"(\d+) bytes spill stores", r)]
    assert spills
    # 88 bytes of the simplest end, once a tile.
    assert max(spills) <= 96
    assert not any(code in r for r in reports for code in ("C7510", "C7512", "C7513"))


def test_by_name_it_runs_or_says_all_that_is_in_the_way():
    h, w = jnp.ones((4, 12), jnp.float32), jnp.ones((12, 9), jnp.float32)
    labels = jnp.zeros(4, jnp.int32)
    message = "is float32; the tensor cores.* 4 tokens.* 12 numbers per token.* 9 entries"
    with pytest.raises(NotImplementedError, match=message):
        linear_cross_entropy(h, w, labels, implementation="mosaic_gpu")
    h, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    labels = jnp.zeros(8, jnp.int32)
    with pytest.raises(NotImplementedError, match="the program is for cpu"):
        linear_cross_entropy(h, w, labels, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("tokens", "here", "kernels"),
    [
        # Away from one, hidden states have their gradient from the chunked form, with the loss.
        (8, Device("cuda", "9.0"), (1, 5)),
        (8, Device("cpu"), (1, 2)),
        (9, Device("cuda", "9.0"), (0, 0)),
    ],
    ids=["on a Hopper", "for one", "a length that does not fit"],
)
def test_kernels_are_chosen_where_they_fit(tokens, here, kernels, monkeypatch):
    monkeypatch.setattr(cross_entropy, "default_device", lambda: here)
    h, w = jnp.ones((tokens, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    labels = jnp.zeros(tokens, jnp.int32)
    loss = lambda h, w: linear_cross_entropy(h, w, labels)[0].mean()
    for f, count in zip((loss, jax.grad(loss, argnums=(0, 1))), kernels, strict=True):
        assert lower_for("H200", f, h, w).as_text().count("@mosaic_gpu") == count


@pytest.mark.parametrize(("weights", "kernels"), [(0, 0), (None, 1)], ids=["each its own", "one"])
def test_instances_of_vmap_are_counted_as_they_run(weights, kernels):
    """Under `vmap` tokens of all instances share the weights, or each instance runs alone."""
    h, y = jnp.ones((2, 12, 64), jnp.bfloat16), jnp.zeros((2, 12), jnp.int32)
    w = jnp.ones((64, 64) if weights is None else (2, 64, 64), jnp.bfloat16)
    loss = jax.vmap(lambda h, w, y: linear_cross_entropy(h, w, y)[0], (0, weights, 0))
    assert lower_for("H200", loss, h, w, y).as_text().count("@mosaic_gpu") == kernels
