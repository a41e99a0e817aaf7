"""Values that a program computes more than once, in different kernels.

XLA copies a producer into every fusion that reads it where that looks cheaper than memory. Each
copy rounds by itself, so a value and its maximum may no longer agree. Values are numbered: two
instructions get one number where operation, shape, attributes and operands are the same, seen
through the parameters of fusions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from xform._hlo._groups import COLLECTIVES
from xform._hlo._text import Computation, Instruction, Module, words
from xform._hlo._work import ARITHMETIC, RULES, TRANSCENDENTAL, Work, work

_COMPUTES = (ARITHMETIC | TRANSCENDENTAL | RULES.keys()) - COLLECTIVES - {"custom-call"}
# Attributes that say nothing of the value.
_NOISE = words(
    "metadata backend_config sharding frontend_attributes channel_id kind calls to_apply"
    " operand_layout_constraints control-predecessors outer_dimension_partitions"
)


@dataclass(frozen=True)
class Twice:
    """Values of one line that the same kernels each compute.

    Attributes:
        line: the user's line.
        ops: what computes them, by opcode.
        kernels: the kernels, in order.
        elements: how many numbers the largest of the values has.
        extra: operations beyond the first time, per execution.
        trips: how often each kernel runs.
        recompute: whether `jax.checkpoint` asked for it.
    """

    line: str
    ops: tuple[str, ...]
    kernels: tuple[str, ...]
    elements: int
    extra: Work
    trips: int
    recompute: bool


class Numbering:
    """Numbers the values of one computation whose instructions are kernels."""

    def __init__(self, module: Module):
        self.module = module
        self._numbers: dict[tuple, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        self._made: dict[int, dict[str, tuple[Computation, Instruction]]] = {}

    def twice(self, computation: Computation, trips: int) -> list[Twice]:
        """Returns what the computation's kernels compute more than once."""
        self._made = {}
        self._run(computation, {}, "")
        groups: dict[tuple, list[tuple[Computation, Instruction]]] = {}
        for made in self._made.values():
            if len(made) > 1:
                within, instruction = next(iter(made.values()))
                key = (self.module.line(instruction), tuple(made))
                groups.setdefault(key, []).append((within, instruction))
        return [
            _group(self.module, line, kernels, values, trips)
            for (line, kernels), values in groups.items()
        ]

    def _number(self, key: tuple) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _run(self, computation: Computation, bound: Mapping[str, int], kernel: str) -> int:
        """Numbers each instruction; returns the number of the root."""
        numbers: dict[str, int] = {}
        for name, instruction in computation.instructions.items():
            operands = tuple(numbers[operand] for operand in instruction.operands)
            if instruction.opcode == "parameter":
                own = self._number(("parameter", computation.name, instruction.literal))
                numbers[name] = bound.get(instruction.literal, own)
            elif instruction.base == "fusion" and not instruction.opcode.endswith("done"):
                body = self.module.computations[instruction.calls[0]]
                inner = {str(i): operand for i, operand in enumerate(operands)}
                numbers[name] = self._run(body, inner, kernel or name)
            else:
                numbers[name] = self._value(instruction, operands)
                self._note(computation, instruction, numbers[name], kernel or name)
        return numbers[computation.root.name]

    def _value(self, instruction: Instruction, operands: tuple[int, ...]) -> int:
        opcode = instruction.opcode
        dims = tuple((leaf.dtype, leaf.dims) for leaf in instruction.leaves)
        match opcode:
            case "tuple":
                number = self._number(("tuple", operands))
                self._parts[number] = operands
                return number
            case "get-tuple-element" if operands[0] in self._parts:
                return self._parts[operands[0]][instruction.numbers("index")[0]]
            case "copy" | "optimization-barrier":
                return operands[0]
            case "fusion-done":
                return operands[0]
            case "constant":
                unique = instruction.name if "..." in instruction.literal else ""
                return self._number(("constant", dims, instruction.literal, unique))
            case "bitcast" | "reshape":
                return self._number(("view", dims, operands))
        pure = opcode in _COMPUTES or not instruction.calls
        pure &= opcode not in ("rng", "infeed", "recv", "rng-get-and-update-state")
        pure &= "custom_call_has_side_effect=true" not in instruction.text
        return self._number(
            (
                opcode,
                dims,
                operands,
                _attributes(self.module, instruction),
                "" if pure and instruction.base not in COLLECTIVES else instruction.name,
            )
        )

    def _note(self, within: Computation, instruction: Instruction, number: int, kernel: str):
        if instruction.opcode in _COMPUTES and max(x.size for x in instruction.leaves) > 1:
            self._made.setdefault(number, {})[kernel] = (within, instruction)


def _attributes(module: Module, instruction: Instruction) -> tuple:
    if instruction.opcode in ARITHMETIC - {"compare"} or instruction.opcode in TRANSCENDENTAL:
        return ()
    kept = tuple(sorted((k, v) for k, v in instruction.attrs.items() if k not in _NOISE))
    applied = instruction.attrs.get("to_apply")
    return (kept, _signature(module, applied.strip("%")) if applied else ())


def _signature(module: Module, name: str) -> tuple:
    """What a small computation does, whatever its parts are called."""
    body = list(module.computations[name].instructions.values())
    place = {instruction.name: i for i, instruction in enumerate(body)}
    return tuple(
        (i.opcode, i.shape, i.literal if not i.operands else "", *map(place.get, i.operands))
        for i in body
    )


def _group(module, line, kernels, values, trips) -> Twice:
    extra = Work()
    for within, instruction in values:
        extra += work(module, within, instruction) or Work()
    return Twice(
        line=line,
        ops=tuple(dict.fromkeys(instruction.opcode for _, instruction in values)),
        kernels=kernels,
        elements=max(leaf.size for _, instruction in values for leaf in instruction.leaves),
        extra=extra * (len(kernels) - 1),
        trips=trips,
        recompute=any("rematted_computation" in i.op_name for _, i in values),
    )
