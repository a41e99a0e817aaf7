"""Weights of the Llama family: what is read is what was written, and logits are `transformers`'.

The latter runs in a Python of its own, named by `XFORM_TORCH_PYTHON`, which has torch and
transformers; see `transformers_judge.py` beside this.
"""

import dataclasses
import json
import os
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")

from safetensors.numpy import load_file, save_file

import hugging_face
import llama
import parallel
import rope
from xform.sharding import make_mesh

TORCH = os.environ.get("XFORM_TORCH_PYTHON")
LLAMA_3 = (8.0, 1.0, 4.0, 32.0)
SIZES: dict = dict(codes=48, layers=3, width=32, heads=4, kv_heads=2, head_size=10, hidden=56)
MODELS = {
    "plain": llama.Config(**SIZES),
    "linear": llama.Config(**SIZES, rope_scaling=(4.0,), rope_base=500.0),
    "llama 3": llama.Config(**SIZES, rope_scaling=LLAMA_3, rope_base=500_000.0, norm_eps=1e-6),
    "tied": llama.Config(**SIZES),
}


@cache
def random_params(name: str) -> dict:
    """Parameters of which no norm is one; the embeddings of `tied` are the same."""
    shapes = jax.eval_shape(partial(llama.init, MODELS[name]), jax.random.key(0))
    rng = np.random.default_rng(len(name))
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3 + (x.ndim == 1), jnp.float32)
    params = jax.tree.map(draw, shapes)
    return {**params, "unembed": params["embed"].T} if name == "tied" else params


def write_models(folder: Path) -> None:
    """Writes all models, the first in one file."""
    for name, config in MODELS.items():
        most = 10**9 if name == "plain" else 20_000
        hugging_face.save(folder / name, config, random_params(name), length=64, most=most)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write_models(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_was_written(written, name):
    config, params = hugging_face.load(written / name)
    assert config == MODELS[name]
    jax.tree.map(np.testing.assert_array_equal, params, random_params(name))
    files = sorted(path.name for path in (written / name).iterdir())
    assert ("model.safetensors" in files) == (name == "plain")
    sizes = [path.stat().st_size for path in (written / name).glob("model-*")]
    assert all(size < 22_000 for size in sizes)
    assert len(sizes) == 0 if name == "plain" else len(sizes) > 2


def test_each_device_reads_its_own_part(written, monkeypatch):
    config, mesh = MODELS["llama 3"], make_mesh(dp=2, tp=2, devices=jax.devices("cpu")[:4])
    placement = parallel.placement(parallel.Layout(fsdp=True), config, mesh)
    read, sizes = hugging_face._Tensors.read, []
    counted = lambda self, name, index: (
        sizes.append(read(self, name, index).size) or read(self, name, index)
    )
    monkeypatch.setattr(hugging_face._Tensors, "read", counted)
    _, params = hugging_face.load(written / "llama 3", placement)
    jax.tree.map(np.testing.assert_array_equal, params, random_params("llama 3"))
    assert jax.tree.map(lambda x: x.sharding, params) == placement
    whole = max(x.size for x in jax.tree.leaves(params["layers"])) // config.layers
    assert max(sizes) == whole // 4


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, "zb-v"])
def test_training_begins_with_them_on_any_mesh(written, schedule):
    train = pytest.importorskip("train")
    pp = {} if schedule is None else {"pp": 2}
    even = dataclasses.replace(MODELS["plain"], layers=4) if pp else MODELS["plain"]
    folder = written / "plain"
    if pp:  # whole stages
        folder = written / "four"
        four = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), random_params("plain")["layers"])
        params = {**random_params("plain"), "layers": four}
        hugging_face.save(folder, even, params, length=64)
    mesh = make_mesh(dp=2, **pp, tp=2, devices=jax.devices("cpu")[: 8 if pp else 4])
    config = train.Config(
        model=even, weights=str(folder), schedule=schedule, **pp, layout=parallel.Layout(fsdp=True)
    )
    state = train.first_state(config, mesh)
    fresh = train.first_state(dataclasses.replace(config, weights=None), mesh)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, fresh)
    at = lambda x: x.sharding
    assert jax.tree.map(at, state) == jax.tree.map(at, fresh)
    found = train.pipelined.at_rest(state, train.schedule_for(config))["params"]
    expected = hugging_face.load(folder)[1]
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_weights_of_another_model_are_refused_before_a_run_begins(written, tmp_path):
    train = pytest.importorskip("train")
    model = dataclasses.replace(MODELS["linear"], layers=5, norm_eps=1e-6)
    config = train.Config(model=model, weights=str(written / "linear"), run=str(tmp_path / "run"))
    with pytest.raises(
        ValueError, match=r"are of another model: layers is 3 there and 5 now; norm"
    ):
        train.main(config)
    assert not (tmp_path / "run").exists()


def test_a_run_is_written_as_theirs(tmp_path, capsys):
    train = pytest.importorskip("train")
    config = train.Config(model=MODELS["llama 3"], length=64)
    params = random_params("llama 3")
    train.run.begin(tmp_path / "run", dataclasses.asdict(config))
    with train.Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(7, {"params": params}, {})
    asked = hugging_face.Asked(out=str(tmp_path / "out"), run=str(tmp_path / "run"))
    hugging_face.main(asked)
    assert "the parameters of step 7 are in" in capsys.readouterr().out
    found = hugging_face.load(tmp_path / "out")
    assert found[0] == config.model
    jax.tree.map(np.testing.assert_array_equal, found[1], params)


def test_other_dtypes_are_rounded_once(written, tmp_path):
    params = random_params("tied")
    hugging_face.save(tmp_path / "b", MODELS["tied"], params, length=64, dtype="bfloat16")
    _, found = hugging_face.load(tmp_path / "b")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"]
    _, found = hugging_face.load(tmp_path / "b", dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}


def test_a_config_that_the_model_can_not_be_is_refused_with_all_reasons(written):
    described = json.loads((written / "plain" / "config.json").read_text())
    more = dict(
        model_type="gemma", hidden_act="gelu", attention_bias=True, sliding_window=128,
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    del described["vocab_size"]
    with pytest.raises(ValueError, match=r"^`config.json` is of no model of llama.py: ") as error:
        hugging_face.config_of(described | more)
    for words in (
        "model_type='gemma' is no Llama", "hidden_act is 'gelu', not 'silu'",
        "attention_bias is True, not False", "sliding_window is 128, not None",
        "partial_rotary_factor is 0.5, not 1.0", "vocab_size is missing",
        "rope_scaling is of type 'yarn', not default, linear, llama3",
    ):  # fmt: skip
        assert words in str(error.value)
    described |= {"vocab_size": 48, "rope_scaling": {"type": "llama3", "factor": 2.0}}
    with pytest.raises(ValueError, match=r"has no low_freq_factor; .* no high_freq_factor"):
        hugging_face.config_of(described)


SCALED = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling has factor, and is of type 'default'"),
        ({"rope_scaling": {"type": None}}, "is of type None, not default, linear, llama3"),
        ({"rope_scaling": {"type": ["linear"]}}, r"is of type \['linear'\], not default"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2.0}},
            "is of type 'linear', and of 'default'",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_scaling has full_attention, and is of type 'default'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}},
            "rope_scaling has low_freq_factor, and is of type 'linear'",
        ),
        ({"rope_scaling": SCALED | {"low_freq_factor": 4.0}}, "low=4.0 below high=4.0"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\}, not None"),
        ({"num_key_value_heads": 3}, "model.heads=4 is no multiple of model.kv_heads=3"),
        ({"head_dim": 7}, "model.head_size=7 must be even"),
    ],
)
def test_what_would_be_left_out_of_a_config_is_refused(written, more, words):
    """It would be another model, and nobody would be told."""
    described = json.loads((written / "plain" / "config.json").read_text())
    with pytest.raises(ValueError, match=rf"is of no model of llama.py: .*{words}"):
        hugging_face.config_of(described | more)


NARROW = {"model.norm.weight": np.zeros(32, np.int8)}


def test_numbers_of_a_config_that_are_none_are_listed(written):
    described = json.loads((written / "plain" / "config.json").read_text())
    more = dict(
        hidden_size="16", num_hidden_layers=0, vocab_size=8.5, rms_norm_eps=-1e-5,
        num_attention_heads=True, rope_theta=None, head_dim=None,
        rope_scaling={"type": "linear", "factor": None},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^`config.json` is of no model of llama.py: ") as error:
        hugging_face.config_of(described | more)
    for words in (
        "hidden_size is '16', not a whole number above 0", "num_hidden_layers is 0, not a whole",
        "vocab_size is 8.5, not a whole", "rms_norm_eps is -1e-05, not a number above 0",
        "num_attention_heads is True", "head_dim is missing", "factor is None, not a number above",
    ):  # fmt: skip
        assert words in str(error.value)
    with pytest.raises(ValueError, match="rope_scaling is 7, no object"):
        hugging_face.config_of(described | {"rope_scaling": 7})
    with pytest.raises(ValueError, match="it holds no object"):
        hugging_face.config_of([described])  # pyright: ignore[reportArgumentType]


def test_an_index_that_is_not_that_of_its_files_is_refused(written, tmp_path):
    config, params = hugging_face.load(written / "plain")
    hugging_face.save(tmp_path / "x", config, params, length=64, most=20_000)
    index = tmp_path / "x" / hugging_face.INDEX
    files = json.loads(index.read_text())["weight_map"]
    first, second, third = sorted(set(files.values()))[:3]
    moved = {name: first if file == second else file for name, file in files.items()}
    index.write_text(json.dumps({"weight_map": {**moved, "ghost": third}}))
    with pytest.raises(ValueError, match=r"the index names what is not there: .*`ghost` in") as e:
        hugging_face.load(tmp_path / "x")
    assert str(e.value).count(" in `") == 1 + list(files.values()).count(second)
    for file in (second, third):
        (tmp_path / "x" / file).unlink()
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(FileNotFoundError, match=rf"there is no `.*{second}`, `.*{third}`"):
        hugging_face.load(tmp_path / "x")
    for broken in ([], {}, {"weight_map": [1]}, {"weight_map": {"a": 3}}):
        index.write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="is damaged: it has no `weight_map` from tensors"):
            hugging_face.load(tmp_path / "x")


def test_tensors_of_another_model_are_listed(written, tmp_path):
    shutil.copytree(written / "plain", tmp_path / "x")
    path = tmp_path / "x" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.bias"] = np.zeros(40, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(5, np.float32)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.copy()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"^the weights in `.*x` are of another model: ") as error:
        hugging_face.load(tmp_path / "x")
    assert str(error.value).split(": ", 1)[1] == (
        "`lm_head.weight` is [32, 48] there and [48, 32] in the model; "
        "`model.layers.1.self_attn.q_proj.bias` is [40] there and missing in the model; "
        "`model.norm.weight` is missing there and [32] in the model."
    )
    save_file({**load_file(written / "plain" / path.name), **NARROW}, path)
    with pytest.raises(ValueError, match=r"norm.weight` is of I8 there, not one of F64, F32"):
        hugging_face.load(tmp_path / "x")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors` is damaged: "):
        hugging_face.load(tmp_path / "x")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no `.*model.safetensors`, of the weights in"):
        hugging_face.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match=r"config.json`: needed is a folder of weights"):
        hugging_face.load(tmp_path / "nothing")


def test_what_can_not_be_written_leaves_nothing_and_spoils_nothing(written, tmp_path):
    with pytest.raises(FileExistsError, match=r"plain` is there already"):
        hugging_face.save(written / "plain", MODELS["plain"], random_params("plain"), length=64)
    hugging_face.load(written / "plain")
    experts = llama.Config(experts=4)
    with pytest.raises(ValueError, match=r"no experts, and this model has 4"):
        hugging_face.save(tmp_path / "e", experts, {}, length=64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("scaling", "words"),
    [((1.0, 2.0), "must be (factor,) or"), ((0.0,), "numbers above 0"),
     ((8.0, 4.0, 4.0, 64.0), "low=4.0 below high=4.0")],
)  # fmt: skip
def test_a_scaling_that_makes_no_sense_is_refused(scaling, words):
    assert words in rope.wrong(scaling)[0]
    assert rope.wrong(LLAMA_3) == rope.wrong((2.0,)) == rope.wrong(()) == []


# ---- beside `transformers` -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A folder with models of both, and their logits by `transformers`."""
    if not TORCH:
        pytest.skip("no `XFORM_TORCH_PYTHON`, a Python with torch and transformers")
    folder = tmp_path_factory.mktemp("judged")
    write_problems(folder)
    judge = Path(__file__).with_name("transformers_judge.py")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    subprocess.run([TORCH, str(judge), str(folder)], check=True, env=clean, capture_output=True)
    return folder


def write_problems(folder: Path) -> None:
    """Writes what the judge reads."""
    (folder / "ours").mkdir()
    write_models(folder / "ours")
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(48, size=(2, 100)))


THEIRS = ("plain", "one head for all", "head size", "linear", "llama 3", "mistral")
BOTH = [*(f"ours/{name}" for name in MODELS), *(f"theirs/{name}" for name in THEIRS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_logits_are_those_of_transformers(judged, name):
    check_logits(judged, name)


def check_logits(folder: Path, name: str) -> None:
    """Asserts equality to 1e-5 of the largest: both round in float32, in another order."""
    expected = np.load(folder / "logits.npz")[name]
    config, params = hugging_face.load(folder / name)
    tokens = jnp.asarray(np.load(folder / "tokens.npy"), jnp.int32)
    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision("highest"):
        found = jax.jit(partial(llama.logits, config=config))(params, tokens, tokens * 0)
    frequencies = json.loads((folder / "frequencies.json").read_text())[name]
    plain = config.rope_base ** -(np.arange(0, config.head_size, 2) / config.head_size)
    turned = rope.scaled(jnp.asarray(plain, jnp.float32), config.rope_scaling)
    np.testing.assert_allclose(turned, frequencies, rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert np.abs(expected).max() > 1
