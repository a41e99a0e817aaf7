"""`scan_layers` is a scan: the same numbers and gradients, with another order of communication."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform.jaxpr import trace, walk
from xform.sharding import data, fsdp, shardings

L, M = 5, 8
SPECS = {"w": P(None, "dp"), "b": P()}
GATHER = partial(data.gather, specs={"w": P("dp"), "b": P()}, axis="dp")


def layer(scale, x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"][None] * scale[None])


def plain(x, stack, scale):
    return jax.lax.scan(lambda x, p: (layer(scale, x, p), None), x, stack)[0]


def ahead_of(x, stack, scale, **how):
    """Layers close over `scale`, which has a gradient too."""
    scale = data.per_device(scale, "dp")
    return fsdp.scan_layers(partial(layer, scale), x, stack, gather=GATHER, **how)


def arrays():
    v = values(0, x=(8, M), w=(L, M, M), b=(L, M), scale=(M,))
    return v["x"], {"w": v["w"], "b": v["b"]}, v["scale"]


IN = (P("dp"), SPECS, P())


@pytest.fixture(scope="module")
def one_device():
    loss = lambda *args: jnp.sum(jnp.sin(plain(*args)))
    return on_one(jax.value_and_grad(loss, argnums=(0, 1, 2)), *arrays())


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ahead", "keep", "unroll"),
    [(1, False, 1), (2, True, 1), (3, False, 2)]
    + [slow(a, k, 1) for a in (0, 1, 2, L) for k in (False, True)],
)
def test_values_and_all_gradients_are_those_of_a_scan(one_device, ahead, keep, unroll):
    def sharded(*args):
        f = partial(ahead_of, ahead=ahead, keep=keep, unroll=unroll)
        loss = lambda *args: jax.lax.psum(jnp.sum(jnp.sin(f(*args))), "dp")
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(*args)

    found = run_on(mesh_of(dp=4), sharded, IN, (P(), IN), arrays())
    assert_equal(found, one_device)


def sites(ahead: int, keep: bool):
    """The communication of forward and backward pass, and whether it is in a loop."""
    mesh = mesh_of(dp=4)
    loss = lambda *a: jax.lax.psum(jnp.sum(ahead_of(*a, ahead=ahead, keep=keep)), "dp")
    f = jax.shard_map(jax.grad(loss, argnums=1), mesh=mesh, in_specs=IN, out_specs=SPECS)
    args = jax.tree.map(np.float32, arrays())
    found = {}
    for site in walk(trace(f, *jax.device_put(args, shardings(mesh, IN)))):
        name = site.eqn.primitive.name
        if name in ("all_gather", "reduce_scatter"):
            loops = [eqn for eqn, _ in site.parents if eqn.primitive.name == "scan"]
            times = [eqn.params["length"] for eqn in loops]
            found[name] = found.get(name, 0) + (times[0] if times else 1)
    return found


@pytest.mark.parametrize(
    ("ahead", "keep", "gathers"),
    [(0, False, 2 * L), (1, False, 2 * L), (2, False, 2 * L), (2, True, L)],
)
def test_each_layer_is_gathered_and_its_gradient_dealt_out_once(ahead, keep, gathers):
    """Once forward, once backward unless it is kept, and never for nothing."""
    assert sites(ahead, keep) == {"all_gather": gathers, "reduce_scatter": L}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_sums_that_are_put_off_are_taken_once_outside_of_all_loops(microbatches):
    """And the gradients are the same; layers are gathered for each microbatch all the same."""
    whole = partial(data.gather, specs=SPECS, axis="dp")

    def loss(params, x):
        stack, scale = params
        y = fsdp.scan_layers(partial(layer, scale), x, stack, gather=GATHER)
        return jnp.sum(jnp.sin(y)), jnp.int32(x.shape[0]) + 0 * jnp.sum(x > 0)

    enter = lambda p: (fsdp.late(p[0], whole), data.per_device(p[1], "dp"))
    f = data.value_and_grad(loss, enter, "dp", microbatches=microbatches)
    x, stack, scale = arrays()
    x = np.concatenate([x, 2 * x])
    specs = (SPECS, P())
    found = run_on(mesh_of(dp=4), f, (specs, P("dp")), (P(), specs), ((stack, scale), x))
    mean = lambda p, x: jnp.sum(jnp.sin(plain(x, *p))) / x.shape[0]
    assert_equal(found, on_one(jax.value_and_grad(mean), (stack, scale), x))

    mesh = mesh_of(dp=4)
    f = jax.shard_map(f, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))
    narrow = jax.tree.map(np.float32, ((stack, scale), x))
    sites = [*walk(trace(f, *jax.device_put(narrow, shardings(mesh, (specs, P("dp"))))))]
    loops = [
        "scan" in [name for name, _ in site.path]
        for site in sites
        if site.eqn.primitive.name in ("reduce_scatter", "psum_invariant", "psum")
    ]
    assert len(loops) == 5  # of `w`, `b`, `scale`, losses and labels
    assert not any(loops)


def test_gathered_layers_are_not_kept_unless_asked_for():
    """What is left for the way back, from the types of the residuals."""
    mesh = mesh_of(dp=4)

    def whole_layers(keep):
        def residuals(*args):
            _, vjp = jax.vjp(partial(ahead_of, keep=keep), *args)
            left = [x.shape for x in jax.tree.leaves(vjp)]
            assert (L - 1, 2, M) in left, "inputs of layers"
            return jnp.float32(left.count((L - 1, M, M)))

        f = jax.shard_map(residuals, mesh=mesh, in_specs=IN, out_specs=P())
        args = jax.tree.map(np.float32, arrays())
        return int(f(*jax.device_put(args, shardings(mesh, IN))))

    assert whole_layers(keep=False) == 0
    assert whole_layers(keep=True) == 1


def test_layers_may_close_over_what_devices_have_wherever_derivatives_are_taken():
    """Numbers of documents inside `shard_map`; derivatives and `vmap` outside of it."""
    x, stack, _ = arrays()
    ids = np.random.default_rng(1).integers(3, size=(2, 8))
    args = np.stack([x, 2 * x]), np.stack([stack["w"], -stack["w"]]), ids

    def of_ids(ids, x, w):
        return x + jnp.tanh(x @ w) * jnp.where(ids > 1, 1.0, 0.5)[:, None]

    def plain(x, w, ids):
        return jax.lax.scan(lambda x, w: (of_ids(ids, x, w), None), x, w)[0]

    def ahead_of(x, w, ids):
        gather = lambda w: data.gather(w, P("dp"), "dp")
        return fsdp.scan_layers(partial(of_ids, ids), x, w, gather=gather)

    def twice(f):
        first = lambda *args: jax.grad(lambda w: jnp.sum(jnp.sin(f(args[0], w, args[2]))))(args[1])
        return jax.vmap(jax.grad(lambda *args: jnp.sum(jnp.cos(first(*args))), argnums=(0, 1)))

    mesh, specs = mesh_of(dp=4), (P("dp"), P(None, "dp"), P("dp"))
    f = jax.shard_map(ahead_of, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    with jax.enable_x64(True):
        placed = jax.device_put(args, shardings(mesh, tuple(P(None, *spec) for spec in specs)))
        found = jax.device_get(jax.jit(twice(f))(*placed))
    assert_equal(found, on_one(twice(plain), *args))


@pytest.mark.parametrize("ahead", [-1, L + 1])
def test_more_layers_ahead_than_there_are_is_refused(ahead):
    with pytest.raises(
        ValueError, match=rf"can gather 0 to 5 layers ahead, of 5; found ahead={ahead}"
    ):
        run_on(mesh_of(dp=4), partial(ahead_of, ahead=ahead), IN, P("dp"), arrays())


def test_what_does_not_fit_is_named(unchecked):
    stack = {"b": jnp.ones((2, 4)), "w": jnp.ones((3, 4, 4))}
    run = lambda stack, layer, **how: fsdp.scan_layers(
        layer, jnp.ones(4), stack, gather=lambda p: p, **how
    )
    with pytest.raises(ValueError, match=r"as many layers each; .*'b'.*\(2, 4\).*\(3, 4, 4\)"):
        run(stack, lambda x, p: x @ p["w"] + p["b"])
    with pytest.raises(ValueError, match=r"as many layers each; found \{\}"):
        run({}, lambda x, p: x)
    with pytest.raises(ValueError, match=r"one layer in a pass, or more; found unroll=0"):
        run(stack["w"], lambda x, w: x @ w, unroll=0)
    with pytest.raises(TypeError, match=r"given float32\[4\] and returned float32\[2\]; needed"):
        run(stack["w"], lambda x, w: (x @ w)[:2])
    with pytest.raises(ValueError, match=r"`split` over 'dp', and the mesh has \{'tp': 2\}"):
        fsdp.split({"w": P()}, stack, mesh_of(tp=2), "dp")
