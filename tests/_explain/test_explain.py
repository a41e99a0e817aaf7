"""Reports on compiled programs, and on runs of them."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from xform import explain, fuse, no_host_gap
from xform._explain import _measure
from xform._explain._report import _NO_COMMAND_BUFFERS
from xform._hlo import compile_and_dump, lower_for, read

P = jax.P


@pytest.fixture(scope="module")
def measured():
    """A sharded, scanned step that uses up its first argument, run."""
    mesh = jax.make_mesh((4, 2), ("dp", "tp"))
    spec = P(None, "dp", "tp")

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, P("dp")), out_specs=P())
    def loss(w, x):
        def layer(h, w):
            w = jax.lax.all_gather(
                jax.lax.all_gather(w, "dp", tiled=True), "tp", axis=1, tiled=True
            )
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(layer, jax.lax.pcast(x, "tp", to="varying"), w)
        return jax.lax.pmean(jnp.mean(h**2), ("dp", "tp"))

    step = jax.jit(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=0)
    place = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))
    w = place(np.random.default_rng(0).normal(size=(3, 128, 128)).astype(np.float32), spec)
    x = place(np.random.default_rng(1).normal(size=(32, 128)).astype(np.float32), P("dp"))
    return explain(step)(w, x), w


def test_parts_add_up_to_the_wall_time(measured):
    report, _ = measured
    run = report.run
    assert run.compute + run.memory + run.communication + run.idle == run.wall
    assert min(run.compute + run.memory, run.communication) > 0
    assert run.idle >= 0
    assert 0 < run.wall < 60e9


def test_each_kernel_ran_as_often_as_the_report_says(measured):
    """The profiler counts what ran; trips × kernels are read from the program."""
    report, _ = measured
    devices = report.program.module.partitions
    assert {k.trips for k in report.program.kernels} == {1, 3}
    for kernel in report.program.kernels:
        assert report.run.counts.get(kernel.name, 0) == devices * kernel.trips, kernel.name


def test_donated_arguments_survive(measured):
    _, w = measured
    assert not w.is_deleted()


def test_lines_add_up_to_the_program(measured):
    report, _ = measured
    assert report.work.matrix == report.program.total(lambda k: k.work.matrix)
    assert report.work.matrix == 3 * 3 * 2 * 8 * 128 * 128  # forward, and twice backward
    assert sum(line.read for line in report.lines) == report.program.total(lambda k: k.read)
    assert sum(line.runs for line in report.lines) == report.launches
    named = [line for line in report.lines if "test_explain.py" in line.line]
    assert len(named) >= 4
    assert named[0].work.matrix == report.work.matrix


def test_text_and_page_show_lines_collectives_and_the_run(measured):
    report, _ = measured
    text, page = str(report), report._repr_html_()
    for part in (
        "dp=4 × tp=2",
        "all-gather",
        "reduce-scatter",
        "Measured: ",
        "launches",
        "(layer)",
    ):
        assert part in text.replace("measured.<locals>.loss.<locals>.layer", "layer")
    assert page.count("<table>") == len(report.tables())
    assert "&lt;locals&gt;" in page
    assert "<locals>" not in page


def test_pictures(measured):
    pytest.importorskip("matplotlib")
    report, _ = measured
    lanes = report.timeline()
    assert len(lanes.get_yticks()) == 8
    drawn = sum(len(c.get_paths()) for c in lanes.collections)
    kinds = ("compute", "memory", "communication")
    assert drawn == sum(event.kind in kinds for event in report.run.events)
    roof = report.roofline()
    busy = [x for x in report.lines if x.work.total and x.read + x.written]
    assert len(roof.collections[0].get_offsets()) == len(busy)


def test_a_report_is_saved_as_a_page_or_as_text(tmp_path):
    train = pytest.importorskip("train", reason="the example needs the extra `train`")
    for name in ("report.html", "report.txt"):
        file = tmp_path / name
        step = train.explained(jax.jit(lambda x: jnp.tanh(x @ x)), str(file))
        assert step(jnp.ones((8, 8))).shape == (8, 8)
        text = file.read_text()
        assert ("<table>" in text) == name.endswith("html")
        assert "Measured" in text
        assert "test_explain.py" in text


def test_waiting_for_the_host_is_idle():
    def slow(x):
        time.sleep(0.05)
        return np.asarray(x)

    def step(x):
        return jax.pure_callback(slow, jax.ShapeDtypeStruct((8,), jnp.float32), jnp.sin(x)) + 1

    report = explain(step)(jnp.ones(8))
    assert report.run.idle > 0.045e9
    assert report.run.idle / report.run.wall > 0.8
    assert "calls to the host" in str(report)


def test_matrix_products_are_compute_and_sums_are_memory():
    x = jnp.ones((1024, 1024))
    products = explain(lambda x: x @ x @ x @ x)(x).run
    assert products.compute > products.memory
    sums = explain(lambda x: jnp.flip(x, 0) + x)(x).run  # far from where this host's roofline bends
    assert sums.compute == 0
    assert sums.memory > 0


def test_shapes_are_enough_for_a_report_and_not_for_a_run():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = explain(lambda x: jnp.tanh(x @ x))(x)
    assert report.run is None
    assert report.work.matrix == 2 * 64**3
    assert report.work.transcendental == 64**2
    with pytest.raises(ValueError, match="an argument is no array"):
        explain(jnp.sin, run=True)(x)
    with pytest.raises(ValueError, match="there is a target, 'H200'"):
        explain(jnp.sin, run=True, target="H200")(x)
    with pytest.raises(ValueError, match="has no run"):
        report.timeline()


def test_static_arguments():
    f = jax.jit(lambda x, n: x**n, static_argnums=1)
    report = explain(f)(jnp.ones(32), 3)
    assert report.run.wall > 0
    assert len(report.program.kernels) >= 1


def test_for_an_accelerator_that_is_not_there():
    def step(w, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    w = jax.ShapeDtypeStruct((9, 256, 256), jnp.bfloat16)
    report = explain(step, target="H200")(w, jax.ShapeDtypeStruct((128, 256), jnp.bfloat16))
    assert report.work.matrix == 9 * 2 * 128 * 256 * 256
    assert report.launches >= 9
    nodes, seconds = report.graph_launches, report.launch_seconds
    assert nodes is not None
    assert seconds is not None
    assert 0 <= nodes <= report.launches
    assert (report.launches - nodes) * 1e-6 < seconds < report.launches * 1e-5
    (layers,) = [x for x in report.lines if x.work.matrix]
    moved = 9 * (256 * 256 + 128 * 256) * 2  # weights and a layer's input, at least
    assert (layers.least or 0) >= max(report.work.matrix / 989.4e12, moved / 4.8e12)
    assert layers.bound == "memory"
    assert "bound by" in str(report)
    assert "in command buffers" in str(report)


def test_kernels_of_a_gpu_are_told_apart_in_a_profile():
    """A profiler sees one event of a command buffer.

    Of a kernel that XLA runs on a part of a stack it has the name of what is within.
    """

    def step(w, x):
        halve = fuse(lambda x, w: x * w[None] / (1 + jnp.sum(x * x, -1, keepdims=True)))
        x = jax.lax.scan(lambda x, w: (halve(x, w), None), x, w)[0]
        return [jnp.sum(jnp.sin(x @ x.T), axis=i % 2) * i for i in range(5)]

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    lowered = lower_for("H200", jax.jit(step), shape(4, 256), shape(64, 256))
    found = {}
    for options in (None, _NO_COMMAND_BUFFERS):
        compiled, dump = compile_and_dump(lowered, options)
        program = read(compiled, dump=dump)
        found[any(k.graph for k in program.kernels)] = {k.name for k in program.kernels}
    assert found[True] == found[False]
    (part,) = [k for k in program.kernels if "dynamic_slice_fusion" in k.name]
    within = [inner for inner, kernel in _measure._owners(program).items() if kernel == part.name]
    assert any("mpmd_map" in inner for inner in within)


def test_one_kernel_for_an_accelerator_is_one_launch():
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    report = explain(lambda x, *, w: x @ w, target="H200")(x, w=x)
    assert (report.launches, len(report.program.kernels)) == (1, 1)


def test_routed_experts_for_an_accelerator():
    """One device has no axis that a primitive would have to be split along."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (4, 32, 16)))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    assert explain(jax.lax.ragged_dot, target="H200")(x, w, sizes).work.matrix >= 2 * 64 * 32 * 16


def test_what_is_no_array_is_part_of_the_program():
    f = lambda p, x, mode: {**p, "y": p["activation"](x @ p["w"] if mode == "product" else x)}
    p = {"activation": jnp.tanh, "w": jnp.ones((8, 8))}
    for report in (
        explain(f)(p, jnp.ones((8, 8)), mode="product"),
        explain(f, run=False)(p, jnp.ones((8, 8)), "product"),
    ):
        assert (report.work.matrix, report.work.transcendental) == (2 * 8**3, 64)


def test_small_kernels_in_a_loop_are_launches():
    """The report says why a loop of small kernels is slow: kernels × trips."""
    f = lambda x: jax.lax.scan(lambda c, _: (jnp.sort(c) + 1, None), x, None, length=1000)[0]
    report = explain(f, run=False)(jnp.ones(16))
    assert report.launches >= 2000
    assert (report.launch_seconds or 0) > 2000 * 1e-7


def test_a_loop_without_end_is_named():
    def f(x):
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)

    text = str(explain(f, run=False)(jnp.ones(4)))
    assert "runs until its condition ends it" in text
    assert "for each iteration" in text


# ---- no host gap ---------------------------------------------------------------------------------


def printing(x):
    y = jnp.sin(x)
    jax.debug.print("{}", y)
    return y


def test_a_step_that_calls_back_is_refused_by_line():
    line = printing.__code__.co_firstlineno + 2
    with pytest.raises(RuntimeError, match=rf"`printing` calls back .*\n.*:{line} \(printing\)"):
        no_host_gap(printing)(jnp.ones(2))


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap, lambda f: lambda x: jax.lax.map(f, x)])
def test_under_another_transformation_too(wrap):
    with pytest.raises(RuntimeError, match="calls back to the host"):
        wrap(no_host_gap(printing))(jnp.ones((3, 2)))


def test_every_callback_is_listed():
    def step(x):
        jax.debug.callback(print, x)
        y = jax.pure_callback(np.asarray, x, x)
        return io_callback(np.asarray, x, y)

    with pytest.raises(RuntimeError) as e:
        no_host_gap(step)(jnp.ones(2))
    assert all(f"{name}_callback" in str(e.value) for name in ("debug", "pure", "io"))


def test_arrays_of_numpy_numbers_and_modules_are_checked_too():
    step = no_host_gap(lambda x, rate: x * rate)
    assert step(np.ones(2), 0.5).tolist() == [0.5, 0.5]
    assert step(jnp.ones(2), 0.25).tolist() == [0.25, 0.25]
    with pytest.raises(RuntimeError, match="debug_print"):
        no_host_gap(printing)(np.ones(2))
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    assert no_host_gap(eqx.filter_jit(lambda m, x: m(x)))(model, jnp.ones(4)).shape == (2,)
    with pytest.raises(RuntimeError, match="debug_print"):
        no_host_gap(eqx.filter_jit(lambda m, x: printing(m(x))))(model, jnp.ones(4))


def test_a_number_that_may_be_static_is_not_taken_for_another():
    @no_host_gap
    @partial(jax.jit, static_argnums=1)
    def step(x, loud):
        return printing(x) if loud else x

    step(jnp.ones(2), False)
    with pytest.raises(RuntimeError, match="debug_print"):
        step(jnp.ones(2), True)


def test_a_step_that_does_not_is_itself():
    calls = []

    @no_host_gap
    @partial(jax.jit, static_argnums=1)
    def step(x, n):
        calls.append(n)
        return x * n

    assert step(jnp.ones(2), 3).tolist() == [3, 3]
    traced = len(calls)
    assert step(jnp.ones(2), 3).tolist() == [3, 3]
    assert len(calls) == traced  # checked once
    assert jax.grad(lambda x: step(x, 2).sum())(jnp.ones(2)).tolist() == [2, 2]
    assert step.__name__ == "step"


def test_kernels_in_a_cuda_graph_are_known_by_their_symbols():
    """There an event has the graph's instruction; seen on an H200."""
    gpu = "/device:GPU:0"
    planes = [
        (gpu, "gemm_fusion_dot_6", "command_buffer_1", 10, 20),
        (gpu, "fusion_2", "fusion.2", 20, 24),
        (gpu, "nvjet_sm90_tst_128x256", "command_buffer_1", 24, 40),
        (gpu, "flex_attention_forward", "custom-call.3", 40, 50),
        (gpu, "flex_attention_kernel", "mpmd_map.3", 60, 70),
        (gpu, "MemcpyD2D", "command_buffer_1", 50, 51),
        (gpu, "ncclDevKernel_AllReduce", "command_buffer_1", 51, 53),
        ("0", "while", "while.1", 0, 60),
    ]
    kinds = {"gemm_fusion_dot.6": "compute", "fusion.2": "memory", "custom-call.3": ""}
    kinds["dynamic_slice_fusion"] = "compute"
    found = {
        (e.kernel, e.kind)
        for e in _measure._events(planes, kinds, {"mpmd_map.3": "dynamic_slice_fusion"})
    }
    assert found == {
        *(("gemm_fusion_dot.6", "compute"), ("fusion.2", "memory"), ("custom-call.3", "compute")),
        *(("nvjet_sm90_tst_128x256", "compute"), ("MemcpyD2D", "memory")),
        *(("ncclDevKernel_AllReduce", "communication"), ("dynamic_slice_fusion", "compute")),
    }


def test_a_profile_that_saw_nothing_is_no_idle_run(monkeypatch):
    seen = _measure._planes
    only_marks = lambda path: [e for e in seen(path) if e[1] == _measure._MARK]
    monkeypatch.setattr(_measure, "_planes", only_marks)
    f, x = lambda x: jnp.tanh(x @ x), jnp.ones((64, 64))
    with pytest.raises(RuntimeError, match="saw no kernel run"):
        explain(f, run=True)(x)
    with pytest.warns(UserWarning, match="saw no kernel run"):
        assert explain(f)(x).run is None
