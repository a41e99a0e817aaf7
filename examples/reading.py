"""What train.py reads, and whether a run that goes on reads what it did before.

A run is known by contents: its tokens, those held out and its tokenizer, wherever they lie.
"""

import dataclasses
import sysconfig
from collections.abc import Collection, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from settings import FREE, Config, kinds, known_of
from xform.train import files, order, run
from xform.train.checkpoint import Checkpoints
from xform.train.data import NO_LABEL, Mixture, Source, batch, count, first, order_of
from xform.train.recovery import batch_number


def tokenizer_for(config: Config) -> files.Tokenizer | None:
    """Returns the tokenizer of texts; None where the data are tokens, and nobody knows of what."""
    if config.tokenizer is None and kinds(config)[0]:
        return None
    tokenizer = files.load_tokenizer(config.tokenizer, config.model.codes)
    files.encode_prompt(tokenizer, config.prompt)
    return tokenizer


def data_for(config: Config, tokenizer: files.Tokenizer | None) -> tuple[Source, Source]:
    """Returns the rows to train on, and those held out, once it is known that they are enough."""
    named = list(map(Path, config.data)) or sorted(Path(_LIBRARY).glob("*.py"))
    apart = list(map(Path, config.held_out))
    # Of a mixture each file or folder is read, and has a part held out, by itself.
    groups = [[path] for path in named] if config.mixture else [named]
    sources, unseen = [], []
    for group in groups:
        documents = read(config, tokenizer, group, without=apart)
        kept, left = (documents, None) if apart else files.hold_out(documents)
        sources.append(files.as_rows(kept, config.length, config.separator, "to train on"))
        unseen += [] if left is None else [left]
    unseen = unseen or [read(config, tokenizer, apart)]
    unseen = [files.as_rows(x, config.length, config.separator, "held out") for x in unseen]
    rows, held_out = (mixed(x, config.mixture) for x in (sources, unseen))
    batch(rows, 0, size=config.batch, seed=config.seed)
    if (held_out.take(first(held_out, config.held_out_rows)).labels == NO_LABEL).all():
        raise ValueError(
            "there is no token to predict in the data held out: give more (--held-out)"
        )
    return rows, held_out


_LIBRARY = sysconfig.get_path("stdlib")


def read(
    config: Config,
    tokenizer: files.Tokenizer | None,
    paths: list[Path],
    without: Sequence[Path] = (),
) -> Sequence[np.ndarray]:
    """Returns the documents of some files and folders, as the config says how to read them."""
    return files.read(
        paths, tokenizer, without=without,
        codes=config.model.codes, dtype=config.token_dtype, column=config.column,
    )  # fmt: skip


def mixed(sources: list[Source], weights: tuple[float, ...]) -> Source:
    """Returns the only source, or several as a mixture."""
    return sources[0] if len(sources) == 1 else Mixture(tuple(sources), weights)


# ---- what a run goes on from ---------------------------------------------------------------------


def info_of(
    config: Config,
    rows: Source,
    held_out: Source | None = None,
    tokenizer: files.Tokenizer | None = None,
) -> dict:
    """Returns what is saved with a state, and tells whether another run may go on from it."""
    made = {"config": dataclasses.asdict(config), "data": files.fingerprint(rows)}
    if held_out is not None:
        made["held_out"] = files.fingerprint(held_out)
    made["order"] = order.fingerprint(order_of(rows, config.seed), count(rows))
    made["random"] = random_of(config)
    made["tokenizer"] = files.fingerprint_of_tokenizer(config.tokenizer)
    codes = tokenizer.codes if tokenizer else None
    return {**made, "tokens": bool(kinds(config)[0]), "codes": codes}


def random_of(config: Config) -> dict:
    """Returns what all random numbers of a run follow from, together with the number of a step."""
    impl, same = jax.config.jax_default_prng_impl, jax.config.jax_threefry_partitionable
    return {"seed": config.seed, "generator": impl, "same_on_all_meshes": same}


def position(config: Config, mesh: Mesh, done: int, skipped: Collection[int] = ()) -> dict:
    """Returns where a run is: the steps that it has seen, its next sample, and on what it ran.

    Args:
      config: That of the run.
      mesh: What it runs on.
      done: How many steps it has seen.
      skipped: The batches that it leaves out.
    """
    at = {"step": done, "sample": batch_number(done, skipped) * config.batch}
    return {**at, "mesh": dict(mesh.shape), "processes": jax.process_count()}


def saved_of(config: Config) -> tuple[str, dict] | None:
    """Returns where a run that goes on was described, and how; None for one that begins."""
    if not config.resume:
        return None
    folder = Path(config.run or run.newest_run())
    described = run.read_run(folder)
    if (folder / "checkpoints").is_dir():
        with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
            if checkpoints.latest is not None:
                return f"the checkpoint in `{checkpoints.folder}`", checkpoints.info()
    return f"the run in `{folder}`", described


def refuse_another(where: str, saved: dict, config: Config, now: dict | None = None) -> None:
    """Raises one error that lists all that a saved run has otherwise, before anything else is said.

    Args:
      where: What it was saved as, in words.
      saved: What `info_of` made then.
      config: That of now.
      now: What it makes now; None reads the data for it, if the config differs or if there is none.
    """
    then = known_of(saved["config"])
    wrong = run.differences(dataclasses.asdict(then), dataclasses.asdict(config), FREE)
    wrong += another_tokenizer(saved, then, config)
    if then.seed == config.seed:  # which is told by its name
        wrong += run.differences(saved.get("random", random_of(config)), random_of(config))
    if wrong and now is None and "data" in saved:
        # As the saved run would have read it: rows of its length, tokens of its tokenizer.
        before = dataclasses.replace(then, data=config.data, held_out=config.held_out)
        if not another_tokenizer(saved, then, config):
            before = dataclasses.replace(before, tokenizer=config.tokenizer)
        try:
            now = info_of(before, *data_for(before, tokenizer_for(before)))
        except (KeyError, OSError, TypeError, ValueError) as error:
            wrong.append(no_data(saved, before, error))
    wrong += other_data(saved, then, config, now or {})
    if wrong:
        raise ValueError(
            f"{where} is of another config: {'; '.join(wrong)}. Go on with the old one, or begin a "
            "new run."
        )


def other_data(saved: dict, then: Config, config: Config, now: dict) -> list[str]:
    """Returns in words what differs in the data, and in what is held out of it."""
    differs = lambda name: name in now and now[name] != saved.get(name, now[name])
    words = lambda name, what: [f"the {what} was {saved[name]} and is {now[name]} now"]
    wrong = words("data", "data") if differs("data") else []
    # What is held out of other data by default is other data, too.
    if differs("held_out") and (not wrong or config.held_out):
        wrong += words("held_out", "data held out")
    if not wrong and then.seed == config.seed and differs("order"):
        wrong += words("order", "order of its rows")
    if now and "held_out" not in saved and then.held_out != config.held_out:
        wrong += run.differences({"held_out": then.held_out}, {"held_out": config.held_out})
    return wrong


def no_data(saved: dict, config: Config, error: Exception) -> str:
    """Returns in words that what is named as data can't be that of a saved run."""
    try:
        found = read(config, tokenizer_for(config), list(map(Path, config.data)))
        found = f"{sum(map(len, found)):,} tokens, too few"
    except (OSError, TypeError, ValueError):
        found = "none"
    reason = str(error).removesuffix(".")
    return f"the data was {saved['data']}, and what is named now is {found}: {reason}"


def data_of(config: Config, tokenizer: files.Tokenizer | None, saved: tuple[str, dict] | None):
    """Returns what `data_for` does; what is no data of a run that goes on is told so."""
    try:
        return data_for(config, tokenizer)
    except (OSError, ValueError) as error:
        if saved is None or "data" not in saved[1]:
            raise
        where, info = saved
        words = no_data(info, config, error)
        raise ValueError(
            f"{where} is of other data: {words}. Name that which it was (`--data`), or begin a new "
            "run."
        ) from None


def another_tokenizer(saved: dict, then: Config, now: Config) -> list[str]:
    """Returns in words that the tokenizer of now is another, by what is in its file."""
    before, after = (files.fingerprint_of_tokenizer(c.tokenizer) for c in (then, now))
    if then.tokenizer == now.tokenizer and "tokenizer" not in saved:
        return []  # of runs that did not note it, the name tells
    before = saved.get("tokenizer", before)
    if before == after is not None:
        return []
    words = run.differences({"tokenizer": then.tokenizer}, {"tokenizer": now.tokenizer})
    return words or [f"the tokenizer was {before} and is {after or 'no file'} now"]
