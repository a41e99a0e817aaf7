"""`remat`: recompute what a budget of bytes asks for, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._compat import Jaxpr
from xform._remat._budget import Budget, Outer, target
from xform._remat._cut import Settings
from xform._remat._jaxprs import flatten
from xform._remat._kinds import KINDS
from xform._remat._named import name_regions, names_in
from xform._remat._primitive import region
from xform._remat._regions import is_reference
from xform._remat._report import Report, report_of
from xform.jaxpr import intern, source_line, walk


class _Remat:
    """`remat`, with `remat.report`."""

    def __call__(
        self,
        f: Callable,
        *,
        budget: Budget | Mapping[str, Budget] = "all",
        again: Collection[str] = ("products", "kernels"),
        offload: Collection[str] = (),
        device: str | None = None,
    ) -> Callable:
        """Returns `f`, to be differentiated within a budget of memory.

        The backward pass of a program needs values of its forward pass. Which are kept, and which
        are computed again, is a minimum cut between the two, exact for the bytes that it keeps and
        the work that it repeats. What is computed again comes right before its first use, and XLA
        can't undo it. Bodies of loops are planned once, their residuals are stacked; equal layers
        in a row share a plan. Arguments are there in any case, and cost nothing.

        What is elementwise is computed again wherever that saves a byte. Of work that costs time,
        `again` lists the kinds that a budget may repeat; what is not in it never runs twice.

        Args:
          f: a function of pytrees of arrays. Leaves that are neither arrays nor floats are
            part of the program, as Python's ints and bools are.
          budget: how many bytes value and gradients may need at once beside arguments and results,
            as XLA's `temp_size_in_bytes` counts them; a float for what lies between the least of
            all plans, 0.0, and that of "all", 1.0. "all" repeats no work. "none" saves nothing
            that may run again: layers and iterations start from their inputs. Or budgets by the
            names of `jax.named_scope`s, each for the bytes that one run of such a region saves
            beside its results; all else is as with "all".
          again: of "products", "kernels" (all that no table knows; loops), "reductions", "random"
            bits and "collectives".
          offload: names of values (`jax.ad_checkpoint.checkpoint_name`) that are kept in the
            host's memory until the backward pass needs them. The carry of a loop waits on the
            device under whatever name: name it where the body reads it. A CPU's memory is the
            host's, and there nothing is won; its budgets are without what is offloaded.
          device: what the program will be compiled for, as in `memory`; by default what JAX runs
            on. A GPU's products may need two megabytes beside what is said here, for partial sums,
            which are counted there.

        Returns:
          A function like `f`: the same values, derivatives in both directions and of all orders.

        Raises:
          BudgetError: while it is differentiated, if no plan fits the budget; with the least that
            one does, and the lines that need it.
          ValueError: an argument is not one of these, or nothing has such a name; or `f` makes
            mutable arrays, or is given some.

        >>> import jax, jax.numpy as jnp
        >>> layers = lambda ws, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
        >>> loss = remat(lambda ws, x: jnp.sum(layers(ws, x) ** 2), budget=150_000)
        >>> gradient = jax.jit(jax.grad(loss))(jnp.ones((8, 32, 32)), jnp.ones((64, 32)))
        """
        plan = _Plan(f, budget, again, offload, device)

        @functools.wraps(f)
        def run(*args, **kwargs):
            traced = _traced(f, args, kwargs)
            program = plan.program(traced.jaxpr, traced.paths)
            return traced.unflatten(region(program, plan.whole, traced.args))

        return run

    def report(
        self,
        f: Callable,
        *,
        budget: Budget | Mapping[str, Budget] = "all",
        again: Collection[str] = ("products", "kernels"),
        offload: Collection[str] = (),
        device: str | None = None,
        argnums: int | Sequence[int] | None = None,
    ) -> Callable[..., Report]:
        """Returns a function that tells what `remat(f, ...)` keeps and repeats, and runs nothing.

        Args:
          f, budget, again, offload, device: as in `remat`.
          argnums: the positional arguments that are differentiated, as in `jax.grad`, since a plan
            depends on these; every floating-point argument where None.

        Returns:
          A function of the arguments of `f`, which may be `jax.ShapeDtypeStruct`s, that returns a
          `Report`.

        Raises:
          ValueError: as `remat`; or `argnums` is no such number, or names an argument that is
            not there or has no floats.

        >>> import jax.numpy as jnp
        >>> f = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)
        >>> [kept.what for kept in remat.report(f)(jnp.ones((8, 8)), jnp.ones((4, 8))).saved]
        ['tanh']
        """
        plan = _Plan(f, budget, again, offload, device)

        def told(*args, **kwargs) -> Report:
            traced = _traced(f, args, kwargs)
            chosen = traced.chosen(argnums, len(args))
            program = plan.program(traced.jaxpr, traced.paths)
            return report_of(program, plan.whole, traced.paths, chosen)

        return told


remat = _Remat()


class _Plan:
    """What a call of `remat` asks for, checked."""

    def __init__(self, f: Any, budget: Any, again: Any, offload: Any, device: Any):
        if not callable(f):
            raise ValueError(f"`remat` takes a function first; found {f!r}.")
        for word, names in dict(again=again, offload=offload).items():
            if isinstance(names, str) or not isinstance(names, Collection):
                raise ValueError(f"`{word}={names!r}`: it is a collection, `{word}=({names!r},)`.")
            if wrong := [name for name in names if not isinstance(name, str)]:
                found = ", ".join(map(repr, wrong))
                raise ValueError(f"`{word}={names!r}`: it is of names, strings; found {found}.")
        again, offload = frozenset(again), frozenset(offload)
        if unknown := sorted(again - set(KINDS)):
            raise ValueError(
                f"`again` may name {', '.join(map(repr, KINDS))}; found "
                f"{', '.join(map(repr, unknown))}."
            )
        if device is not None and not isinstance(device, str):
            raise ValueError(f"`device={device!r}`: it is a name, such as 'H200' or 'cpu'.")
        if device is not None:  # what is here is asked when a program is: not by a decorator
            target(device)  # or else it raises
        self.settings = Settings(again, (), offload=offload)
        named = _by_name(budget) if isinstance(budget, Mapping) else {}
        self.whole = Outer("all" if named else _checked(budget), self.settings, device=device)
        self.named = {name: Outer(b, self.settings, named=True) for name, b in named.items()}

    def program(self, jaxpr: Jaxpr, paths: Sequence[str]) -> Jaxpr:
        """The program with its named regions, checked; `paths` are the names of its inputs."""
        eqns = [site.eqn for site in walk(jaxpr)]
        made = dict.fromkeys(source_line(e) for e in eqns if e.primitive.name in _REFS)
        given = [p for p, v in zip(paths, jaxpr.invars, strict=True) if is_reference(v)]
        if refs := [*made, *given]:
            raise ValueError(
                "`remat` plans values that may be read a second time, which those of mutable "
                f"arrays can't be: {', '.join(refs)}. Call `remat` on parts without them."
            )
        names = names_in(jaxpr) if self.settings.offload else set()
        if missing := sorted(self.settings.offload - names):
            raise ValueError(
                f"`offload` names {', '.join(map(repr, missing))}; the program has "
                f"{', '.join(map(repr, sorted(names))) or 'no names'}: mark what is meant with "
                "`jax.ad_checkpoint.checkpoint_name`; a value that no result needs has no name."
            )
        return intern(name_regions(jaxpr, self.named) if self.named else jaxpr)


# What makes a mutable array.
_REFS = ("new_ref", "empty_ref")


def _by_name(budgets: Mapping) -> dict[str, Budget]:
    """Budgets by the names of scopes, checked."""
    names = ", ".join(repr(name) for name in budgets if not isinstance(name, str))
    if names or not budgets:
        raise ValueError(
            f"`budget={budgets!r}`: a dict has a budget for each of some names of "
            f"`jax.named_scope`s, which are strings; found {names or 'no name'}. For all of the "
            'program give its budget alone, such as `budget="all"`.'
        )
    return {name: _checked(b, f"budget[{name!r}]") for name, b in budgets.items()}


def _checked(budget: Any, word: str = "budget") -> Budget:
    if isinstance(budget, str) and budget in ("all", "none"):
        return budget
    if isinstance(budget, int | np.integer) and not isinstance(budget, bool) and budget >= 0:
        return int(budget)
    if isinstance(budget, float | np.floating) and 0 <= budget <= 1:
        return float(budget)
    named = ", or a dict of these by the name of a `jax.named_scope`" if word == "budget" else ""
    raise ValueError(
        f"`{word}={budget!r}`: it may be bytes (an int), a fraction (a float from 0.0 to 1.0), "
        f'"all", "none"{named}.'
    )


class _traced:
    """The program of a call: its arrays and floats are arguments, the rest is part of it."""

    def __init__(self, f: Callable, args: tuple, kwargs: dict):
        leaves, tree = jax.tree.flatten_with_path((args, kwargs))
        moving = [i for i, (_, x) in enumerate(leaves) if _is_array(x)]
        values = [x for _, x in leaves]

        def call(*arrays):
            full = list(values)
            for i, x in zip(moving, arrays, strict=True):
                full[i] = x
            args, kwargs = jax.tree.unflatten(tree, full)
            return f(*args, **kwargs)

        own = [values[i] for i in moving]
        self._from = [leaves[i][0] for i in moving]
        closed, out = jax.make_jaxpr(call, return_shape=True)(*own)
        self.jaxpr, consts = flatten(closed)
        self.args = [*consts, *own]
        names = [jax.tree_util.keystr(leaves[i][0][1:]) for i in moving]
        self.paths = [*[f"closed over: {jax.typeof(c).str_short()}" for c in consts], *names]
        self._out = jax.tree.structure(out)

    def chosen(self, argnums: Any, count: int) -> list[bool]:
        """Which inputs are of these positional arguments, of `count` that the call had."""
        if argnums is None:
            return [True] * len(self.args)
        named = [argnums] if isinstance(argnums, int | np.integer) else argnums
        is_row = isinstance(named, Sequence)
        if not is_row or not all(isinstance(n, int | np.integer) for n in named):
            raise ValueError(
                f"`argnums={argnums!r}`: it is the number of a positional argument (an int), or "
                "several, such as `argnums=(0, 1)`; None for all."
            )
        if wrong := [n for n in named if not -count <= n < count]:
            raise ValueError(
                f"`argnums={argnums}` names {', '.join(map(str, wrong))}, and the call has "
                f"{count} positional arguments."
            )
        among = {n % count for n in named}
        own = [path[0].idx == 0 and path[1].idx in among for path in self._from]
        inner = self.args[len(self.args) - len(own) :]
        types = [jax.typeof(x) for x, chosen in zip(inner, own, strict=True) if chosen]
        if not any(jnp.issubdtype(t.dtype, jnp.inexact) for t in types):
            found = ", ".join(t.str_short() for t in types) or "none"
            raise ValueError(
                f"`argnums={argnums}` names no array of floats; only these are differentiated, "
                f"and there it found {found}."
            )
        return [False] * (len(self.args) - len(own)) + own

    def unflatten(self, outs: list) -> Any:
        return jax.tree.unflatten(self._out, outs)


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, float | complex)
