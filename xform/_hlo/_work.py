"""What one instruction of a compiled program computes, and what it reads and writes.

Counts are exact where the text says enough: matrix products, convolutions, elementwise operations,
reductions, slices read out of larger arrays. A call into a library or a hand-written kernel whose
name is not in the table counts as *opaque*, never as zero.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from xform._hlo._text import Computation, Instruction, Leaf, Module, words

ARITHMETIC = words(
    "abs add and ceil clamp compare count-leading-zeros divide floor maximum minimum multiply"
    " negate not or popcnt remainder round-nearest-afz round-nearest-even select shift-left"
    " shift-right-arithmetic shift-right-logical sign subtract xor"
)
TRANSCENDENTAL = words(
    "acos acosh asin asinh atan2 atanh cbrt cosh cosine erf exponential exponential-minus-one log"
    " log-plus-one logistic power rsqrt sine sinh sqrt tan tanh"
)
# What moves, names or makes data and computes nothing.
MOVES = words(
    "parameter constant tuple get-tuple-element bitcast bitcast-convert convert copy reshape"
    " transpose broadcast iota slice dynamic-slice dynamic-update-slice concatenate pad reverse"
    " gather reduce-precision real imag complex after-all optimization-barrier partition-id"
    " replica-id get-dimension-size set-dimension-size add-dependency domain is-finite"
    " stochastic-convert all-gather all-to-all collective-permute collective-broadcast"
    " ragged-all-to-all send recv infeed outfeed rng rng-bit-generator"
    " rng-get-and-update-state dynamic-reshape async"
)


@dataclass(frozen=True)
class Work:
    """Operations of one execution.

    Attributes:
        matrix: FLOPs of matrix products and convolutions; a multiply-add is two, a complex one
            eight.
        other: elementwise operations and reductions, one each.
        transcendental: exponentials, logarithms, roots, trigonometric and hyperbolic functions.
    """

    matrix: int = 0
    other: int = 0
    transcendental: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matrix + other.matrix,
            self.other + other.other,
            self.transcendental + other.transcendental,
        )

    def __mul__(self, times: int) -> "Work":
        return Work(self.matrix * times, self.other * times, self.transcendental * times)

    @property
    def total(self) -> int:
        return self.matrix + self.other + self.transcendental


Rule = Callable[[Module, Computation, Instruction], Work]


def work(module: Module, within: Computation, instruction: Instruction) -> Work | None:
    """Returns the operations of an instruction itself, None where nobody can tell.

    An instruction that runs a computation (a fusion, a loop) does none itself.
    """
    opcode = instruction.base
    if opcode in ARITHMETIC:
        return Work(other=_elements(instruction))
    if opcode in TRANSCENDENTAL:
        return Work(transcendental=_elements(instruction))
    rule = RULES.get(opcode)
    if rule:
        return rule(module, within, instruction)
    return Work() if opcode in MOVES or instruction.calls else None


def factor_of(module: Module, within: Computation, instruction: Instruction) -> str:
    """Returns the dtype, as XLA names it, of what a kernel multiplies; "" where it does not."""
    if instruction.base in ("dot", "convolution", "custom-call") and instruction.operands:
        return _operand(within, instruction, 0).dtype
    if instruction.base not in ("fusion", "call", "while"):
        return ""
    bodies = (module.computations[name] for name in instruction.calls)
    inner = (factor_of(module, body, i) for body in bodies for i in body.instructions.values())
    return next((dtype for dtype in inner if dtype), "")


def _elements(instruction: Instruction) -> int:
    return sum(leaf.size for leaf in instruction.leaves)


def _operand(within: Computation, instruction: Instruction, index: int) -> Leaf:
    return within.instructions[instruction.operands[index]].leaves[0]


# ---- matrix products -----------------------------------------------------------------------------


def _dot(module: Module, within: Computation, dot: Instruction) -> Work:
    del module
    lhs = _operand(within, dot, 0)
    contracted = math.prod(lhs.dims[i] for i in dot.numbers("lhs_contracting_dims"))
    return Work(matrix=_multiply_add(lhs) * dot.leaves[0].size * contracted)


def _multiply_add(factor: Leaf) -> int:
    """FLOPs of one multiply-add: a complex one is four real products and four sums."""
    return 8 if factor.dtype.startswith("c") else 2


def _convolution(module: Module, within: Computation, conv: Instruction) -> Work:
    """Multiplications with a true input element: not with padding, nor between dilated ones."""
    del module
    lhs, rhs = _operand(within, conv, 0), _operand(within, conv, 1)
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", conv.attrs["dim_labels"])
    if not labels:
        raise ValueError(f"can't read `dim_labels` of {conv.name}: {conv.attrs['dim_labels']!r}")
    inputs, kernel, outputs = labels.groups()
    window = _window(conv)
    pairs = 1
    for digit in sorted(set(kernel) - {"i", "o"}):
        at = int(digit)
        pairs *= _pairs(
            lhs.dims[inputs.index(digit)],
            rhs.dims[kernel.index(digit)],
            conv.leaves[0].dims[outputs.index(digit)],
            **{key: values[at] for key, values in window.items()},
        )
    batch = lhs.dims[inputs.index("b")] // int(conv.attrs.get("batch_group_count", 1))
    features = rhs.dims[kernel.index("i")] * rhs.dims[kernel.index("o")]
    return Work(matrix=_multiply_add(lhs) * batch * features * pairs)


def _window(conv: Instruction) -> dict[str, list[int]]:
    """Stride, low padding and the dilations of each spatial dim of a convolution."""
    text = conv.attrs.get("window", "{}").strip("{}")
    fields = dict(field.split("=") for field in text.split())
    rank = len(fields["size"].split("x")) if "size" in fields else 0
    numbers = lambda key, default: [
        int(part.split("_")[0]) for part in fields.get(key, "x".join([default] * rank)).split("x")
    ]
    if not rank:
        return {}
    return {
        "stride": numbers("stride", "1"),
        "pad": numbers("pad", "0_0"),
        "lhs_dilate": numbers("lhs_dilate", "1"),
        "rhs_dilate": numbers("rhs_dilate", "1"),
    }


def _pairs(size, kernel, out, *, stride=1, pad=0, lhs_dilate=1, rhs_dilate=1) -> int:
    """How many (output, kernel) positions of one dim meet an input element."""
    count = 0
    for k in range(kernel):
        # Position o * stride + first of the padded, dilated input must be a true element.
        first = k * rhs_dilate - pad
        step = lhs_dilate // math.gcd(stride, lhs_dilate)
        start = next((o for o in range(step) if (o * stride + first) % lhs_dilate == 0), None)
        if start is None:
            continue
        last = (size - 1) * lhs_dilate
        low = max(0, math.ceil(-first / stride))
        low += (start - low) % step
        high = min(out - 1, (last - first) // stride)
        count += max(0, (high - low) // step + 1)
    return count


def _gemm(within: Computation, call: Instruction) -> Work:
    """A product by cuBLAS, whose dimensions stand in the backend's notes."""
    config = call.config.get("gemm_backend_config", call.config)
    dims = config["dot_dimension_numbers"]["lhs_contracting_dimensions"]
    lhs = _operand(within, call, 0)
    contracted = math.prod(lhs.dims[int(i)] for i in dims)
    return Work(matrix=_multiply_add(lhs) * call.leaves[0].size * contracted)


def _library_convolution(within: Computation, call: Instruction) -> Work:
    """A convolution by cuDNN, padding counted: its input, kernel and output by what it computes."""
    labels = call.attrs["dim_labels"].partition("_")[2].partition("->")[0]
    first, second, result = _operand(within, call, 0), _operand(within, call, 1), call.leaves[0]
    target = call.attrs["custom_call_target"]
    kernel = result if "BackwardFilter" in target else second
    outputs = {"BackwardFilter": second, "BackwardInput": first}
    output = next((leaf for key, leaf in outputs.items() if key in target), result)
    taken = [size for size, label in zip(kernel.dims, labels, strict=True) if label != "o"]
    return Work(matrix=_multiply_add(output) * output.size * math.prod(taken))


# Calls into libraries by a pattern of their target. `None`: it computes nothing.
LIBRARY: dict[str, Callable[[Computation, Instruction], Work] | None] = {
    r"__cublas\$.*": _gemm,
    r"__cudnn\$conv.*": _library_convolution,
    r"AllocateBuffer|Sharding|annotate_device_placement|MoveTo\w+|PinTo\w+|SPMD\w+": None,
}


def _library(module: Module, within: Computation, call: Instruction) -> Work | None:
    del module
    target = call.attrs.get("custom_call_target", "").strip('"')
    for pattern, rule in LIBRARY.items():
        if re.fullmatch(pattern, target):
            return rule(within, call) if rule else Work()
    return None


# ---- reductions ----------------------------------------------------------------------------------


def _reducer(module: Module, instruction: Instruction) -> Work:
    """The operations of one step of a reduction."""
    return total(module, module.computations[instruction.attrs["to_apply"].strip("%")])


def _reduce(module: Module, within: Computation, reduce: Instruction) -> Work:
    steps = _operand(within, reduce, 0).size - reduce.leaves[0].size
    return _reducer(module, reduce) * max(steps, 0)


def _all_reduce(module: Module, within: Computation, reduce: Instruction) -> Work:
    """One step for each element of the result: what a ring adds up on the way counts once."""
    result = sum(leaf.size for leaf in result_of(within, reduce).leaves)
    return _reducer(module, reduce) * result


def _reduce_window(module: Module, within: Computation, reduce: Instruction) -> Work:
    del within
    size = re.search(r"size=([\dx]+)", reduce.attrs.get("window", ""))
    window = math.prod(map(int, size[1].split("x"))) if size else 1
    return _reducer(module, reduce) * (reduce.leaves[0].size * (window - 1))


def _scatter(module: Module, within: Computation, scatter: Instruction) -> Work:
    updates = _operand(within, scatter, len(scatter.operands) - 1)
    return _reducer(module, scatter) * updates.size


def _select_and_scatter(module: Module, within: Computation, scatter: Instruction) -> Work:
    source = _operand(within, scatter, 1)
    step = total(module, module.computations[scatter.attrs["scatter"].strip("%")])
    return step * source.size


def _sort(module: Module, within: Computation, sort: Instruction) -> Work:
    """A comparison sort: n log₂ n steps along the sorted dim."""
    del within
    leaf = sort.leaves[0]
    length = leaf.dims[sort.numbers("dimensions")[0]] if leaf.dims else 1
    return _reducer(module, sort) * (leaf.size * max(length - 1, 0).bit_length())


def _solve(module: Module, within: Computation, solve: Instruction) -> Work:
    """A triangular solve, one multiply-add for each nonzero of the triangle and right-hand side."""
    del module
    return Work(matrix=_operand(within, solve, 0).dims[-1] * solve.leaves[0].size)


def _cholesky(module: Module, within: Computation, call: Instruction) -> Work:
    del module, within
    return Work(matrix=call.leaves[0].size * call.leaves[0].dims[-1] // 3)


def _fft(module: Module, within: Computation, call: Instruction) -> Work:
    """The usual 5 n log₂ n."""
    del module
    length = math.prod(call.numbers("fft_length"))
    size = max(_operand(within, call, 0).size, call.leaves[0].size)
    return Work(other=5 * size * max(length - 1, 0).bit_length())


RULES: dict[str, Rule | Callable[..., Work | None]] = {
    "dot": _dot,
    "convolution": _convolution,
    "custom-call": _library,
    "reduce": _reduce,
    "all-reduce": _all_reduce,
    "reduce-scatter": _all_reduce,
    "reduce-window": _reduce_window,
    "scatter": _scatter,
    "select-and-scatter": _select_and_scatter,
    "sort": _sort,
    "triangular-solve": _solve,
    "cholesky": _cholesky,
    "fft": _fft,
}


def total(module: Module, computation: Computation) -> Work:
    """Returns the operations of a computation without loops, fusions inside it included."""
    result = Work()
    for instruction in computation.instructions.values():
        result += work(module, computation, instruction) or Work()
        if instruction.base == "fusion":
            result += total(module, module.computations[instruction.calls[0]])
    return result


# ---- bytes ---------------------------------------------------------------------------------------


_SLICES = ("slice", "dynamic-slice", "gather")
_VIEWS = ("bitcast", "reshape")


def traffic(module: Module, within: Computation, instruction: Instruction) -> tuple[int, int]:
    """Returns the bytes that an instruction reads and writes.

    Of an array from which only slices are taken, the slices count; of one that is updated in place,
    the update. What several operands share is read once.
    """
    if instruction.base == "fusion":
        body = module.computations[instruction.calls[0]]
        read: dict[str, int] = {}
        for operand, parameter in zip(instruction.operands, body.parameters, strict=True):
            read[operand] = max(read.get(operand, 0), _read(body, parameter, parameter.bytes))
        return sum(read.values()), _written(body, body.root)
    sources = {name: within.instructions[name] for name in instruction.operands}
    read = {name: _use(within, instruction, name, source.bytes) for name, source in sources.items()}
    written = result_of(within, instruction).bytes
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        written = _written(within, instruction)
    return sum(read.values()), written


def result_of(within: Computation, instruction: Instruction) -> Instruction:
    """Returns what has the shape of the result: of an asynchronous operation, its end."""
    if not instruction.opcode.endswith("-start"):
        return instruction
    users = within.users[instruction.name]
    return next((user for user in users if user.opcode.endswith("-done")), instruction)


def _read(body: Computation, value: Instruction, size: int) -> int:
    """Bytes of a value that its users in a fusion read."""
    taken = 0
    for user in body.users[value.name]:
        taken += (
            _read(body, user, size) if user.opcode in _VIEWS else _use(body, user, value.name, size)
        )
    return min(taken, size)


def _use(body: Computation, user: Instruction, name: str, size: int) -> int:
    """Bytes of a value of some size that one user reads."""
    if user.opcode in _SLICES and user.operands[0] == name:
        again = name in user.operands[1:]
        return size if again else min(size, user.bytes)
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    if user.opcode == "scatter" and user.operands[0] == name:
        return min(size, body.instructions[user.operands[-1]].bytes)
    return size


def _written(body: Computation, root: Instruction) -> int:
    """Bytes that the result of a fusion puts into memory."""
    if root.opcode == "tuple":
        parts = dict.fromkeys(root.operands)
        return sum(_written(body, body.instructions[name]) for name in parts)
    if root.opcode in _VIEWS:
        return min(root.bytes, _written(body, body.instructions[root.operands[0]]))
    if root.opcode == "dynamic-update-slice":
        return body.instructions[root.operands[1]].bytes
    if root.opcode == "scatter":
        return body.instructions[root.operands[-1]].bytes
    return root.bytes
