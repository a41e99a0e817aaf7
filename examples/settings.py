"""What train.py is asked for: each setting, what it means, and whether they make sense together."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import llama
import parallel
import pipelined
import rope
from parallel import Layout
from xform.train import files, run


@dataclasses.dataclass(frozen=True)
class Config:
    """What is trained, on what, and for how long."""

    model: llama.Config = llama.Config()
    steps: int = 500
    batch: int = 8
    """Rows in a batch, over all devices."""
    length: int = 256
    """Tokens in a row."""
    learning_rate: float = 3e-3
    """Its peak: it rises over a tenth of the steps, then falls along a cosine to a tenth."""
    weight_decay: float = 0.1
    precision: Literal["f32", "bf16", "f16", "fp8", "fp8_forward", "mxfp8", "mxfp4", "nvfp4"] = (
        "f32"
    )
    """What loss and gradients are computed in; parameters and their gradients are float32."""
    explain: str | None = None
    """A file to write what the compiled step runs to, by line: a page if it ends in `.html`."""
    seed: int = 0

    data: tuple[str, ...] = ()
    """Text files, or `.bin` files of tokens, or folders of either; or files of records, each a text
    or a list of tokens: Parquet, array-record. By default, Python's library."""
    mixture: tuple[float, ...] = ()
    """How many rows are drawn of each of `data`, in proportion, one number for each; by default, of
    all of it each row once."""
    held_out: tuple[str, ...] = ()
    """What to validate on, in the same forms, and not to train on, though it be among the data; by
    default, a twentieth of that."""
    held_out_rows: int = 1024
    """How many rows of it are used, at most."""
    tokenizer: str | None = None
    """A Hugging Face `tokenizer.json`; by default, the bytes of a text are its tokens."""
    token_dtype: Literal["uint16", "uint32"] | None = None
    """Of `.bin` files without a header, by default the narrower one that holds `model.codes`; and
    of array-record, whose records are by default text."""
    column: str | None = None
    """Of Parquet files; by default `text`, `tokens` or `input_ids`, or the only one that can be."""
    separator: int | None = None
    """The token that ends a document of `.bin` files; by default, each is one document."""

    dp: int | None = None
    """Devices along the data axis; by default all that others leave."""
    pp: int | None = None
    """Devices along the pipeline axis, by default none: layers go round in no pipeline."""
    schedule: str | None = None
    """gpipe, 1f1b (the pipeline's default), interleaved, zb-h1, zb-v, dualpipe-v, or a file."""
    microbatches: int | None = None
    """In how many parts a batch goes through it; by default, as many as the table in the file has,
    or twice as many as there are devices along it."""
    executor: pipelined.Executor = "one_program"
    """What runs it: one program in lockstep, or one for each pass of a stage."""
    cp: int | None = None
    """Devices along the context axis, which share each row; by default the mesh has none."""
    tp: int | None = None
    """Devices along the tensor axis; by default 2 where it divides devices and model."""
    ep: int | None = None
    """Devices along the expert axis, which have different rows and experts; by default 1 where the
    model has experts."""
    layout: Layout = parallel.PLAIN
    coordinator: str | None = None
    """Where process 0 waits for the others, as `host:port`; `auto` where a cluster says so."""
    processes: int = 1
    """How many processes share the mesh."""
    process: int = 0
    """Which one of them this is."""

    weights: str | None = None
    """A folder of Hugging Face's weights of the Llama family to begin with, whose model it is."""
    run: str | None = None
    """The run's folder; by default a new one in `runs/`, named by date and time."""
    resume: bool = False
    """Go on with the run in `run`, by default the newest in `runs/`, with its config."""
    save_every: int = 100
    """Steps from one checkpoint to the next."""
    keep: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = None
    """Those of steps that this divides are kept for ever, beside the newest."""
    hang: float = 600.0
    """Seconds without progress after which a process says where it hangs, and ends with code 75;
    where it compiles or reads, ten times as many."""
    max_skips: int = 8
    """How many batches may be left out whose loss is no number or jumps, before the run ends."""
    spike: float | None = 10.0
    """A loss jumps that is above the median of those before by so many times their spread; `None`
    for losses that are numbers, whatever they are."""
    replay_every: int | None = None
    """Steps from one to the next part of which two replicas compute, to be compared bit by bit; by
    default, none is."""
    slow: float = 3.0
    """How many times the median of those before a step takes that is named as slow."""
    tensorboard: bool = False
    """Write what TensorBoard reads, too."""
    profile: tuple[int, int] | None = None
    """The first and the last step to record by JAX's profiler, to `profile` in the run's folder."""
    prompt: str = (
        "class Stack:\n    def push(self, item):\n        self.items.append(item)\n        self."
    )
    """The beginning of the texts that the trained model is asked for."""
    temperature: float = 0.5


# What may be another when a run goes on. Its data, what is held out and its tokenizer are known by
# their contents, wherever they lie.
FREE = (
    *("dp", "cp", "tp", "ep", "layout", "pp", "schedule", "microbatches", "executor"),
    *("coordinator", "processes", "process"),
    *("run", "resume", "save_every", "keep", "keep_every"),
    *("prompt", "temperature", "explain", "held_out_rows"),
    *("data", "held_out", "tokenizer"),
    *("hang", "max_skips", "spike", "replay_every", "slow", "tensorboard", "profile"),
)


# What processes that share a mesh may have each for itself. Data are known by their contents, too.
OF_EACH = ("coordinator", "process", "data", "held_out", "tokenizer")


def in_common(config: Config) -> dict[str, Any]:
    """Returns what all processes of a run must have: its config, on the same versions of JAX."""
    had = dataclasses.asdict(config).items()
    versions = {name: x for name, x in run.versions().items() if name.startswith("jax")}
    return {**{name: x for name, x in had if name not in OF_EACH}, "versions": versions}


OF_EXPERTS = ("experts", "top_k", "shared", "router", "capacity", "balance", "router_z")


def wrong_experts(config: Config) -> list[str]:
    """Returns in words why tokens could not find their experts."""
    m, wrong = config.model, []
    given = {name: getattr(m, name) for name in OF_EXPERTS if name != "experts"}
    given = [f"model.{name}={x}" for name, x in given.items() if x != getattr(llama.Config, name)]
    given += [f"ep={config.ep}"] if config.ep else []
    if not m.experts and given:
        wrong.append(f"{' and '.join(given)} without experts: set model.experts too")
    if m.experts < 0 or m.shared < 0:
        wrong.append(f"model.experts={m.experts} and model.shared={m.shared} must be at least 0")
    for name in ("balance", "router_z"):
        if not 0 <= getattr(m, name) < math.inf:
            wrong.append(f"model.{name}={getattr(m, name)} must be a number that is not negative")
    if m.experts > 0:
        try:
            m.routing  # noqa: B018
        except ValueError as error:
            wrong.append(str(error).rstrip("."))
    return wrong


def wrong_processes(config: Config) -> list[str]:
    """Returns in words why processes could not find each other."""
    wrong = []
    if config.processes <= 0:
        wrong.append(f"processes={config.processes} must be above 0")
    if config.processes > 1 and not (config.coordinator and config.run):
        wrong.append("processes have to find each other: name a coordinator, and a run")
    address = config.coordinator or "auto"
    host, _, port = address.rpartition(":")
    if address != "auto" and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        wrong.append(
            f"coordinator={config.coordinator} must be `auto`, or `host:port` with a port from 1 "
            f"to {2**16 - 1}"
        )
    if not 0 <= config.process < max(1, config.processes):
        wrong.append(f"process={config.process} is none of processes={config.processes}, from 0")
    return wrong


def wrong_watching(config: Config) -> list[str]:
    """Returns in words why a run could not be watched as it is asked for."""
    wrong = []
    for name, least in (("hang", 0), ("slow", 1), ("spike", 0)):
        if (x := getattr(config, name)) is not None and not least < x < math.inf:
            wrong.append(f"{name}={x} must be a number above {least}")
    if config.max_skips < 0:
        wrong.append(f"max_skips={config.max_skips} must be at least 0")
    if config.profile and not 0 < config.profile[0] <= config.profile[1]:
        wrong.append("profile={} to {} must be steps from 1, in order".format(*config.profile))
    if config.profile and config.profile[1] > config.steps:
        wrong.append(f"profile ends at step {config.profile[1]}, and the run at {config.steps}")
    if config.replay_every and config.model.experts:
        wrong.append("replay_every compares replicas, and losses of experts mix them: leave it out")
    if config.replay_every and config.dp == 1:
        wrong.append("replay_every compares replicas, and dp=1 is one: leave it out, or set dp")
    return wrong


def wrong_attention(m: llama.Config) -> list[str]:
    """Returns in words why heads could not share keys, or RoPE not turn them."""
    wrong = rope.wrong(m.rope_scaling)
    if m.kv_heads > 0 and m.heads % m.kv_heads:
        wrong.append(f"model.heads={m.heads} is no multiple of model.kv_heads={m.kv_heads}")
    if m.head_size % 2:
        wrong.append(f"model.head_size={m.head_size} must be even, since RoPE turns pairs")
    return wrong


def check(config: Config) -> None:
    """Raises one error that lists all that makes no sense by itself."""
    m, layout = config.model, config.layout
    names = ("steps", "batch", "length", "held_out_rows", "save_every", "dp", "tp")
    names += ("pp", "cp", "ep", "microbatches", "keep", "keep_every", "replay_every")
    sizes = dataclasses.asdict(m).items()
    others = (*OF_EXPERTS, "rope_scaling")
    positive = {f"model.{name}": size for name, size in sizes if name not in others}
    positive |= {name: getattr(config, name) for name in names}
    good = lambda n: n is None or 0 < n < math.inf
    wrong = [f"{x}={n} must be above 0" for x, n in positive.items() if not good(n)]
    wrong += wrong_attention(m)
    if layout.microbatches < 1 or not 0 <= layout.ahead <= m.layers:
        wrong.append(
            f"layout.microbatches={layout.microbatches} must be above 0, and "
            f"layout.ahead={layout.ahead} from 0 to model.layers={m.layers}"
        )
    if layout.overlap and not layout.sequence:
        wrong.append("layout.overlap hides what layout.sequence sends: set that too")
    if (layout.keep or layout.late) and not layout.fsdp:
        wrong.append("layout.keep and layout.late say how layout.fsdp gathers: set that too")
    wrong += wrong_experts(config)
    wrong += wrong_processes(config)
    wrong += wrong_watching(config)
    if config.processes > 1 and config.explain:
        wrong.append("explain is of one process")
    if config.pp is None and (config.schedule, config.microbatches) != (None, None):
        wrong.append(
            "schedule and microbatches are a pipeline's: set pp too (without one, "
            "layout.microbatches is in how many parts a device works on its rows)"
        )
    if config.executor == "per_stage" and (config.processes > 1 or config.explain):
        wrong.append("executor=per_stage has many programs, of one process: nothing to explain")
    if not 0 <= config.temperature < math.inf:
        wrong.append(f"temperature={config.temperature} must be a number that is not negative")
    if not 0 < config.learning_rate < math.inf or not 0 <= config.weight_decay < math.inf:
        wrong.append(
            f"learning_rate={config.learning_rate} must be above 0, and "
            f"weight_decay={config.weight_decay} at least 0"
        )
    if not 0 <= config.seed < 2**32:
        wrong.append(f"seed={config.seed} must be from 0 to 2³² - 1")
    if config.separator is not None and not 0 <= config.separator < m.codes:
        wrong.append(f"separator={config.separator} is outside of model.codes={m.codes}")
    if not config.prompt:
        wrong.append("prompt is empty, and a text begins with a token")
    if config.explain and not Path(config.explain).absolute().parent.is_dir():
        wrong.append(f"explain={config.explain} is in a folder that does not exist")
    wrong += wrong_data(config)
    if wrong:
        raise ValueError(f"config: {'; '.join(wrong)}.")


def wrong_data(config: Config) -> list[str]:
    """Returns in words why what is named as data can't be read together, or mixed."""
    wrong, (flat, text) = [], kinds(config)
    named = list(map(Path, (*config.data, *config.held_out)))
    why = "".join(f"; {words}" for words in files.nothing_at(named))
    if flat and text:
        wrong.append(files.mixed(flat, text))
    if not flat and (config.separator, config.token_dtype) != (None, None):
        wrong.append(f"separator and token_dtype are of `.bin` files, and there is none{why}")
    if config.column and not any(path.suffix.lower() == ".parquet" for path in (*flat, *text)):
        wrong.append(f"column={config.column} is of Parquet files, and there is none{why}")
    if config.mixture and len(config.mixture) != len(config.data):
        wrong.append(
            f"mixture={config.mixture} has {len(config.mixture)} weights for the "
            f"{len(config.data)} of data: needed is one for each"
        )
    if not all(0 < weight < math.inf for weight in config.mixture):
        wrong.append(f"mixture={config.mixture} must be of numbers above 0")
    return wrong


def kinds(config: Config) -> tuple[list[Path], list[Path]]:
    """Returns the files of tokens, and those of text, that the config names."""
    names = (*(config.data or ("Python's library",)), *config.held_out)
    return files.by_kind(list(map(Path, names)), dtype=config.token_dtype, column=config.column)


def known_of(saved: dict[str, Any]) -> Config:
    """Returns a saved config, without names that train.py no longer has."""

    def known(kind, saved: dict[str, Any]) -> dict[str, Any]:
        return {f.name: saved[f.name] for f in dataclasses.fields(kind) if f.name in saved}

    parts = known(Config, saved)
    model = known(llama.Config, saved.get("model", {}))
    model["rope_scaling"] = tuple(model.get("rope_scaling", ()))
    parts["model"] = llama.Config(**model)
    parts["layout"] = Layout(**known(Layout, saved.get("layout", {})))
    parts |= {name: tuple(saved.get(name, ())) for name in ("data", "held_out", "mixture")}
    if parts.get("profile"):
        parts["profile"] = tuple(parts["profile"])
    return Config(**parts)
