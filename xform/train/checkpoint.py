"""Checkpoints of a run, on orbax: each is whole or not there.

A checkpoint is written beside its place, in the background, and put there by one rename, so that
whatever stops the process leaves the last one as it was. It holds arrays, in the layout and on the
mesh that whoever restores it asks for, and a JSON object of what else a run needs to go on.
"""

import gc
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.tree_util import keystr
from jaxtyping import PyTree

_INFO = "info"
_FINALIZE = "save_finalize"  # orbax's thread that sees to it that a save is whole
_TREE = "tree"  # orbax wants a container, and a tree may be one array


class Checkpoints:
    """The newest checkpoints of one run, each under the number of steps that it has seen.

    Use it in a `with` block, whose end waits for the last save. One process writes to a folder.

    Args:
      folder: Where they are; made if need be. Half-written ones of a process that was killed are
        cleared away.
      keep: How many are kept, of the newest.
      keep_every: Those of steps that this divides are kept for ever, too; None for no others.
      read_only: Nothing is made or cleared away: another process may be at work here.

    >>> import tempfile, jax.numpy as jnp
    >>> state = {"params": {"w": jnp.arange(3.0)}, "key": jax.random.key(0)}
    >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(10, state, {"lr": 0.1})
    ...     print(checkpoints.latest, checkpoints.info())
    ...     print(checkpoints.restore({"params": state["params"]}))
    10 {'lr': 0.1}
    {'params': {'w': Array([0., 1., 2.], dtype=float32)}}
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        read_only: bool = False,
    ):
        self.folder = Path(folder).absolute()
        if read_only and not self.folder.is_dir():
            raise FileNotFoundError(f"there are no checkpoints: `{self.folder}` is no folder")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_meet),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._size = 0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            self.wait()
        except OSError:
            if error is None:
                raise
        finally:
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """The steps of all that there are, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Mapping[str, PyTree], info: Mapping) -> None:
        """Begins to save a checkpoint; the arrays may be donated as soon as this returns.

        Args:
          step: Number of steps that the state has seen.
          state: Trees of arrays by name, each of which can be restored without the others.
          info: What else belongs to it, as JSON.

        Raises:
          OSError: This save or the one before failed, for want of space for example. Earlier
            checkpoints are whole.
        """
        self.wait()
        self._size = sum(x.nbytes for x in jax.tree.leaves(dict(state)))
        items = {name: ocp.args.StandardSave({_TREE: tree}) for name, tree in state.items()}
        args = ocp.args.Composite(**items, **{_INFO: ocp.args.JsonSave(dict(info))})
        try:
            self._manager.save(step, args=args, force=True)
        except OSError as error:
            self._failed(error)

    def wait(self) -> None:
        """Waits until the last save is whole.

        Raises:
          OSError: It failed. Earlier checkpoints are whole.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:  # tensorstore has no type of its own for a full disk
            self._failed(error)

    def check(self) -> None:
        """Raises as soon as the last save has failed; where it is still being written, returns.

        A loop asks for it after each step, so as not to train on to the next save in vain.

        Raises:
          OSError: It failed. Earlier checkpoints are whole.
        """
        if all(thread.name != _FINALIZE for thread in threading.enumerate()):
            self.wait()

    def info(self) -> dict:
        """Returns the JSON object of the newest checkpoint.

        Raises:
          FileNotFoundError: There is no checkpoint.
          Damaged: It can't be read.
        """
        args = ocp.args.Composite(**{_INFO: ocp.args.JsonRestore()})
        return self._read(lambda step: self._manager.restore(step, args=args)[_INFO])

    def restore(self, like: Mapping[str, PyTree]) -> dict[str, PyTree]:
        """Returns the trees of the newest checkpoint that `like` names.

        Args:
          like: Trees by name, of arrays or of `jax.ShapeDtypeStruct`s with a sharding, which say
            shape, dtype and placement of each leaf. The mesh need not be that of the save. An array
            that nobody placed, as a counter of optax, may go on being used with those of any mesh.

        Raises:
          FileNotFoundError: There is no checkpoint.
          Damaged: It can't be read.
          ValueError: It lists every leaf of another shape or dtype, missing or left over.
        """
        wanted = {name: jax.tree.map(_struct, tree) for name, tree in like.items()}
        items = {name: ocp.args.StandardRestore({_TREE: tree}) for name, tree in wanted.items()}

        def read(step: int) -> dict[str, PyTree]:
            path = self.folder / str(step)
            wrong = [x for name, tree in wanted.items() for x in _differences(path / name, tree)]
            if wrong:
                raise _OfAnother(
                    f"the checkpoint `{path}` is of another program: {'; '.join(wrong)}."
                )
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
            return {
                name: jax.tree.map(_as_free, tree, restored[name][_TREE])
                for name, tree in like.items()
            }

        return self._read(read)

    def _read(self, read: Callable[[int], Any]) -> Any:
        """What is read of the newest checkpoint; if it is damaged, says which can be."""
        self.wait()  # it may be the one that is being written
        step = self._newest()
        try:
            return read(step)
        except _NOT_DAMAGED:
            raise
        except Exception as error:  # orbax, tensorstore and JSON have no type for it in common
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        older = [x for x in self._manager.all_steps() if x < step]
        path = self.folder / str(step)
        with _quiet():
            whole = next((x for x in sorted(older, reverse=True) if _succeeds(read, x)), None)
        cure = (
            "There is none before it that can be read: begin a new run."
            if whole is None
            else f"That of step {whole} can be read: move what is after it away, `{path}` too, to "
            "go on from there."
        )
        raise Damaged(
            f"the checkpoint of step {step} is damaged, `{path}` can't be read "
            f"({reason[:200]}). {cure}"
        )

    def set_aside(self) -> Path:
        """Moves the newest checkpoint to `damaged` beside the folder, for the one before it.

        One of several processes does so; the others see it once they `reload`.

        Returns:
          Where it is now.

        Raises:
          FileNotFoundError: There is no checkpoint.
        """
        step = self._newest()
        place = self.folder.with_name("damaged")
        place.mkdir(exist_ok=True)
        place /= f"{step}-{len(list(place.iterdir()))}"
        (self.folder / str(step)).rename(place)
        self.reload()
        return place

    def reload(self) -> None:
        """Looks again at what is in the folder."""
        self._manager.reload()

    def _newest(self) -> int:
        if self.latest is None:
            raise FileNotFoundError(f"there is no checkpoint in `{self.folder}`")
        return self.latest

    def _failed(self, error: Exception):
        """Clears away what is half written, and says what is left."""
        for path in self.folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(path, ignore_errors=True)
        self._manager.reload()
        left = f"that of step {self.latest} is whole" if self.latest else "there is none before it"
        raise OSError(
            f"a checkpoint of {self._size / 1e6:,.1f} MB could not be saved in `{self.folder}`: "
            f"{str(error).rsplit(': ', 1)[-1]}; {left}. Make room or choose another folder, then "
            "resume."
        ) from None  # that of orbax names its own files, on a hundred lines


def _meet(*, key: str, timeout_ms: int) -> None:
    """Waits for all processes, as orbax does; but not in a thread that failed to save.

    The others wait elsewhere then, each for the other, until the time is up. So the error comes out
    here, and they learn of it as its process ends.
    """
    error = sys.exception()
    if error and jax.process_count() > 1 and threading.current_thread().name == _FINALIZE:
        raise error
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class Damaged(ValueError):
    """A checkpoint that can't be read as it was written."""


class _OfAnother(ValueError):
    """A checkpoint that can be read, and is not what was asked for."""


# What keeps a checkpoint from being read that may be whole.
_NOT_DAMAGED = (_OfAnother, MemoryError, PermissionError, jax.errors.JaxRuntimeError)


def _succeeds(f: Callable[[int], Any], step: int) -> bool:
    try:
        f(step)
    except Exception:  # as above
        return False
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """Clears away, without a word, what orbax began to read beside the leaf that failed."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        for _ in range(5):  # its threads may still be reading
            time.sleep(0.02)
            gc.collect()
        yield
        gc.collect()
    finally:
        sys.unraisablehook = before


def _struct(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _as_free(like, x: jax.Array) -> jax.Array:
    """The array, bound to its device only if the other one is."""
    if getattr(like, "committed", True):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(jax.device_get(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(jax.device_get(x))


def _differences(path: Path, wanted: PyTree) -> list[str]:
    """What the saved tree has otherwise than `wanted`, in words."""
    if not path.is_dir():
        return [f"it holds no `{path.name}`"]
    handler = ocp.StandardCheckpointHandler()
    saved = handler.metadata(path).tree[_TREE]  # pyright: ignore[reportArgumentType]
    has, needs = _types(saved), _types(jax.eval_shape(_plain, wanted))
    return [
        f"`{path.name}/{leaf}` is {has.get(leaf, 'missing')} there and "
        f"{needs.get(leaf, 'missing')} here"
        for leaf in sorted(has | needs)
        if has.get(leaf) != needs.get(leaf)
    ]


def _plain(tree: PyTree) -> PyTree:
    """The tree as it is written: keys of random numbers are their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def _types(tree: PyTree) -> dict[str, str]:
    """The type of each leaf, such as "float32[2,3]", by its path."""
    return {
        keystr(path, simple=True, separator="/"): f"{x.dtype}{list(x.shape)}".replace(" ", "")
        for path, x in jax.tree.leaves_with_path(tree)
    }


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname


# What goes wrong in orbax's threads is raised here, once; its log would print each frame of it.
logging.getLogger("absl").addFilter(_is_not_of_orbax)
