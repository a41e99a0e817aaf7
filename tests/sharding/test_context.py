"""Context parallelism: equal to one device for any mask and layout, balanced, and hidden."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.sharding.context_cases import (
    KINDS,
    METHODS,
    Case,
    T,
    compared,
    layouts_of,
)
from tests.sharding.equal import assert_equal, mesh_of, on_one, run_on, values
from xform import causal, documents, flex_attention, sliding_window
from xform.sharding import audit, context, declare, shardings
from xform.sharding.context._plan import live_steps
from xform.sharding.context._tiles import tiles_by_chunk

pytestmark = pytest.mark.usefixtures("unchecked")


# ---- equal to one device -------------------------------------------------------------------------

# Methods with sizes and other axes in pairs; of kinds those that have others inside. Windows, ALiBi
# and four devices on a ring are below.
SOME = [
    Case("documents", "ring", 8),
    Case("table", "ring", 2, dp=2, tp=2),
    Case("bias", "ulysses", 4),
]
ALL = [Case(*x) for x in product(KINDS, METHODS, (2, 4, 8))]


def equals_one_device(case: Case):
    for layout in layouts_of(case.cp):
        report = compared(case, layout)
        assert not report.wrong, f"{case} in {layout}: {report.complaint()}"
        assert max(leaf.error for leaf in report.leaves) < 1e-12


@pytest.mark.parametrize("case", SOME, ids=str)
def test_loss_and_gradients_equal_one_device(case):
    equals_one_device(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_kind_method_and_size_equals_one_device(case):
    equals_one_device(case)


# ---- what is known while a program is traced -----------------------------------------------------


@pytest.mark.slow
def test_steps_in_which_nobody_has_work_send_nothing():
    """A window of 6 over parts of 8 reaches one neighbour: keys and values move once."""
    case = Case("alibi in a window", "ring", 4)
    layout = context.contiguous(T, 4)
    report = compared(case, layout, known=True)
    assert max(leaf.error for leaf in report.leaves) < 1e-12
    mask = causal() & sliding_window(6)
    assert program_of(lambda x: ring_of(x, layout, mask)).count("ppermute[") == 2


def program_of(f) -> str:
    """The program of a function of one array `[1, T, 2, 4]` that four devices share."""
    mesh, spec = mesh_of(cp=4), P(None, "cp")
    x = jax.device_put(jnp.ones((1, T, 2, 4)), shardings(mesh, spec))
    return str(jax.make_jaxpr(on(mesh, f, spec))(x))


def ring_of(x, layout, mask):
    return context.attention(x, x, x, axis="cp", method="ring", layout=layout, mask_mod=mask)


@pytest.mark.parametrize(
    ("mask", "layout", "steps"),
    [
        (None, context.contiguous(32, 4), [0, 1, 2, 3]),
        (lambda b, h, q, k: (q - k < 6) & (k - q < 6), context.contiguous(32, 4), [0, 1, 3]),
        (lambda b, h, q, k: (b > 0) & (q - k < 2) & (q >= k), context.contiguous(8, 4), [0, 1]),
        (lambda b, h, q, k: q < 0, context.contiguous(32, 4), []),
    ],
    ids=["none", "both sides", "of an entry", "nothing"],
)
def test_live_steps(mask, layout, steps):
    assert list(live_steps(mask, layout, 2, 1)) == steps


def test_a_mask_that_hides_all_gives_nothing_and_moves_nothing():
    layout = context.contiguous(32, 4)
    f = lambda x: ring_of(x, layout, lambda b, h, q, k: q < 0)
    spec = P(None, "cp")
    both = lambda x: (f(x), jax.grad(lambda x: jax.lax.psum(jnp.sum(f(x) ** 2), "cp"))(x))
    assert "permute" not in program_of(both)
    out, grad = run_on(mesh_of(cp=4), both, (spec,), spec, (np.ones((1, 32, 2, 4)),))
    assert not out.any()
    assert not grad.any()


def on(mesh, f, specs, out=None):
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out or P(None, "cp"))


# ---- layouts -------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_a_layout_is_a_permutation_that_join_undoes(n, chunks, chunk, seed):
    order = np.random.default_rng(seed).permutation(n * chunks).reshape(n, chunks)
    layout = context.Layout(order.astype(np.int32), chunk)
    x = np.arange(layout.length)[None]
    assert sorted(layout.permutation) == list(range(layout.length))
    np.testing.assert_array_equal(layout.split(x)[0], layout.permutation)
    np.testing.assert_array_equal(layout.join(layout.split(x)), x)


def random_ids(length: int, seed: int, mean: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).exponential(mean, 4 * length // mean).astype(int) + 1
    return np.repeat(np.arange(len(lengths)), lengths)[:length]


LONG, TILE = 2048, 8
"""In tiles, a row of 32k with the tiles of a kernel."""


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 4, 8])
def test_random_documents_are_balanced_to_a_twentieth(n):
    for seed, mean in enumerate((100, 500, 1500)):
        mask = causal() & documents(random_ids(LONG, seed, mean))
        load = context.balanced(mask, LONG, n, tile=TILE).load(mask, tile=TILE)
        assert load.imbalance <= 1.05
        assert load.rounds.sum() < 1.25 * load.each.mean()  # of a ring, where all wait for all
        assert context.contiguous(LONG, n).load(mask, tile=TILE).imbalance > 1.05


def test_layers_of_other_masks_are_balanced_in_their_sum():
    """What balances one of them leaves the other uneven."""
    packed = causal() & documents(random_ids(LONG, 5, 350))
    early = lambda b, h, q, k: (q < LONG // 2) & (k <= q)
    layout = context.balanced([packed, early], LONG, 4, tile=TILE)
    assert layout.load([packed, early], tile=TILE).imbalance < 1.02
    for mask in (packed, early):
        assert layout.load(mask, tile=TILE).imbalance > 1.02


@pytest.mark.slow
def test_batches_and_heads_count_by_their_own_masks():
    ids = np.stack([random_ids(256, seed, 60) for seed in range(3)])
    of_head = lambda b, h, q, k: (
        (q >= k) & (ids_jax[b, q] == ids_jax[b, k]) & (q - k < 32 * (h + 1))
    )
    ids_jax = jnp.asarray(ids)
    layout = context.balanced(of_head, 256, 4, chunk=4, batch=3, heads=2)
    load = layout.load(of_head, tile=4, batch=3, heads=2)
    i, j = np.arange(256)[:, None], np.arange(256)[None]
    dense = [
        (i >= j) & (ids[b][i] == ids[b][j]) & (i - j < 32 * (h + 1))
        for b in range(3)
        for h in (0, 1)
    ]
    tiles = np.mean([m.reshape(64, 4, 64, 4).any((1, 3)) for m in dense], axis=0)
    by_device = tiles[layout.order.ravel()].reshape(4, 16, 64).sum((1, 2))
    np.testing.assert_allclose(load.each, by_device)
    assert load.imbalance < 1.02


def test_rounds_of_a_ring_are_those_of_its_busiest_device():
    load = context.zigzag(64, 4).load(causal(), tile=8)
    assert load.tiles.tolist() == [[3, 2, 2, 2], [2, 3, 2, 2], [2, 2, 3, 2], [2, 2, 2, 3]]
    assert load.rounds.tolist() == [3, 2, 2, 2]
    assert context.contiguous(64, 4).load(causal(), tile=8).rounds.tolist() == [3, 4, 4, 4]


@pytest.mark.slow
def test_permuted_positions_leave_tiles_what_they_are():
    """A tile within a chunk is proven empty or full by the ends of its positions, as in order."""
    ids = random_ids(256, 3, 60)
    mask = causal() & documents(ids)
    layout = context.balanced(mask, 256, 2, chunk=32)
    order = np.asarray(layout.permutation)
    placed = lambda b, h, q, k: mask(b, h, jnp.asarray(order)[q], jnp.asarray(order)[k])
    i, j = np.arange(256)[:, None], np.arange(256)[None]
    dense = (i >= j) & (ids[i] == ids[j])
    tiles = dense.reshape(16, 16, 16, 16).any((1, 3))
    moved, _ = tiles_by_chunk(placed, 256, 16, 16)
    rows = order[::16] // 16
    np.testing.assert_array_equal(moved, tiles[np.ix_(rows, rows)])


# ---- which method --------------------------------------------------------------------------------


def on_h200s(part: int, heads: int = 16, kv_heads: int = 8, **options):
    q, k = (jax.ShapeDtypeStruct((1, part, h, 128), jnp.bfloat16) for h in (heads, kv_heads))
    return context.which(q, k, k, 4, device="H200", **options)


def test_the_choice_follows_bytes_and_tiles():
    long = on_h200s(8192, mask_mod=causal(), layout=context.zigzag(32768, 4))
    assert long.method == "ring"  # whose messages hide
    keys = 8192 * 8 * 256 * 2
    assert (long.costs["ring"].sent, long.costs["all_gather"].sent) == (3 * keys, 3 * keys)
    assert long.costs["ulysses"].sent == 3 * (keys + 2 * keys) // 4
    assert long.costs["ring"].exposed < 1e-9 < long.costs["all_gather"].exposed
    in_order = on_h200s(8192, mask_mod=causal())
    assert in_order.method == "ulysses"  # which is even in any layout
    assert in_order.costs["ring"].compute > 1.5 * in_order.costs["ulysses"].compute
    odd = on_h200s(8192, 6, 2, mask_mod=causal())
    assert odd.costs["ulysses"].misfit == "4 devices don't divide 6 query heads"
    window = on_h200s(8192, mask_mod=causal() & sliding_window(1024))
    assert window.costs["ring"].sent == keys  # to one neighbour
    text = str(odd)
    assert "can't run" in text
    assert "tiles of the busiest device" in text


def test_what_is_chosen_runs_and_names_run_as_asked():
    """Two heads leave four devices a ring or a gather, which is one message and not three."""
    of = lambda method: program_of(lambda x: context.attention(x, x, x, axis="cp", method=method))
    x = jax.ShapeDtypeStruct((1, T // 4, 2, 4), jnp.float32)
    assert context.which(x, x, x, 4).method == "all_gather"
    for method in (None, "all_gather"):
        assert "all_gather[" in of(method)
        assert "ppermute[" not in of(method)
    assert "ppermute[" in of("ring")
    assert "all_gather[" not in of("ring")


# ---- what is refused -----------------------------------------------------------------------------


IDS = jnp.arange(8)


def refused(**options):
    mesh = mesh_of(cp=4)
    spec = options.pop("spec", P(None, "cp"))
    heads, length = options.pop("heads", 4), options.pop("keys", 32)
    q, k = np.ones((1, 32, heads, 4), np.float32), np.ones((1, length, 2, 4), np.float32)
    axis = options.pop("axis", "cp")
    attend = lambda q, k: context.attention(q, k, k, axis=axis, **options)
    jax.eval_shape(
        on(mesh, attend, spec, P()), *jax.device_put((q, k), shardings(mesh, (spec,) * 2))
    )


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"spec": P()}, ValueError, r"`q`, `k`, `v` the same on all devices of 'cp': split the"),
        ({"keys": 16}, ValueError, r"8 queries and 4 keys on a device: needed are equally many"),
        ({"layout": context.contiguous(64, 2)}, ValueError, r"is of 64 positions on 2 devices; n"),
        ({"method": "tree"}, ValueError, r"`method` is 'tree'; there is None, 'ring', 'all_g"),
        ({"implementation": "reference"}, ValueError, r"is dense, and of one device: compare"),
        ({"axis": "c"}, ValueError, r"there is no 'c' among the axes of a `jax.shard_map`"),
        ({"dropout_rate": 0.1}, NotImplementedError, r"dropout_rate=0.1.*random.dropout"),
        ({"aux": "max"}, ValueError, r"`aux` asks for \['max'\]; there is \['lse'\]"),
        ({"mask_mod": documents(np.ones(8, int))}, ValueError, r"has shape \[8\]; .*needs \[32\]"),
        ({"mask_mod": lambda b, h, i, j: IDS[j] == 0}, ValueError, r"at kv_idx .* are 32 keys"),
        ({"method": "ulysses", "heads": 6}, NotImplementedError, r"cp=4 does not divide 6 query"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        refused(**options)


def test_layouts_refuse_what_does_not_divide_and_what_is_not_known():
    with pytest.raises(
        ValueError, match=r"`zigzag` can't deal out 12 positions to 4 devices: .* 8"
    ):
        context.zigzag(12, 4)
    with pytest.raises(ValueError, match=r"layout of 8 positions got an array of shape \(1, 6\)"):
        context.zigzag(8, 2).split(np.ones((1, 6)))
    with pytest.raises(ValueError, match=r"these arrays are traced: make it outside"):
        jax.jit(lambda ids: context.balanced(documents(ids), 8, 2, chunk=2).order)(jnp.ones(8, int))
    with pytest.raises(ValueError, match=r"`method` without an `axis`: name the mesh axis"):
        context.ContextParallel(method="ring")


# ---- precision, derivatives, communication -------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_is_as_right_as_on_one_device():
    """Against float64: sums over parts are rounded once, at their end."""
    v = values(1, q=(1, 64, 4, 16), k=(1, 64, 2, 16), v=(1, 64, 2, 16), ct=(1, 64, 4, 16))
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in v.values()]
    layout = context.zigzag(64, 2)

    def pulled(attend):
        def f(q, k, v, ct):
            out, back = jax.vjp(lambda *x: attend(*x, mask_mod=causal()), q, k, v)
            return out, *back(ct)

        return f

    attend = lambda *x, **o: context.attention(*x, axis="cp", method="ring", layout=layout, **o)
    mesh = mesh_of(cp=2)
    split = jax.device_put([layout.split(x) for x in narrow], shardings(mesh, P(None, "cp")))
    found = jax.jit(on(mesh, pulled(attend), P(None, "cp")))(*split)
    found = [layout.join(np.asarray(x, np.float64)) for x in found]
    one = jax.jit(pulled(flex_attention))(*narrow)
    truth = on_one(pulled(flex_attention), *[np.asarray(x, np.float64) for x in narrow])
    error = lambda x, y: np.sqrt(np.square(np.asarray(x, np.float64) - y).mean())
    for x, y, exact in zip(found, one, truth, strict=True):
        assert error(x, exact) <= 1.1 * error(y, exact)


@pytest.mark.slow
def test_a_ring_has_second_derivatives():
    x = values(2, q=(1, 8, 2, 4), k=(1, 8, 1, 4), v=(1, 8, 1, 4))
    x = tuple(x.values())

    def twice(attend, total):
        once = jax.grad(lambda *x: total(jnp.sin(attend(*x))), argnums=(0, 1, 2))
        return jax.grad(lambda *x: sum(total(g**2) for g in once(*x)), argnums=(0, 1, 2))

    attend = lambda *x: context.attention(*x, axis="cp", method="ring", mask_mod=causal())
    total = lambda y: jax.lax.psum(jnp.sum(y), "cp")
    specs = (P(None, "cp"),) * 3
    found = run_on(mesh_of(cp=2), twice(attend, total), specs, specs, x)
    right = on_one(twice(lambda *x: flex_attention(*x, mask_mod=causal()), jnp.sum), *x)
    assert_equal(found, right, rtol=1e-11)


def ring_on_h200s(n: int, implementation: str, part: int):
    """The audit of a ring's loss and gradients, compiled for so many H200s."""
    layout = context.zigzag(part * n, n)

    def loss(q, k, v, ids):
        mask = causal() & documents(context.whole(ids, axis="cp", layout=layout))
        out = context.attention(
            q, k, v, axis="cp", method="ring", layout=layout, mask_mod=mask,
            implementation=implementation,
        )  # fmt: skip
        with declare("loss", "cp"):
            return jax.lax.psum(jnp.sum(out.astype(jnp.float32)), "cp")

    of = lambda heads: jax.ShapeDtypeStruct((1, part * n, heads, 64), jnp.bfloat16)
    args = (of(4), of(2), of(2), jax.ShapeDtypeStruct((1, part * n), jnp.int32))
    specs = (P(None, "cp"),) * 4
    g = lambda *x: jax.shard_map(loss, in_specs=specs, out_specs=P())(*x)
    return audit(jax.grad(g, argnums=(0, 1, 2)), args, {"cp": n}, specs=specs)


@pytest.mark.parametrize(
    ("n", "implementation"),
    [
        (2, "blockwise"),
        *(pytest.param(n, "mosaic_gpu", marks=pytest.mark.slow) for n in (2, 4, 8)),
    ],
)
def test_every_message_of_a_ring_has_attention_to_hide_behind(n, implementation):
    """Forward and backward; an audit raises for a message that is not hidden."""
    part = 512 if implementation == "mosaic_gpu" else 256
    report = ring_on_h200s(n, implementation, part)
    sends = [m for m in report.messages if m.op == "collective-permute"]
    assert all(m.covered for m in sends)
    keys = part * 2 * 64 * 2 * 2  # bytes of keys and values
    # Forward n - 1, back n - 2 more and n - 1 of gradients in float32; none after the last step.
    assert sum(m.sent for m in sends) == keys * (n - 1) + keys * (n - 2) + 2 * keys * (n - 1)
