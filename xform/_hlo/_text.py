"""The text of a compiled program, as XLA prints it, taken apart.

The text is the one form that every backend gives alike and that needs no other package to decode.
Parsing splits a line into name, shape, operation and operands; attributes are split when somebody
asks, since most are never asked for.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax

from xform._show import named

UNKNOWN = "unknown"

_PACKAGES = tuple(str(Path(file).parent) for file in (jax.__file__, Path(__file__).parent))

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\]]|, ')
_OPERAND = re.compile(r"%([\w.\-]+)")
_LITERAL = ("constant", "parameter", "iota")
_NAME = re.compile(r"%?([\w.\-]+)")
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)


def words(text: str) -> frozenset[str]:
    """Returns the words of a text: opcodes, which are many and short."""
    return frozenset(text.split())


class Leaf(NamedTuple):
    """One array of a shape: dtype as XLA names it, dims, and bytes."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def text(self) -> str:
        """As XLA prints it, without its layout: `f32[2,3]`."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@lru_cache(maxsize=4096)
def leaves(shape: str) -> tuple[Leaf, ...]:
    """Returns the arrays of a shape in order, those of nested tuples too.

    >>> leaves("(f32[2,3]{1,0}, (s4[5]{0:E(4)}, token[]))")
    (Leaf(dtype='f32', dims=(2, 3), bytes=24), Leaf(dtype='s4', dims=(5,), bytes=3),
     Leaf(dtype='token', dims=(), bytes=0))
    """
    found = []
    for dtype, text, layout in _ARRAY.findall(shape):
        dims = tuple(int(dim.strip(" <=")) for dim in text.split(",") if dim)
        found.append(Leaf(dtype, dims, -(-math.prod(dims) * _bits(dtype, layout) // 8)))
    return tuple(found)


def _bits(dtype: str, layout: str) -> int:
    """An element's bits: a whole byte at least, unless the layout packs several into one."""
    packed = re.search(r"E\((\d+)\)", layout or "")
    if packed:
        return int(packed[1])
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return max(8, int(digits[1])) if digits else 8 * (dtype == "pred")


class _Parts(NamedTuple):
    """What a line splits into."""

    name: str
    shape: str
    opcode: str
    literal: str
    text: str


class Instruction(_Parts):
    """One instruction.

    Attributes:
        name: unique in the module.
        shape: the text of its type.
        opcode: such as "fusion" or "all-gather-start".
        literal: what stands in the parentheses: operands, a constant's value, a parameter's number.
        text: its attributes, unsplit.
    """

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of instructions of the same computation."""
        return () if self.opcode in _LITERAL else tuple(_OPERAND.findall(self.literal))

    @cached_property
    def attrs(self) -> Mapping[str, str]:
        """Attributes by name, values as printed."""
        return dict(_split(self.text))

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return leaves(self.shape)

    @property
    def bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves)

    @property
    def base(self) -> str:
        """The operation, whether or not it runs asynchronously."""
        return re.sub(r"-(start|update|done)$", "", self.opcode)

    @cached_property
    def calls(self) -> tuple[str, ...]:
        """Names of the computations that it runs; of a conditional, its branches in order."""
        texts = (self.attrs[key] for key in _CALLS if key in self.attrs)
        return tuple(name for text in texts for name in _NAME.findall(text))

    @cached_property
    def op_name(self) -> str:
        """JAX's name for what made it, such as "jit(f)/while/body/dot_general"."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attrs.get("metadata", ""))
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    @property
    def inserted(self) -> bool:
        """Whether the partitioner put it in."""
        return 'is_spmd_generated="true"' in self.attrs.get("frontend_attributes", "")

    @cached_property
    def frame(self) -> int:
        """The number of its stack frame, 0 where it has none."""
        found = re.search(r"stack_frame_id=(\d+)", self.attrs.get("metadata", ""))
        return int(found[1]) if found else 0

    @cached_property
    def config(self) -> dict:
        """The backend's own notes; empty where they are not JSON."""
        try:
            config = json.loads(self.attrs.get("backend_config", "{}"))
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}

    def numbers(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute: `dimensions={0,2}`."""
        return tuple(map(int, re.findall(r"-?\d+", self.attrs.get(key, ""))))


def _split(text: str) -> list[tuple[str, str]]:
    """Splits `, a=1, b={x, y}` at the commas that no bracket or string encloses."""
    cuts, depth = [], 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "{" | "(" | "[":
                depth += 1
            case "}" | ")" | "]":
                depth -= 1
            case ", " if depth == 0:
                cuts.append(token.start())
    pieces = [text[a + 2 : b] for a, b in pairwise([*cuts, len(text)])]
    return [(key, value) for key, equals, value in (p.partition("=") for p in pieces) if equals]


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in order, which is the order they run in where the module is scheduled."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """The instructions that read each one."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
        name: such as "jit_step".
        partitions: the devices that one program is split over.
        computations: by name; `entry` names the one that runs first.
        frames: each frame's line, `"file:line (function)"`, file, and parent, by number.
    """

    name: str
    partitions: int
    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[str, str, int]] = field(repr=False, default_factory=dict)

    @cached_property
    def _lines(self) -> dict[int, str]:
        return {}

    def line(self, instruction: Instruction) -> str:
        """Returns the user's line that made an instruction: the innermost outside JAX and xform."""
        frame = instruction.frame
        if frame not in self._lines:
            self._lines[frame] = self._user_line(frame)
        return self._lines[frame]

    def _user_line(self, frame: int) -> str:
        while frame in self.frames:
            line, file, parent = self.frames[frame]
            if not file.startswith(_PACKAGES):
                return line
            frame = parent
        return UNKNOWN


def parse(text: str) -> Module:
    """Parses a module as `Compiled.as_text()` prints it.

    Raises:
      ValueError: A line is not of the form that XLA prints.
    """
    lines = text.splitlines()
    head = next((line for line in lines if line.startswith("HloModule")), None)
    if head is None:
        raise ValueError(f"`text` must be the text of a compiled module; it begins {text[:60]!r}")
    computations: dict[str, Computation] = {}
    tables: dict[str, list[str]] = {}
    section: list[str] = []
    entry, name, body, root = "", "", {}, None
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("HloModule"):
            continue
        if name and line.startswith(" "):
            instruction, is_root = _instruction(line, number)
            body[instruction.name] = instruction
            root = instruction if is_root else root
        elif name:  # the brace that closes it
            computations[name] = Computation(name, body, root or list(body.values())[-1])
            name = ""
        elif line.endswith("{"):
            name, body, root = _name(line.removeprefix("ENTRY ")), {}, None
            entry = name if line.startswith("ENTRY ") else entry
        elif line[0].isdigit():
            section.append(line)
        else:
            section = tables.setdefault(line, [])
    partitions = re.search(r"num_partitions=(\d+)", head)
    return Module(
        name=_name(head.removeprefix("HloModule ")),
        partitions=int(partitions[1]) if partitions else 1,
        computations=computations,
        entry=entry,
        frames=_frames(tables),
    )


def _name(line: str) -> str:
    match = _NAME.match(line)
    if not match:
        raise ValueError(f"can't read a name from the compiled program: {line[:200]!r}")
    return match[1]


def _instruction(line: str, number: int) -> tuple[Instruction, bool]:
    match = _INSTRUCTION.match(line)
    if not match:
        raise ValueError(f"can't read line {number} of the compiled program: {line[:200]!r}")
    root, name, shape, opcode, rest = match.groups()
    end = rest.find(")")
    if "(" in rest[:end]:  # operands printed with their shapes, or a complex constant
        end = _closing(rest)
    return Instruction(name, shape, opcode, rest[:end], rest[end + 1 :]), bool(root)


def _closing(text: str) -> int:
    depth = 1
    for bracket in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text):
        depth += {"(": 1, ")": -1}.get(bracket[0], 0)
        if depth == 0:
            return bracket.start()
    return len(text)


def _frames(tables: Mapping[str, list[str]]) -> dict[int, tuple[str, str, int]]:
    """Joins the four tables at the top of the text, which name each other by number."""

    def rows(title: str) -> dict[int, str]:
        split = (line.partition(" ") for line in tables.get(title, ()))
        return {int(number): row for number, _, row in split}

    def quoted(title: str) -> dict[int, str]:
        return {number: json.loads(row) for number, row in rows(title).items()}

    fields = lambda row: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
    files, functions = quoted("FileNames"), quoted("FunctionNames")
    places = {number: fields(row) for number, row in rows("FileLocations").items()}
    frames = {}
    for number, row in rows("StackFrames").items():
        frame = fields(row)
        place = places[frame["file_location_id"]]
        file = files[place["file_name_id"]]
        line = f"{named(file)}:{place.get('line', 0)} ({functions[place['function_name_id']]})"
        # A parent is printed one higher than its number: 1 means that there is none.
        frames[number] = (line, file, frame.get("parent_frame_id", 1) - 1)
    return frames
