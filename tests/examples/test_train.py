import dataclasses
import inspect
import json
import re
import shutil
from functools import cache, partial
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

import llama

pytest.importorskip("matplotlib")
pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")

import cache as caches
import generate
import train
from tests.oracle import once
from xform.sharding import make_mesh
from xform.train import run
from xform.train.checkpoint import Checkpoints
from xform.train.data import NO_LABEL, count, encode, pack
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
    """The functions of four files, which are much shorter than a row or much longer."""
    text = "".join(inspect.getsource(file) for file in (llama, caches, generate, train))
    return [encode(part) for part in text.split("\n\n\n")]


def losses_on(dp: int, tp: int, steps: int = TINY.steps, **options) -> np.ndarray:
    """Those of the first steps."""
    rows, config = pack(some_documents(), TINY.length), dataclasses.replace(TINY, **options)
    training = train.training(config, mesh_of(dp, tp), rows)
    return np.array([loss for _, loss in islice(training, steps)])


@cache
def one_device() -> np.ndarray:
    """The losses that all others are compared with."""
    return losses_on(1, 1)


def test_it_learns():
    losses = one_device()
    assert losses[0] == pytest.approx(np.log(256), abs=0.5)
    assert losses[-5:].mean() < 3.2  # batches differ


@pytest.mark.parametrize(
    "layout",
    [(4, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in [(8, 1), (2, 4)])],
    ids="dp{0[0]}×tp{0[1]}".format,
)
def test_the_loss_curve_is_that_of_one_device(layout):
    np.testing.assert_allclose(losses_on(*layout, steps=20), one_device()[:20], rtol=0, atol=1e-4)


def test_validation_is_the_mean_over_all_labels():
    params = once(partial(llama.init, TINY.model), jax.random.key(0))
    some = [some_documents()[:n] for n in (5, 4, 3)]
    # A last batch that is not full.
    documents = next(d for d in some if len(pack(d, TINY.length).tokens) % TINY.batch)
    rows = pack(documents, TINY.length)
    total, labels = once(partial(llama.loss, config=TINY.model), params, rows)
    assert labels == sum(len(d) - 1 for d in documents) == (rows.labels != NO_LABEL).sum()
    mesh = mesh_of(2, 2)
    placed = jax.device_put(params, train.shardings(mesh, llama.SPECS))
    found = train.evaluate(TINY, mesh, placed, rows)
    assert found == pytest.approx(float(total / labels), rel=1e-6)


def test_the_library_is_split_by_file():
    rows, held_out = train.data_for(train.Config(), train.files.BYTES)
    assert count(held_out) > 100
    assert count(rows) > 10 * count(held_out)
    seen, unseen = ({row.tobytes() for x in part.blocks for row in x} for part in (rows, held_out))
    assert not seen & unseen


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
    """The losses and the state of 7 steps, stopped after the fifth."""
    config = dataclasses.replace(TINY, steps=7, save_every=2)
    rows = pack(some_documents(), TINY.length)
    folder.mkdir()
    if first_mesh:
        assert train.fit(config, first_mesh, rows, folder, StopAfter(5))[1] == 5
        assert len(losses_in(folder)) == 5
    state, done = train.fit(config, then_mesh, rows, folder, Stop())
    assert done == len(losses_in(folder)) == 7
    return losses_in(folder), state


def test_a_run_that_goes_on_has_the_loss_curve_of_an_unbroken_one(tmp_path):
    """Bit by bit, and so has its state."""
    mesh = mesh_of(2, 2)
    whole = broken_run(tmp_path / "whole", None, mesh)
    broken = broken_run(tmp_path / "broken", mesh, mesh)
    assert len(set(whole[0])) == 7
    jax.tree.map(np.testing.assert_array_equal, broken, whole)


@pytest.mark.slow
def test_a_run_may_go_on_with_another_mesh(tmp_path):
    whole, _ = broken_run(tmp_path / "whole", None, mesh_of(4, 2))
    moved, _ = broken_run(tmp_path / "moved", mesh_of(4, 2), mesh_of(8, 1))
    assert moved[:5] == whole[:5]
    np.testing.assert_allclose(moved, whole, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory) -> tuple[Path, train.Config]:
    """A run with a checkpoint, and its config."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    text = folder.parent / "a.txt"
    text.write_text("some text to train on " * 99)
    config = dataclasses.replace(TINY, steps=3, data=(str(text),), run=str(folder))
    rows, _ = train.data_for(config, train.files.BYTES)
    info = train.info_of(config, rows)
    run.begin(folder, dataclasses.asdict(config), data=info["data"])
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, train.first_state(config, mesh_of(1, 1)), info)
    return folder, dataclasses.replace(config, resume=True)


NO_MODEL = dataclasses.replace(TINY.model, heads=6, kv_heads=4, layers=3, codes=200)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 5, "dp": 3}, ["seed is 0 there and 5 now"]),
        (  # a mesh that is too large, heads that fit nothing, rows of another length
            {"dp": 64, "model": NO_MODEL, "length": 7, "batch": 3, "steps": -1},
            [
                *(f"model.{x} now" for x in ("layers is 2 there and 3", "heads is 8 there and 6")),
                *("model.codes is 256 there and 200 now", "length is 48 there and 7 now"),
                *("batch is 8 there and 3 now", "steps is 3 there and -1 now"),
            ],
        ),
        (
            {"seed": 1, "data": ("other.txt",)},
            ["seed is 0 there and 1 now", "the data was 2,", "and is 2,"],
        ),
        (  # token 60,000 is in neither vocabulary
            {"batch": 4, "data": ("tokens.bin",)},
            ["batch is 8 there and 4 now", "what is named now is none", "holds token 60000"],
        ),
        ({"batch": 4, "data": ("none.txt",)}, ["batch is 8", "none.txt` can't be read: No such"]),
        ({"tokenizer": "none.json"}, ["tokenizer is None there and 'none.json' now"]),
        ({"data": ("other.txt",)}, ["the data was 2,", "and is 2,"]),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
@pytest.mark.parametrize("saved", ["checkpoint", "run"])
def test_all_that_a_saved_run_has_otherwise_is_listed_first(
    saved_run, tmp_path, changed, words, saved
):
    """Before any other error, and where no checkpoint is there yet, too; nothing is written."""
    folder, config = saved_run
    if saved == "run":
        (tmp_path / "run").mkdir()
        shutil.copy(folder / "run.json", tmp_path / "run")
        folder = tmp_path / "run"
    (tmp_path / "other.txt").write_text("another text of equal length" * 99)
    (tmp_path / "tokens.bin").write_bytes(np.full(2000, 60_000, "<u2").tobytes())
    if "data" in changed:
        changed = {**changed, "data": tuple(str(tmp_path / name) for name in changed["data"])}
    before = (folder / "run.json").read_text()
    with pytest.raises(ValueError, match=rf"^the {saved} in `.*` is of another config: ") as error:
        train.main(dataclasses.replace(config, run=str(folder), **changed))
    for found in words:
        assert found in str(error.value)
    assert not {"dp", "resume", "run"} & {x.split()[0] for x in str(error.value).split("; ")}
    assert (folder / "run.json").read_text() == before


def test_a_state_of_another_config_is_not_restored(saved_run):
    folder, config = saved_run
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        info = checkpoints.info()
        with pytest.raises(ValueError, match=r"the data was .* and is 9 tokens now"):
            train.refuse_others(checkpoints, config, {"data": "9 tokens"})
        train.refuse_others(checkpoints, dataclasses.replace(config, dp=8), info)


def refused(config, saved, **changed) -> str:
    """Why a run may not go on with some changes; nothing if it may."""
    config = dataclasses.replace(config, **changed)
    try:
        train.refuse_another("the run", saved, config)
        rows = train.data_of(config, train.tokenizer_for(config), ("the run", saved))
        train.refuse_another("the run", saved, config, train.info_of(config, *rows))
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_is_known_by_what_it_reads_and_not_by_where_that_lies(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "?": 2}
    for name in ("one", "two", "other"):
        words = vocabulary if name != "other" else {**vocabulary, "c": 3}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(f"{tmp_path}/{name}.json")
    for name, text in (
        ("a", "a b " * 999),
        ("b", "b a " * 99),
        ("c", "b a " * 99),
        ("d", "a " * 99),
    ):
        (tmp_path / name).write_text(text)
    at = lambda name: str(tmp_path / name)
    config = dataclasses.replace(
        TINY, data=(at("a"),), held_out=(at("b"),), tokenizer=at("one.json"), prompt="a"
    )
    saved = train.info_of(config, *train.data_for(config, train.tokenizer_for(config)))
    moved = {"held_out": (at("c"),), "tokenizer": at("two.json")}
    free = {"explain": at("x.txt"), "held_out_rows": 3}
    assert refused(config, saved, **moved, **free) == ""
    old = {key: x for key, x in saved.items() if key in ("config", "data")}
    old["config"] = {k: x for k, x in old["config"].items() if k not in ("pp", "held_out_rows")}
    assert refused(config, old) == ""
    assert "held_out is " in refused(config, old, held_out=(at("c"),))
    assert "tokenizer is " in refused(config, saved, tokenizer=at("other.json"))
    assert "the data held out was 2" in refused(config, saved, held_out=(at("d"),))
    Path(at("two.json")).write_text("{}")
    assert "tokenizer is " in refused(config, saved, **moved)
    for name, words in (
        ("d", "what is named now is 99 tokens, too few: "),
        ("no", "now is none: "),
    ):
        found = refused(config, saved, data=(at(name),))
        assert "the run is of other data: the data was 2,016 tokens, crc32 " in found
        assert words in found
        assert ".." not in found


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run_and_says_where_it_was_born(tmp_path):
    config = dataclasses.replace(TINY, steps=9, save_every=1, learning_rate=1e30)
    rows = pack(some_documents(), TINY.length)
    with pytest.raises(FloatingPointError, match=r"step \d is not finite, and changed") as error:
        train.fit(config, mesh_of(1, 1), rows, tmp_path, Stop())
    words = str(error.value)
    assert "first: Inf in `" in words
    assert re.search(r"examples/(llama|between)\.py:\d+ \(", words)
    assert "argument" not in words  # the parameters are those before the step, and finite
    assert re.search(r"the last step that is saved is \d", "".join(error.value.__notes__))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp8", "bf16", "nvfp4"])
def test_it_learns_in_other_dtypes(policy):
    losses, exact = losses_on(1, 1, steps=12, precision=policy), one_device()[:12]
    assert (losses != exact).any()
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
    for tp in (2, 4):  # shares that differ would make a run that resumes another one
        with pytest.raises(ValueError, match=f"codes=1003 is not a multiple of tp={tp}"):
            train.mesh_for(train.Config(model=llama.Config(codes=1003), tp=tp))
    one_head = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, kv_heads=1))
    assert train.mesh_for(one_head).shape == {"dp": 8, "tp": 1}
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
        "temperature=-1.0 must be a number that is not negative",
        "separator=256 is outside of model.codes=256",
        "prompt is empty",
        "separator and token_dtype are of `.bin` files, and there is none; `a.txt` does not exist",
    ):
        assert words in str(error.value)
    config = dataclasses.replace(
        TINY, learning_rate=float("nan"), weight_decay=-1.0, seed=-1, temperature=float("inf"),
        explain="nowhere/a.html", held_out=("a.bin",), coordinator="localhost",
        model=dataclasses.replace(TINY.model, norm_eps=float("nan"), rope_base=float("inf")),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^config: ") as error:
        train.check(config)
    for words in (
        "learning_rate=nan must be above 0, and weight_decay=-1.0 at least 0",
        "seed=-1 must be from 0",
        "model.norm_eps=nan must be above 0",
        "model.rope_base=inf must be above 0",
        "coordinator=localhost must be `auto`, or `host:port` with a port from 1",
        "temperature=inf must be a number",
        "explain=nowhere/a.html is in a folder that does not exist",
        "there are `.bin` files of tokens (`a.bin`) and text (`Python's library`)",
    ):
        assert words in str(error.value)
    train.check(TINY)


def test_data_that_can_not_be_read_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"12")
    (tmp_path / "short.txt").write_text("x" * 300)
    for names, message in (
        (("a.bin", "b.bin"), r"place 0, .*; `.*b.bin` can't be read: No such"),
        (("a.bin", "short.txt"), r"tokens \(`.*a.bin`\) and text \(`.*short.txt`\): name only"),
        ((".",), r"tokens \(`.*a.bin`\) and text \(`.*short.txt`\): name only"),
        (("a.bin",), r"token 12849 at place 0, read as uint16, .* ends at 255"),
        (("none",), r"none` can't be read: No such file"),
        (("short.txt",), r"at least size=8 rows, found 2: use more text, shorter rows or smaller"),
    ):
        config = train.Config(data=tuple(f"{tmp_path}/{name}" for name in names))
        with pytest.raises(ValueError, match=message):
            train.data_for(config, train.tokenizer_for(config))
    config = train.Config(data=(f"{tmp_path}/short.txt",), length=2, held_out_rows=1, batch=1)
    (tmp_path / "one.txt").write_text("x")
    (tmp_path / "few.bin").write_bytes(bytes(2000))
    for name, dtype, message in (
        ("one.txt", None, "there is no token"),
        ("few.bin", "uint16", "a row takes 256 tokens, and there are 50 of them"),
    ):
        data = (f"{tmp_path}/{name}",)
        few = dataclasses.replace(train.Config(), data=data, token_dtype=dtype)
        with pytest.raises(ValueError, match=rf"too little data held out: {message}\. Give more"):
            train.data_for(few, train.files.BYTES)
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


@pytest.fixture
def four_devices(monkeypatch):
    """What runs by itself takes a mesh for which there is a program already."""
    monkeypatch.setattr(train, "mesh_for", lambda config: mesh_of(2, 2))


@pytest.mark.usefixtures("four_devices")
def test_main_prints_what_the_readme_promises(tmp_path, capsys):
    folder = tmp_path / "run"
    small = {"steps": 2, "prompt": "def f(x):\n", "run": str(folder)}
    small |= {"held_out_rows": 16}
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


@pytest.mark.usefixtures("four_devices")
def test_a_run_on_tokens(tmp_path, capsys):
    """A folder of `.bin` files, whatever their case, which have no text to go on with."""
    tokens = np.random.default_rng(0).integers(200, size=20_000).astype("<u2")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(tokens[:15_000].tobytes())
    (tmp_path / "data" / "B.BIN").write_bytes(tokens[15_000:].tobytes())
    tokenless = {"steps": 1, "data": (f"{tmp_path}/data",), "separator": 7}
    config = dataclasses.replace(TINY, **tokenless, run=str(tmp_path / "run"))
    train.main(config)
    out = capsys.readouterr().out
    assert (
        "18,960 tokens in 395 rows (40 more fill no row), read as uint16; cpu devices: dp=2 × tp=2"
        in out
    )
    assert "validation loss" in out
    assert "tokenize" not in out
    with pytest.raises(ValueError, match=r"was trained on tokens: name the tokenizer"):
        generate.main(generate.Config(run=config.run))


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
