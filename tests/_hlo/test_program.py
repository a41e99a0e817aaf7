"""What a program runs: values computed twice, calls to the host, buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform._hlo import compile_and_dump, read

X = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)


def program_of(f, *args):
    compiled, dump = compile_and_dump(jax.jit(f).lower(*args))
    return read(compiled, dump=dump)


SCALE = jax.ShapeDtypeStruct((), jnp.bfloat16)


def scaled_softmax(x, scale):
    scaled = x * scale  # the line that two kernels compute
    m = scaled.max(-1, keepdims=True)
    e = jnp.exp(scaled.astype(jnp.float32) - m.astype(jnp.float32))
    return e / e.sum(-1, keepdims=True)


def test_a_value_that_two_kernels_compute():
    """Each may round it differently, and a row's maximum then is not the maximum of the row."""
    program = program_of(scaled_softmax, X, SCALE)
    found = [t for t in program.twice if "multiply" in t.ops]
    line = scaled_softmax.__code__.co_firstlineno + 1
    assert f"test_program.py:{line} (scaled_softmax)" in found[0].line
    assert len(found[0].kernels) >= 2
    assert found[0].elements == 64 * 256
    assert found[0].extra.other >= 64 * 256
    assert not found[0].recompute


def test_a_barrier_makes_it_one():
    def f(x, scale):
        scaled = jax.lax.optimization_barrier(x * scale)
        return scaled_softmax(scaled, jnp.ones((), jnp.bfloat16))

    program = program_of(f, X, SCALE)
    multiplied = [t for t in program.twice if "multiply" in t.ops and t.elements == 64 * 256]
    assert multiplied == []


def test_different_values_are_not_one():
    def f(x, y):
        return jnp.sin(x).sum(0), jnp.sin(y).sum(0), jnp.sin(x[::-1]).sum(1)

    assert program_of(f, X, X).twice == ()


def test_what_checkpoint_recomputes_is_said_to_be_asked_for():
    @jax.checkpoint
    def loss(w):
        return jnp.sum(jnp.sin(jnp.exp(w).sum(0, keepdims=True)) * w)

    program = program_of(jax.grad(loss), jax.ShapeDtypeStruct((32, 32), jnp.float32))
    assert all(twice.recompute for twice in program.twice if "exponential" in twice.ops)


def callback_step(x):
    def body(c, _):
        seen = jax.pure_callback(lambda c: np.asarray(c) * 2, x, c)  # in the loop
        return seen + 1, None

    y, _ = jax.lax.scan(body, x, None, length=7)
    jax.debug.print("{}", y.sum())
    return y


def test_calls_to_the_host_with_line_and_trips():
    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    program = program_of(callback_step, x)
    first = callback_step.__code__.co_firstlineno
    calls = {int(call.line.split(":")[1].split()[0]) - first: call.trips for call in program.host}
    assert calls == {2: 7, 6: 1}
    assert all("callback" in call.target for call in program.host)


def test_library_calls_are_opaque_not_free():
    program = program_of(jnp.linalg.eigvalsh, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    libraries = [k for k in program.kernels if k.kind == "library"]
    assert libraries
    assert all(k.label for k in libraries)


@pytest.mark.parametrize("rows", [1, 64])
def test_buffers_of_a_cpu_program(rows):
    compiled, dump = compile_and_dump(
        jax.jit(lambda x: jnp.tanh(x @ x.T) @ x).lower(jnp.ones((rows, 32)))
    )
    stats = compiled.memory_analysis()
    assert dump.launches is None  # a CPU lists none
    of = lambda kind: {b.allocation: b for b in dump.buffers if b.kind == kind}
    assert sum(b.bytes for b in of("parameter").values()) == stats.argument_size_in_bytes
    assert sum(b.bytes for b in of("output").values()) == stats.output_size_in_bytes
    names = {k.name for k in read(compiled).kernels}
    assert {b.instruction for b in of("output").values()} <= names
