"""The kernels of `fuse` without a GPU: in the interpreter, and compiled for one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._fuse import subjects
from tests._fuse.subjects import (
    DONATED,
    LONG,
    REFUSED,
    SHAPES,
    SUBJECTS,
    arguments_of,
    by_truth,
    normal,
    with_gradients,
)
from tests.oracle import assert_as_right_as, in_float64
from xform import fuse
from xform._compat import found_races
from xform._fuse._region import region_of
from xform._hlo import compile_for, lower_for
from xform.jaxpr import interpret, trace
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu import _rows
from xform.lowering.mosaic_gpu._row_passes import takes_own_functions

ROOT = Path(__file__).parents[3]


def by_kernels(f, *args, races=True):
    """Runs a function, its fused regions by kernels in the interpreter, which looks for races."""
    interpreter = plgpu.InterpretGPUParams(detect_races=races)
    kernel = lambda *xs, call_jaxpr, **rest: _rows.run(
        region_of(call_jaxpr), *xs, **rest, interpret=interpreter
    )
    run = interpret(trace(f, *args), {"fused": kernel}, default=_as_it_is)
    outs = run(*jax.tree.leaves(args))
    assert not (races and found_races())
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(f, *args)), outs)


def _as_it_is(eqn, *args):
    return eqn.primitive.bind(*args, **eqn.params)


def check(name, width, dtype, monkeypatch, rows=5):
    monkeypatch.setattr(subjects, "N", rows)
    f, arguments, argnums = SUBJECTS[name]
    args = arguments(width, dtype)
    found = by_kernels(with_gradients(fuse(f), argnums), *args)
    judge = jax.jit(with_gradients(f, argnums))(*args)
    assert_as_right_as(found, judge, in_float64(with_gradients(f, argnums), *args))


@pytest.mark.parametrize("name", ["residual + RMSNorm", "rotary embedding"])
def test_subject_is_as_right_as_a_plain_program(name, monkeypatch):
    check(name, 257, jnp.bfloat16, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("width", [257, 512])
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_is_as_right_as_a_plain_program(name, width, dtype, monkeypatch):
    check(name, width, dtype, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("width", [12_288, 65_537])
@pytest.mark.parametrize("name", ["softmax", "row cross-entropy"])
def test_rows_that_registers_do_not_hold(name, width, monkeypatch):
    check(name, width, jnp.bfloat16, monkeypatch, rows=3)


def test_more_rows_than_blocks_keep_sums(monkeypatch):
    monkeypatch.setattr(_rows, "_BLOCKS", 2)
    check("layer norm", 128, jnp.float32, monkeypatch)


def check_shape(f, shapes):
    args = arguments_of(shapes)
    run = with_gradients(fuse(f), tuple(range(len(args))))
    judge = jax.jit(with_gradients(f, tuple(range(len(args)))))
    assert_as_right_as(by_kernels(run, *args), judge(*args), in_float64(judge, *args))


@pytest.mark.parametrize(
    "name",
    ["over columns", "sums of each dim", "one row", "a weight a head", "a computed row is cut"],
)
def test_shapes_that_rows_come_in(name):
    check_shape(*SHAPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES, *LONG])
def test_all_shapes_that_rows_come_in(name, monkeypatch):
    monkeypatch.setattr(_rows, "_BLOCKS", 4)
    check_shape(*(SHAPES | LONG)[name])


def test_truth_values_go_in_and_out():
    x = normal(0, (5, 33))
    found, wanted = by_kernels(by_truth(fuse), x), by_truth(lambda f: f)(x)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), wanted)


@pytest.mark.parametrize("name", DONATED)
def test_results_are_written_over_operands_of_their_kind(name):
    """Values are those of a plain program; compiled for a GPU, no more memory is taken."""
    f, shapes, given, over = DONATED[name]
    args = [jnp.abs(x) for x in arguments_of(shapes)]
    # The interpreter's twin loads an operand as a whole, which other rows are written over.
    found = by_kernels(fuse(f, donate_argnums=given), *args, races=False)
    judge = jax.jit(f)(*args)
    assert_as_right_as(found, judge, in_float64(f, *args))
    fits = over == len(given)  # else JAX warns of what is donated in vain
    run = jax.jit(fuse(f, donate_argnums=given), donate_argnums=given if fits else ())
    program = compile_for("H200", run, *args)
    text = str(program.as_text())
    written = re.findall(r"output_to_operand_aliasing={(.*?)}, [a-z]", text)
    assert sum(text.count("(") for text in written) == over
    if fits:
        assert not re.search(r" copy(-start)?\(", text)
        assert program.memory_analysis().temp_size_in_bytes < 4096


def test_who_needs_a_donated_array_afterwards_has_it_by_a_copy():
    f = fuse(lambda x, y: x - 2 * y, donate_argnums=0)
    x = jnp.ones((64, 128))
    copies = lambda g: len(re.findall(r" copy\(", str(compile_for("H200", g, x).as_text())))
    donated = lambda g: jax.jit(g, donate_argnums=0)
    assert copies(donated(lambda x: f(x, x * 2))) == 0
    assert copies(donated(lambda x: f(x, x))) > 0
    assert copies(lambda x: (f(x, x * 2), x)) > 0
    assert copies(lambda x: f(x, x * 2)) > 0


def test_the_gpu_s_own_functions_are_for_what_is_rounded_afterwards():
    wide = lambda f: lambda x: f(x.astype(jnp.float32))
    softmax = wide(lambda x: jax.nn.softmax(x, axis=-1))
    narrow = lambda f: lambda x: f(x).astype(jnp.bfloat16)
    total = lambda x: jnp.exp(x - x.max(-1, keepdims=True)).sum(-1)
    cases = {
        True: [narrow(softmax), jnp.exp, jax.nn.silu, wide(total)],
        False: [
            softmax, wide(jnp.exp), lambda x: x + 1, narrow(wide(lambda x: jnp.exp(jnp.log(x)))),
            wide(lambda x: jnp.exp(x).max(-1)), lambda x: (jnp.exp(x), jnp.exp(wide(abs)(x))),
        ],
    }  # fmt: skip
    for own, functions in cases.items():
        for f in functions:
            (eqn,) = trace(fuse(f), jnp.ones((4, 8), jnp.bfloat16)).eqns
            assert takes_own_functions(region_of(eqn.params["call_jaxpr"])) == own


@pytest.mark.parametrize("name", REFUSED)
def test_without_a_kernel_it_raises_by_name(name):
    f, shape, why = REFUSED[name]
    with pytest.raises(NotImplementedError, match=why):
        lower_for("H200", fuse(f), jnp.ones(shape))


def compiled(names, width, tmp_path) -> dict[str, tuple]:
    """Of each subject, the kernels of forward pass and gradients, and what the compiler reports."""
    program = f"""
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from tests._fuse.subjects import SUBJECTS, with_gradients
from xform import fuse
from xform._hlo import compile_for, read
for name in {list(names)!r}:
    f, arguments, argnums = SUBJECTS[name]
    args = arguments({width}, jnp.bfloat16)
    for g in (fuse(f), with_gradients(fuse(f), argnums)):
        text = compile_for("H200", g, *args).as_text()
        entry = text[text.index("ENTRY"):]
        fusions = [line for line in entry.splitlines() if " fusion(" in line]
        kernels = entry.count('custom_call_target="mosaic_gpu')
        print("found:", name, "|", kernels, "|", len(fusions))
"""
    dump = {"MOSAIC_GPU_DUMP_TO": str(tmp_path), "MOSAIC_GPU_DUMP_PTXAS": "1"}
    environment = {**os.environ, **dump, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": "."}
    command = [sys.executable, "-c", program]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    found: dict[str, tuple] = {}
    for name, kernels, fusions in re.findall(r"found: (.*) \| (\d+) \| (\d+)", printed):
        found[name] = (*found.get(name, ()), int(kernels), int(fusions))
    return found


SUMS = {"residual + RMSNorm": 1, "layer norm": 1}
"""Where weights have gradients: one reduction finishes them."""


def check_compiled(names, width, tmp_path):
    found = compiled(names, width, tmp_path)
    # One forward, one forward and one backward, and what finishes sums.
    assert found == {name: (1, 0, 2, SUMS.get(name, 0)) for name in names}
    reports = [f.read_text() for f in tmp_path.glob("*.ptxas")]
    spills = [int(n) for r in reports for n in re.findall(r"(\d+) bytes spill stores", r)]
    assert len(spills) == 3 * len(names)
    assert max(spills) == 0
    if width % 1024 == 0:
        code = "".join(f.read_text() for f in tmp_path.glob("*.ptx"))
        assert "ld.global.v4.b32" in code
        assert "st.global.v4.b32" in code


def test_compiles_for_an_h200(tmp_path):
    check_compiled(["residual + RMSNorm"], 4096, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("width", [257, 4096, 7168])
def test_every_subject_compiles_for_an_h200(width, tmp_path):
    check_compiled(list(SUBJECTS), width, tmp_path)


@pytest.mark.slow
def test_long_rows_compile_for_an_h200(tmp_path):
    check_compiled(["softmax", "row cross-entropy"], 65_537, tmp_path)
