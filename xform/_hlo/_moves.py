"""Which argument a value was, and which result it becomes, by what only moves data.

A collective moves a weight, or sums a gradient; its line says where, and these say of what.
Followed are copies, casts, slices, tuples, loops and calls, and arithmetic with a number: not
products, sums of arrays or anything else that makes a new value.
"""

import re
from collections.abc import Iterable, Iterator

from xform._hlo._text import Computation, Instruction, Module, words

# The name of a computation and of an instruction in it, and which part of a tuple.
Node = tuple[str, str, int | None]

_MOVES = words(
    "copy bitcast reshape transpose convert slice dynamic-slice pad reverse concatenate"
    " all-gather all-to-all collective-permute"
)
_SCALES = words("multiply divide add subtract negate select")
_REFERENCE = re.compile(r"%([\w.\-]+)(?:#(\d+))?")


class Moves:
    """Where values of a program come from and go to.

    Args:
      module: A program in which calls and loops stand, as the partitioner leaves it.
    """

    def __init__(self, module: Module):
        self.module = module
        self.before: dict[Node, list[Node]] = {}
        self.after: dict[Node, list[Node]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                for to, source in self._edges(computation, instruction):
                    self.before.setdefault(to, []).append(source)
                    self.after.setdefault(source, []).append(to)

    def arguments(self, computation: Computation, instruction: Instruction) -> list[Instruction]:
        """Returns the parameters of the program that reach an operand of an instruction."""
        start = [(computation.name, *ref) for ref in references(instruction)]
        reached = self._reach(start, self.before)
        entry = self.module.computations[self.module.entry]
        names = {name for body, name, _ in reached if body == entry.name}
        return [p for p in entry.parameters if p.name in names]

    def results(self, computation: Computation, instruction: Instruction) -> list[int]:
        """Returns the numbers of the program's results that an instruction reaches."""
        parts = [None, *range(len(instruction.leaves))]
        start = [(computation.name, instruction.name, part) for part in parts]
        entry = self.module.computations[self.module.entry]
        root = (entry.name, entry.root.name)
        ends = {node[2] or 0 for node in self._reach(start, self.after) if node[:2] == root}
        return sorted(ends)

    def _reach(self, start: Iterable[Node], edges: dict[Node, list[Node]]) -> set[Node]:
        seen, todo = set(), list(start)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += edges.get(node, ())
        return seen

    def _edges(self, within: Computation, one: Instruction) -> Iterator[tuple[Node, Node]]:
        """The parts of a value, each with what it is a copy of."""
        refs = [(within.name, *ref) for ref in references(one)]
        here = lambda part=None: (within.name, one.name, part)
        many = range(len(one.leaves)) if one.shape.startswith("(") else ()
        match one.opcode:
            case "tuple":
                yield from ((here(i), ref) for i, ref in enumerate(refs))
            case "get-tuple-element":
                yield here(), (*refs[0][:2], int(one.attrs["index"]))
            case "while":
                body, test = (self._body(one, key) for key in ("body", "condition"))
                for i in many or (None,):
                    first = _part(refs[0], i)
                    again = (body.name, body.root.name, i)
                    for inside in (body, test):
                        yield (inside.name, inside.parameters[0].name, i), first
                    yield (body.name, body.parameters[0].name, i), again
                    yield here(i), first
                    yield here(i), again
            case "call" | "conditional":
                bodies = [self.module.computations[name] for name in one.calls]
                given = [refs] * len(bodies) if one.opcode == "call" else [[r] for r in refs[1:]]
                for body, args in zip(bodies, given, strict=False):
                    for parameter, ref in zip(body.parameters, args, strict=False):
                        for i in (None, *range(len(parameter.leaves))):
                            yield (body.name, parameter.name, i), _part(ref, i)
                    for i in (None, *many):
                        yield here(i), (body.name, body.root.name, i)
            case "optimization-barrier" | "opt-barrier":
                yield from ((here(i), _part(refs[0], i)) for i in many or (None,))
            case "dynamic-update-slice":
                yield from ((here(), ref) for ref in refs[:2])
            case "custom-call" if "Shard" in one.text:
                yield here(), refs[0]
            case opcode if opcode in _MOVES or (opcode in _SCALES and self._scales(within, one)):
                for i, ref in enumerate(refs):
                    yield here(i if many else None), ref

    def _scales(self, within: Computation, one: Instruction) -> bool:
        """Whether all operands but one are numbers, spread over its shape."""
        sources = [within.instructions[name] for name in one.operands]
        return sum(not _is_number(within, source) for source in sources) == 1

    def _body(self, one: Instruction, key: str) -> Computation:
        return self.module.computations[one.attrs[key].strip("%")]


def _is_number(within: Computation, value: Instruction) -> bool:
    while value.opcode in ("broadcast", "copy", "convert"):
        value = within.instructions[value.operands[0]]
    return value.opcode == "constant" or value.leaves[0].dims == ()


def references(instruction: Instruction) -> list[tuple[str, int | None]]:
    """Returns the operands, each with the part of a tuple that is read: `%while.1#2`."""
    found = _REFERENCE.findall(instruction.literal) if instruction.operands else []
    return [(name, int(part) if part else None) for name, part in found]


def _part(node: Node, part: int | None) -> Node:
    return (*node[:2], part if node[2] is None else node[2])
