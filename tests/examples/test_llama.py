from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import llama
import parallel
from cache import Cache, empty_cache
from tests.oracle import UNOPTIMISED, once
from xform.sharding import make_mesh, shardings
from xform.train.data import NO_LABEL, Rows, pack

SMALL = llama.Config(codes=24, layers=2, width=24, heads=8, kv_heads=4, head_size=6, hidden=20)


def mesh_of(dp: int, tp: int):
    return make_mesh(dp=dp, tp=tp, devices=jax.devices("cpu")[: dp * tp])


def random_rows() -> Rows:
    """Eight rows of documents of 1 to 30 tokens, which keep from 0 to 100 % of their labels."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(SMALL.codes, size=n) for n in rng.integers(1, 30, size=20)]
    rows = Rows(*(x[:8] for x in pack(documents, length=16)))
    keep = rng.random(rows.labels.shape) < np.linspace(0, 1, 8)[:, None]
    return rows._replace(labels=np.where(keep, rows.labels, NO_LABEL))


@cache
def random_params() -> dict:
    """Fresh parameters, with norms that are not all one."""
    leaves, tree = jax.tree.flatten(once(partial(llama.init, SMALL), jax.random.key(1)))
    rng = np.random.default_rng(2)
    noisy = [x + np.float32(0.1) * rng.normal(size=x.shape).astype("float32") for x in leaves]
    return jax.tree.unflatten(tree, noisy)


def test_it_is_short():
    assert len(Path(llama.__file__).read_text().splitlines()) < 300


def test_with_kernels_between_products_it_is_the_same_model():
    of = lambda fused: partial(llama.loss, config=replace(SMALL, fuse=fused))
    gradients = lambda fused: once(
        jax.value_and_grad(lambda p: of(fused)(p, random_rows())[0]), random_params()
    )
    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, gradients(True), gradients(False))


def test_specs_have_the_structure_of_the_parameters():
    params = jax.eval_shape(partial(llama.init, llama.Config()), jax.random.key(0))
    assert jax.tree.structure(params) == jax.tree.structure(llama.SPECS)
    assert sum(x.size for x in jax.tree.leaves(params)) == 754_816 <= 1_000_000


def test_init_is_bitwise_the_same_on_every_mesh():
    def init_on(layout):
        placed = shardings(mesh_of(*layout), llama.SPECS)
        init = partial(llama.init, SMALL)
        return jax.jit(init, out_shardings=placed, compiler_options=UNOPTIMISED)(jax.random.key(3))

    one, *others = map(init_on, [(1, 1), (4, 2)])
    for params in others:
        jax.tree.map(np.testing.assert_array_equal, params, one)


@pytest.fixture(scope="module")
def one_device() -> tuple:
    """Loss and gradients of the rows' mean, with no mesh at all."""

    def mean(params):
        total, labels = llama.loss(params, random_rows(), SMALL)
        return total / labels

    return once(jax.value_and_grad(mean), random_params())


@pytest.mark.parametrize(
    "layout", [(4, 2), pytest.param((2, 4), marks=pytest.mark.slow)], ids="dp{0[0]}×tp{0[1]}".format
)
def test_loss_and_every_gradient_equal_those_of_one_device(one_device, layout):
    rows = random_rows()
    counts = (rows.labels != NO_LABEL).reshape(2, -1).sum(1)
    assert counts[1] > 2 * counts[0], "the shards must hold different numbers of labels"

    mesh = mesh_of(*layout)
    body = partial(parallel.loss_and_grads, model=SMALL)
    specs = llama.SPECS
    sharded = jax.shard_map(body, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))
    loss, grads = once(
        sharded,
        jax.device_put(random_params(), shardings(mesh, specs)),
        jax.device_put(rows, shardings(mesh, P("dp"))),
    )
    expected_loss, expected = one_device
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for (path, ours), one in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(expected), strict=True
    ):
        scale = np.abs(one).max()
        assert scale > 1e-4, path
        np.testing.assert_allclose(ours, one, rtol=0, atol=1e-5 * scale, err_msg=str(path))


def test_documents_do_not_see_each_other_nor_what_follows():
    params = random_params()
    rng = np.random.default_rng(4)
    tokens = rng.integers(SMALL.codes, size=(1, 12)).astype(np.int32)
    ids = np.repeat(np.arange(2, dtype=np.int32), [5, 7])[None]
    logits = jax.jit(partial(llama.logits, config=SMALL))

    changed = tokens.copy()
    changed[0, [1, 8]] = (changed[0, [1, 8]] + 1) % SMALL.codes
    difference = np.abs(logits(params, changed, ids) - logits(params, tokens, ids)).max(-1)[0]
    assert (difference[[0, 5, 6, 7]] == 0).all()
    assert (difference[[1, 2, 3, 4, 8, 9, 10, 11]] > 1e-3).all()


def test_a_document_means_the_same_wherever_it_lies():
    params = random_params()
    rng = np.random.default_rng(5)
    document = rng.integers(SMALL.codes, size=6).astype(np.int32)
    before = rng.integers(SMALL.codes, size=9).astype(np.int32)
    logits = jax.jit(partial(llama.logits, config=SMALL))
    alone = logits(params, document[None], np.zeros((1, 6), np.int32))
    packed = logits(
        params,
        np.concatenate([before, document])[None],
        np.repeat(np.arange(2, dtype=np.int32), [9, 6])[None],
    )
    np.testing.assert_allclose(packed[:, 9:], alone, rtol=0, atol=2e-5)


def test_flops_are_those_of_the_traced_products():
    config = llama.Config()
    length = 256
    weights = 754_816 - config.codes * config.width - (2 * config.layers + 1) * config.width
    attention = config.layers * 2 * 2 * config.heads * config.head_size * length / 2
    assert llama.flops_per_token(config, length) == 3 * (2 * weights + attention)


def test_a_text_that_is_extended_has_the_logits_of_the_whole():
    """In parts of several lengths, beyond one tile of keys; the room behind is never seen."""
    params, T = random_params(), 300
    tokens = np.random.default_rng(6).integers(SMALL.codes, size=(2, T)).astype(np.int32)
    whole = once(partial(llama.logits, config=SMALL), params, tokens, np.zeros_like(tokens))
    extend = jax.jit(llama.extend, static_argnames="config", compiler_options=UNOPTIMISED)
    cache = empty_cache(SMALL, 2, T + 7)
    assert isinstance(cache, Cache)
    cache = cache._replace(v_LBSKD=cache.v_LBSKD + 100.0)  # whatever it was
    found = []
    for part in np.split(tokens, [298, 299], axis=1):
        logits, cache = extend(params, part, cache, SMALL)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=0, atol=2e-5)
    assert cache.length_L.tolist() == [T] * SMALL.layers
