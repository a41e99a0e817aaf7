"""What one equation costs: a table of rules, one a primitive.

A rule is `rule(eqn) -> Work`. The conventions, for users to know what a number means:

* `matrix`: products and sums of matrix products, convolutions and factorisations, 2 for each
  multiply-add, 8 where the numbers are complex. What a convolution would multiply with padding or
  with the zeros of a dilation is not counted, as in XLA.
* `other`: one for each element of arithmetic on floating-point numbers, comparisons of them
  included; n - 1 for a sum or maximum of n. Integers and booleans are no floating-point operations.
* `transcendentals`: one for each exp, log, sin, tanh, sqrt, pow, … (XLA's list), beside `other`.
* moving, choosing, converting and rounding count nothing.
* Factorisations count what textbooks do (Golub and Van Loan, Matrix Computations; LAPACK Working
  Note 41); where the count depends on the data (eigenvalues, singular values), its usual estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._amount import Amount
from xform._compat import Jaxpr, JaxprEqn
from xform._program import VIEWS, array_bytes
from xform.jaxpr import source_line
from xform.jaxpr._interpret import called


@dataclass(frozen=True, slots=True)
class Work:
    """What one equation does, once, on one device.

    Attributes:
      matrix: floating-point operations of matrix products.
      other: all other floating-point operations.
      transcendentals: elementary functions evaluated.
      read, written: bytes, where they are not those of all operands and results.
      kind: what numbers are multiplied, "bfloat16"; that of the first operand by default.
    """

    matrix: Amount = 0
    other: Amount = 0
    transcendentals: Amount = 0
    read: int | None = None
    written: int | None = None
    kind: str | None = None


type CostRule = Callable[[JaxprEqn], Work]

RULES: dict[str, CostRule] = {}
"""The table, by the primitive's name."""


def cost_rule(*names: str) -> Callable[[CostRule], CostRule]:
    """Registers the rule of the primitives of these names, as a decorator.

    >>> @cost_rule("my_primitive")
    ... def my_cost(eqn):
    ...     return Work(other=3 * eqn.outvars[0].aval.size)
    """

    def register(rule: CostRule) -> CostRule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


STILL: set[CostRule] = set()
"""Rules of what computes nothing, whatever it moves."""

BY_TYPE: dict[CostRule, tuple[str, ...]] = {}
"""Rules that ask for no more than the types of the first operand and of the first result, and for
these parameters."""


def _still(rule: CostRule) -> CostRule:
    STILL.add(rule)
    return rule


def _by_type(*params: str) -> Callable[[CostRule], CostRule]:
    def mark(rule: CostRule) -> CostRule:
        BY_TYPE[rule] = params
        return rule

    return mark


def _table(rule: CostRule, names: str) -> None:
    RULES.update(dict.fromkeys(names.split(), rule))


# ---- sizes ---------------------------------------------------------------------------------------


def aval(atom) -> Any:
    """The type of an operand or result; that of its array for a reference."""
    return getattr(atom.aval, "inner_aval", atom.aval)


def size(atom) -> int:
    """The number of elements."""
    return math.prod(getattr(aval(atom), "shape", ()))


def nbytes(*atoms) -> int:
    """The bytes of arrays."""
    types = [aval(a) for a in atoms]
    return sum(array_bytes(math.prod(t.shape), t.dtype) for t in types if hasattr(t, "dtype"))


@functools.cache
def _weight(dtype) -> int:
    """0 for what is no floating-point number, 1 for a real one, 2 for a complex one."""
    real, complex_ = (jnp.issubdtype(dtype, k) for k in (jnp.floating, jnp.complexfloating))
    return 2 if complex_ else int(real)


_NOTHING, _VIEW = Work(), Work(read=0, written=0)
_table(_still(lambda eqn: _VIEW), " ".join(VIEWS))
_table(_still(lambda eqn: _VIEW), """
    vary_unreduced_cast_p reduced_vary_cast_p create_token after_all add_dependency tie
    shape_assertion check device_put
    axis_index platform_index program_id num_programs multiple_of max_contiguous new_ref freeze
    empty_ref free_ref random_wrap random_unwrap random_clone debug_callback debug_print dce_sink
    inspect_sharding broadcast_to einshape_lo dimension_size dim_as_value xla_metadata_value
    from_edtype to_edtype pin unpin mutable_array tree_barrier all_gather_done all_reduce_done
    psum_done reduce_scatter_done ppermute_done all_to_all_done precv program_order
    eq_to le_to lt_to
""")  # fmt: skip
_table(_still(lambda eqn: _NOTHING), """
    broadcast_in_dim iota iota_2x32_shape concatenate pad transpose rev select_n copy copy_p
    convert_element_type reduce_precision real imag complex split tile stack unstack roll
    and or xor not shift_left shift_right_logical shift_right_arithmetic population_count clz mulhi
    reduce_and reduce_or reduce_xor random_bits random_seed random_split random_fold_in
    threefry2x32 threefry4x32 philox2x32 philox4x32 rng_bit_generator rng_uniform
    lu_pivots_to_permutation empty empty2 zeros_like stochastic_round pack_elementwise
    unpack_elementwise pack_dtype unpack_dtype
""")  # fmt: skip


# ---- element by element --------------------------------------------------------------------------


def _pointwise(real: int = 1, complex_: int | None = None) -> CostRule:
    """So many operations for each element of the result, of real and of complex numbers."""
    counts = (0, real, 2 * real if complex_ is None else complex_)

    def rule(eqn: JaxprEqn) -> Work:
        each = counts[_weight(aval(eqn.invars[0]).dtype)]
        return Work(other=each * size(eqn.outvars[0])) if each else _NOTHING

    return _by_type()(rule)


@_by_type()
def _transcendental(eqn: JaxprEqn) -> Work:
    return Work(transcendentals=size(eqn.outvars[0]))


_table(_pointwise(), """
    add sub neg add_any max min abs sign floor ceil round is_finite rem nextafter
    eq ne lt le gt ge _copysign
""")  # fmt: skip
_table(_pointwise(1, 6), "mul square")
_table(_pointwise(1, 11), "div reciprocal")
_table(_pointwise(0, 1), "conj")
_table(_pointwise(2), "clamp one_minus_square")
_table(_transcendental, """
    exp exp2 expm1 log log2 log1p sqrt rsqrt cbrt pow sin cos tan asin acos atan atan2 sinh cosh
    tanh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma polygamma zeta igamma igammac
    igamma_grad_a random_gamma random_gamma_grad regularized_incomplete_beta bessel_i0e bessel_i1e
""")  # fmt: skip


@cost_rule("integer_pow")
@_by_type("y")
def _integer_pow(eqn: JaxprEqn) -> Work:
    """By repeated squaring: a square for each bit but the first, a product for each bit set."""
    n = abs(eqn.params["y"])
    products = max(0, n.bit_length() + n.bit_count() - 2)
    each = (0, products, 6 * products)[_weight(aval(eqn.invars[0]).dtype)]
    return Work(other=(each + (eqn.params["y"] < 0)) * size(eqn.outvars[0]))


@cost_rule("polynomial")
def _polynomial(eqn: JaxprEqn) -> Work:
    """Horner's scheme."""
    return Work(other=2 * max(0, len(eqn.invars) - 2) * size(eqn.outvars[0]))


# ---- reductions and scans ------------------------------------------------------------------------


@cost_rule("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "reduce_prod")
@_by_type()
def _reduce(eqn: JaxprEqn) -> Work:
    x, out = eqn.invars[0], eqn.outvars[0]
    products = eqn.primitive.name == "reduce_prod"
    each = (0, 1, 6 if products else 2)[_weight(aval(x).dtype)]
    return Work(other=each * max(0, size(x) - size(out)))


def _each_time(jaxpr: Jaxpr) -> Work:
    """What a function of scalars does, inside of a reduction or a scatter."""
    other: Amount = 0
    functions: Amount = 0
    for eqn in jaxpr.eqns:
        if (body := called(eqn)) is not None:
            work = _each_time(body)
        elif (rule := RULES.get(eqn.primitive.name)) is not None:
            work = rule(eqn)
        else:
            raise NotImplementedError(
                f"no cost is known of `{eqn.primitive.name}` at {source_line(eqn)}, in a function "
                'of scalars. Register a rule: `@xform.cost_rule("' + eqn.primitive.name + '")`.'
            )
        other, functions = other + work.other, functions + work.transcendentals
    return Work(other=other, transcendentals=functions)


def _times(work: Work, times: int) -> Work:
    return Work(other=work.other * times, transcendentals=work.transcendentals * times)


@cost_rule("reduce")
def _reduce_by(eqn: JaxprEqn) -> Work:
    """A reduction by a function of the user's: what it does, n - 1 times."""
    arrays = eqn.invars[: len(eqn.outvars)]
    steps = max(0, size(arrays[0]) - size(eqn.outvars[0]))
    return _times(_each_time(eqn.params["jaxpr"]), steps)


@cost_rule("cumsum", "cumprod", "cummax", "cummin")
@_by_type("axis")
def _cumulative(eqn: JaxprEqn) -> Work:
    n = size(eqn.invars[0])
    rows = n // max(1, aval(eqn.invars[0]).shape[eqn.params["axis"]])
    products = eqn.primitive.name == "cumprod"
    return Work(other=(0, 1, 6 if products else 2)[_weight(aval(eqn.invars[0]).dtype)] * (n - rows))


@cost_rule("cumlogsumexp")
def _cumlogsumexp(eqn: JaxprEqn) -> Work:
    """Each step a maximum, a difference, two functions and two sums."""
    n = size(eqn.invars[0])
    steps = n - n // max(1, aval(eqn.invars[0]).shape[eqn.params["axis"]])
    return Work(other=4 * steps, transcendentals=2 * steps)


@cost_rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add")
def _window(eqn: JaxprEqn) -> Work:
    window = math.prod(eqn.params["window_dimensions"])
    out = sum(map(size, eqn.outvars))
    return Work(other=_weight(aval(eqn.invars[0]).dtype) * out * (window - 1))


@cost_rule("reduce_window")
def _window_by(eqn: JaxprEqn) -> Work:
    """A window reduced by a function of the user's."""
    window = math.prod(eqn.params["window_dimensions"])
    return _times(_each_time(eqn.params["jaxpr"]), size(eqn.outvars[0]) * (window - 1))


@cost_rule("select_and_scatter")
def _scatter_window_by(eqn: JaxprEqn) -> Work:
    """A choice for each point of each window but the first, and one update for each window."""
    windows, window = size(eqn.invars[1]), math.prod(eqn.params["window_dimensions"])
    select, scatter = (_each_time(eqn.params[name]) for name in ("select_jaxpr", "scatter_jaxpr"))
    select, scatter = _times(select, windows * (window - 1)), _times(scatter, windows)
    return Work(
        other=select.other + scatter.other,
        transcendentals=select.transcendentals + scatter.transcendentals,
    )


@cost_rule("select_and_scatter_add")
def _scatter_window(eqn: JaxprEqn) -> Work:
    """The maximum of each window, and one sum for each."""
    return Work(other=size(eqn.invars[0]) * math.prod(eqn.params["window_dimensions"]))


@cost_rule("sort", "top_k", "approx_top_k")
def _sort(eqn: JaxprEqn) -> Work:
    """`n log2 n` comparisons, or `n log2 k` for the first k."""
    params, x = eqn.params, eqn.invars[0]
    dim = params.get("dimension", params.get("reduction_dimension", -1))
    k = params.get("k", aval(x).shape[dim])
    keys = params.get("num_keys", 1)
    depth = max(1, math.ceil(math.log2(k))) if k > 1 else 0
    return Work(other=(_weight(aval(x).dtype) > 0) * size(x) * depth * keys)


# ---- part of an array ----------------------------------------------------------------------------


@cost_rule("slice", "dynamic_slice", "gather")
@_still
def _read_part(eqn: JaxprEqn) -> Work:
    """Only what is taken is read."""
    out = nbytes(*eqn.outvars)
    return Work(read=out + nbytes(*eqn.invars[1:]), written=out)


@cost_rule("dynamic_update_slice")
@_still
def _write_part(eqn: JaxprEqn) -> Work:
    """In place: only what is replaced is written."""
    return Work(read=nbytes(*eqn.invars[1:]), written=nbytes(eqn.invars[1]))


@cost_rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn: JaxprEqn) -> Work:
    """In place: what is updated is read, if it counts, and written.

    By a function of the user's (`x.at[i].apply(f)`), that runs once for each.
    """
    updates, name = eqn.invars[2], eqn.primitive.name
    part, by = nbytes(updates), eqn.params["update_jaxpr"]
    each = (0, 1, 6 if name == "scatter-mul" else 2)[_weight(aval(updates).dtype)]
    combines = name != "scatter"
    work = Work(other=each * size(updates)) if combines else _NOTHING
    if not combines and by is not None and by.eqns:
        work, combines = _times(_each_time(by), size(updates)), True
    read = part * (1 + combines) + nbytes(eqn.invars[1])
    return dataclasses.replace(work, read=read, written=part)


@cost_rule("get", "load", "masked_load")
def _load(eqn: JaxprEqn) -> Work:
    part = nbytes(*eqn.outvars)
    return Work(read=part, written=part)


@cost_rule("swap", "masked_swap")
def _store(eqn: JaxprEqn) -> Work:
    part = nbytes(eqn.invars[1])
    return Work(read=part, written=part)


@cost_rule("addupdate", "accum_grad_in_ref", "atomic_rmw")
def _accumulate(eqn: JaxprEqn) -> Work:
    part, weight = nbytes(eqn.invars[1]), _weight(aval(eqn.invars[1]).dtype)
    return Work(other=weight * size(eqn.invars[1]), read=2 * part, written=part)


# ---- products ------------------------------------------------------------------------------------


# How a product of float32 is asked for that no matrix unit rounds.
_IN_FULL = (lax.Precision.HIGHEST, lax.DotAlgorithmPreset.F32_F32_F32)


def _multiply_adds(eqn: JaxprEqn, count: int) -> Work:
    x = aval(eqn.invars[0]).dtype
    precision = eqn.params.get("precision")
    given = precision if isinstance(precision, tuple) else (precision,)
    exact = any(one in given for one in _IN_FULL)
    kind = f"{x.name}@highest" if exact and x == jnp.float32 else x.name
    return Work(matrix=(8 if _weight(x) == 2 else 2) * count, kind=kind)


@cost_rule("dot_general", "scaled_dot", "scaled_matmul_wrapper", "scaled_matmul", "scaled_product")
@_by_type("dimension_numbers", "precision")
def _dot_general(eqn: JaxprEqn) -> Work:
    numbers = eqn.params.get("dimension_numbers")
    x = aval(eqn.invars[0])
    contracted = (x.ndim - 1,) if numbers is None else numbers[0][0]
    return _multiply_adds(eqn, size(eqn.outvars[0]) * math.prod(x.shape[d] for d in contracted))


@cost_rule("ragged_dot_general")
def _ragged_dot(eqn: JaxprEqn) -> Work:
    """Every row meets the matrix of its own group: as many products as if there were one group."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    x, y = aval(eqn.invars[0]), aval(eqn.invars[1])
    (x_in, y_in), (x_batch, y_batch) = numbers.dot_dimension_numbers
    del x_in, x_batch
    columns = [
        n
        for d, n in enumerate(y.shape)
        if d not in (*y_in, *y_batch, *numbers.rhs_group_dimensions)
    ]
    return _multiply_adds(eqn, math.prod(x.shape) * math.prod(columns))


@cost_rule("conv_general_dilated")
def _conv(eqn: JaxprEqn) -> Work:
    x, w, out = (aval(v) for v in (*eqn.invars[:2], eqn.outvars[0]))
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    pairs = 1
    for i, (dx, dw, do) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        at = np.arange(out.shape[do])[:, None] * p["window_strides"][i] - p["padding"][i][0]
        at = at + np.arange(w.shape[dw]) * p["rhs_dilation"][i]
        step, last = p["lhs_dilation"][i], (x.shape[dx] - 1) * p["lhs_dilation"][i]
        pairs *= int(np.sum((at >= 0) & (at <= last) & (at % step == 0)))
    features = w.shape[numbers.rhs_spec[0]] * w.shape[numbers.rhs_spec[1]]
    batch = x.shape[numbers.lhs_spec[0]] // p["batch_group_count"]
    return _multiply_adds(eqn, pairs * features * batch)


@cost_rule("contract")
def _contract(eqn: JaxprEqn) -> Work:
    """The product of attention's tiles: `[g,q,k]`, `[g,q,d]` and `[k,d]`, two of them given."""
    x, y, out = (aval(v).shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    summed = {"tile": x[-1], "row": x[-1], "col": x[0] * x[1]}[eqn.params["out"]]
    del y
    return Work(matrix=2 * math.prod(out) * summed, kind=eqn.params["dtype"].name)


@cost_rule("kept_attention")
def _kept_attention(eqn: JaxprEqn) -> Work:
    """Both products with all keys that there is room for: what texts have of them is not known."""
    q, k, v, _, *rest = (aval(x).shape for x in eqn.invars)
    room = k[1] * (rest[0][1] if eqn.params["paged"] else 1)
    pairs = math.prod(q[:3]) * room
    return Work(matrix=2 * pairs * (q[3] + v[3]), other=4 * pairs, transcendentals=pairs)


@cost_rule("fft")
def _fft(eqn: JaxprEqn) -> Work:
    """`5 n log2 n` for n complex points, half of it for real ones (Golub and Van Loan, 1.4)."""
    lengths = eqn.params["fft_lengths"]
    n, points = math.prod(lengths), max(size(eqn.invars[0]), size(eqn.outvars[0]))
    real = eqn.params["fft_type"] in (lax.FftType.RFFT, lax.FftType.IRFFT)
    return Work(other=round(5 * points * math.log2(max(n, 1))) // (2 if real else 1))


# ---- factorisations ------------------------------------------------------------------------------


def _factorise(count: Callable[..., int]) -> CostRule:
    """`count(m, n)` for each matrix of the first operand."""

    def rule(eqn: JaxprEqn) -> Work:
        *batch, m, n = aval(eqn.invars[0]).shape
        weight = 4 if _weight(aval(eqn.invars[0]).dtype) == 2 else 1
        return Work(matrix=weight * math.prod(batch) * count(m, n))

    return rule


def _lu(m: int, n: int) -> int:
    k = min(m, n)
    return (6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3) // 3


def _qr(m: int, n: int) -> int:
    return 2 * min(m, n) ** 2 * (3 * max(m, n) - min(m, n)) // 3


_table(_factorise(lambda m, n: n * (n + 1) * (2 * n + 1) // 6), "cholesky")
_table(_factorise(_lu), "lu")
_table(_factorise(_qr), "qr geqrf geqp3 householder_product")
_table(_factorise(lambda m, n: 9 * n**3), "eigh")
_table(_factorise(lambda m, n: 25 * n**3), "eig schur")
_table(_factorise(lambda m, n: 4 * m * n * min(m, n) + 22 * min(m, n) ** 3), "svd")
_table(_factorise(lambda m, n: 10 * n**3 // 3), "hessenberg tridiagonal")
_table(_factorise(lambda m, n: 4 * n**2), "cholesky_update")


@cost_rule("triangular_solve")
def _triangular_solve(eqn: JaxprEqn) -> Work:
    """`n^2` for each right-hand side."""
    n = aval(eqn.invars[0]).shape[-1]
    return _multiply_adds(eqn, n * size(eqn.invars[1]) // 2)


@cost_rule("tridiagonal_solve")
def _tridiagonal_solve(eqn: JaxprEqn) -> Work:
    return Work(other=8 * size(eqn.invars[3]))


@cost_rule("symmetric_product")
def _symmetric_product(eqn: JaxprEqn) -> Work:
    *_, n, k = aval(eqn.invars[0]).shape
    del n
    return _multiply_adds(eqn, size(eqn.outvars[0]) * k)


@cost_rule("ormqr")
def _ormqr(eqn: JaxprEqn) -> Work:
    return _multiply_adds(eqn, 2 * size(eqn.invars[2]) * aval(eqn.invars[1]).shape[-1])


# ---- between devices -----------------------------------------------------------------------------


def sent(eqn: JaxprEqn, sizes: Mapping[str, int]) -> tuple[dict[str, Any], int] | None:
    """Bytes that a device sends over each mesh axis, and additions that it makes; None if none.

    A collective is a ring over each axis in turn, the innermost axis taking most: an all-reduce of
    p bytes over n devices sends `2 p (n - 1) / n`, an all-gather that makes p, a reduce-scatter,
    an all-to-all or a broadcast of p send `p (n - 1) / n`, a permutation p for each pair. It is
    what a ring on one axis of all devices would send, divided among the axes. An exchange of ragged
    parts sends as much as there is room for.
    """
    named = named_axes(eqn)
    if named is None:
        return None
    axes, rule = [a for a in named if a in sizes], _COLLECTIVES[eqn.primitive.name]
    ns = [sizes[a] for a in axes]
    if groups := eqn.params.get("axis_index_groups"):
        ns = [*ns[:-1], len(groups[0])]
    arrays = _operands(eqn)
    each = rule(eqn, Fraction(nbytes(*arrays)), ns)
    n = math.prod(ns)
    elements = sum(_weight(aval(x).dtype) * size(x) for x in arrays)
    additions = elements * (n - 1) // n if eqn.primitive.name in _SUMS else 0
    return {a: x for a, x in zip(axes, each, strict=True) if x}, additions


def _operands(eqn: JaxprEqn) -> Sequence[Any]:
    """What a collective sends of: not what says to whom, and what is left of dimensions."""
    if eqn.primitive.name == "ragged_all_to_all":
        return eqn.invars[:1]
    return eqn.outvars if _dims(eqn) else eqn.invars


def _dims(eqn: JaxprEqn) -> list[int]:
    """The dimensions that a sum over mesh axes takes too: `vmap`'s, by its axis name."""
    return [axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int)]


def _sum_over_dims(eqn: JaxprEqn) -> Work:
    """What a device adds up before it sends anything."""
    pairs = zip(eqn.invars, eqn.outvars, strict=True) if _dims(eqn) else ()
    return Work(other=sum(_weight(aval(x).dtype) * max(0, size(x) - size(y)) for x, y in pairs))


def named_axes(eqn: JaxprEqn) -> tuple[Any, ...] | None:
    """The axes over which a collective of the program runs; None for any other equation."""
    if eqn.primitive.name not in _COLLECTIVES:
        return None
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(names) if isinstance(names, tuple | list) else (names,)


def _all_reduce(eqn, payload, ns) -> list:
    del eqn
    return [2 * x for x in _scattered(payload, ns)]


def _scattered(payload, ns) -> list:
    """The innermost axis first, with all of it; the next with the share that is left."""
    out = []
    for n in reversed(ns):
        out.append(payload * (n - 1) / n)
        payload /= n
    return out[::-1]


def _reduce_scatter(eqn, payload, ns) -> list:
    del eqn
    return _scattered(payload, ns)


def _broadcast(eqn, payload, ns) -> list:
    """In a chain each device hands on all of it, but for the last."""
    del eqn
    return _scattered(payload, ns)


def _all_gather(eqn, payload, ns) -> list:
    del eqn
    return _scattered(payload * math.prod(ns), ns)


def _all_to_all(eqn, payload, ns) -> list:
    """What goes to another device of the outermost axis crosses that axis, and so on inwards."""
    del eqn
    out = []
    for n in ns:
        out.append(payload * (n - 1) / n)
        payload /= n
    return out


def _permute(eqn, payload, ns) -> list:
    """Each pair crosses the outermost axis along which it moves; the mean over all devices."""
    out = [0] * len(ns)
    for pair in eqn.params["perm"]:
        source, target = (np.unravel_index(i, ns) for i in pair)
        moved = [d for d in range(len(ns)) if source[d] != target[d]]
        if moved:
            out[moved[0]] += payload / math.prod(ns)
    return out


_COLLECTIVES: dict[str, Callable] = {
    name: rule
    for rule, names in (
        (_all_reduce, "psum pmax pmin psum_invariant unreduced_psum unreduced_pmax unreduced_pmin"),
        (_all_reduce, "psum_start psum_invariant_start"),
        (_reduce_scatter, "reduce_scatter reduce_scatter_start unreduced_reduce_scatter"),
        (_all_gather, "all_gather all_gather_invariant all_gather_reduced all_gather_start"),
        (_all_gather, "all_gather_reduced_start"),
        (_all_to_all, "all_to_all all_to_all_start ragged_all_to_all"),
        (_permute, "ppermute ppermute_start psend"),
        (_broadcast, "pbroadcast"),
    )
    for name in names.split()
}
_SUMS = {name for name, rule in _COLLECTIVES.items() if rule in (_all_reduce, _reduce_scatter)}
_table(_sum_over_dims, " ".join(_COLLECTIVES))
