"""Who talks to whom: the devices of a collective, as groups and as axes of a mesh."""

import math
import re
from collections.abc import Mapping

import numpy as np

from xform._hlo._text import Instruction, words

COLLECTIVES = words(
    "all-reduce all-gather reduce-scatter all-to-all collective-permute collective-broadcast"
    " ragged-all-to-all send recv"
)

Groups = tuple[tuple[int, ...], ...]


def groups_of(collective: Instruction, devices: int) -> Groups:
    """Returns the groups of devices among which a collective runs; of a permutation, its pairs.

    Raises:
      ValueError: They are printed in a form that is not known.
    """
    pairs = collective.attrs.get("source_target_pairs")
    if pairs is not None:
        return _lists(pairs)
    text = collective.attrs.get("replica_groups", "{}")
    if "device_ids" in collective.attrs:
        ids, _, axes = collective.attrs["device_ids"].partition(" ")
        text += f" {axes}"
        order = _order(ids.removeprefix("(").removesuffix(")"))
    else:
        order = None
    if text.startswith("mesh["):
        return _mesh_groups(text, order)
    if "<=" in text:
        return tuple(tuple(int(i) for i in row) for row in _iota(text))
    if not re.fullmatch(r"[{}\d, ]*", text):
        raise ValueError(f"can't read the replica groups of {collective.name}: {text!r}")
    return _lists(text) or (tuple(range(devices)),)


def _lists(text: str) -> Groups:
    """`{{0,1},{2,3}}`."""
    rows = re.findall(r"\{([\d, ]+)\}", text)
    return tuple(tuple(int(i) for i in row.split(",")) for row in rows)


def _iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: the numbers from 0 in order, reshaped, transposed, reshaped again."""
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text.strip())
    if not match:
        raise ValueError(f"can't read the device list {text!r}")
    numbers = lambda part: tuple(map(int, part.split(",")))
    source = numbers(match[2])
    ids = np.arange(math.prod(source)).reshape(source)
    return (ids.transpose(numbers(match[3])) if match[3] else ids).reshape(numbers(match[1]))


def _order(text: str) -> np.ndarray:
    """The device numbers of a mesh in its own order, where that is not 0, 1, 2, …."""
    if "<=" in text:
        return _iota(text).ravel()
    permuted = re.fullmatch(r"\[([\d,]+)\]T\(([\d,]+)\)", text)
    if permuted:
        shape, axes = (tuple(map(int, part.split(","))) for part in permuted.groups())
        return np.arange(math.prod(shape)).reshape(shape).transpose(axes).ravel()
    return np.array(list(map(int, re.findall(r"\d+", text))))


def _mesh_groups(text: str, order: np.ndarray | None) -> Groups:
    """`mesh['x'=2,'y'=4] {'y'}`; a part of an axis is `'y':(2)2`, two steps of 2 out of its 4."""
    match = re.fullmatch(r"mesh\[(.*?)\],? \{(.*)\}", text)
    if not match:
        raise ValueError(f"can't read the replica groups {text!r}")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
    wanted = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", match[2])
    # Each axis splits into (before, part, after), of which a group varies over the part.
    shape, varying = [], []
    for name, size in sizes.items():
        parts = [(int(pre or 1), int(part or size)) for axis, pre, part in wanted if axis == name]
        done = 1
        for pre, part in sorted(parts):
            shape += [pre // done, part]
            varying.append(len(shape) - 1)
            done = pre * part
        shape.append(size // done)
    ids = np.arange(math.prod(shape)) if order is None else order
    fixed = [dim for dim in range(len(shape)) if dim not in varying]
    rows = ids.reshape(shape).transpose(fixed + varying)
    return tuple(map(tuple, rows.reshape(-1, math.prod(shape[d] for d in varying)).tolist()))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which the devices of each group differ, in the mesh's order.

    Args:
      groups: Of device positions in the mesh, outermost axis first.
      mesh: Size of each axis.

    Returns:
      None where a device is not in the mesh.

    >>> axes_of(((0, 2), (1, 3)), {"dp": 2, "tp": 2})
    ('dp',)
    """
    sizes = tuple(mesh.values())
    if any(device >= math.prod(sizes) for group in groups for device in group):
        return None
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(group, sizes))
        differ |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(axis for axis, varies in zip(mesh, differ, strict=True) if varies)


def wire_bytes(op: str, size: int, read: int, written: int) -> int:
    """Returns the bytes that a device sends in a collective among `size`, in the best algorithm.

    Of a whole of N bytes, (size - 1) / size · N for a gather, a scatter or an exchange, twice that
    for an all-reduce, and N for a permutation.
    """
    if op in ("collective-permute", "collective-broadcast", "send"):
        return read
    if op == "recv":
        return 0
    whole = written if op == "all-gather" else read
    return (2 if op == "all-reduce" else 1) * whole * (size - 1) // size
