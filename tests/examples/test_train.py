import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import llama

pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import generate
import train
from tests.oracle import once
from xform.sharding import make_mesh
from xform.train.checkpoint import Checkpoints
from xform.train.data import NO_LABEL, encode, pack
from xform.train.run import Stop

TINY = train.Config(
    model=llama.Config(layers=2, width=32, heads=8, kv_heads=4, head_size=8, hidden=64),
    steps=50,
    batch=8,
    length=48,
    learning_rate=1e-2,
)


def mesh_of(dp: int, tp: int):
    return make_mesh(dp=dp, tp=tp, devices=jax.devices("cpu")[: dp * tp])


def some_documents() -> list[np.ndarray]:
    """The functions of two files, which are much shorter than a row or much longer."""
    text = Path(llama.__file__).read_text() + Path(generate.__file__).read_text()
    return [encode(part) for part in text.split("\n\n\n")]


def losses_on(dp: int, tp: int) -> np.ndarray:
    rows = pack(some_documents(), TINY.length)
    return np.array([loss for _, loss in train.training(TINY, mesh_of(dp, tp), rows)])


@pytest.fixture(scope="module")
def one_device() -> np.ndarray:
    return losses_on(1, 1)


def test_it_learns(one_device):
    assert one_device[0] == pytest.approx(np.log(256), abs=0.5)
    assert one_device[-5:].mean() < 3.2  # batches differ


@pytest.mark.parametrize(
    "layout",
    [(4, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in [(8, 1), (2, 4)])],
    ids="dp{0[0]}×tp{0[1]}".format,
)
def test_the_loss_curve_is_that_of_one_device(one_device, layout):
    np.testing.assert_allclose(losses_on(*layout), one_device, rtol=0, atol=1e-4)


def test_validation_is_the_mean_over_all_labels():
    params = once(partial(llama.init, TINY.model), jax.random.key(0))
    some = [some_documents()[:n] for n in (5, 4, 3)]
    # A last batch that is not full.
    documents = next(d for d in some if len(pack(d, TINY.length).tokens) % TINY.batch)
    rows = pack(documents, TINY.length)
    total, labels = once(partial(llama.loss, config=TINY.model), params, rows)
    assert labels == sum(len(d) - 1 for d in documents) == (rows.labels != NO_LABEL).sum()
    mesh = mesh_of(4, 2)
    placed = jax.device_put(params, train.shardings(mesh, llama.SPECS))
    found = train.evaluate(TINY, mesh, placed, rows)
    assert found == pytest.approx(float(total / labels), rel=1e-6)


def test_the_library_is_split_by_file():
    rows, held_out = train.data_for(train.Config(), train.files.BYTES)
    assert len(held_out.tokens) > 100
    assert len(rows.tokens) > 10 * len(held_out.tokens)
    assert not {row.tobytes() for row in rows.tokens} & {row.tobytes() for row in held_out.tokens}


# ---- runs ----------------------------------------------------------------------------------------


def losses_in(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


class StopAfter(Stop):
    """Asks to stop after so many steps, as a signal does that comes in the middle of the last."""

    def __init__(self, steps: int):
        self.left = steps

    def __bool__(self):
        self.left -= 1
        return self.left <= 0


def broken_run(folder: Path, first_mesh, then_mesh) -> tuple[list[float], dict]:
    """The losses and the state of 12 steps, stopped after the seventh."""
    config = dataclasses.replace(TINY, steps=12, save_every=4)
    rows = pack(some_documents(), TINY.length)
    folder.mkdir()
    if first_mesh:
        assert train.fit(config, first_mesh, rows, folder, StopAfter(7))[1] == 7
        assert len(losses_in(folder)) == 7
    state, done = train.fit(config, then_mesh, rows, folder, Stop())
    assert done == len(losses_in(folder)) == 12
    return losses_in(folder), state


def test_a_run_that_goes_on_has_the_loss_curve_of_an_unbroken_one(tmp_path):
    """Bit by bit, and so has its state."""
    mesh = mesh_of(4, 2)
    whole = broken_run(tmp_path / "whole", None, mesh)
    broken = broken_run(tmp_path / "broken", mesh, mesh)
    assert len(set(whole[0])) == 12
    jax.tree.map(np.testing.assert_array_equal, broken, whole)


@pytest.mark.slow
def test_a_run_may_go_on_with_another_mesh(tmp_path):
    whole, _ = broken_run(tmp_path / "whole", None, mesh_of(4, 2))
    moved, _ = broken_run(tmp_path / "moved", mesh_of(4, 2), mesh_of(8, 1))
    assert moved[:7] == whole[:7]
    np.testing.assert_allclose(moved, whole, rtol=0, atol=1e-4)


def test_a_checkpoint_of_another_config_or_other_data_is_refused(tmp_path):
    config = dataclasses.replace(TINY, steps=1)
    rows, mesh = pack(some_documents(), TINY.length), mesh_of(1, 1)
    info = {"config": dataclasses.asdict(config), "data": train.files.fingerprint(rows)}
    state = train.first_state(config, mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, info)
        other = dataclasses.replace(
            config, seed=5, dp=3, model=dataclasses.replace(TINY.model, layers=3)
        )
        asked = {"config": dataclasses.asdict(other), "data": "9 tokens"}
        with pytest.raises(ValueError, match="is of another config: ") as error:
            train.restored(checkpoints, state, asked)
        train.restored(checkpoints, state, info)
    for words in (
        "seed is 0 in the checkpoint and 5 now",
        "model.layers is 2 in the checkpoint and 3 now",
        f"the data was {info['data']} and is 9 tokens now",
    ):
        assert words in str(error.value)
    assert "dp" not in str(error.value)


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_says_where_it_was_born(tmp_path):
    config = dataclasses.replace(TINY, steps=9, save_every=1, learning_rate=1e30)
    rows = pack(some_documents(), TINY.length)
    with pytest.raises(FloatingPointError, match=r"step \d is not finite, and changed") as error:
        train.fit(config, mesh_of(1, 1), rows, tmp_path, Stop())
    words = str(error.value)
    assert "first: Inf in `" in words
    assert "llama.py:" in words
    assert "argument" not in words  # the parameters are those before the step, and finite
    assert re.search(r"the last step that is saved is \d", "".join(error.value.__notes__))


@pytest.mark.parametrize(
    "policy", ["fp8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bf16", "nvfp4"))]
)
def test_it_learns_in_other_dtypes(one_device, policy):
    config = dataclasses.replace(TINY, precision=policy, steps=20)
    rows = pack(some_documents(), TINY.length)
    losses = [loss for _, loss in train.training(config, mesh_of(1, 1), rows)]
    full = dataclasses.replace(TINY, steps=20)
    exact = [loss for _, loss in train.training(full, mesh_of(1, 1), rows)]
    assert losses != exact
    tolerance = {"bf16": 0.01, "fp8": 0.03, "nvfp4": 0.1}[policy]
    np.testing.assert_allclose(losses, exact, rtol=tolerance)


@pytest.mark.slow
def test_300_steps_of_fp8_follow_bf16():
    """Of the example as it is: each step's loss is noise of 3 %, the mean of all is not."""
    found = {}
    for policy in ("bf16", "fp8"):
        config = dataclasses.replace(train.Config(), steps=300, precision=policy)
        rows, _ = train.data_for(config, train.tokenizer_for(config))
        losses = [loss for _, loss in train.training(config, mesh_of(1, 1), rows)]
        found[policy] = np.array(losses)
    relative = found["fp8"] / found["bf16"] - 1
    assert abs(found["fp8"].mean() / found["bf16"].mean() - 1) < 0.01
    assert np.abs(relative).mean() < 0.01
    assert abs(relative[-50:].mean()) < 0.01


# ---- what is refused -----------------------------------------------------------------------------


def test_a_model_that_does_not_divide_is_refused():
    config = train.Config(model=llama.Config(heads=6, kv_heads=2), tp=4)
    with pytest.raises(ValueError, match=r"heads=6 is not a multiple of tp=4, kv_heads=2 is not"):
        train.mesh_for(config)
    with pytest.raises(ValueError, match=r"dp=3 × tp=2, which takes 6 devices"):
        train.mesh_for(train.Config(dp=3))
    with pytest.raises(ValueError, match=r"dp=1 × tp=16, which takes 16 devices, but there are 8"):
        train.mesh_for(train.Config(tp=16))


def test_all_that_is_wrong_with_a_config_is_listed():
    model = llama.Config(heads=4, kv_heads=3, head_size=7, layers=0)
    config = train.Config(
        model=model, batch=-1, dp=0, temperature=-1.0, separator=256, prompt="", data=("a.txt",)
    )
    with pytest.raises(ValueError, match=r"^config: ") as error:
        train.check(config)
    for words in (
        "model.layers=0 must be above 0",
        "batch=-1 must be above 0",
        "dp=0 must be above 0",
        "model.heads=4 is no multiple of model.kv_heads=3",
        "model.head_size=7 must be even",
        "temperature=-1.0 must not be negative",
        "separator=256 is outside of model.codes=256",
        "prompt is empty",
        "separator and token_dtype are of `.bin` files, and there is none",
    ):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"mix text and `\.bin` files"):
        train.check(dataclasses.replace(TINY, held_out=("a.bin",)))
    train.check(TINY)


def test_data_that_can_not_be_read_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"12")
    (tmp_path / "short.txt").write_text("x" * 300)
    for names, message in (
        (("a.bin", "b.bin"), r"one `.bin` file, and nothing beside it"),
        (("a.bin",), r"token 12849 at place 0, and the vocabulary ends at 255"),
        (("none",), r"none` can't be read: No such file"),
        (("short.txt",), r"at least size=8 rows, found 2: use more text, shorter rows or smaller"),
    ):
        config = train.Config(data=tuple(f"{tmp_path}/{name}" for name in names))
        with pytest.raises(ValueError, match=message):
            train.data_for(config, train.tokenizer_for(config))
    config = train.Config(data=(f"{tmp_path}/short.txt",), length=2, held_out_rows=1, batch=1)
    (tmp_path / "one.txt").write_text("x")
    config = dataclasses.replace(config, held_out=(f"{tmp_path}/one.txt",))
    with pytest.raises(ValueError, match=r"no token to predict in the data held out"):
        train.data_for(config, train.files.BYTES)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("    return x + 1", None),
        ("def f(x):", None),
        ("# it's fine", None),
        ("print('a", "unterminated string"),
        ("f(x", "EOF in multi-line statement"),
        ('    """Return x', "EOF in multi-line string"),
        ("f('x", "unterminated string"),
        ("x = 0b12", "invalid"),
    ],
)
def test_lines_are_judged_by_the_tokenizer(line, said):
    found = train.complaint(line)
    assert found is None if said is None else said in str(found)


def test_main_prints_what_the_readme_promises(tmp_path, capsys):
    folder = tmp_path / "run"
    small = {"steps": 4, "length": 64, "prompt": "def f(x):\n", "run": str(folder)}
    config = dataclasses.replace(TINY, **small)
    train.main(config)
    out = capsys.readouterr().out
    for words in ("parameters", "tokens/s", "MFU", "validation loss", "lines pass `tokenize`"):
        assert words in out
    assert {path.name for path in folder.iterdir()} == {
        "checkpoints", "curves.png", "metrics.jsonl", "run.json",
    }  # fmt: skip
    with pytest.raises(FileExistsError, match="holds a run already: resume it"):
        train.main(config)


def test_a_run_on_tokens(tmp_path, capsys):
    """A `.bin` file, which has no text to go on with."""
    tokens = np.random.default_rng(0).integers(200, size=20_000).astype("<u2")
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    tokenless = {"steps": 2, "data": (f"{tmp_path}/a.bin",), "separator": 7}
    train.main(dataclasses.replace(TINY, **tokenless, run=str(tmp_path / "run")))
    out = capsys.readouterr().out
    assert "18,960 tokens in 395 rows" in out
    assert "validation loss" in out
    assert "tokenize" not in out


@pytest.mark.slow
def test_a_run_on_the_tokens_of_a_tokenizer(tmp_path, capsys):
    """Text in a vocabulary of its own, there and back: trained on, sampled, and asked again."""
    tokenizers = pytest.importorskip("tokenizers")
    texts = sorted(Path(json.__file__).parent.glob("*.py"))
    level = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=level.alphabet(), show_progress=False
    )
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = (
        level(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
    )
    made.train(list(map(str, texts)), vocabulary)
    made.save(str(tmp_path / "tokenizer.json"))
    config = dataclasses.replace(
        TINY, steps=2, data=tuple(map(str, texts)), held_out=(str(texts[0]),),
        tokenizer=str(tmp_path / "tokenizer.json"), run=str(tmp_path / "run"), prompt="def né",
        model=dataclasses.replace(TINY.model, codes=400),
    )  # fmt: skip
    train.main(config)
    assert "nats per token" in capsys.readouterr().out
    generate.main(generate.Config(run=config.run, prompt="def né", tokens=5))
    assert capsys.readouterr().out.startswith("def né")
    with pytest.raises(ValueError, match=r"has 400 tokens, .* ends at 255: it needs codes=400"):
        train.main(dataclasses.replace(config, model=TINY.model, run=str(tmp_path / "other")))
