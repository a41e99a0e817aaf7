"""A compiled program held to what its rules declared.

`audit` compiles a function for a mesh, which need not be present, and reads what the devices say to
each other: each collective with its axes, bytes, line and turns, the rule that declared it, and
whether a matrix product runs meanwhile. It raises where the program says more than was declared, or
hides less than was promised.

Reading order: `_declare` (what a rule says), `_findings` (records and text), `_checks` (each
contract), `_divergence`; all reading of compiled programs is `xform._hlo`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from xform._hlo import compile_and_dump, lower_for, mesh_of, read, target_mesh
from xform._program import program
from xform.sharding._checks import (
    Allowed,
    Partitioned,
    broken,
    divergent,
    message,
    rematerialised,
    swallowed,
)
from xform.sharding._checks import (
    replicated as held_whole,
)
from xform.sharding._findings import Audit
from xform.sharding._findings import sizes as in_words

# A value is large from this size on: an embedding, a matrix, an activation; not a norm's scale.
LARGE = 2**24


def audit(
    f: Callable,
    args: tuple,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    *,
    target: str | None = "H200",
    specs: Any = None,
    replicated: Sequence[str] = (),
    large: int = LARGE,
    strict: bool = True,
) -> Audit:
    """Compiles a function for a mesh, and holds its communication to what its rules declared.

    It raises for
      * collectives that no `declare` covers, whoever put them there: the user, a derivative (the
        sum that belongs to an implicit `pcast`), or the partitioner;
      * collectives that break a promise of their declaration: `hidden` (on GPUs) or `once`;
      * large values that every device holds whole: arguments, and what the partitioner leaves
        unsplit outside of `shard_map`. Not what is equal to, computed from, or of the shape of an
        argument that `replicated` names;
      * values that the partitioner gathers on every device only to split them in another way;
      * collectives in a `cond` or `while` that devices along the same axis may leave each other in.

    What Pallas kernels send to other devices is not seen.

    Args:
      f: The function, jitted or not.
      args: A tuple of its arguments, of which only shapes, dtypes and shardings count.
      mesh: Where it runs: a mesh, or the sizes of its axes, outermost first, which are then
        explicit. Its devices need not be present: up to 16,384 are compiled for in seconds. It is
        the mesh in context while `f` is traced, so that `f` need not name one. By default the one
        of the arguments, or of the program.
      target: The device to compile for, present or not; None for those of the mesh itself.
      specs: A tree of `PartitionSpec`s for `args`, or for parts of them; by default their own
        shardings. An argument without any is held whole.
      replicated: Patterns, as of `fnmatch`, of the arguments that may be held whole, which are
        named by place and path, `"0/layers/norm"`, and of JAX's names of operations.
      large: A value is large from so many bytes on.
      strict: Whether to raise; without, the report lists the offenders.

    Raises:
      AuditError: A ValueError that lists all offenders with path or type, axes, bytes and line.
      ValueError: The mesh and the arguments don't fit together.
      RuntimeError: The compiler of the target is not installed.

    >>> from xform.sharding import audit, declare
    >>> @declare("total", "dp")
    ... def total(x):
    ...     return jax.lax.psum(x.sum(), "dp")
    >>> f = lambda x: jax.shard_map(total, in_specs=jax.P("dp"), out_specs=jax.P())(x)
    >>> x = jax.ShapeDtypeStruct((4096, 64), "float32")
    >>> report = audit(f, (x,), {"dp": 1024}, specs=jax.P("dp"))
    >>> report.counts()["total all-reduce dp"]["turns"]
    1
    """
    if not isinstance(args, tuple):
        raise ValueError(f"`audit` takes a tuple of arguments, `args=(x,)`; found {type(args)}")
    mesh = _mesh(mesh, target)
    placed = _placed(args, mesh, specs)
    leaves, tree = jax.tree.flatten(placed)
    paths = _paths(placed)

    def called(*flat):
        return _under(mesh, f)(*jax.tree.unflatten(tree, flat))

    called.__name__ = getattr(f, "__name__", "f")
    jitted = jax.jit(called)
    traced = jitted.trace(*leaves)
    found = mesh or mesh_of(traced, leaves)
    sizes = dict(found.shape) if found is not None else {}
    lowered = lower_for(target, jitted, *leaves) if target else traced.lower()
    compiled, dump = compile_and_dump(lowered, partitioning=True)
    report = read(compiled, mesh=sizes or None, dump=dump)
    partitioned = Partitioned(dump, sizes, paths, _paths(traced.out_info))
    messages = tuple(message(c, report, partitioned) for c in report.collectives)
    allowed = Allowed(replicated, partitioned, leaves)
    offenders = (
        *broken(messages, report),
        *swallowed(messages, partitioned),
        *held_whole(dump, allowed, large),
        *rematerialised(dump),
        *divergent(program(traced.jaxpr), sizes),
    )
    audited = Audit(
        name=called.__name__,
        device=report.device,
        mesh=sizes,
        messages=messages,
        offenders=tuple(dict.fromkeys(offenders)),
        memory=_memory(compiled),
        program=report,
    )
    if strict:
        audited.check()
    return audited


# ---- the mesh and the arguments on it ------------------------------------------------------------


def _mesh(mesh: Any, target: str | None) -> Mesh | None:
    """The mesh; of sizes alone, or an abstract one, with devices of the target."""
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if target is None:
        raise ValueError(
            "`audit(..., target=None)` compiles for the devices of its mesh, and "
            f"{mesh} has none: pass a `jax.sharding.Mesh` of them"
        )
    if isinstance(mesh, AbstractMesh):
        return target_mesh(target, dict(mesh.shape), mesh.axis_types)
    return target_mesh(target, mesh)


def _under(mesh: Mesh | None, f: Callable) -> Callable:
    """The function, traced with the mesh in context."""
    if mesh is None:
        return f

    def under(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return f(*args)

    return under


def _placed(args: tuple, mesh: Mesh | None, specs: Any) -> tuple:
    """The types of the arguments, placed on the mesh."""
    given = specs if specs is not None else None
    is_spec = lambda x: isinstance(x, jax.P) or x is None
    if given is not None and mesh is None:
        raise ValueError("`audit(..., specs=)` needs `mesh=`, whose axes the specs name")
    if isinstance(given, jax.P):
        given = jax.tree.map(lambda _: given, args)
    elif given is None:
        given = jax.tree.map(lambda _: None, args)
    given = jax.tree.broadcast(given, args, is_leaf=is_spec)
    leaves, tree = jax.tree.flatten(args)
    wanted = jax.tree.leaves(given, is_leaf=is_spec)
    return tree.unflatten([_place(x, mesh, s) for x, s in zip(leaves, wanted, strict=True)])


def _place(x: Any, mesh: Mesh | None, spec: jax.P | None) -> Any:
    own: Any = getattr(x, "sharding", None)
    own = own if isinstance(own, NamedSharding) else None
    if own is not None and mesh is not None and dict(own.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"`audit` got the mesh {in_words(mesh.shape)} and an argument {jax.typeof(x)} on "
            f"{in_words(own.mesh.shape)}: pass types without a sharding and `specs=`, or leave the "
            "mesh out"
        )
    if spec is None:
        spec = own.spec if own is not None else None
    if own is not None and mesh is None:
        mesh = own.mesh
    sharding = NamedSharding(mesh, spec or jax.P()) if mesh is not None else None
    kind = x if hasattr(x, "dtype") else jax.typeof(x)
    return jax.ShapeDtypeStruct(
        kind.shape, kind.dtype, sharding=sharding, weak_type=getattr(kind, "weak_type", False)
    )


def _paths(tree: Any) -> list[str]:
    """The path of each leaf, `"0/layers/norm"`."""
    leaves = jax.tree.leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def _memory(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
