"""Programs held to what their rules declared, most compiled for H200s that are not there."""

import re
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType

from xform.sharding import AuditError, audit, declare, make_mesh

P = jax.P
S = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16


def auto_mesh(**sizes: int) -> AbstractMesh:
    """A mesh along whose axes the partitioner decides."""
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def varying(x, *axes):
    return lax.pcast(x, axes, to="varying")


def over(f, in_specs, out_specs):
    """`f` on each device of the mesh in context."""
    return lambda *args: jax.shard_map(f, in_specs=in_specs, out_specs=out_specs)(*args)


# ---- a program of rules --------------------------------------------------------------------------

WIDTH, TOKENS, LAYERS = 256, 1024, 4
SPECS = ((P(None, "dp", "tp"), P(None, "tp", "dp")), P("dp"))
ARGS = (
    (S((LAYERS, WIDTH, 4 * WIDTH), BF16), S((LAYERS, 4 * WIDTH, WIDTH), BF16)),
    S((TOKENS, WIDTH), BF16),
)


def layer(x, w):
    """Fully sharded over dp, split over tp; each gather and sum declared, its derivative too."""
    with declare("gather", "dp"):
        up = lax.all_gather(w[0], "dp", axis=0, tiled=True)
        down = lax.all_gather(w[1], "dp", axis=1, tiled=True)
    with declare("column", "tp"):
        x = varying(x, "tp")
    h = jnp.tanh(x @ up)
    with declare("row", "tp"):
        return lax.psum(h @ down, "tp")


def loss(w, x):
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, w)
    with declare("loss", "dp"):
        return lax.psum(jnp.sum(x.astype(jnp.float32) ** 2), "dp")


step = jax.value_and_grad(over(loss, SPECS, P()))


@pytest.fixture(scope="module")
def report():
    return audit(step, ARGS, {"dp": 4, "tp": 2}, specs=SPECS)


def test_what_is_declared_passes_and_is_listed(report):
    counts = report.counts()
    assert set(counts) == {
        "gather all-gather dp",
        "gather reduce-scatter dp",
        "row all-reduce tp",
        "column all-reduce tp",
        "loss all-reduce dp",
    }
    gathers = counts["gather all-gather dp"]
    # XLA joins the gathers of a layer's two weights; backward reads what the forward pass kept.
    assert gathers["turns"] == LAYERS
    of_one = WIDTH * 4 * WIDTH // 2 * 2 * 3 // 4  # bytes of half a matrix in bf16, 3 of 4 parts
    assert gathers["sent"] == 2 * LAYERS * of_one
    assert counts["gather reduce-scatter dp"]["sent"] == 2 * LAYERS * of_one
    assert counts["row all-reduce tp"]["turns"] == LAYERS
    assert (counts["loss all-reduce dp"]["turns"], counts["loss all-reduce dp"]["sent"]) == (1, 6)


def test_a_report_has_lines_text_and_html(report):
    assert all("test_audit.py" in m.line for m in report.messages)
    text = str(report)
    assert "step" in text or "dp=4 × tp=2" in text
    assert "product meanwhile" in text
    assert "all-gather" in text
    gather = next(m for m in report.messages if m.op == "all-gather")
    assert gather.paths == ("argument '0/0'", "argument '0/1'")
    scatter = next(m for m in report.messages if m.op == "reduce-scatter")
    assert scatter.paths == ("result '1/0'", "result '1/1'")
    assert report._repr_html_().count("<tr>") == 1 + len(report.messages)
    assert report.memory["arguments"] == (2 * LAYERS * WIDTH * 4 * WIDTH // 8 + 256 * WIDTH) * 2


def test_sixteen_thousand_devices_take_seconds():
    args = (
        (S((2, 2048, 8192), BF16), S((2, 8192, 2048), BF16)),
        S((2048, 2048), BF16),
    )
    start = time.perf_counter()
    report = audit(step, args, {"dp": 2048, "tp": 8}, specs=SPECS)
    assert time.perf_counter() - start < 30
    assert report.mesh == {"dp": 2048, "tp": 8}
    assert report.counts()["gather all-gather dp"]["turns"] == 2


# ---- undeclared ----------------------------------------------------------------------------------


def test_the_sum_of_an_implicit_pcast_is_undeclared():
    """Weights meet rows that differ over dp; the derivative sums over dp, which no line says."""

    def total(w, x):
        y = x @ w
        with declare("loss", "dp"):
            return lax.psum(y.sum(), "dp")

    specs = (P(), P("dp"))
    args = (S((128, 128), jnp.float32), S((512, 128), jnp.float32))
    g = jax.grad(over(total, specs, P()))
    with pytest.raises(AuditError) as error:
        audit(g, args, {"dp": 4}, specs=specs)
    message = str(error.value)
    assert "all-reduce of f32[128,128] (the result) over dp" in message
    assert "98.3 kB sent in each of 1 turns" in message
    assert re.search(r"test_audit\.py:\d+ \(.*total\)", message)
    assert [x.kind for x in error.value.report.offenders] == ["undeclared"]


def test_a_declaration_of_another_axis_does_not_count():
    def f(x):
        with declare("row", "tp"):
            return lax.psum(x, ("dp", "tp"))

    specs = P("dp", "tp")
    with pytest.raises(AuditError, match=r"over dp, tp, .* \('row' declares tp\)"):
        audit(over(f, specs, P()), (S((8, 8), BF16),), {"dp": 2, "tp": 2}, specs=specs)


def test_sums_that_xla_joins_are_told_apart():
    """Twelve sums become one; eleven are declared."""

    def f(ws):
        out = []
        for i, w in enumerate(ws):
            scope = declare(f"r{i}", "dp") if i != 3 else jax.named_scope("forgotten")
            with scope:
                out.append(lax.psum(w * i, "dp"))
        return out

    args = ([S((64, 64), jnp.float32)] * 12,)
    report = audit(over(f, P("dp"), P()), args, {"dp": 4}, specs=P("dp"), strict=False)
    (message,) = report.messages
    assert set(message.rules) == {f"r{i}" for i in range(1, 12) if i != 3} | {"r0"}
    assert len(message.undeclared) == 1
    assert "forgotten/psum" in report.complaint()


def folded(x, y):
    """XLA makes one sum over both axes of it, which has neither name."""
    del y
    x = lax.psum(x, "tp")
    with declare("rows", "dp"):
        return lax.psum(x, "dp")


def added(x, y):
    """XLA sums once, and keeps the name of the first."""
    with declare("rows", "dp", "tp"):
        x = lax.psum(x, ("dp", "tp"))
    return x + lax.psum(y, ("dp", "tp"))


@pytest.mark.parametrize("f", [folded, added], ids=lambda f: f.__name__)
def test_what_xla_swallows_is_found_all_the_same(f):
    specs = P(("dp", "tp"))
    args = (S((64, 64), jnp.float32), S((64, 64), jnp.float32))
    with pytest.raises(AuditError, match=r"all-reduce of f32\[\d+,64\] over dp, tp"):
        audit(over(f, specs, P()), args, {"dp": 4, "tp": 2}, specs=specs)
    said = declare("all", "dp", "tp")(f)
    (message,) = audit(over(said, specs, P()), args, {"dp": 4, "tp": 2}, specs=specs).messages
    assert message.op == "all-reduce"
    assert "rows" in message.rules or "all" in message.rules


def test_an_ensemble_of_sharded_models_under_vmap():
    def f(ws, x):
        def of_one(w, x):
            with declare("total", "dp"):
                return lax.psum((x * w).sum(), "dp")

        g = lambda w: jax.shard_map(of_one, in_specs=(P(), P("dp")), out_specs=P())(w, x)
        return jax.vmap(g)(ws)

    args = (S((3,), jnp.float32), S((64,), jnp.float32))
    (message,) = audit(f, args, {"dp": 4}, specs=(P(), P("dp"))).messages
    assert (message.arrays, message.rules) == (("f32[3]",), ("total",))


def test_a_partly_manual_program_has_both_kinds():
    """A ring over pp by hand, products over tp by the partitioner."""

    def f(x, w):
        @partial(jax.shard_map, in_specs=(P("pp"), P()), out_specs=P("pp"), axis_names={"pp"})
        def stage(x, w):
            with declare("block", "tp"):
                w = lax.with_sharding_constraint(w, P(None, "tp"))
                y = jnp.tanh(x @ w) @ w.T
            with declare("send", "pp"):
                return lax.ppermute(y, "pp", [(0, 1), (1, 0)])

        return stage(x, w)

    args = (S((64, 512), jnp.float32), S((512, 512), jnp.float32))
    specs = (P("pp"), P(None, "tp"))
    messages = audit(f, args, auto_mesh(pp=2, tp=4), specs=specs).messages
    assert {(m.op, m.axes, m.rules, m.inserted) for m in messages} == {
        ("all-reduce", ("tp",), ("block",), True),
        ("collective-permute", ("pp",), ("send",), False),
    }


def test_turns_are_counted_through_nested_loops_and_branches():
    def f(x):
        def twice(c):
            with declare("inner", "dp"):
                step = lambda c, _: (varying(lax.psum(jnp.sin(c), "dp"), "dp"), None)
                return lax.scan(step, c, length=5)[0]

        def body(c, _):
            with declare("asked", "dp"):
                go = lax.pmax(c.sum(), "dp") > 0
            return lax.cond(go, twice, lambda c: c, c), None

        return lax.scan(body, x, length=3)[0]

    report = audit(
        over(f, P("dp"), P("dp")), (S((64, 256), jnp.float32),), {"dp": 4}, specs=P("dp")
    )
    turns = {m.rules: (m.trips, m.looped) for m in report.messages}
    assert turns == {("asked",): (3, True), ("inner",): (15, True)}


def test_sums_over_several_axes_and_of_tuples_and_exchanges():
    def f(x):
        with declare("both", "dp", "tp"):
            a, b = lax.psum((x, 2 * x[:2]), ("tp", "dp"))
        with declare("exchange", "tp"):
            c = lax.all_to_all(x, "tp", 0, 1, tiled=True)
        with declare("ring", "dp"):
            c = lax.ppermute(c, "dp", [(0, 1), (1, 0)])
        return a, b, c

    specs = P(("dp", "tp"))
    out = (P(), P(), P(("dp", "tp")))
    report = audit(
        over(f, specs, out), (S((64, 64), jnp.float32),), {"dp": 2, "tp": 4}, specs=specs
    )
    assert {(m.op, m.axes, m.rules) for m in report.messages} == {
        ("all-reduce", ("dp", "tp"), ("both",)),
        ("all-to-all", ("tp",), ("exchange",)),
        ("collective-permute", ("dp",), ("ring",)),
    }


def test_what_the_partitioner_inserts_is_named_by_what_wants_it():
    """A value goes from (dp, tp) to (tp, dp); that is declared where it is asked for, or not."""
    mesh = auto_mesh(dp=4, tp=2)

    def f(x, *, said):
        x = lax.with_sharding_constraint(jnp.tanh(x), P("dp", "tp"))
        with declare("turn", "dp", "tp") if said else jax.named_scope("turn"):
            x = lax.with_sharding_constraint(x, P("tp", "dp"))
        return jnp.sin(x)

    args = (S((512, 512), jnp.float32),)
    report = audit(partial(f, said=True), args, mesh, specs=P("dp", "tp"))
    assert {m.rules for m in report.messages} == {("turn",)}
    assert all(m.inserted for m in report.messages)
    with pytest.raises(AuditError, match=r"put in by the partitioner.*test_audit\.py"):
        audit(partial(f, said=False), args, mesh, specs=P("dp", "tp"))


def test_explicit_axes_are_held_to_the_same():
    def f(w, x, *, said):
        h = jnp.tanh(jnp.einsum("bd,df->bf", x, w, out_sharding=P("dp", "tp")))
        with declare("row", "tp") if said else jax.named_scope("row"):
            return jnp.einsum("bf,df->bd", h, w, out_sharding=P("dp", None))

    args = (S((64, 256), jnp.float32), S((512, 64), jnp.float32))
    specs = (P(None, "tp"), P("dp", None))
    (message,) = audit(partial(f, said=True), args, {"dp": 2, "tp": 4}, specs=specs).messages
    assert (message.op, message.axes, message.rules) == ("all-reduce", ("tp",), ("row",))
    with pytest.raises(AuditError, match=r"all-reduce of f32\[256,64\] \(the result\) over tp"):
        audit(partial(f, said=False), args, {"dp": 2, "tp": 4}, specs=specs)


def test_a_reshape_into_microbatches_moves_nothing():
    """Rows split over dp, taken apart so that each microbatch keeps every device busy."""
    mesh = auto_mesh(dp=8)
    rows = S((64, 32), jnp.float32)

    def right(x):
        return jnp.sin(x.reshape(8, 4, 2, 32).swapaxes(0, 1))

    def wrong(x):
        return jnp.sin(lax.with_sharding_constraint(x.reshape(4, 16, 32), P(None, "dp")))

    assert audit(right, (rows,), mesh, specs=P("dp")).messages == ()
    with pytest.raises(AuditError, match="all-to-all"):
        audit(wrong, (rows,), mesh, specs=P("dp"))


# ---- promises ------------------------------------------------------------------------------------


def ring(x, w, *, hidden):
    """The chunks of x go round while they are multiplied."""
    n, out = 4, []
    for turn in range(n):
        y = x @ w
        if turn < n - 1:
            with declare("ring", "tp", hidden=hidden):
                x, y = lax.optimization_barrier(
                    (lax.ppermute(x, "tp", [(i, (i + 1) % n) for i in range(n)]), y)
                )
        out.append(y)
    return jnp.concatenate(out)


RING = ((S((2048, 4096), BF16), S((4096, 4096), BF16)), (P("tp"), P(None, "tp")))


def test_what_is_promised_hidden_and_is_passes():
    args, specs = RING
    report = audit(
        over(partial(ring, hidden=True), specs, P(None, "tp")), args, {"tp": 4}, specs=specs
    )
    assert report.counts()["ring collective-permute tp"]["covered"] == 3


def test_what_is_promised_hidden_and_is_not_fails():
    def f(x, w):
        with declare("gather", "tp", hidden="all-gather"):
            return lax.all_gather(x, "tp", tiled=True) @ w

    args, specs = RING
    with pytest.raises(
        AuditError, match=r"promised to be hidden(.|\n)*all-gather of bf16.*'gather'"
    ):
        audit(over(f, specs, P(None, "tp")), args, {"tp": 4}, specs=specs)


def test_a_promise_for_one_operation_leaves_the_others_free():
    def f(x, w):
        with declare("gather", "tp", hidden="reduce-scatter"):
            return lax.all_gather(x, "tp", tiled=True) @ w

    args, specs = RING
    audit(over(f, specs, P(None, "tp")), args, {"tp": 4}, specs=specs)


@pytest.mark.parametrize("outside", [True, False])
def test_what_is_promised_once_stands_outside_of_loops(outside):
    def f(xs):
        def body(total, x):
            g = jnp.outer(x, x)
            if not outside:
                with declare("reduce", "dp", once=True):
                    g = varying(lax.psum(g, "dp"), "dp")
            return jnp.sin(total + g), None  # which keeps XLA from moving the sum out

        zeros = varying(jnp.zeros((256, 256)), "dp")
        total, _ = lax.scan(body, zeros, xs)
        with declare("reduce", "dp", once=True):
            return lax.psum(total, "dp") / (1 if outside else 2)

    g = over(f, P(None, "dp"), P())
    args = (S((6, 512), jnp.float32),)
    if outside:
        assert [m.trips for m in audit(g, args, {"dp": 2}, specs=P(None, "dp")).messages] == [1]
        return
    with pytest.raises(AuditError, match=r"promised to run once, and stands in a loop"):
        audit(g, args, {"dp": 2}, specs=P(None, "dp"))


# ---- held whole ----------------------------------------------------------------------------------


def test_an_argument_that_nobody_split_is_named_by_its_path():
    """1,003 codes do not divide by 8, and somebody fell back on no split at all."""
    params = {"embed": S((1003, 64), jnp.float32), "norm": S((64,), jnp.float32)}
    specs = ({"embed": P(), "norm": P()}, P("dp"))

    def f(params, x):
        return x @ params["embed"].T * params["norm"].sum()

    args = (params, S((64, 64), jnp.float32))
    with pytest.raises(AuditError, match=r"'0/embed', f32\[1003,64\], 257 kB"):
        audit(f, args, {"dp": 8}, specs=specs, large=2**16)
    audit(f, args, {"dp": 8}, specs=specs, large=2**16, replicated="0/*")
    audit(f, args, {"dp": 8}, specs=specs, large=2**20)


def test_an_argument_without_any_sharding_is_held_whole():
    f = lambda x, y: x + y
    args = (S((256, 256), jnp.float32), S((256, 256), jnp.float32))
    with pytest.raises(AuditError, match=r"argument '1', f32\[256,256\], 262 kB"):
        audit(f, args, auto_mesh(dp=8), specs=(P("dp"), None), large=2**16)


def test_what_the_partitioner_computes_on_every_device_is_found_where_it_begins():
    """Logits whose split was lost; what is computed from them is not named again."""

    def f(x, w):
        with declare("lost", "dp"):
            logits = lax.with_sharding_constraint(x @ w, P())
        return jax.nn.softmax(logits)

    args = (S((512, 64), jnp.float32), S((64, 512), jnp.float32))
    specs = (P("dp"), P(None, None))
    with pytest.raises(AuditError) as error:
        audit(f, args, auto_mesh(dp=8), specs=specs, large=2**19)
    (offender,) = error.value.report.offenders
    assert offender.kind == "whole"
    assert "f32[512,512], 1.05 MB" in offender.text
    assert "test_audit.py" in offender.line


def test_gradients_of_what_may_be_whole_may_be_whole():
    """Plain data parallelism by the partitioner: parameters, gradients, update."""

    def train(w, x):
        with declare("gradients", "dp"):
            g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * g

    args = (S((512, 512), jnp.float32), S((1024, 512), jnp.float32))
    specs = (P(), P("dp"))
    audit(train, args, auto_mesh(dp=8), specs=specs, large=2**19, replicated=["0"])
    with pytest.raises(AuditError, match=r"2 × is held whole(.|\n)*argument '0'(.|\n)*transpose"):
        audit(train, args, auto_mesh(dp=8), specs=specs, large=2**19)


def test_a_loop_over_what_may_be_whole_finds_nothing_new():
    def f(w, x):
        def body(x, w):
            return jnp.tanh(x @ (w * 2)), None

        return lax.scan(body, x, w)[0]

    args = (S((4, 512, 512), jnp.float32), S((1024, 512), jnp.float32))
    report = audit(f, args, auto_mesh(dp=8), specs=(P(), P("dp")), large=2**19, replicated="0")
    assert report.messages == ()


# ---- rematerialised ------------------------------------------------------------------------------

MOVES = [P("a", ("b", "c")), P(("c", "a")), P("b", "a"), P(("a", "b", "c")), P(None, ("c", "b"))]


def moved(x, source, target):
    wsc = lax.with_sharding_constraint
    with declare("move", "a", "b", "c"):
        return jnp.tanh(wsc(jnp.sin(wsc(jnp.tanh(x), source)), target))


def test_a_full_rematerialisation_is_named_with_both_shardings():
    mesh, source, target = auto_mesh(a=2, b=2, c=2), P("b", "a"), P(("a", "b", "c"))
    f = partial(moved, source=source, target=target)
    with pytest.raises(AuditError) as error:
        audit(f, (S((64, 64), jnp.float32),), mesh, specs=source)
    (offender,) = error.value.report.offenders
    assert offender.kind == "remade"
    assert "f32[64,64], 16.4 kB" in offender.text
    assert "[{'b'}, {'a'}]" in offender.text
    assert "[{'a', 'b', 'c'}, {}]" in offender.text
    assert "test_audit.py" in offender.line


def test_a_move_that_xla_has_a_way_for_is_none():
    mesh, source, target = auto_mesh(a=2, b=2, c=2), P("a", ("b", "c")), P(("c", "a"))
    f = partial(moved, source=source, target=target)
    assert audit(f, (S((64, 64), jnp.float32),), mesh, specs=source).messages


@pytest.mark.slow
@pytest.mark.parametrize("source", MOVES, ids=str)
@pytest.mark.parametrize("target", MOVES, ids=str)
def test_they_are_those_that_xla_complains_of(source, target, capfd):
    """XLA prints a warning for each; it is read from the process's standard error."""
    mesh = auto_mesh(a=2, b=2, c=2)
    f = partial(moved, source=source, target=target)
    report = audit(f, (S((64, 64), jnp.float32),), mesh, specs=source, strict=False)
    complained = "Involuntary full rematerialization" in capfd.readouterr().err
    assert complained == any(x.kind == "remade" for x in report.offenders)


# ---- what it is called with ----------------------------------------------------------------------


def test_the_mesh_and_the_arguments_must_fit(unchecked):
    mesh = make_mesh(dp=8)
    x: Any = S((64,), jnp.float32, sharding=jax.NamedSharding(mesh, P("dp")))
    with pytest.raises(ValueError, match=r"mesh dp=16 and an argument .* on dp=8"):
        audit(jnp.sin, (x,), {"dp": 16})
    with pytest.raises(ValueError, match=r"takes a tuple of arguments, `args=\(x,\)`"):
        audit(jnp.sin, x)
    with pytest.raises(ValueError, match="needs `mesh=`, whose axes the specs name"):
        audit(jnp.sin, (S((64,), jnp.float32),), specs=P("dp"))


@pytest.mark.slow
def test_a_mesh_of_present_devices_gives_what_its_size_gives():
    """The program names a mesh of CPU devices, and so do its arguments."""
    mesh = make_mesh(dp=4, tp=2)
    f = jax.jit(jax.value_and_grad(jax.shard_map(loss, mesh=mesh, in_specs=SPECS, out_specs=P())))
    place = lambda x, spec: S(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))
    args = jax.tree.map(place, ARGS, (SPECS[0], SPECS[1]))
    here = audit(f, args)
    assert here.counts() == audit(step, ARGS, {"dp": 4, "tp": 2}, specs=SPECS).counts()
    on_cpu = audit(f, args, target=None)
    assert on_cpu.device == "cpu"
    assert on_cpu.counts().keys() == here.counts().keys()


def test_one_device_says_nothing():
    report = audit(lambda x: x @ x, (S((64, 64), jnp.float32),))
    assert report.messages == ()
    assert "one device" in str(report)
