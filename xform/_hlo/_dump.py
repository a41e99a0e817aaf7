"""What XLA knows of a program and leaves out of its text: its buffers and its launches.

XLA writes both to files while it compiles, where asked to. So a program is compiled anew, past
the compilation cache, into a folder that lives for the length of the call.
"""

import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jax.stages import Compiled, Lowered

from xform._compat import no_compilation_cache
from xform._hlo._text import Module, parse


@dataclass(frozen=True)
class Buffer:
    """A part of memory and the value that is in it for a while.

    Attributes:
        instruction: the name of the instruction that makes the value.
        index: which part of a tuple, () for an array.
        bytes: its size.
        offset: where it begins in its allocation.
        allocation: the number of the allocation, which values share that are not alive together.
        kind: "parameter", "output", "temp", "constant" or "thread-local".
        shape: as XLA prints it.
    """

    instruction: str
    index: tuple[int, ...]
    bytes: int
    offset: int
    allocation: int
    kind: str
    shape: str


@dataclass(frozen=True)
class Launch:
    """Something that the host starts on an accelerator.

    Attributes:
        instruction: the name of the instruction that it is a part of.
        kind: XLA's word, such as "kCustomKernel", "kCopy", "kGemm".
        graph: whether a command buffer (a CUDA graph) starts it, together with others.
    """

    instruction: str
    kind: str
    graph: bool


@dataclass(frozen=True)
class Dump:
    """What XLA wrote beside a program.

    Attributes:
        buffers: its buffer assignment.
        launches: where the backend lists them (CUDA does, a CPU does not).
        whole, split: the program before and after the partitioner split it over devices, where
            that was asked for and there are several.
    """

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...] | None
    whole: Module | None = None
    split: Module | None = None


def compile_and_dump(
    lowered: Lowered,
    options: Mapping[str, str | bool] | None = None,
    *,
    partitioning: bool = False,
) -> tuple[Compiled, Dump]:
    """Compiles, and reads what XLA wrote beside: of the partitioner, if `partitioning`."""
    with tempfile.TemporaryDirectory(prefix="xform-") as folder:
        asked = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if partitioning:
            asked["xla_dump_hlo_pass_re"] = "^spmd-partitioning$"
        with no_compilation_cache(), warnings.catch_warnings():
            compiled = lowered.compile(compiler_options={**(options or {}), **asked})
        texts = {
            suffix: "".join(path.read_text() for path in Path(folder).glob(f"*{suffix}.txt"))
            for suffix in (
                *("-buffer-assignment", "thunk_metadata"),
                *("thunk_sequence", "after_thunk_passes"),  # the second, where a pass changed it
            )
        }
        modules = {
            when: next(Path(folder).glob(f"*.{when}_spmd-partitioning.*txt"), None)
            for when in ("before", "after")
        }
        whole, split = (parse(file.read_text()) if file else None for file in modules.values())
    launches = None
    if texts["thunk_metadata"]:
        started = texts["after_thunk_passes"] or texts["thunk_sequence"]
        launches = read_launches(started, texts["thunk_metadata"])
    return compiled, Dump(read_buffers(texts["-buffer-assignment"]), launches, whole, split)


_ALLOCATION = re.compile(r"allocation (\d+): size \d+(.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_KINDS = {
    "thread-local": "thread-local",
    "constant": "constant",
    "parameter": "parameter",
    "output": "output",
}


def read_buffers(text: str) -> tuple[Buffer, ...]:
    """Reads a buffer assignment."""
    buffers, allocation, kind = [], 0, ""
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            allocation = int(match[1])
            kind = next((kind for word, kind in _KINDS.items() if word in match[2]), "temp")
        elif match := _VALUE.match(line):
            name, index, size, offset, shape = match.groups()
            path = tuple(int(i) for i in (index or "").split(",") if i)
            buffers.append(Buffer(name, path, int(size), int(offset), allocation, kind, shape))
    return tuple(buffers)


_THUNK = re.compile(r"( *)(\d+): (k\w+)")
_META = re.compile(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)')
# What holds or orders other launches.
_HOLDERS = ("kWhile", "kConditional", "kSequential", "kCommandBuffer")
_WRAPPERS = ("kAsyncStart", "kDynamicSliceFusion", "kDynamicSlice")
_SILENT = ("kAsyncDone", "kWaitForStreams")


def read_launches(text: str, metadata: str) -> tuple[Launch, ...]:
    """Reads a tree of thunks, which its indentation draws, and their names."""
    names = {int(number): name for name, number in _META.findall(metadata)}
    launches: list[Launch] = []
    above: list[tuple[int, str, str]] = []  # indentation, kind and name of what encloses
    for line in text.splitlines():
        match = _THUNK.match(line)
        if not match:
            continue
        depth, number, kind = len(match[1]), int(match[2]), match[3]
        while above and above[-1][0] >= depth:
            above.pop()
        # What an asynchronous or sliced launch wraps goes by the name of the wrapper.
        outer = above[-1] if above and above[-1][1] in _WRAPPERS else None
        name = outer[2] if outer else names.get(number, "")
        if kind in _HOLDERS or kind in _WRAPPERS:
            above.append((depth, kind, name))
        elif kind not in _SILENT and not kind.endswith("Done"):
            graph = any(kind == "kCommandBuffer" for _, kind, _ in above)
            launches.append(Launch(name, kind, graph))
    return tuple(launches)
