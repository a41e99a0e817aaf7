"""What `flex_attention` refuses: everything that is wrong at once, in one error."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xform.lowering._contract import wide_of
from xform.lowering._eight import FORMATS
from xform.primitives._choose import IMPLEMENTATIONS
from xform.primitives._objects import Mod, Shape
from xform.primitives._open import open_mods
from xform.primitives._rules import check_sizes

_AUX = ("lse", "max")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Positions, and those of a last tile that sticks out, are int32.
_LONGEST = 2**30


def check_arguments(
    q, k, v, sinks, dropout_rate, dropout_key, aux, implementation, format=None, *,
    caller="flex_attention",
) -> None:  # fmt: skip
    """Raises one error that lists everything wrong with the arguments."""
    wrong = []
    arrays = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    for name, x in arrays.items():
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            wrong.append(f"`{name}` is of type {type(x).__name__}; needed is an array")
    if not isinstance(aux, Sequence) or not all(isinstance(name, str) for name in aux):
        wrong.append(f"`aux` is {aux!r}; needed is a tuple of names")
    if not isinstance(dropout_rate, int | float | jax.Array | np.number):
        wrong.append(f"`dropout_rate` is {dropout_rate!r}; needed is a number")
    if dropout_key is not None and not _is_key(dropout_key):
        found = jax.typeof(dropout_key).str_short() if hasattr(dropout_key, "dtype") else ""
        wrong.append(
            f"`dropout_key` is {found or repr(dropout_key)}; needed is a key, "
            "`jax.random.key(seed)`"
        )
    if wrong:
        raise TypeError(f"{caller}: {'; '.join(wrong)}.")
    check_sizes(caller, **arrays)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            wrong.append(
                f"`{name}` has shape {x.shape}; needed are 4 dimensions, [B, length, heads, size]"
            )
        if x.dtype not in _DTYPES:
            wrong.append(f"`{name}` has dtype {x.dtype}; needed is one of {', '.join(_DTYPES)}")
    if not wrong:
        wrong += _misfits(q, k, v, sinks)
    if isinstance(dropout_rate, jax.Array):
        raise ValueError(f"{caller}: `dropout_rate` is an array; needed is a Python number.")
    if not 0 <= dropout_rate < 1:
        wrong.append(f"`dropout_rate` is {dropout_rate}; needed is a probability below 1")
    if dropout_rate and dropout_key is None:
        wrong.append(f"`dropout_rate` is {dropout_rate} and there is no `dropout_key`")
    if dropout_key is not None and jax.random.key_data(dropout_key).ndim != 1:
        wrong.append(f"`dropout_key` has shape {dropout_key.shape}; needed is one key")
    if unknown := [name for name in aux if name not in _AUX]:
        wrong.append(f"`aux` asks for {unknown}; there is {list(_AUX)}")
    if implementation not in IMPLEMENTATIONS:
        wrong.append(f"`implementation` is {implementation!r}; there is {list(IMPLEMENTATIONS)}")
    if format not in FORMATS:
        wrong.append(f"`format` is {format!r}; there is {list(FORMATS)}")
    elif format and "max" in aux:
        wrong.append(
            f'`aux` asks for "max", which attention in {format} does not know: its rows are taken '
            "relative to scores and the scales of values; leave out one of `format` and `max`"
        )
    if wrong:
        raise ValueError(f"{caller}: {'; '.join(wrong)}.")


def check_mods(score_mod, mask_mod, scale, shape: Shape, caller="flex_attention") -> None:
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if isinstance(mod, type):
            raise TypeError(f"`{name}` is the class `{mod.__name__}`: call it, `{mod.__name__}()`.")
        if mod is not None and not callable(mod):
            raise TypeError(
                f"`{name}` must be a function of scalars, found {type(mod).__name__}. Of an array, "
                "make one: `lambda b, h, q_idx, kv_idx: array[q_idx, kv_idx]`, whose array has an "
                "entry for each query and key."
            )
    mods = [mod for mod in (score_mod, mask_mod) if isinstance(mod, Mod)]
    if wrong := [words for mod in mods for words in mod.misfits(shape)]:
        raise ValueError(f"{caller}: {'; '.join(wrong)}.")
    if not (scale is None or isinstance(scale, int | float) or hasattr(scale, "dtype")):
        raise TypeError(f"`scale` is {scale!r}; needed is a number or a scalar array.")
    if scale is not None and jnp.shape(scale):
        raise ValueError(f"`scale` must be a scalar, found shape {jnp.shape(scale)}.")
    if scale is not None and jnp.iscomplexobj(scale):
        raise TypeError(f"`scale` is {scale!r}; needed is a real number.")


def of_pairs(sizes: Sequence[int | None], *mods: Callable | None) -> tuple[Callable | None, ...]:
    """Returns the mods, each None where there is no pair of a query and a key to ask them about.

    Arrays that are made for none are empty, and nothing can be read from them, not even in a trace.
    """
    return (None,) * len(mods) if 0 in sizes else mods


def check_places(q, score_mod, mask_mod, shape: Shape, caller: str = "flex_attention") -> None:
    """Raises if the mods read arrays that are too short for `shape`.

    For whoever calls them at other indices than their own, or does not trace them.
    """
    open_mods(score_mod, mask_mod, wide_of(q.dtype), shape, caller)


def _is_key(key) -> bool:
    """Whether it is a key, or an array of them, of either form."""
    try:
        jax.random.key_data(key)
    except TypeError:
        return False
    return hasattr(key, "dtype")


def _misfits(q, k, v, sinks) -> list[str]:
    (b, t, h, d), (_, s, kv, _) = q.shape, k.shape
    wrong = []
    if (longest := max(t, s)) > _LONGEST:
        wrong.append(f"{longest:,} positions; indices are int32, needed are at most {_LONGEST:,}")
    if not q.dtype == k.dtype == v.dtype:
        wrong.append(f"dtypes differ (q {q.dtype}, k {k.dtype}, v {v.dtype}): cast them to one")
    if k.shape != (b, s, kv, d):
        wrong.append(
            f"`k` has shape {k.shape}; with q {q.shape} it needs batch {b} and head size {d}"
        )
    if v.shape[:3] != (b, s, kv):
        wrong.append(
            f"`v` has shape {v.shape}; with q {q.shape} and k {k.shape} "
            f"it needs [{b}, {s}, {kv}, V]"
        )
    if kv == 0 or h % kv:
        wrong.append(f"{h} query heads are no multiple of {kv} key/value heads")
    if sinks is not None and sinks.shape != (h,):
        wrong.append(f"`sinks` has shape {sinks.shape}; needed is one per query head, ({h},)")
    if sinks is not None and not jnp.issubdtype(sinks.dtype, jnp.floating):
        wrong.append(f"`sinks` has dtype {sinks.dtype}; needed is a floating-point dtype")
    return wrong
