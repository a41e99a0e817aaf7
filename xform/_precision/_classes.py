"""Which equations are computed in what, by primitive: the tables of `xform.precision`."""

from xform._ops import ELEMENTWISE, MOVES

# Sums, and functions that a narrow operand would cost range or digits: in `accumulate`.
ACCUMULATES = frozenset(
    {
        "reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum",
        "exp", "exp2", "expm1", "log", "log1p", "pow", "integer_pow", "square", "sqrt", "rsqrt",
        "cbrt", "erf_inv", "lgamma", "digamma", "sin", "cos", "tan", "logaddexp",
    }
)  # fmt: skip

# Sums over devices: in `reduce`. What marks a value as varying is the transpose of one.
REDUCE = frozenset({"psum", "psum_invariant", "reduce_scatter", "pvary", "pcast"})

# Computed in what the operands are in.
LIKE_OPERANDS = (
    (ELEMENTWISE | MOVES)
    - ACCUMULATES
    - REDUCE
    - {"scan", "while", "cond", "bitcast_convert_type", "complex"}
) | frozenset(
    {
        "eq", "ne", "lt", "le", "gt", "ge", "is_finite", "argmax", "argmin", "gather", "scatter",
        "cummax", "cummin", "pmax", "pmin", "and", "or", "reduce_window_max", "eq_to", "le_to",
        "lt_to", "select_and_gather_add", "top_k", "approx_top_k", "reduce_precision",
    }
)  # fmt: skip

# What rounds its result, so that two readers might see two roundings of it.
ROUNDS = frozenset(
    {"add", "add_any", "atan2", "div", "erf", "erfc", "logistic", "mul", "rem", "sub", "tanh",
     "convert_element_type", "dot_general", "conv_general_dilated"}
)  # fmt: skip
