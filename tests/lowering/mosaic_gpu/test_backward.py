"""The backward kernel without a GPU: compiled for one, and interpreted, watched for races."""

import dataclasses
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lowering.mosaic_gpu.test_kernel import MODS, compiled, spills
from tests.primitives.cases import CASES, check
from xform import causal, flex_attention, which
from xform._compat import found_races
from xform.lowering import mosaic_gpu
from xform.lowering._spec import EMPTY
from xform.lowering.mosaic_gpu import _attend, _gradient
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._backward import Backward
from xform.lowering.mosaic_gpu._backward_narrow import Narrow
from xform.lowering.mosaic_gpu._backward_pairs import Pairs
from xform.lowering.mosaic_gpu._backward_wide import Wide
from xform.lowering.mosaic_gpu._classes import BAND, ROW
from xform.lowering.mosaic_gpu._lines import Grid
from xform.lowering.mosaic_gpu._tuning import Tiles
from xform.primitives import tile_sum
from xform.primitives.block_map import block_map

SLOPES = jnp.arange(4.0)
# Registers that go to memory, in bytes a thread: the branch of partial tiles, and a mod's numbers.
SPILLED, SPILLED_WIDE = 64, 240
VARIANTS = [
    ("no mods", 128), ("causal", 128), ("causal", 64), ("causal", 32), ("documents", 128),
    ("alibi", 128), ("soft cap", 128), ("soft cap", 64), ("table", 64), ("rows and columns", 128),
    ("graph", 64), ("no mods", 256), ("no mods", 192), ("causal", 256),
]  # fmt: skip
FREE = [("causal", 128), ("causal", 64), ("soft cap", 64), ("causal", 48)]
QUICK = [("causal", 128, True)]


@pytest.mark.parametrize(
    ("mods", "size", "deterministic"),
    [
        pytest.param(*v, marks=() if v in QUICK else pytest.mark.slow)
        for v in (*[(*v, True) for v in VARIANTS], *[(*v, False) for v in FREE])
    ],
)
def test_compiles_for_an_h200(mods, size, deterministic, tmp_path):
    options = f"deterministic={deterministic}, **MODS['{mods}']"
    attend = f"flex_attention(q, k, v, {options}).astype('float32').sum()"
    gradient = f"jax.grad(lambda q, k, v: {attend}, (0, 1, 2))"
    printed, reports = compiled(gradient, size, "bfloat16", tmp_path)
    backward = [r for r in reports if "backward" in r]
    assert backward, printed
    assert max(spills(backward)) <= (SPILLED if size <= 128 else SPILLED_WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("mask", ["", "mask_mod=lambda b, h, q, k: q >= k"])
@pytest.mark.parametrize(
    ("score", "shape"),
    [
        ("s + p[h, q, k]", "(4, 1024, 1024)"), ("s + p[h, q - k + 1023]", "(4, 2047)"),
        ("s * p[h, q]", "(4, 1024)"),
    ],
)  # fmt: skip
def test_compiles_sums_in_kernels_of_their_own(size, mask, score, shape, tmp_path):
    mods = f"score_mod=lambda s, b, h, q, k: {score}, {mask}"
    attend = f"flex_attention(q, k, v, {mods}).astype('float32').sum()"
    gradient = f"lambda q, k, v: jax.grad(lambda p: {attend})(jax.numpy.zeros({shape}))"
    printed, reports = compiled(gradient, size, "bfloat16", tmp_path)
    own = [r for r in reports if "backward_pairs" in r or "backward_lines" in r]
    assert own, printed
    assert max(spills(own)) == 0


@pytest.mark.parametrize("kind", [Backward, Narrow, Wide, Pairs])
def test_warpgroups_ask_for_no_more_registers_than_a_block_is_launched_with(kind):
    """The hardware makes who asks for more wait for ever, which no compiler tells."""
    warpgroups = len(kind.registers)
    at_launch = 65_536 // (128 * warpgroups) // 8 * 8
    assert sum(kind.registers) <= warpgroups * at_launch
    assert all(count % 8 == 0 for count in kind.registers)


@pytest.fixture
def interpreted(monkeypatch):
    """Gradients by the kernel in the interpreter, which the lowering of a primitive can't hold."""
    by_primitive, params = tile_sum.tile_sum, plgpu.InterpretGPUParams(detect_races=True)
    calls = []

    def by_kernel(fn, operands, context, *, hidden, outs, **options):
        if mosaic_gpu.gradient_misfits(fn, operands):
            return by_primitive(fn, operands, context, hidden=hidden, outs=outs, **options)
        calls.append(fn)
        return mosaic_gpu.tile_sum(fn, block_map, hidden, outs, operands, context, interpret=params)

    monkeypatch.setattr(tile_sum, "tile_sum", by_kernel)
    yield
    assert calls
    assert not found_races()


EASY = ["bfloat16"]
HARD = [
    "rows without a key", "a batch without a key", "no visible pair", "more queries than keys",
    "hidden NaN", "odd sizes", "five to one", "one query", "float16", "scores of ten thousand",
    "scores near minus ten thousand", "hidden minus infinity",
]  # fmt: skip


@pytest.mark.parametrize("name", [*EASY, *[pytest.param(n, marks=pytest.mark.slow) for n in HARD]])
def test_gives_the_gradients_of_the_table_in_the_interpreter(name, interpreted):
    case = CASES[name]
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    check(dataclasses.replace(case, dtype=dtype, aux=("lse",)), None)


def _gradients(implementation, q, k, v, captures, mod, **options):
    def loss(q, k, v, captures):
        score = partial(mod, captures) if mod else None
        out = flex_attention(q, k, v, score_mod=score, implementation=implementation, **options)
        return jnp.sin(out.astype(jnp.float32)).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, captures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mod", "captures"),
    [
        (None, ()),
        (lambda c, s, b, h, q, k: c[0] * jnp.tanh(s / c[0]) - c[1][h] * (q - k), (3.0, SLOPES)),
        (lambda c, s, b, h, q, k: s * c[0][b, h] + c[1][k], (jnp.ones((2, 4)), jnp.zeros(300))),
    ],
)
@pytest.mark.parametrize(("kv_heads", "deterministic"), [(4, True), (2, True), (2, False)])
def test_captures_and_groups_over_many_tiles(mod, captures, kv_heads, deterministic, interpreted):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 200, 4, 32), jnp.bfloat16)
    k, v = (jax.random.normal(key, (2, 300, kv_heads, 32), jnp.bfloat16) for key in keys[1:])
    captures = jax.tree.map(jnp.asarray, captures)
    run = partial(
        _gradients, q=q, k=k, v=v, captures=captures, mod=mod, mask_mod=causal(),
        deterministic=deterministic,
    )  # fmt: skip
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), dict(q=q, k=k, v=v, captures=captures))
    true = _gradients("reference", **wide, mod=mod, mask_mod=causal())
    for a, b in zip(jax.tree.leaves(run(None)), jax.tree.leaves(true), strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert error < 8e-3


BIAS = partial(jax.random.normal, jax.random.key(7))
PAIRED = {
    "one of each head, a group": (
        (2, 70, 90, 2, 1), lambda c, s, b, h, q, k: s + c[h, q, k], BIAS((2, 70, 90)), None,
    ),
    "one for all, behind a mask": (
        (2, 130, 200, 4, 2), lambda c, s, b, h, q, k: s * (1 + c[q, k]), BIAS((130, 200)), causal(),
    ),
    "three that differ along others": (
        (2, 70, 70, 2, 2), lambda c, s, b, h, q, k: s + c[0][h, q, k] * c[1][b, q, k] + c[2][b, k],
        (BIAS((2, 70, 70)), 1 + BIAS((2, 70, 70)), BIAS((2, 70))), None,
    ),
    "at indices of labels, a mask of each entry": (
        (3, 80, 80, 2, 2), lambda c, s, b, h, q, k: s + c[q // 2 + 3, 79 - k], BIAS((80, 80)),
        lambda b, h, q, k: (q - k) % (b + 2) == 0,
    ),
}  # fmt: skip


LINED = {
    "a table of distances": (
        (2, 130, 200, 2, 1), lambda c, s, b, h, q, k: s + c[h, q - k + 199], BIAS((2, 329)),
        causal(),
    ),
    "whole tiles": (
        (1, 128, 256, 1, 1), lambda c, s, b, h, q, k: s + c[q - k + 255], BIAS((383,)), None,
    ),
    "in buckets, of each entry": (
        (3, 150, 70, 2, 2),
        lambda c, s, b, h, q, k: s * c[b, jnp.clip(abs(q - k) // 9, 0, 11)],
        1 + BIAS((3, 12)), None,
    ),
    "of queries, one for all heads": (
        (2, 130, 200, 2, 2), lambda c, s, b, h, q, k: s * c[q // 2], 1 + BIAS((65,)), None,
    ),
    "of all kinds, behind a mask of each entry": (
        (2, 200, 330, 4, 2),
        lambda c, s, b, h, q, k: s * c[0][b, q] + c[1][h, q - k + 329] * c[2][h] + c[3][k],
        (1 + BIAS((2, 200)), BIAS((4, 529)), BIAS((4,)), BIAS((330,))),
        lambda b, h, q, k: (q - k + 150) // 40 % (b + 2) == 0,
    ),
}  # fmt: skip
APART = {**PAIRED, **LINED}
FIRST = (next(iter(PAIRED)), next(iter(LINED)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FIRST else pytest.mark.slow) for n in APART]
)
def test_sums_in_kernels_of_their_own(name, interpreted):
    (batch, q_len, kv_len, heads, kv_heads), mod, captures, mask = APART[name]
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (batch, q_len, heads, 32), jnp.bfloat16)
    k, v = (jax.random.normal(x, (batch, kv_len, kv_heads, 32), jnp.bfloat16) for x in keys[1:])
    run = partial(_gradients, captures=captures, mod=mod, mask_mod=mask)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    found, true = run(None, q, k, v), run("reference", *wide)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert error < 8e-3


@pytest.mark.slow
@pytest.mark.parametrize(("size", "v_size", "kv_heads"), [(160, 144, 1), (256, 256, 2)])
def test_wide_heads_over_many_tiles(size, v_size, kv_heads, interpreted):
    """Odd lengths, a mod with gradients of what it reads, more tiles than slots."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 200, 2, size), jnp.bfloat16)
    k = jax.random.normal(keys[1], (1, 130, kv_heads, size), jnp.bfloat16)
    v = jax.random.normal(keys[2], (1, 130, kv_heads, v_size), jnp.bfloat16)
    captures = (jnp.float32(0.9), jnp.sin(jnp.arange(130.0)))
    mod = lambda c, s, b, h, q, k: s * c[0] + c[1][k]
    run = partial(_gradients, q=q, k=k, v=v, captures=captures, mod=mod, mask_mod=causal())
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), dict(q=q, k=k, v=v, captures=captures))
    true = _gradients("reference", **wide, mod=mod, mask_mod=causal())
    for a, b in zip(jax.tree.leaves(run(None)), jax.tree.leaves(true), strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        assert error < 8e-3


@hypothesis.given(st.sampled_from([1, 7, 40]), st.sampled_from([1, 9]), st.integers(0, 2**16))
@hypothesis.settings(max_examples=12, deadline=None)
def test_what_meets_at_a_place_is_added_up_in_order(count, size, seed):
    rng = np.random.default_rng(seed)
    places, values = rng.integers(-1, size, count), rng.integers(-99, 99, count)
    found = _gradient._summed_by_place(jnp.asarray(places), jnp.asarray(values, jnp.float32), size)
    assert np.array_equal(found, [values[places == n].sum() for n in range(size)])


def test_sums_that_would_take_gigabytes_are_refused():
    q = jax.ShapeDtypeStruct((1, 1 << 17, 64, 64), jnp.bfloat16)
    table = jnp.zeros((64, 1 << 18))
    mod = lambda s, b, h, q, k: s + table[h, q - k + (1 << 17)]
    said = []
    ask = lambda q: said.append(which(q, q, q, score_mod=mod, gradient=True).why)
    jax.eval_shape(ask, q)
    assert "sums of 64 x 4094 lines of tiles, for what is read per distance" in said[0]


@hypothesis.given(
    st.sampled_from([ROW, BAND]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**16)
)
def test_lines_visit_every_tile_and_add_up_all_that_belongs_together(along, rows, cols, seed):
    tiles = Tiles(q=4, kv=4, by_keys=True)  # 4 queries by 8 keys
    q_len, kv_len = 4 * rows - seed % 4, 8 * cols - seed // 4 % 8
    grid = Grid.of(along, (q_len, kv_len), tiles)
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 3, (rows, cols))
    counts, lists = grid.lists(jnp.asarray(codes))
    values = rng.integers(-9, 9, (rows, cols, 8, 4)).astype(np.float32)
    sums, found = np.zeros((grid.lines, 8, 4), np.float32), np.zeros((rows, cols), int)
    for line in range(grid.lines):
        for code in np.asarray(lists)[line, : counts[line]]:
            row, col = grid.row(line, code // 2), code // 2
            found[row, col] = 2 - code % 2
            sums[line] += values[row, col]
    assert np.array_equal(found, codes)
    whole = np.where(codes[:, :, None, None] > 0, values, 0).transpose(0, 3, 1, 2)
    whole = whole.reshape(4 * rows, 8 * cols)
    distance = np.subtract.outer(np.arange(4 * rows), np.arange(8 * cols))
    true = {
        ROW: whole.sum(1)[:q_len],
        BAND: [whole[distance == d].sum() for d in range(1 - kv_len, q_len)],
    }
    assert np.array_equal(grid.added(jnp.asarray(sums), q_len, kv_len), true[along])


@hypothesis.given(st.sampled_from([1, 5]), st.just(4), st.booleans(), st.integers(0, 2**16))
@hypothesis.settings(max_examples=12, deadline=None)
def test_turns_count_the_blocks_launched_before(columns, tiles, back, seed):
    kinds = jax.random.randint(jax.random.key(seed), (1, 2, columns, tiles), 0, 3)
    lists = _attend.walks(kinds.astype(jnp.int8), back=back)
    order, count, entries, turns = map(np.asarray, lists)
    live = np.asarray(kinds != EMPTY)
    for unit in np.ndindex(1, 2):
        assert sorted(order[unit]) == list(range(columns))
        assert list(count[unit][:, 1]) == sorted(live[unit].sum(-1), reverse=True)
        seen = np.zeros(tiles, int)
        for n, block in enumerate(order[unit]):
            visits = count[*unit, n, 1]
            visited = entries[*unit, n, :visits] // 2
            assert list(visited) == list(np.flatnonzero(live[*unit, block])[:: -1 if back else 1])
            assert list(turns[*unit, n, :visits]) == list(seen[visited])
            seen[visited] += 1


def test_says_what_of_a_gradient_no_kernel_takes():
    q = jnp.ones((1, 8, 4, 16), jnp.bfloat16)
    table = jnp.zeros((4, 8, 15))
    for mod in (
        lambda s, b, h, q, k: s - SLOPES[h] * (q - k),
        lambda s, b, h, q, k: s + table[h, q, 0],
        lambda s, b, h, q, k: s + table[h, 0, q - k + 7],
        lambda s, b, h, q, k: s + table[h, q, k],
    ):
        assert which(q, q, q, score_mod=mod, gradient=True).why == (
            "no kernel: the program is for cpu, not for an NVIDIA GPU"
        )
    few = lambda s, b, h, q, k: s + jnp.zeros((2, 3))[q // 4, k // 4]
    why = which(q, q, q, score_mod=few, gradient=True).why
    assert "read per query and key, and has 6 numbers where there are 64 pairs" in why
    wide = jnp.ones((1, 8, 4, 160), jnp.bfloat16)
    assert which(wide, wide, wide, gradient=True).why == (
        "no kernel: the program is for cpu, not for an NVIDIA GPU"
    )


def test_forward_mode_by_name_raises():
    q = jnp.ones((1, 8, 4, 16), jnp.bfloat16)
    push = lambda q: jax.jvp(
        lambda q: flex_attention(q, q, q, implementation="mosaic_gpu"), (q,), (q,)
    )
    lowered = jax.jit(push).trace(q)
    with pytest.raises(NotImplementedError, match=r"reverse mode of first order, not for Jvp"):
        lowered.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("mods", MODS)
def test_every_mod_has_a_derivative_in_the_kernel(mods):
    q = jnp.ones((1, 1024, 4, 16), jnp.bfloat16)
    # What a mask costs before the kernel runs comes behind.
    why = which(q, q, q, gradient=True, **MODS[mods]).why.split("; in `mask_mod`")[0]
    reasons = why.removeprefix("no kernel: the program is for cpu, not for an NVIDIA GPU")
    assert not reasons or "the gradient of an array that is read per" in reasons
