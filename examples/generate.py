"""Lets a model that train.py has trained go on with a text.

    uv run --extra train examples/generate.py
    uv run --extra train examples/generate.py --run runs/mine --prompt "import " --temperature 0

Every token costs one pass over itself: keys and values of what came before are kept.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import llama
from cache import empty_cache
from xform import all_finite
from xform.train import files, run
from xform.train.checkpoint import Checkpoints


@dataclass(frozen=True)
class Config:
    """What is written, by which model."""

    run: str | None = None
    """The run whose newest checkpoint is used; by default, the newest in `runs/`."""
    tokenizer: str | None = None
    """A Hugging Face `tokenizer.json`; by default, the run's own."""
    prompt: str = "def "
    rows: int = 1
    """How many texts."""
    tokens: int = 300
    """How many are added to the prompt."""
    temperature: float = 0.7
    """Below 1 the likely gets likelier; at 0 the likeliest is always taken."""
    top_k: int | None = None
    """Only so many likeliest tokens are drawn from."""
    top_p: float | None = None
    """Only the likeliest tokens are drawn from that have this probability together."""
    seed: int = 0
    page_size: int | None = None
    """Keys and values are kept in pages of so many tokens; by default, in one piece."""


def check(config: Config, codes: int | None = None) -> None:
    """Raises one error that lists every number that makes no sense, in a vocabulary if known."""
    k = config.top_k
    rules = {
        f"rows={config.rows} must be at least 1": config.rows >= 1,
        f"tokens={config.tokens} must be at least 1": config.tokens >= 1,
        f"temperature={config.temperature} must be at least 0": 0 <= config.temperature < math.inf,
        f"seed={config.seed} must be from 0 to 2³² - 1": 0 <= config.seed < 2**32,
        f"top_k={k} must be at least 1": k is None or k >= 1,
        f"top_k={k} must be at most the {codes} of the vocabulary": k is None
        or codes is None
        or k <= codes,
        f"page_size={config.page_size} must be at least 1": config.page_size is None
        or config.page_size >= 1,
        f"top_p={config.top_p} must be above 0 and at most 1": config.top_p is None
        or 0 < config.top_p <= 1,
    }
    if wrong := [words for words, holds in rules.items() if not holds]:
        raise ValueError(f"{'; '.join(wrong)}.")


def choose(logits_BC, key, *, temperature: float, top_k: int | None, top_p: float | None):
    """Returns one token [B] of each row, drawn among those that `top_k` and `top_p` leave."""
    if temperature < jnp.finfo(jnp.float32).smallest_normal:  # which may be flushed to 0
        return jnp.argmax(logits_BC, axis=-1)
    # Below the highest, which becomes 0: none gets too large to be a number.
    logits_BC = (logits_BC - jnp.max(logits_BC, axis=-1, keepdims=True)) / temperature
    best_BC = -jnp.sort(-logits_BC, axis=-1)
    if top_k is not None:
        least_B1 = best_BC[:, min(top_k, best_BC.shape[-1]) - 1, None]
        logits_BC = jnp.where(logits_BC < least_B1, -jnp.inf, logits_BC)
        best_BC = jnp.where(best_BC < least_B1, -jnp.inf, best_BC)
    if top_p is not None:
        p_BC = jax.nn.softmax(best_BC, axis=-1)
        # A token is in as long as the likelier ones have less than `top_p` together.
        inside_BC = jnp.cumsum(p_BC, axis=-1) - p_BC < top_p
        least_B1 = jnp.min(best_BC, axis=-1, keepdims=True, where=inside_BC, initial=jnp.inf)
        logits_BC = jnp.where(logits_BC < least_B1, -jnp.inf, logits_BC)
    return jax.random.categorical(key, logits_BC)


@partial(
    jax.jit, static_argnames=("config", "tokens", "temperature", "top_k", "top_p", "page_size")
)
def generate(
    params: dict, prompt_BT, config: llama.Config, *, tokens: int, key, temperature: float,
    top_k: int | None = None, top_p: float | None = None, page_size: int | None = None,
):  # fmt: skip
    """Returns the `tokens` that follow each row of the prompt, `[B, tokens]`.

    Token t is drawn with `fold_in(key, t)`, where t counts from the first of the prompt.
    """
    B, T = prompt_BT.shape
    pick = partial(choose, temperature=temperature, top_k=top_k, top_p=top_p)

    def step(carry, t):
        cache, last_B = carry
        logits_B1C, cache = llama.extend(params, last_B[:, None], cache, config)
        next_B = pick(logits_B1C[:, 0], jax.random.fold_in(key, t))
        return (cache, next_B), next_B

    cache = empty_cache(config, B, T + tokens, page_size)
    logits_BTC, cache = llama.extend(params, prompt_BT, cache, config)
    first_B = pick(logits_BTC[:, -1], jax.random.fold_in(key, T))
    _, rest = jax.lax.scan(step, (cache, first_B), T + 1 + jnp.arange(tokens - 1))
    return jnp.concatenate([first_B[None], rest]).T


def trained(folder: Path) -> tuple[dict, dict]:
    """Returns the newest parameters of a run, on one device, and what was saved with them.

    Raises:
      FileNotFoundError: There are none.
      ValueError: They are of another program, or not finite.
    """
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        info = checkpoints.info()
        try:
            saved = info["config"]["model"]
            scaling = tuple(saved.get("rope_scaling", ()))  # JSON knows lists alone
            model = llama.Config(**saved | {"rope_scaling": scaling})
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the checkpoint in `{folder}` is of another program: no config of its model "
                f"({error!r})."
            ) from None
        place = SingleDeviceSharding(jax.devices()[0])
        like = jax.eval_shape(partial(llama.init, model), jax.random.key(0))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), like)
        params = checkpoints.restore({"params": like})["params"]
        if not all_finite(params):
            raise ValueError(
                f"the checkpoint of step {checkpoints.latest} in `{folder}` holds numbers that are "
                "not finite: it was damaged, or saved by another program."
            )
    return params, {**info, "model": model}


def codes_of(info: dict) -> int:
    """Returns how many tokens the tokenizer had that a run was trained on; 0 if nobody knows."""
    if "codes" in info:
        return info["codes"] or 0
    try:  # of runs that did not note it
        path, tokens = info["config"]["tokenizer"], info.get("tokens", True)
        return 0 if tokens and not path else files.load_tokenizer(path, info["model"].codes).codes
    except ValueError:
        return 0


def main(config: Config) -> None:
    """Prints texts."""
    check(config)
    params, info = trained(Path(config.run or run.newest_run()))
    model, trained_as = info["model"], info["config"]
    check(config, model.codes)
    path = config.tokenizer or trained_as["tokenizer"]
    # Of runs that did not note it, the names tell.
    named = any(name.lower().endswith(".bin") for name in trained_as["data"])
    if path is None and info.get("tokens", named):
        raise ValueError("the run was trained on tokens: name the tokenizer that made them.")
    tokenizer = files.load_tokenizer(path, model.codes)
    if tokenizer.codes < (codes := codes_of(info)):
        raise ValueError(
            f"the run was trained on a tokenizer of {codes} tokens, and `{path}` has "
            f"{tokenizer.codes}: name that which made its data (`--tokenizer`)."
        )
    prompt = files.encode_prompt(tokenizer, config.prompt)
    if len(prompt) > (length := trained_as.get("length", len(prompt))):
        print(
            f"the prompt has {len(prompt)} tokens, and the model has seen no more than {length} "
            "together: expect less of what follows",
            file=sys.stderr,
        )
    texts = generate(
        params,
        np.tile(prompt, (config.rows, 1)),
        model,
        tokens=config.tokens,
        key=jax.random.key(config.seed),
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        page_size=config.page_size,
    )
    print(
        *(config.prompt + tokenizer.decode(text) for text in np.asarray(texts)), sep="\n--------\n"
    )


if __name__ == "__main__":
    import tyro

    with run.told(__file__):
        main(tyro.cli(Config))
