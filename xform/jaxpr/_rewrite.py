"""Replace equations of a program, and keep it a program."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.interpreters import partial_eval

from xform._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    WrappedFun,
    jaxpr_as_fun,
    source_info_util,
    varying_axes,
    weakref_lru_cache,
    wrap_init,
)
from xform.jaxpr._interpret import (
    Rules,
    as_function,
    call_rule,
    called,
    evaluate,
    find_rule,
    run_body,
)
from xform.jaxpr._trace import trace
from xform.jaxpr._walk import source_line, sub_jaxprs, walk


def rewrite(f: Callable, rules: Rules) -> Callable:
    """Returns `f` with each equation that has a rule replaced by it, at every depth.

    A rule is `rule(*args, **params)`, a function of arrays that returns what the equation returned:
    as many results, of the same shapes and dtypes. What encloses a replaced equation is built again
    around it: a scan stays a scan, a cond a cond, a shard_map a shard_map, remat stays remat. What
    encloses none is kept as it is.

    The derivative rules of `custom_jvp` and `custom_vjp` functions are part of the program: they
    are kept, and rewritten like the rest, so that the gradient of the rewritten function is that of
    the rewritten program. Where a rule changes *what* such a function computes, its derivative is
    void: let the call give way to its body, with `run_body` as its rule, and JAX derives it anew.

    Args:
        f: a function of pytrees of arrays.
        rules: the table. A rule may capture concrete arrays; traced ones only where no loop, branch
            or other inner program encloses the equation.

    Returns:
        A function with the signature of `f`, to be jitted, differentiated, batched, sharded,
        scanned over or rewritten again.

    Raises:
        TypeError: while tracing, where a rule returns another shape or dtype than the equation.
        ValueError: while tracing, where a rule inside an inner program captures a traced value.
        NotImplementedError: where a hijax primitive that can't be built again encloses an equation.

    >>> from xform.jaxpr import rewrite
    >>> cosine = rewrite(jax.numpy.sin, {"sin": lambda x, **_: jax.numpy.cos(x)})
    >>> round(float(cosine(1.0)), 4), round(float(jax.grad(cosine)(1.0)), 4)
    (0.5403, -0.8415)
    """
    rewriter = _Rewriter(rules)

    def run(jaxpr: Jaxpr, args: Sequence) -> list:
        results = zip(rewriter.run_closed(jaxpr, args), jaxpr.out_avals, strict=True)
        return [x if isinstance(x, jax.Array) else jnp.asarray(x, _form(t)[1]) for x, t in results]

    return as_function(f, run)


def inline(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the same program without its inner `jit`s, whose constants become the program's own.

    >>> from xform.jaxpr import inline, trace
    >>> inline(trace(lambda x: 1.0 + jax.jit(jax.numpy.sin)(x), 1.0))
    { lambda ; a:f32[]. let b:f32[] = sin a; c:f32[] = add 1.0:f32[] b in (c,) }
    """
    return trace(rewrite(jaxpr_as_fun(jaxpr), {"jit": run_body}), *jaxpr.in_avals)


def bind(eqn: JaxprEqn, *args) -> list:
    """Returns the results of an equation on other operands, traced as from its own line."""
    return _Rewriter({})._apply(eqn, *args)


class _Rewriter:
    """Runs, or traces again, each kind of program that a rewrite meets."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.body = weakref_lru_cache(self._body)

    def run(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence) -> list:
        """The results of a program, rewritten."""
        return evaluate(jaxpr, consts, args, self._apply)

    def run_closed(self, jaxpr: Jaxpr, args: Sequence) -> list:
        """The same for a program that holds its constants."""
        return self.run(jaxpr, jaxpr.consts, args)

    def _apply(self, eqn: JaxprEqn, *args) -> list:
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        source = source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)
        with source, eqn.ctx.manager:
            rule = find_rule(self.rules, eqn)
            if rule is run_body:
                return self.run_closed(_body_of(eqn), args)
            if rule is not None:
                results = call_rule(rule, eqn, args)
                return [_conform(eqn, *pair) for pair in zip(eqn.outvars, results, strict=True)]
            if eqn.primitive.name == "custom_vmap_call" and self._concerns(_body_of(eqn)):
                raise NotImplementedError(
                    f"`rewrite` can't reach the batching rule of a `custom_vmap` function (at "
                    f"{source_line(eqn)}), which would compute something else than its body. Give "
                    "`custom_vmap_call` a rule; `run_body` lets JAX batch the body itself."
                )
            if eqn.primitive.name == "shard_map":
                return self._shard_map(*args, **eqn.params)
            params = eqn.primitive.get_bind_params(self._params(eqn))
            out = eqn.primitive.bind(*args, **params)
            return list(out) if eqn.primitive.multiple_results else [out]

    def _params(self, eqn: JaxprEqn) -> dict[str, Any]:
        """An equation's parameters, with the programs in them rewritten."""
        if "_prim" in eqn.params:
            return {"_prim": self._hijax(eqn)}
        rules = {
            "jvp_jaxpr_fun": self._thunk,
            "fwd_jaxpr_thunk": self._thunk,
            "bwd": self._backward,
        }
        with _scope(eqn):
            return {key: rules.get(key, self._bodies)(value) for key, value in eqn.params.items()}

    def _bodies(self, value: Any) -> Any:
        """A parameter with each jaxpr in it rewritten."""
        match value:
            case Jaxpr():
                return self.body(value)
            case _ if is_dataclass(value) and not isinstance(value, type):
                parts = {f.name: getattr(value, f.name) for f in fields(value)}
                new = {name: self._bodies(part) for name, part in parts.items()}
                same = all(new[name] is part for name, part in parts.items())
                return value if same else replace(value, **new)
            case tuple() if hasattr(value, "_fields"):
                return type(value)(*map(self._bodies, value))
            case tuple() | list():
                return type(value)(map(self._bodies, value))
        return value

    def _body(self, jaxpr: Jaxpr) -> Jaxpr:
        if not self._concerns(jaxpr):
            return jaxpr
        body, consts = _retrace(lambda *args: self.run_closed(jaxpr, args), jaxpr, jaxpr.in_avals)
        if traced := [x for x in consts if isinstance(x, Tracer)]:
            found = ", ".join(jax.typeof(x).str_short() for x in traced)
            raise ValueError(
                f"a rule captures traced values ({found}) where a loop, a branch or another inner "
                "program encloses the equation: there it can capture concrete arrays only. Make "
                "them arguments of the function, and of the loop."
            )
        return body.with_consts(consts)

    def _concerns(self, jaxpr: Jaxpr) -> bool:
        """Whether a rule may apply in a program; what a derivative rule holds is not known yet."""
        custom = ("custom_jvp_call", "custom_vjp_call")
        return any(
            site.eqn.primitive.name in custom or find_rule(self.rules, site.eqn) is not None
            for site in walk(jaxpr)
        )

    def _thunk(self, thunk: WrappedFun) -> WrappedFun:
        """A derivative rule that AD asks for as `thunk(*zeros) -> (jaxpr, consts, …)`."""

        def rewritten(*zeros):
            jaxpr, consts, *rest = thunk.call_wrapped(*zeros)
            avals = [var.aval for var in (*jaxpr.constvars, *jaxpr.invars)]
            n = len(consts)
            body, captured = _retrace(
                lambda *args: self.run(jaxpr, args[:n], args[n:]), jaxpr, avals
            )
            return body, [*captured, *consts], *rest

        return wrap_init(rewritten, debug_info=thunk.debug_info)

    def _backward(self, backward: WrappedFun) -> WrappedFun:
        """A backward rule, a function of residuals and cotangents."""
        f = as_function(lambda *args: backward.call_wrapped(*args), self.run_closed)
        return wrap_init(f, debug_info=backward.debug_info)

    def _shard_map(self, *args, jaxpr, mesh, in_specs, out_specs, newly_manual_axes, check_vma):
        """Traced again by its public function, which knows the types that a body runs in."""
        return jax.shard_map(
            lambda *shards: self.run_closed(jaxpr, shards),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=list(out_specs),
            axis_names=newly_manual_axes,
            check_vma=check_vma,
        )(*args)

    def _hijax(self, eqn: JaxprEqn) -> Any:
        """A hijax primitive, built again from its parameters if a rule may apply inside."""
        primitive = eqn.params["_prim"]
        if not any(self._concerns(body) for _, body in sub_jaxprs(eqn)):
            return primitive
        kind = type(primitive)
        try:
            return kind(**{key: self._bodies(value) for key, value in primitive.params.items()})
        except TypeError as error:
            raise NotImplementedError(
                f"`rewrite` can't build the hijax primitive `{kind.__name__}` again around a "
                f"rewritten body (at {source_line(eqn)}): give `call_hi_primitive` a rule."
            ) from error


def _retrace(run: Callable, jaxpr: Jaxpr, avals: Sequence) -> tuple[Jaxpr, list]:
    """A new program for an old one, and the constants that it captured."""
    fun = wrap_init(run, debug_info=jaxpr.debug_info.with_unknown_names())
    out, _, consts = partial_eval.trace_to_jaxpr_dynamic(fun, avals)
    return out, consts


def _body_of(eqn: JaxprEqn) -> Jaxpr:
    if (body := called(eqn)) is None:
        raise TypeError(
            f"`run_body` can't be the rule of `{eqn.primitive.name}` (at {source_line(eqn)}): it "
            "serves primitives that only call a body, such as jit, custom_jvp_call and remat2."
        )
    return body


def _scope(eqn: JaxprEqn) -> contextlib.AbstractContextManager:
    """What must hold while an equation's body is traced: in a kernel, its grid."""
    if eqn.primitive.name == "pallas_call":
        return eqn.params["grid_mapping"].trace_env()
    return contextlib.nullcontext()


def _conform(eqn: JaxprEqn, var: Var, result: Any) -> Any:
    """A rule's result, made to vary over the mesh axes over which the equation's did."""
    need, found = var.aval, jax.typeof(result)
    if _form(need) != _form(found):
        raise TypeError(
            f"the rule of `{eqn.primitive.name}` returned {found.str_short()} where the equation "
            f"gives {need.str_short()} (at {source_line(eqn)}): return the same shape and dtype."
        )
    missing = tuple(sorted(varying_axes(need) - varying_axes(found)))
    return jax.lax.pcast(result, missing, to="varying") if missing else result


def _form(aval: Any) -> tuple:
    return getattr(aval, "shape", None), getattr(aval, "dtype", None)
