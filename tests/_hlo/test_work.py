"""Operations and bytes of compiled programs, against formulas and against XLA's own count."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform._hlo import Work, parse, read, total
from xform._hlo._work import _pairs
from xform._hlo._work import total as total_of

shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)


def program_of(f, *args):
    return read(jax.jit(f).lower(*args).compile())


def matrix(f, *args) -> int:
    return program_of(f, *args).total(lambda k: k.work.matrix)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        ("ij,jk->ik", dict(i=7, j=33, k=5)),
        ("ij,kj->ik", dict(i=16, j=8, k=24)),
        ("bhqd,bhkd->bhqk", dict(b=2, h=3, q=8, k=16, d=4)),
        ("bij,ij->b", dict(b=6, i=4, j=9)),
        ("i,j->ij", dict(i=64, j=3)),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_exact(spec, dims, dtype):
    a, b = spec.split("->")[0].split(",")
    args = [shape(*(dims[i] for i in name), dtype=dtype) for name in (a, b)]
    counted = program_of(lambda a, b: jnp.einsum(spec, a, b), *args)
    work = sum((k.work for k in counted.kernels), Work())
    contracted = set(a) & set(b) - set(spec.split("->")[1])
    volume = np.prod(list(dims.values()))
    if work.matrix:
        assert work.matrix == 2 * volume
    else:  # XLA rewrote a product of vectors as multiplications
        assert not contracted or volume < 1000
        assert work.other >= volume


def test_trips_multiply():
    w = shape(5, 3, 16, 16)

    def f(w, x):
        inner = lambda c, w: (c @ w, None)
        outer = lambda c, w: (jax.lax.scan(inner, c, w)[0], None)
        return jax.lax.scan(outer, x, w)[0]

    program = program_of(f, w, shape(4, 16))
    assert program.total(lambda k: k.work.matrix) == 5 * 3 * 2 * 4 * 16 * 16
    assert [(loop.trips, loop.runs) for loop in program.loops] == [(5, 1), (3, 5)]


def test_remat_of_a_scan_counts_the_recompute():
    """One product forward, one again, two backward: 4 × 24, less what the first layer need not."""

    def loss(w):
        body = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w) @ w, None))
        return jax.lax.scan(body, jnp.ones((8, 8)), w)[0].sum()

    product = 2 * 8**3
    # Forward 2. Backward: the first product again, and two for each.
    assert matrix(jax.grad(loss), shape(24, 8, 8)) == 24 * (2 + 1 + 4) * product


def test_an_unknown_trip_count_is_said_and_counts_once():
    def f(x, n):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ c[0], c[1] + 1), (x, 0))[0]

    program = program_of(f, shape(8, 8), shape(dtype=jnp.int32))
    (loop,) = program.loops
    assert loop.trips is None
    assert "test_work.py" in loop.line
    (product,) = [k for k in program.kernels if k.kind == "matmul"]
    assert product.loops == (loop.line,)
    assert product.trips == 1


def test_of_a_conditional_the_dearest_branch_counts():
    def f(p, x):
        branches = [lambda x: x @ x, lambda x: x @ x @ x @ x, jnp.sin]
        return jax.lax.scan(lambda c, p: (jax.lax.switch(p, branches, c), None), x, p)[0]

    program = program_of(f, shape(6, dtype=jnp.int32), shape(16, 16))
    assert program.total(lambda k: k.work.matrix) == 6 * 3 * 2 * 16**3
    assert len([k for k in program.kernels if k.kind == "matmul"]) == 4
    assert {branch for k in program.kernels for _, branch in k.path} == {0, 1, 2}


CONVOLUTIONS = [
    dict(window_strides=(1, 1), padding="SAME"),
    dict(window_strides=(2, 1), padding="VALID"),
    dict(window_strides=(1, 2), padding=((2, 1), (0, 3)), rhs_dilation=(2, 1)),
    dict(window_strides=(1, 1), padding=((1, 1), (1, 1)), lhs_dilation=(2, 3)),
]


def positions(size, kernel, out, stride, low, base, window) -> int:
    """Counts by trying each."""
    at = lambda o, k: o * stride + k * window - low
    return sum(
        at(o, k) % base == 0 and 0 <= at(o, k) // base < size
        for o, k in itertools.product(range(out), range(kernel))
    )


def test_positions_of_a_convolution():
    for size, kernel, stride, low, base, window in itertools.product(
        (1, 5, 8), (1, 3), (1, 2, 3), (0, 2), (1, 2, 3), (1, 2)
    ):
        padded = (size - 1) * base + 1 + 2 * low
        out = max(0, (padded - (kernel - 1) * window - 1) // stride + 1)
        counted = _pairs(
            size, kernel, out, stride=stride, pad=low, lhs_dilate=base, rhs_dilate=window
        )
        assert counted == positions(size, kernel, out, stride, low, base, window)


CONVOLUTION = """HloModule m

ENTRY %main (x: f32[2,9,8,4], w: f32[3,2,2,6]) -> f32[2,9,4,6] {
  %x = f32[2,9,8,4]{3,2,1,0} parameter(0)
  %w = f32[3,2,2,6]{3,2,1,0} parameter(1)
  ROOT %y = f32[2,9,4,6]{3,2,1,0} convolution(%x, %w), ATTRIBUTES
}
""".replace(
    "ATTRIBUTES",
    "window={size=3x2 stride=1x2 pad=1_1x0_0}, dim_labels=b01f_01io->b01f, feature_group_count=2",
)


def test_a_convolution_counts_no_padding():
    module = parse(CONVOLUTION)
    rows = positions(9, 3, 9, 1, 1, 1, 1)
    columns = positions(8, 2, 4, 2, 0, 1, 1)
    assert total_of(module, module.computations["main"]).matrix == 2 * 2 * rows * columns * 2 * 6


@pytest.mark.parametrize("options", CONVOLUTIONS)
def test_a_convolution_as_xla_counts_it(options):
    x, w = shape(2, 9, 8, 4), shape(3, 2, 4, 6)
    f = lambda x, w: jax.lax.conv_general_dilated(
        x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )
    compiled = jax.jit(f).lower(x, w).compile()
    program = read(compiled)
    if any(k.kind == "library" for k in program.kernels):
        pytest.skip("this CPU has a library for it")
    counted = program.total(lambda k: k.work.matrix)
    assert counted == compiled.cost_analysis()["flops"] > 0


def test_elementwise_as_xla_counts_it():
    def f(x, y):
        return (jnp.tanh(x) * y + jnp.exp(y)).sum(0) / 3, jnp.max(x - y)

    compiled = jax.jit(f).lower(shape(32, 16), shape(32, 16)).compile()
    work = sum((k.work for k in read(compiled).kernels), Work())
    theirs = compiled.cost_analysis()
    assert work.transcendental == theirs["transcendentals"] == 2 * 32 * 16
    assert work.other == theirs["flops"]


def test_a_scan_reads_each_layers_weights_once():
    """Not the whole stack in each layer: only the slice counts."""
    w, x = shape(10, 64, 64), shape(1, 64)
    program = program_of(lambda w, x: jax.lax.scan(lambda c, w: (c @ w, None), x, w)[0], w, x)
    stack = 10 * 64 * 64 * 4
    read_bytes = program.total(lambda k: k.read)
    # Once out of the stack, and once into the product where the slice is a kernel of its own.
    assert stack <= read_bytes <= 2 * stack + 10 * 64 * 4 * 8


def test_a_scan_writes_each_result_once():
    """Results go into the stack in place: the update counts, not the stack."""
    x = shape(100)
    f = lambda x: jax.lax.scan(lambda c, _: (c * 2, jnp.sin(c)), x, None, length=50)[1]
    program = program_of(f, x)
    stack = 50 * 100 * 4
    # To fill it, in the loop, and to copy it out at most thrice: not 50 times.
    assert stack <= program.total(lambda k: k.written) <= 5 * stack


def test_total_counts_what_is_asked():
    program = program_of(lambda x: x @ x, shape(8, 8))
    assert total(program.kernels, lambda k: 1) == len(program.kernels)
