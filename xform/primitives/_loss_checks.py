"""What `linear_cross_entropy` refuses: everything that is wrong at once, in one error."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xform._compat import varying_axes
from xform.lowering._loss_fn import Chunks
from xform.primitives._rules import check_sizes

_DTYPES = ("bfloat16", "float16", "float32", "float64")
IMPLEMENTATIONS = (None, "chunked", "mosaic_gpu", "reference")


def check_kinds(hidden, weight, labels, bias, chunks) -> None:
    """Raises one error that lists everything that is no array, and chunks that are none."""
    arrays = {"hidden": hidden, "weight": weight, "labels": labels}
    arrays |= {} if bias is None else {"bias": bias}
    wrong = [
        f"`{name}` is of type {type(x).__name__}; needed is an array"
        for name, x in arrays.items()
        if not isinstance(x, jax.Array | np.ndarray)
    ]
    if not isinstance(chunks, Chunks | None):
        wrong.append(f"`chunks` is {chunks!r}; needed is `xform.lowering.chunked.Chunks`, or None")
    if wrong:
        raise TypeError(f"linear_cross_entropy: {'; '.join(wrong)}.")
    check_sizes("linear_cross_entropy", **arrays)


# What each number has to be, in words and as a condition.
_NUMBERS = {
    "softcap": ("a positive number, or None", lambda x: 0 < x < np.inf),
    "label_smoothing": ("a number from 0 to 1", lambda x: 0 <= x <= 1),
    "z_loss": ("a number not below 0", lambda x: 0 <= x < np.inf),
    "ignore_label": ("an integer of 32 bits", lambda x: abs(x) < 2**31 and x == int(x)),
    "vocab_dim": ("1 for [D, V], or 0 for [V, D]", lambda x: x in (0, 1)),
}


def check_numbers(**numbers) -> None:
    """Raises one error that lists everything wrong with the numbers."""
    wrong = []
    for name, x in numbers.items():
        needed, fits = _NUMBERS[name]
        if isinstance(x, Tracer):
            wrong.append(f"`{name}` is traced; needed is a number of the program")
        elif not ((_is_number(x) and fits(float(x))) or (x is None and name == "softcap")):
            wrong.append(f"`{name}` is {x!r}; needed is {needed}")
    if wrong:
        raise ValueError(f"linear_cross_entropy: {'; '.join(wrong)}.")


def _is_number(x) -> bool:
    """Whether `x` is a real number, be it an array's only one; True and False are none."""
    if isinstance(x, jax.Array | np.ndarray):
        x = x.item() if x.ndim == 0 else None
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def check_arrays(hidden, weight, labels, bias, vocab_dim, vocab_axis, implementation) -> None:
    """Raises one error that lists everything wrong with the arrays."""
    wrong = []
    if hidden.ndim == 0 or weight.ndim != 2:
        wrong.append(
            f"`hidden` has shape {hidden.shape} and `weight` {weight.shape}; needed are [..., D] "
            "and [D, V]"
        )
    elif hidden.shape[-1] != weight.shape[1 - vocab_dim]:
        hint = "" if hidden.shape[-1] != weight.shape[vocab_dim] else (
            f": for weights {'[V, D]' if vocab_dim else '[D, V]'} say `vocab_dim={1 - vocab_dim}`"
        )  # fmt: skip
        wrong.append(
            f"`hidden` has {hidden.shape[-1]} numbers per token and `weight`, {weight.shape}, "
            f"{weight.shape[1 - vocab_dim]} per entry{hint}"
        )
    elif not hidden.shape[-1]:
        wrong.append(f"`hidden` has shape {hidden.shape}; needed is at least one number per token")
    if labels.shape != hidden.shape[:-1]:
        wrong.append(
            f"`labels` has shape {labels.shape}; needed is one per token, {hidden.shape[:-1]}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        wrong.append(f"`labels` has dtype {labels.dtype}; needed is an integer dtype")
    if str(hidden.dtype) not in _DTYPES or hidden.dtype != weight.dtype:
        wrong.append(
            f"`hidden` is {hidden.dtype} and `weight` {weight.dtype}; needed is one of "
            f"{', '.join(_DTYPES)} for both: cast them"
        )
    if bias is not None and weight.ndim == 2:
        entries = weight.shape[vocab_dim]
        if bias.shape != (entries,) or not jnp.issubdtype(bias.dtype, jnp.floating):
            wrong.append(
                f"`bias` is {bias.dtype}{list(bias.shape)}; needed is one float per entry, "
                f"[{entries}]"
            )
    split = vocab_axis in tuple(varying_axes(weight))
    if vocab_axis is not None and not split:
        wrong.append(
            f"`vocab_axis` is {vocab_axis!r} and `weight` does not vary over it; needed is a call "
            "inside `jax.shard_map`, with types checked, that splits `weight` over it"
        )
    if split and vocab_axis in varying_axes(labels):
        wrong.append(
            f"`labels` vary over {vocab_axis!r}, the `vocab_axis`; needed are the same tokens on "
            "all devices along it: split tokens over another axis, or gather them, labels by "
            "`jax.lax.all_gather(labels, axis, to='invarying', tiled=True)`"
        )
    if implementation not in IMPLEMENTATIONS:
        wrong.append(f"`implementation` is {implementation!r}; there is {list(IMPLEMENTATIONS)}")
    if implementation == "reference" and vocab_axis is not None:
        wrong.append("the reference runs on one device: `vocab_axis` must be None")
    if wrong:
        raise ValueError(f"linear_cross_entropy: {'; '.join(wrong)}.")


def check_kept(keep_logits, chunks, implementation) -> None:
    """Raises if logits are to be kept by a way of computing that makes none."""
    if not isinstance(keep_logits, bool | np.bool_):
        raise TypeError(
            f"linear_cross_entropy: `keep_logits` is {keep_logits!r}; needed is True or False."
        )
    given = {"chunks": chunks, "implementation": implementation}
    wrong = [f"`{name}` is {x!r}" for name, x in given.items() if x is not None]
    if keep_logits and wrong:
        raise ValueError(
            f"linear_cross_entropy: {'; '.join(wrong)}, which says how to do without logits; with "
            "`keep_logits=True` leave it out."
        )
