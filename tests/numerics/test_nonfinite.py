"""Where the first NaN or infinity is born: in every kind of program that encloses an equation."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xform import flex_attention
from xform.numerics import find_nonfinite
from xform.sharding import make_mesh


def lines_of(f) -> range:
    """The lines of a function's source, of which an answer must name one."""
    lines, first = inspect.getsourcelines(f)
    return range(first, first + len(lines))


def assert_in(origin, f):
    path, number, *_ = origin.line.replace(" ", ":").split(":")
    assert path == __file__
    assert int(number) in lines_of(f)


def test_a_scan_names_operation_line_iteration_and_operand():
    def step(c, _):
        return jnp.log(c - 1.0), c

    found = find_nonfinite(lambda xs: lax.scan(step, 3.0, xs))(jnp.arange(5))
    first = found.first
    assert found.outputs == ("result[0]", "result[1]")
    assert (first.operation, first.kind, first.iterations) == ("log", "nan", (("scan", 1),))
    assert first.operands[0].value == pytest.approx(np.log(np.float32(2)) - 1, rel=1e-6)
    assert_in(first, step)
    assert "log of a negative number" in str(found)


def test_iteration_7_of_a_nested_scan_in_a_vmap_at_batch_index_3():
    def outer(c, row):
        c = lax.scan(lambda a, z: (a + z, None), c, row)[0]
        return c, jnp.sqrt(10.0 - c)

    xs = jnp.full((9, 5, 3), 0.1).at[7, 3, 1].set(50.0)
    program = lambda xs: jax.vmap(lambda x: lax.scan(outer, 0.0, x), in_axes=1)(xs)
    first = find_nonfinite(jax.jit(program))(xs).first
    assert (first.operation, first.iterations) == ("sqrt", (("scan", 7),))
    assert first.index == (3,)
    assert first.batch == (("`xs` dimension 1", 3),)
    assert_in(first, outer)


def test_the_inner_of_two_loops_has_both_iterations():
    inner = lambda a, z: (jnp.sqrt(a - z), None)
    outer = lambda c, row: (lax.scan(inner, c, row)[0] + 4.0, None)
    rows = jnp.zeros((4, 6)).at[2, 5].set(100.0)
    first = find_nonfinite(lambda rows: lax.scan(outer, 4.0, rows)[0])(rows).first
    assert first.iterations == (("scan", 2), ("scan", 5))


def test_a_while_loop_counts_its_turns_and_its_test_is_watched():
    body = lambda c: (c[0] + 1, jnp.sqrt(c[1] - 1.0))
    found = find_nonfinite(lambda x: lax.while_loop(lambda c: c[0] < 9, body, (0, x)))(4.0)
    assert found.first.iterations == (("while", 2),)
    # The test alone sees the root of a negative number, in the turn that ends the loop.
    test = lambda x: ~(jnp.sqrt(x) < 0) & (x >= 0)
    found = find_nonfinite(lambda x: lax.while_loop(test, lambda x: x - 1, x))(2.0)
    assert not found
    assert [(o.operation, o.iterations) for o in found.dead] == [("sqrt", (("while", 3),))]


def test_only_the_branch_that_runs_is_looked_at():
    f = lambda x: lax.cond(x > 0, jnp.log, lambda x: jnp.sqrt(x) * 2, x)
    assert find_nonfinite(f)(-1.0).first.operation == "sqrt"
    assert not find_nonfinite(f)(2.0)
    assert find_nonfinite(f)(2.0).dead == ()


@pytest.mark.parametrize("checked", [True, False])
def test_a_device_of_a_mesh(checked):
    mesh = make_mesh(dp=4, tp=2)

    def shard(x):
        return lax.scan(lambda c, _: (jnp.log(c - 5), None), x, None, length=2)[0]

    sharded = jax.shard_map(
        shard, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P(("dp", "tp")), check_vma=checked
    )
    x = np.full(16, 5 + np.exp(5.5), np.float32)
    x[11] = 4.0
    x = jax.device_put(x, jax.NamedSharding(mesh, P(("dp", "tp"))))
    found = find_nonfinite(sharded)(x)
    assert found.first.device == (("dp", 2), ("tp", 1))
    assert found.first.index == (1,)
    assert found.first.iterations == (("scan", 0),)
    assert found.first.operands[0].value == -1.0


def test_pmap_is_a_mesh_too():
    f = jax.pmap(lambda x: jnp.log(x - 5))
    found = find_nonfinite(f)(jnp.arange(8.0) + 1.5)
    assert [i for _, i in found.first.device] == [0]
    assert found.first.more_devices == 3


def test_the_gradient_of_a_norm_at_zero():
    found = find_nonfinite(jax.grad(lambda x: jnp.sqrt((x**2).sum())))(jnp.zeros(3))
    assert (found.first.operation, found.first.kind) == ("div", "inf")
    assert found.first.operands[1].value == 0
    assert "derivative of `sqrt` at 0" in str(found.first)
    assert found.origins[1].kind == "nan"
    assert found.origins[1].phase == "backward"


@pytest.mark.parametrize("op", [jnp.sqrt, jnp.log], ids=["sqrt", "log"])
def test_an_unselected_branch_poisons_a_gradient(op):
    f = lambda x: jnp.where(x > 0, op(x), 0.0).sum()
    x = jnp.array([1.0, 0.0, 2.0])
    forward = find_nonfinite(f)(x)
    assert not forward
    found = find_nonfinite(jax.grad(f))(x)
    assert found.origins[-1].kind == "nan"
    assert found.origins[-1].index == (1,)
    assert "Mask before the operation" in str(found.origins[-1])
    cured = lambda x: jnp.where(x > 0, op(jnp.where(x > 0, x, 1)), 0.0).sum()
    assert not find_nonfinite(jax.grad(cured))(x)


def test_what_reaches_no_result_is_listed_apart():
    def f(x):
        lost = jnp.log(x)  # -inf, and then finite again
        return jnp.exp(lost) + 1 / jnp.where(x > 0, x, 1)

    found = find_nonfinite(f)(jnp.array([0.0, 1.0]))
    assert not found
    assert found.first is None
    assert [(o.operation, o.kind, o.index) for o in found.dead] == [("log", "inf", (0,))]
    assert "reached no result: Inf in `log(0)`" in str(found)


def test_dead_and_live_side_by_side():
    def f(x, y):
        dead = jnp.where(x > 0, jnp.log(x), 0.0)
        return {"fine": dead, "broken": (jnp.sqrt(y),)}

    found = find_nonfinite(f)(jnp.zeros(2), jnp.array([1.0, -1.0]))
    assert found.outputs == ("result['broken'][0]",)
    assert [o.operation for o in found.origins] == ["sqrt"]
    assert [o.operation for o in found.dead] == ["log"]


def test_an_argument_that_comes_broken():
    f = lambda params, *rows, scale: params["w"] @ rows[1] * scale
    rows = jnp.ones(2), jnp.ones(2).at[1].set(jnp.nan)
    found = find_nonfinite(f)({"w": jnp.ones((3, 2))}, *rows, scale=2.0)
    assert (found.first.operation, found.first.line, found.first.index) == (
        "argument", "`rows[1]`", (1,),
    )  # fmt: skip
    assert len(found.origins) == 1  # the product passes it on


def test_arrays_without_elements():
    f = lambda a, b: (a @ b, jnp.log(a), jnp.sum(a / a), lax.sort(b))
    assert not find_nonfinite(f)(jnp.zeros((3, 0)), jnp.zeros((0, 2)))


def test_a_number_of_the_program_itself_where_nothing_is_born():
    masked = lambda x: jnp.max(jnp.where(x > 9, x, -jnp.inf))
    found = find_nonfinite(jax.jit(masked))(jnp.arange(4.0))
    assert (found.first.kind, found.first.operation) == ("inf", "literal")
    assert_in(found.first, masked)
    born = find_nonfinite(lambda x: masked(x) + jnp.log(x[0]))(jnp.arange(4.0))
    assert [origin.operation for origin in born.origins] == ["log"]


def test_rows_of_a_product_are_told_apart():
    """An infinite row is old news; another row's overflow is born here."""
    x = jnp.array([[jnp.inf, 1.0], [3e38, 3e38]])
    found = find_nonfinite(lambda x, y: x @ y)(x, jnp.ones((2, 1)))
    born = found.origins[-1]
    assert (born.operation, born.kind, born.index) == ("dot_general", "inf", (1, 0))


@pytest.mark.parametrize(
    ("f", "args", "operation", "kind", "index"),
    [
        (lambda x: x.astype(jnp.float16), (np.float32(1e5),), "convert_element_type", "inf", ()),
        (lambda x, i: jnp.take(x, i), (np.ones(3), np.array([1, 7])), "gather", "nan", (1,)),
        (lambda x: jnp.exp(x).sum(0), (np.array([[1, 99.0]]),), "exp", "inf", (0, 1)),
        (jnp.cumsum, (np.array([3e38, 3e38, 0], np.float32),), "cumsum", "inf", (1,)),
        (lambda x: (x * 1j) / 0, (np.ones(2),), "div", "nan", (0,)),
        (lambda n: 1 / n, (np.array([2, 0]),), "div", "inf", (1,)),
        (lambda x: lax.rsqrt(x), (jnp.zeros(2, jnp.bfloat16),), "rsqrt", "inf", (0,)),
    ],
    ids=["convert", "take", "exp", "cumsum", "complex", "integers", "bf16"],
)
def test_kinds_of_operations(f, args, operation, kind, index):
    first = find_nonfinite(f)(*args).first
    assert (first.operation, first.kind, first.index) == (operation, kind, index)


def test_a_row_that_is_masked_everywhere():
    masked = lambda n: jnp.where(jnp.arange(4) < n, 1.0, -jnp.inf)
    found = find_nonfinite(lambda n: jax.nn.softmax(masked(n)))(0)
    assert found.first.operation == "sub"
    assert [x.value for x in found.first.operands] == [-np.inf, -np.inf]
    assert not find_nonfinite(lambda n: jax.nn.softmax(masked(n)))(2)


def test_custom_derivatives_and_remat():
    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)

    def backward(x, ct):
        return (ct * 0.5 / jnp.sqrt(x),)

    root.defvjp(lambda x: (root(x), x), backward)

    def call(x):
        return jnp.sum(root(x) * 2)

    f = jax.checkpoint(call)
    found = find_nonfinite(jax.jit(jax.grad(f)))(jnp.array([1.0, 0.0]))
    assert found.first.operation == "div"
    assert [x.value for x in found.first.operands] == [1.0, 0.0]
    assert_in(found.first, call)  # JAX gives a backward rule the line of the call
    assert find_nonfinite(f)(jnp.array([-1.0])).first.operation == "sqrt"


def test_a_reverse_scan_counts_as_the_loop_does():
    step = lambda c, x: (c * jnp.where(x > 0, jnp.log(x), 1.0), None)
    f = lambda xs: lax.scan(step, 1.0, xs)[0]
    found = find_nonfinite(jax.grad(f))(jnp.array([1.5, 2.0, 0.0, 3.0, 4.0]))
    assert found.origins[-1].iterations == (("scan", 2),)
    assert found.origins[-1].phase == "backward"


def test_attention_is_one_operation():
    q = jnp.ones((1, 4, 1, 8)).at[0, 2].set(1e30)
    found = find_nonfinite(lambda q: flex_attention(q, q, q).sum())(q * 1e10)
    assert found.first.operation == "argument"
    found = find_nonfinite(lambda q: flex_attention(q, q, q).sum())(q)
    assert found.first.operation == "flex_attention"
    assert found.first.operands[0].high == pytest.approx(1e30)


def test_an_explicit_mesh_outside_of_shard_map():
    mesh = make_mesh(dp=4, tp=2)
    x = np.ones((8, 6), np.float32)
    x[5, 4] = -1
    x = jax.device_put(x, jax.NamedSharding(mesh, P("dp", "tp")))
    with jax.set_mesh(mesh):
        first = find_nonfinite(lambda x: jnp.log(x) * 2)(x).first
    assert (first.index, first.operands[0].value) == ((5, 4), -1.0)


def test_no_call_to_the_host():
    """The run is one program."""
    seen = []
    jit = jax.jit

    def spy(f=None, **options):
        if f is None:
            return lambda f: spy(f, **options)
        compiled = jit(f, **options)

        def call(*args):
            seen.append(compiled.lower(*args).as_text())
            return compiled(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", spy)
        found = find_nonfinite(lambda xs: lax.map(lambda x: jnp.log(x) + 1, xs))(jnp.array([0.0]))
    assert found.first.operation == "log"
    assert len(seen) == 1
    assert "callback" not in seen[0]


def test_traced_arguments_raise():
    with pytest.raises(TypeError, match="call it on concrete arrays"):
        jax.jit(lambda x: find_nonfinite(jnp.log)(x).first)(1.0)
