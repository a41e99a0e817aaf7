"""Primitives by what they do to elements: tables that several transforms read."""

from xform._program import VIEWS

ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan", "atan2", "atanh",
        "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "convert_element_type",
        "cos", "cosh", "digamma", "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
        "igamma", "igammac", "imag", "integer_pow", "lgamma", "log", "log1p", "logistic", "max",
        "min", "mul", "neg", "nextafter", "polygamma", "pow", "real", "reduce_precision",
        "regularized_incomplete_beta", "rem", "round", "rsqrt", "sign", "sin", "sinh", "sqrt",
        "square", "sub", "tan", "tanh", "zeta",
    }
)  # fmt: skip

# These only move elements, so that nothing is born in them.
MOVES = VIEWS | {
    "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice", "dynamic_update_slice",
    "pad", "reduce_max", "reduce_min", "rev", "select_n", "slice", "sort", "split", "transpose",
    "all_gather", "all_to_all", "ppermute", "psum_invariant_noop", "while", "scan", "cond",
}  # fmt: skip
