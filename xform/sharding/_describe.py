"""A layout in words: what splits each tensor, what its gradient is summed over, who reads what.

Nothing is computed: it is what specs say, read by the rules of this package. An axis has one of
three relations to a parameter's gradient:

    it splits tokens, not the parameter       summed over it: each device has other tokens
    it splits both, and is a data axis        summed, and each device gets its part (FSDP)
    it splits both, and is another            whole on its device: a block sees all tokens
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from xform.sharding._specs import axes_by_dim, is_spec

# Whose devices have other samples or positions, and so the same use for every parameter.
_DATA = ("dp", "cp")


@dataclass(frozen=True)
class Tensor:
    """One parameter.

    Attributes:
      path: Where it is in the tree.
      dtype, shape: Those of the whole.
      split: The axes that split each dimension, outermost first.
      part: The shape of a device's part.
      summed: The axes over which its gradient is summed, all-reduced or dealt out.
      dealt_out: Those of them of which each device gets its part alone.
      copies: On how many devices each number is.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    split: tuple[tuple[str, ...], ...]
    part: tuple[int, ...]
    summed: tuple[str, ...]
    dealt_out: tuple[str, ...]
    copies: int

    @property
    def bytes(self) -> int:
        """Of a device's part."""
        return math.prod(self.part) * jnp.dtype(self.dtype).itemsize

    def words(self) -> tuple[str, ...]:
        """What it is, what splits it, and where its gradient goes."""
        by = [f"{'·'.join(axes)}: dim {dim}" for dim, axes in enumerate(self.split) if axes]
        sums = [f"{a} (dealt out)" if a in self.dealt_out else a for a in self.summed]
        return (
            f"{self.path} {self.dtype}{list(self.shape)}",
            f"{list(self.part)} by {', '.join(by)}" if by else f"all, on {self.copies} devices",
            ", ".join(sums) or "nothing: it is whole where it is made",
        )


@dataclass(frozen=True)
class Reader:
    """The devices that read the same samples.

    Attributes:
      at: Their coordinate along each axis that splits tokens.
      rows, positions: The ranges that they read, from first to one past the last.
      devices: Their ids.
      processes: The processes that have to load these samples.
    """

    at: dict[str, int]
    rows: tuple[int, int]
    positions: tuple[int, int]
    devices: tuple[int, ...]
    processes: tuple[int, ...]

    def words(self) -> tuple[str, ...]:
        """Who, which rows, which positions, on which devices."""
        who = " ".join(f"{axis}={i}" for axis, i in self.at.items()) or "all"
        some = ", ".join(map(str, self.devices[:8])) + (", …" if len(self.devices) > 8 else "")
        reads = [f"{name} {a}-{b - 1}" for name, (a, b) in
                 (("rows", self.rows), ("positions", self.positions))]  # fmt: skip
        return who, *reads, f"devices {some}"


@dataclass(frozen=True)
class Description:
    """A layout; `print` it, or read its records.

    Attributes:
      mesh: Size of each axis.
      tensors: Of each parameter.
      readers: Who reads which samples.
    """

    mesh: dict[str, int]
    tensors: tuple[Tensor, ...]
    readers: tuple[Reader, ...]

    @property
    def bytes(self) -> int:
        """Of all parameters on one device."""
        return sum(x.bytes for x in self.tensors)

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        whole = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in self.tensors)
        head = f"{mesh}: {math.prod(self.mesh.values())} devices, each with {self.bytes:,} of "
        titles = [("parameter", "on a device", "gradient summed over")]
        rows = self.readers[:8]
        more = [f"  … and {len(self.readers) - 8} more"] if len(self.readers) > 8 else []
        return "\n".join(
            [f"{head}{whole:,} bytes of parameters", ""]
            + _columns(titles + [x.words() for x in self.tensors])
            + ["", "  samples"] + _columns([x.words() for x in rows]) + more
        )  # fmt: skip


def describe(
    mesh: Mesh | AbstractMesh,
    params: PyTree,
    specs: PyTree,
    *,
    rows: tuple[int, int],
    tokens: P = P("dp"),
    stream: P | None = None,
    inside: Sequence[str] = (),
) -> Description:
    """Returns what a layout means for each parameter and each sample.

    Args:
      mesh: The mesh, or an abstract one, whose devices are counted.
      params: Parameters, or their shapes.
      specs: How each is split, in a tree of the same structure.
      rows: Rows and positions of a batch, over all devices.
      tokens: How the batch is split, `[B, T]`.
      stream: How activations between blocks are split, `[B, T]`: with sequence parallelism,
        `P("dp", "tp")`. By default as tokens are.
      inside: Ends of the paths of parameters that are used inside blocks and not split, such as
        the scale of a norm on queries; each device of `tp` uses them on its heads.

    Raises:
      ValueError: Lists the parameters and rows that don't divide, or axes that aren't there.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=2, tp=2, devices=jax.devices()[:4])
    >>> params = {"norm": jnp.ones(4), "up": jnp.ones((4, 8))}
    >>> specs = {"norm": P(), "up": P("dp", "tp")}
    >>> print(describe(mesh, params, specs, rows=(8, 16), stream=P("dp", "tp")))
    dp=2 × tp=2: 4 devices, each with 48 of 144 bytes of parameters
    <BLANKLINE>
      parameter             on a device                   gradient summed over
      ['norm'] float32[4]   all, on 4 devices             dp, tp
      ['up'] float32[4, 8]  [2, 4] by dp: dim 0, tp: dim 1  dp (dealt out)
    <BLANKLINE>
      samples
      dp=0  rows 0-3  positions 0-15  devices 0, 1
      dp=1  rows 4-7  positions 0-15  devices 2, 3
    """
    between = set(itertools.chain(*axes_by_dim(tokens if stream is None else stream, 2)))
    leaves = zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(specs, is_leaf=is_spec), strict=True
    )
    wrong, tensors = [], []
    for (path, x), spec in leaves:
        name = jax.tree_util.keystr(path)
        split = axes_by_dim(spec, len(x.shape))
        part, problem = _part(mesh, x.shape, split)
        if problem:
            wrong.append(f"{name} {problem}")
            continue
        summed = _summed(mesh, {a for dim in split for a in dim}, between, name, inside)
        tensors.append(
            Tensor(
                path=name, dtype=str(x.dtype), shape=tuple(x.shape), split=tuple(split), part=part,
                summed=summed, dealt_out=tuple(a for a in summed if any(a in d for d in split)),
                copies=mesh.size // math.prod(mesh.shape[a] for dim in split for a in dim),
            )
        )  # fmt: skip
    if problem := _part(mesh, rows, axes_by_dim(tokens, 2))[1]:
        wrong.append(f"a batch of rows {problem}")
    if wrong:
        shape = " × ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise ValueError(f"`describe` on the mesh {shape}: {'; '.join(wrong)}.")
    return Description(dict(mesh.shape), tuple(tensors), _readers(mesh, rows, tokens))


def _part(
    mesh: Mesh | AbstractMesh, shape: Sequence[int], split: list
) -> tuple[tuple[int, ...], str]:
    """The shape of a device's part, and what is wrong with it."""
    missing = sorted({a for dim in split for a in dim} - set(mesh.shape))
    if missing or len(split) > len(shape):
        return (), f"{tuple(shape)} is split over {missing or split}, which it or the mesh lacks"
    counts = [math.prod(mesh.shape[a] for a in axes) for axes in split]
    if any(size % n for size, n in zip(shape, counts, strict=True)):
        return (), f"{tuple(shape)} is split into {tuple(counts)} parts, which don't divide it"
    return tuple(size // n for size, n in zip(shape, counts, strict=True)), ""


def _summed(
    mesh: Mesh | AbstractMesh, own: set, between: set, name: str, inside: Sequence[str]
) -> tuple:
    """The axes over which a gradient is summed; those of the module's table."""
    used = any(name.endswith((f"['{end}']", f".{end}", end)) for end in inside)
    apart = {
        axis: axis in between or (axis == "tp" and used) or axis == "pp" for axis in mesh.shape
    }
    return tuple(
        axis for axis, differs in apart.items()
        if differs and (axis in _DATA or axis not in own)
    )  # fmt: skip


def _devices(mesh: Mesh | AbstractMesh) -> np.ndarray:
    """Id and process of each device; of an abstract mesh, which has none, their places."""
    found = np.empty(tuple(mesh.shape.values()), object)
    for place, index in enumerate(np.ndindex(found.shape)):
        device: Any = mesh.devices[index] if isinstance(mesh, Mesh) else None
        found[index] = (place, 0) if device is None else (device.id, device.process_index)
    return found


def _readers(mesh: Mesh | AbstractMesh, rows: tuple[int, int], tokens: P) -> tuple[Reader, ...]:
    splits = axes_by_dim(tokens, 2)
    axes = [axis for dim in splits for axis in dim]
    found = {}
    for index, device in np.ndenumerate(_devices(mesh)):
        at = dict(zip(mesh.shape, index, strict=True))
        found.setdefault(tuple(at[a] for a in axes), []).append(device)
    readers = []
    for key, devices in sorted(found.items()):
        at = dict(zip(axes, key, strict=True))
        ranges = []
        for size, dim in zip(rows, splits, strict=True):
            place, count = 0, 1
            for axis in dim:
                place, count = place * mesh.shape[axis] + at[axis], count * mesh.shape[axis]
            ranges.append((place * size // count, (place + 1) * size // count))
        ids, processes = zip(*devices, strict=True)
        readers.append(Reader(at, *ranges, devices=ids, processes=tuple(sorted(set(processes)))))
    return tuple(readers)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda row: "  ".join(word.ljust(n) for word, n in zip(row, widths, strict=True))
    return [f"  {pad(row)}".rstrip() for row in rows]
