"""Run a program on values of another kind."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xform._compat import Jaxpr, JaxprEqn, Literal
from xform.jaxpr._walk import at_line, own_params, source_line

type Rule = Callable[..., Any] | eqn_rule
"""What is done in place of an equation: `rule(*operands, **params)`, or an `eqn_rule`."""
type Rules = Mapping[Any, Rule]  # keys: Primitive | str | tuple[str, str], which Mapping can't vary
"""Rules by a primitive, its name, or its name and its parameter `name`: `("jit", "clip")`."""


@dataclass(frozen=True)
class eqn_rule:
    """Marks a rule that is called as `rule(eqn, *args)`, the equation in place of its parameters.

    For rules that need the result's shape (`eqn.outvars[0].aval`) or the source line.

    >>> from xform.jaxpr import eqn_rule, interpret, trace
    >>> sizes = {"sin": eqn_rule(lambda eqn, n: n + eqn.outvars[0].aval.size)}
    >>> interpret(trace(jax.numpy.sin, jax.numpy.ones(5)), sizes)(0)
    [5]
    """

    rule: Callable[..., Any]


def interpret(
    f: Callable | Jaxpr,
    rules: Rules,
    *,
    default: Callable[..., Any] | None = None,
    lift: Callable[[Any], Any] | None = None,
) -> Callable:
    """Returns a function that runs the equations of `f` by rules, on values of any type.

    A rule is `rule(*args, **params)`, of the equation's operands and parameters; it returns the
    result, or a list of them where the primitive has several. Equations that only call (jit, remat,
    custom_jvp, custom_vjp, …) run their body unless they have a rule. Loops and branches mean
    nothing by themselves on a new type: their rules, often two lines, say `interpret(body, rules)`.

    Args:
        f: a function, traced at the shapes and dtypes of the arguments that it is then given:
            arrays, `jax.ShapeDtypeStruct`s or values of your own with `shape` and `dtype`. Or a
            jaxpr, whose interpretation takes values of any kind, flat, and returns a list.
        rules: the table.
        default: called as `default(eqn, *args)` at a primitive without a rule.
        lift: applied to each literal and each constant, to make it one of your values.

    Returns:
        A function with the signature of `f`.

    Raises:
        NotImplementedError: at a primitive without a rule, with its name and the user's line.

    >>> from xform.jaxpr import interpret, trace
    >>> uses = {"sin": lambda n, **_: n + 1, "add": lambda n, m: n + m}
    >>> program = trace(lambda x: jax.numpy.sin(x) + jax.numpy.sin(jax.numpy.sin(x)), 1.0)
    >>> interpret(program, uses)(0)
    [3]
    """

    def apply(eqn: JaxprEqn, *args) -> list:
        rule = find_rule(rules, eqn)
        if rule not in (None, run_body):
            return call_rule(rule, eqn, args)
        if (body := called(eqn)) is not None:
            with at_line(eqn):
                return evaluate(body, body.consts, args, apply, lift)
        if default is not None:
            return _results(eqn, default(eqn, *args))
        raise NotImplementedError(_no_rule(eqn))

    if isinstance(f, Jaxpr):
        return lambda *args: evaluate(f, f.consts, args, apply, lift)
    return as_function(f, lambda jaxpr, args: evaluate(jaxpr, jaxpr.consts, args, apply, lift))


def run_body(*args, **params):
    """The rule of a call that gives way to its body, to which the other rules then apply.

    `interpret` does this unasked. For `rewrite`, `{"jit": run_body}` removes inner jits, and
    `{"custom_jvp_call": run_body}` has JAX derive a function whose declared derivative is void.

    >>> import jax, jax.numpy as jnp
    >>> from xform.jaxpr import rewrite
    >>> f = lambda x: jax.jit(jnp.sin)(x) + 1
    >>> [eqn.primitive.name for eqn in jax.make_jaxpr(rewrite(f, {"jit": run_body}))(1.0).eqns]
    ['sin', 'add']
    """
    del args, params
    raise TypeError("`run_body` is an entry for a table of rules, and isn't called")


# Where the primitives that only run a program on their operands keep it, if not in `call_jaxpr`.
_CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "call_hi_primitive": "jaxpr",  # remat, in the hijax form that will follow remat2
    "custom_vmap_call": "call",
    "xla_metadata_call": "jaxpr",
}


def called(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that an equation merely calls, if that is all it does."""
    return own_params(eqn).get(_CALLS.get(eqn.primitive.name, "call_jaxpr"))


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence,
    args: Sequence,
    apply: Callable[..., list],
    lift: Callable[[Any], Any] | None = None,
) -> list:
    """Runs a program; `apply(eqn, *operands)` returns the list of an equation's results."""
    lift = lift or (lambda x: x)
    binders = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(binders, [*map(lift, consts), *args], strict=True))

    def read(atom):
        return lift(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, apply(eqn, *map(read, eqn.invars)), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def as_function(f: Callable, run: Callable[[Jaxpr, list], list]) -> Callable:
    """A function with the signature of `f` that traces `f`, then has the flat program run."""

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_has_shape)
        args, kwargs = jax.tree.unflatten(tree, map(_traceable, leaves))
        jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args, **kwargs)
        return jax.tree.unflatten(jax.tree.structure(shapes), run(jaxpr, leaves))

    return wrapped


def _has_shape(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _traceable(x: Any) -> Any:
    """An array or a number as it is; a value of the user's own by its shape and dtype."""
    known = isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if _has_shape(x) and not known else x


def find_rule(rules: Rules, eqn: JaxprEqn) -> Rule | None:
    """The rule for an equation under the most specific key that the table has."""
    primitive = eqn.primitive
    keys = ((primitive.name, str(eqn.params.get("name"))), primitive, primitive.name)
    return next((rules[key] for key in keys if key in rules), None)


def call_rule(rule: Rule, eqn: JaxprEqn, args: Sequence) -> list:
    """The results of a rule, as a list of the right length."""
    by_eqn = isinstance(rule, eqn_rule)
    return _results(eqn, rule.rule(eqn, *args) if by_eqn else rule(*args, **eqn.params))


def _results(eqn: JaxprEqn, out: Any) -> list:
    several = eqn.primitive.multiple_results and type(out) in (list, tuple)
    results = list(out) if several else [out]
    if len(results) != len(eqn.outvars):
        raise ValueError(
            f"the rule of `{eqn.primitive.name}` returned {len(results)} results where the "
            f"equation (at {source_line(eqn)}) has {len(eqn.outvars)}: return a list of so many."
        )
    return results


def _no_rule(eqn: JaxprEqn) -> str:
    name, results = eqn.primitive.name, len(eqn.outvars)
    args = ", ".join(f"x{i}" for i in range(len(eqn.invars)))
    what = "the result" if results == 1 else f"a list of the {results} results"
    return (
        f"no rule for the primitive `{name}` (at {source_line(eqn)}). Register one:\n\n"
        f"    def {name}_rule({args}, **params):\n"
        f"        return ...  # {what}\n"
        f'    rules["{name}"] = {name}_rule\n'
    )
