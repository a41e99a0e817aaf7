"""What train.py's model has learned: texts that it writes, judged by Python's own tokenizer."""

import io
import tokenize
from typing import TYPE_CHECKING

import jax
import numpy as np

from generate import generate
from xform.train import files

if TYPE_CHECKING:
    from settings import Config


TEXTS = 16
"""How many are written."""


def sample(config: "Config", tokenizer: files.Tokenizer, params: dict) -> list[str]:
    """Returns continuations of the prompt that fill a row, made on one device.

    At a temperature of 0 there is one, since they would all be the same.

    Args:
      params: Those of the host.
    """
    rows = TEXTS if config.temperature else 1
    prompt = files.encode_prompt(tokenizer, config.prompt)
    tokens = generate(
        params,
        np.tile(prompt, (rows, 1)),
        config.model,
        tokens=max(1, config.length - len(prompt)),
        key=jax.random.key(config.seed),
        temperature=config.temperature,
    )
    return [tokenizer.decode(row) for row in np.asarray(tokens)]


def complaint(line: str) -> str | None:
    """Returns what Python's tokenizer says against the line, by itself; None if it passes."""
    try:
        list(tokenize.generate_tokens(io.StringIO(line.strip()).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        return str(error)
    return None


def show(config: "Config", tokenizer: files.Tokenizer, params: dict) -> None:
    """Prints texts of the model; those of Python are judged by Python's own tokenizer."""
    texts = sample(config, tokenizer, params)
    print(config.prompt + "\n--------\n".join(texts))
    if config.data:
        return
    # The first line of a text completes the prompt's, and the last one is cut off.
    lines = [line for text in texts for line in text.splitlines()[1:-1] if line.strip()][:10]
    complaints = [complaint(line) for line in lines]
    # A line may open a docstring or a bracket for a later one to close: 6 % of the library's do.
    begun = sum("EOF in multi-line" in (words or "") for words in complaints)
    passed = f"\n{complaints.count(None)} of {len(lines)} lines pass `tokenize` by themselves"
    print(f"{passed}, {begun} more as the beginning of several")
