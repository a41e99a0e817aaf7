"""Tokens drawn one by one, with a cache, are those of the full forward pass."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

import generate
import llama
from tests.oracle import once
from xform.train import run
from xform.train.checkpoint import Checkpoints

SMALL = llama.Config(codes=50, layers=2, width=24, heads=4, kv_heads=2, head_size=6, hidden=20)
PROMPT = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@cache
def params():
    """Sharper than fresh ones, so that greedy choices are no ties."""
    return jax.tree.map(lambda x: 2 * x, once(partial(llama.init, SMALL), jax.random.key(1)))


@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        ({"temperature": 0.0}, 20),
        ({"temperature": 0.0, "page_size": 8}, 40),
        ({"temperature": 0.9, "top_k": 9, "top_p": 0.8}, 300),
        pytest.param({"temperature": 0.0}, 600, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.3}, 600, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_those_of_the_full_forward_pass(how, tokens):
    key = jax.random.key(7)
    found = generate.generate(params(), PROMPT, SMALL, tokens=tokens, key=key, **how)
    text = jnp.concatenate([jnp.asarray(PROMPT), found], axis=1)
    logits = once(partial(llama.logits, config=SMALL), params(), text, jnp.zeros_like(text))
    how = {"top_k": None, "top_p": None, **how}
    how.pop("page_size", None)  # where keys are kept decides nothing
    pick = jax.jit(lambda t: generate.choose(logits[:, t - 1], jax.random.fold_in(key, t), **how))
    expected = np.stack([pick(t) for t in range(5, 5 + tokens)], axis=1)
    np.testing.assert_array_equal(found, expected)
    assert (found[0] != found[1]).any()
    assert len(np.unique(found)) > 3


def test_equal_seeds_give_equal_texts():
    draw = lambda seed: generate.generate(
        params(), PROMPT, SMALL, tokens=300, key=jax.random.key(seed),
        temperature=0.9, top_k=9, top_p=0.8,
    )  # fmt: skip
    assert (draw(1) == draw(1)).all()
    assert (draw(1) != draw(2)).any()


def drawn(logits, **how) -> set[int]:
    """Every token that comes up in many draws."""
    how = {"temperature": 1.0, "top_k": None, "top_p": None, **how}
    rows = jnp.tile(jnp.log(logits), (2000, 1))
    return set(generate.choose(rows, jax.random.key(0), **how).tolist())


def test_only_what_top_k_and_top_p_leave_is_drawn():
    p = jnp.array([0.05, 0.4, 0.1, 0.25, 0.2])
    assert drawn(p) == {0, 1, 2, 3, 4}
    assert drawn(p, top_k=2) == {1, 3}
    assert drawn(p, top_k=99) == {0, 1, 2, 3, 4}
    assert drawn(p, top_p=0.39) == {1}
    assert drawn(p, top_p=0.6) == {1, 3}
    assert drawn(p, top_p=0.7) == {1, 3, 4}
    assert drawn(p, top_k=3, top_p=0.7) == {1, 3}, "shares of what top_k leaves"
    assert drawn(p, top_p=1.0) == {0, 1, 2, 3, 4}
    assert drawn(p, temperature=0.0) == {1}
    for temperature in (0.02, 1e-37, 1e-39, 5e-324):
        assert drawn(p, temperature=temperature) == {1}
        assert drawn(p * 1e30, temperature=temperature, top_k=3, top_p=0.9) == {1}


def test_a_checkpoint_is_asked(tmp_path, capsys):
    model = llama.Config(layers=1, width=16, heads=4, kv_heads=2, head_size=4, hidden=16)
    params = once(partial(llama.init, model), jax.random.key(0))
    state = {"params": params, "optimizer": jnp.zeros(3)}
    config = {"model": vars(model), "tokenizer": None, "data": ["a.txt"], "length": 2}
    run.begin(tmp_path, config)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {"config": config, "tokens": False})
    asked = generate.Config(run=str(tmp_path), prompt="né", rows=2, tokens=5, top_k=1)
    generate.main(asked)
    out, err = capsys.readouterr()
    one, two = out.rstrip("\n").split("\n--------\n")
    assert "the prompt has 3 tokens, and the model has seen no more than 2 together" in err
    assert one == two
    assert one.startswith("né")
    for changed, message in (
        ({"prompt": ""}, r"the prompt is empty"),
        ({"prompt": "\udcff"}, r"can't be encoded: .*surrogates"),
        ({"top_k": 257}, r"top_k=257 must be at most the 256 of the vocabulary"),
        ({"tokenizer": "none.json"}, r"none.json` is no tokenizer: .*No such file"),
        ({"run": str(tmp_path / "none")}, r"no checkpoints: `.*none/checkpoints` is no folder"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            generate.main(dataclasses.replace(asked, **changed))
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(
        f"{tmp_path}/small.json"
    )
    with pytest.raises(ValueError, match=r"a tokenizer of 256 tokens, and `.*small.json` has 1: "):
        generate.main(dataclasses.replace(asked, tokenizer=f"{tmp_path}/small.json", prompt="a"))
    nan = jax.tree.map(lambda x: x.at[..., 0].set(jnp.nan), params)
    for step, saved, info, message in (
        (2, state, {"config": {**config, "data": ["A.BIN"]}}, r"tokens: name the tokenizer that"),
        (3, state, {"config": config, "tokens": True}, r"tokens: name the tokenizer that made"),
        (4, {**state, "params": nan}, {"config": config}, r"of step 4 .* that are not finite"),
        (5, state, {"config": {"model": {"depth": 3}}}, r"is of another program: .*depth"),
        (6, state, {}, r"is of another program: no config of its model \(KeyError"),
    ):
        with Checkpoints(tmp_path / "checkpoints") as checkpoints:
            checkpoints.save(step, saved, info)
        with pytest.raises(ValueError, match=message):
            generate.main(asked)


def test_what_makes_no_sense_is_listed():
    with pytest.raises(ValueError, match="tokens=0 must be") as error:
        generate.check(
            generate.Config(tokens=0, rows=0, temperature=-1, top_k=0, top_p=1.5, page_size=0)
        )
    for name in ("page_size=0", "rows=0", "temperature=-1", "top_k=0", "top_p=1.5"):
        assert f"{name} must be" in str(error.value)
    nan, infinite = float("nan"), float("inf")
    pairs = ("temperature", nan), ("temperature", infinite), ("top_p", nan), ("top_p", 0.0)
    for name, x in pairs:
        with pytest.raises(ValueError, match=f"{name}=.* must be"):
            generate.check(dataclasses.replace(generate.Config(), **{name: x}))
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"seed={seed} must be from 0 to"):
            generate.check(generate.Config(seed=seed))
    generate.check(generate.Config(top_k=1, top_p=1.0, temperature=0.0))
    generate.check(generate.Config(top_k=256), codes=256)
