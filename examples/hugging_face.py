"""Weights of the Llama family as Hugging Face keeps them, in and out.

    uv run --extra train examples/train.py --weights llama/ --tokenizer llama/tokenizer.json
    uv run --extra train examples/hugging_face.py --run runs/2026-11-29_22-55-00 --out weights/

A folder of theirs has a `config.json` and `safetensors` files, several with an index where they are
large. They keep a matrix as [out, in] and each layer by itself; here it is [in, out], and layers
are stacked. Weights are read where they are needed: a device reads its own part of each, and no
process ever holds all of them. What the model of llama.py can't be is refused, never left out.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import llama
from settings import known_of, wrong_attention
from xform.train import run
from xform.train.checkpoint import Checkpoints

# Our names and theirs. Matrices but for that of `embed` lie the other way round.
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "unembed": "lm_head.weight",
}
OF_LAYER = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "hidden_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
SIZES = {
    "codes": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
REAL = ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")
LLAMA_3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# The numbers that a kind of RoPE's scaling is told by, and what else may stand beside them.
SCALINGS = {"default": (), "linear": ("factor",), "llama3": ("factor", *LLAMA_3)}
OF_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Of what their configs may say, what this model is; it is also what they mean if they say nothing.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them; narrower ones go with scales
INDEX = "model.safetensors.index.json"


# ---- config --------------------------------------------------------------------------------------


def config_of(described: Mapping[str, Any]) -> llama.Config:
    """Returns what a `config.json` says the model is.

    Raises:
      ValueError: Lists all that is missing, and all that the model of llama.py can't be.
    """
    if not isinstance(described, Mapping):
        raise ValueError("`config.json` is damaged: it holds no object.")
    d = dict(described)
    family = d.get("model_type")
    wrong = [] if family in ("llama", "mistral") else [f"model_type={family!r} is no Llama"]
    d.setdefault("num_key_value_heads", d.get("num_attention_heads"))
    width, heads = d.get("hidden_size"), d.get("num_attention_heads")
    if d.get("head_dim") is None and not (_no_number("", width) or _no_number("", heads)):
        d["head_dim"] = d["hidden_size"] // d["num_attention_heads"]
    d.setdefault("rms_norm_eps", 1e-6)  # as `transformers` does
    wrong += [f"{name} is missing" for name in SIZES.values() if d.get(name) is None]
    parts = {name: d.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    wrong += [
        f"{name} is {x!r}, no object" for name, x in parts.items() if not isinstance(x, Mapping)
    ]
    known = [part for part in parts.values() if isinstance(part, Mapping)]
    rope = {name: x for part in known for name, x in part.items()}
    bases = (rope.get("rope_theta"), d.get("rope_theta"), 10_000.0)
    d["rope_theta"] = next(x for x in bases if x is not None)
    d |= {name: rope[name] for name in FIXED if name in rope}
    given = {name: d.get(name, needed) for name, needed in FIXED.items()}
    wrong += [
        f"{name} is {x!r}, not {FIXED[name]!r}" for name, x in given.items() if x != FIXED[name]
    ]
    names, wrong_rope = _scaling_of(rope)
    wrong += wrong_rope
    numbers = {name: d[name] for name in (*SIZES.values(), "rope_theta") if d.get(name) is not None}
    numbers |= {name: rope[name] for name in names if name in rope}
    wrong += [words for name, x in numbers.items() if (words := _no_number(name, x))]
    config = None
    if not wrong:
        sizes = {ours: d[name] for ours, name in SIZES.items()}
        scaling = tuple(float(rope[name]) for name in names)
        config = llama.Config(**sizes, rope_base=float(d["rope_theta"]), rope_scaling=scaling)
        wrong = wrong_attention(config)
    if wrong or config is None:
        raise ValueError(f"`config.json` is of no model of llama.py: {'; '.join(wrong)}.")
    return config


def _scaling_of(rope: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """The numbers that a scaling of RoPE is told by, and in words what the model can't be."""
    kinds = [rope[name] for name in ("rope_type", "type") if name in rope] or ["default"]
    if wrong := [kind for kind in kinds if not (isinstance(kind, str) and kind in SCALINGS)]:
        return (), [f"rope_scaling is of type {x!r}, not {', '.join(SCALINGS)}" for x in wrong]
    if len(set(kinds)) > 1:
        return (), [f"rope_scaling is of type {kinds[0]!r}, and of {kinds[1]!r}"]
    names = SCALINGS[kinds[0]]
    wrong = [f"rope_scaling has no {name}" for name in names if name not in rope]
    more = [name for name in rope if name not in (*names, *OF_ROPE)]
    return names, wrong + [f"rope_scaling has {x}, and is of type {kinds[0]!r}" for x in more]


def _no_number(name: str, x: Any) -> str | None:
    """In words, that something is no number that the model could have."""
    kind, called = (int | float, "number") if name in REAL else (int, "whole number")
    if isinstance(x, kind) and not isinstance(x, bool) and 0 < x < math.inf:
        return None
    return f"{name} is {x!r}, not a {called} above 0"


def description_of(config: llama.Config, length: int, *, tied: bool, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a model that was trained on rows of `length` tokens."""
    described = {name: getattr(config, ours) for ours, name in SIZES.items()}
    described |= {name: x for name, x in FIXED.items() if name in ("hidden_act", "attention_bias")}
    rope = None
    if config.rope_scaling:
        kind = "llama3" if len(config.rope_scaling) > 1 else "linear"
        numbers = dict(zip(("factor", *LLAMA_3), config.rope_scaling, strict=False))
        rope = {"rope_type": kind, "type": kind, **numbers}
        if kind == "llama3":
            rope[LLAMA_3[-1]] = int(rope[LLAMA_3[-1]])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **described,
        "rope_theta": config.rope_base,
        "rope_scaling": rope,
        "max_position_embeddings": length,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }


# ---- in ------------------------------------------------------------------------------------------


def model_of(folder: Path | str) -> llama.Config:
    """Returns the model whose weights are in a folder; see `config_of`."""
    return config_of(_json(Path(folder) / "config.json"))


def check(folder: Path | str, model: llama.Config) -> None:
    """Raises unless the weights in a folder are those of a model."""
    wrong = run.differences(asdict(model_of(folder)), asdict(model))
    if wrong:
        raise ValueError(f"the weights in `{folder}` are of another model: {'; '.join(wrong)}.")


def load(
    folder: Path | str, placement: PyTree | None = None, dtype: str = "float32"
) -> tuple[llama.Config, dict]:
    """Returns the model of a folder, and its parameters.

    Where embeddings are tied, both of ours are read from the one: training parts them.

    Args:
      folder: With `config.json`, and `model.safetensors` or an index and several files.
      placement: Where each parameter goes, as `parallel.placement` makes it; by default, all are on
        one device.
      dtype: What they become.

    Raises:
      FileNotFoundError: A file is missing.
      ValueError: It is another model, or damaged; or lists every tensor that is missing, left over
        or of another shape.
    """
    folder = Path(folder)
    described = _json(folder / "config.json")
    config = config_of(described)
    shapes = jax.eval_shape(partial(llama.init, config), jax.random.key(0))
    at = SingleDeviceSharding(jax.devices()[0])
    placement = placement or jax.tree.map(lambda _: at, shapes)
    with _Tensors(folder) as tensors:
        names = dict(NAMES)
        if described.get("tie_word_embeddings"):
            tensors.files.pop(names["unembed"], None)  # a copy
            names["unembed"] = names["embed"]
        places = _places(shapes, names)
        _check_shapes(folder, tensors, places, shapes)

        def read(place: Place, struct: jax.ShapeDtypeStruct, sharding) -> jax.Array:
            part = lambda index: place.read(tensors, index).astype(jnp.dtype(dtype))
            return jax.make_array_from_callback(struct.shape, sharding, part)

        return config, jax.tree.map(read, places, shapes, placement)


@dataclass(frozen=True)
class Place:
    """Where a parameter is among their tensors: in one, or in one for each layer.

    Attributes:
      names: Of these tensors.
      stacked: Whether there is one for each layer.
      turned: Whether they keep it the other way round.
    """

    names: tuple[str, ...]
    stacked: bool
    turned: bool

    def read(self, tensors: "_Tensors", index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the parameter."""
        names, inside = (self.names[index[0]], index[1:]) if self.stacked else (self.names, index)
        parts = [tensors.read(name, inside[::-1] if self.turned else inside) for name in names]
        parts = [part.T for part in parts] if self.turned else parts
        return np.stack(parts) if self.stacked else parts[0]

    def cut(self, x: jax.Array) -> Iterator[tuple[str, np.ndarray]]:
        """Yields their tensors of the parameter."""
        for i, name in enumerate(self.names):
            part = np.asarray(x[i] if self.stacked else x)
            yield name, np.ascontiguousarray(part.T if self.turned else part)


def _places(params: PyTree, names: Mapping[str, str]) -> PyTree:
    """The place of each parameter, in a tree as theirs."""
    layers = {}
    for name, x in params["layers"].items():
        each = (f"model.layers.{i}.{OF_LAYER[name]}.weight" for i in range(x.shape[0]))
        layers[name] = Place(tuple(each), stacked=True, turned=x.ndim > 2)
    ends = {name: Place((names[name],), stacked=False, turned=name == "unembed") for name in names}
    return {**ends, "layers": layers}


def _check_shapes(folder: Path, tensors: "_Tensors", places: PyTree, shapes: PyTree) -> None:
    """Raises unless their tensors are those that are needed, each of its shape."""
    needed = {}
    for place, struct in zip(jax.tree.leaves(places), jax.tree.leaves(shapes), strict=True):
        shape = struct.shape[1:] if place.stacked else struct.shape
        needed |= dict.fromkeys(place.names, shape[::-1] if place.turned else shape)
    # Old files keep the frequencies of RoPE as well, which the config tells.
    found = {n: tensors.shape(n) for n in tensors.files if not n.endswith("rotary_emb.inv_freq")}
    kinds = {name: tensors.kind(name) for name in found}
    words = lambda shape: "missing" if shape is None else str(list(shape))
    wrong = [
        f"`{name}` is {words(found.get(name))} there and {words(needed.get(name))} in the model"
        for name in sorted(found.keys() | needed.keys())
        if found.get(name) != needed.get(name)
    ]
    wrong += [
        f"`{name}` is of {kind} there, not one of {', '.join(FLOATS)}"
        for name, kind in kinds.items()
        if kind not in FLOATS
    ]
    if wrong:
        more = f"; and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(
            f"the weights in `{folder}` are of another model: {'; '.join(wrong[:20])}{more}."
        )


class _Tensors:
    """The tensors of a folder, by name; a context, in which its files are open."""

    def __init__(self, folder: Path):
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()
        if (folder / INDEX).exists():
            self.files = _files_of(folder / INDEX)
            self._check_index()
        else:
            path = folder / "model.safetensors"
            self.files = dict.fromkeys(self._file(path).keys(), path)

    def _check_index(self) -> None:
        """Raises unless every file of an index is there, and every tensor in its file."""
        paths = sorted(set(self.files.values()))
        if gone := [f"`{path}`" for path in paths if not path.is_file()]:
            raise FileNotFoundError(f"of the weights, there is no {', '.join(gone)}.")
        inside = {path: set(self._file(path).keys()) for path in paths}
        wrong = [f"`{name}` in `{p}`" for name, p in self.files.items() if name not in inside[p]]
        if wrong:
            raise ValueError(f"the index names what is not there: {', '.join(wrong[:20])}.")

    def __enter__(self) -> "_Tensors":
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _file(self, path: Path):
        if path not in self._open:
            if not path.is_file():
                raise FileNotFoundError(f"there is no `{path}`, of the weights in `{path.parent}`.")
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise ValueError(f"`{path}` is damaged: {error}.") from None
        return self._open[path]

    def _slice(self, name: str):
        try:
            return self._file(self.files[name]).get_slice(name)
        except SafetensorError as error:
            raise ValueError(f"`{self.files[name]}` is damaged: {error}.") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def kind(self, name: str) -> str:
        return self._slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return self._slice(name)[index]


def _files_of(index: Path) -> dict[str, Path]:
    """Returns the file of each tensor that an index names."""
    found = _json(index)
    files = found.get("weight_map") if isinstance(found, Mapping) else None
    if not isinstance(files, Mapping) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"`{index}` is damaged: it has no `weight_map` from tensors to files.")
    return {name: index.parent / file for name, file in files.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no `{path}`: needed is a folder of weights.") from None
    except ValueError as error:
        raise ValueError(f"`{path}` is damaged: {error}.") from None
    return found


# ---- out -----------------------------------------------------------------------------------------


def save(
    folder: Path | str,
    config: llama.Config,
    params: dict,
    *,
    length: int,
    dtype: str = "float32",
    most: int = 5 * 10**9,
) -> None:
    """Writes a model to a new folder, which is whole or not there.

    Embeddings that are equal, bit by bit, are written as one: tied.

    Args:
      folder: Where; it must not exist.
      config, params: The model, layers in its order. Of one process.
      length: The longest text that it is for, in tokens.
      dtype: "float32", "bfloat16" or "float16".
      most: Bytes of tensors in a file, unless one tensor has more.

    Raises:
      FileExistsError: There is something in its place.
      ValueError: The model has experts, which a Llama has not.
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"`{folder}` is there already: choose another folder.")
    if config.experts:
        raise ValueError(f"a Llama has no experts, and this model has {config.experts}.")
    tied = np.array_equal(np.asarray(params["embed"]), np.asarray(params["unembed"]).T)
    names = {name: x for name, x in NAMES.items() if name != "unembed" or not tied}
    places = _places(params, names)
    kept = {name: x for name, x in params.items() if name in places}
    pairs = zip(jax.tree.leaves(places), jax.tree.leaves(kept), strict=True)
    tensors = (
        (name, part.astype(jnp.dtype(dtype))) for place, x in pairs for name, part in place.cut(x)
    )
    half = folder.with_name(f"{folder.name}.half-written")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    _write(half, tensors, most)
    described = description_of(config, length, tied=tied, dtype=dtype)
    (half / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    half.rename(folder)


def _write(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], most: int) -> None:
    """Writes tensors to files of `most` bytes, and an index if there are several."""
    files: list[list[str]] = []
    total = 0
    for part in _parts(tensors, most):
        save_file(part, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(part))
        total += sum(x.nbytes for x in part.values())
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for i, name in enumerate(names):
        (folder / f"{i}.safetensors").rename(folder / name)
    where = {tensor: name for name, inside in zip(names, files, strict=True) for tensor in inside}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _parts(tensors: Iterator[tuple[str, np.ndarray]], most: int) -> Iterator[dict[str, np.ndarray]]:
    part: dict[str, np.ndarray] = {}
    for name, x in tensors:
        if part and sum(y.nbytes for y in part.values()) + x.nbytes > most:
            yield part
            part = {}
        part[name] = x
    yield part


# ---- of a run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """Which run's parameters are written, and where to."""

    out: str
    """A new folder."""
    run: str | None = None
    """The run's folder; by default the newest in `runs/`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def main(asked: Asked) -> None:
    """Writes the parameters of a run's newest checkpoint."""
    folder = Path(asked.run or run.newest_run())
    config = known_of(run.read_run(folder)["config"])
    params = jax.eval_shape(partial(llama.init, config.model), jax.random.key(0))
    at = SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), params)
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        params = checkpoints.restore({"params": like})["params"]
        save(asked.out, config.model, params, length=config.length, dtype=asked.dtype)
        print(f"the parameters of step {checkpoints.latest} are in {asked.out}")


if __name__ == "__main__":
    import tyro

    with run.told(__file__):
        main(tyro.cli(Asked))
