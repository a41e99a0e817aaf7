"""Compiled programs: made for a named device that need not be present, and read.

`read(compiled)` lists what a program runs, with the user's line of each: kernels and what they
compute and move, collectives with the mesh axes they run along and the kernels that run beside
them, loops with their trip counts, calls to the host, values computed more than once. For buffers
and exact launches compile with `compile_and_dump`, and hand on what it returns.

Reading order: `_text` (the parser), `_work` (operations and bytes of one instruction), `_groups`
(collectives and axes), `_twice`, `_program` (all of it together), `_partition` (what the
partitioner did), `_moves` (of which argument); `_target` and `_dump` compile.
"""

from xform._hlo._dump import Buffer as Buffer
from xform._hlo._dump import Dump as Dump
from xform._hlo._dump import Launch as Launch
from xform._hlo._dump import compile_and_dump as compile_and_dump
from xform._hlo._groups import COLLECTIVES as COLLECTIVES
from xform._hlo._groups import axes_of as axes_of
from xform._hlo._groups import groups_of as groups_of
from xform._hlo._moves import Moves as Moves
from xform._hlo._partition import Remade as Remade
from xform._hlo._partition import Whole as Whole
from xform._hlo._partition import held_whole as held_whole
from xform._hlo._partition import readers as readers
from xform._hlo._partition import remade as remade
from xform._hlo._program import Collective as Collective
from xform._hlo._program import HostCall as HostCall
from xform._hlo._program import Kernel as Kernel
from xform._hlo._program import Loop as Loop
from xform._hlo._program import Program as Program
from xform._hlo._program import read as read
from xform._hlo._program import total as total
from xform._hlo._target import TARGETS as TARGETS
from xform._hlo._target import compile_for as compile_for
from xform._hlo._target import lower_for as lower_for
from xform._hlo._target import mesh_of as mesh_of
from xform._hlo._target import target_mesh as target_mesh
from xform._hlo._text import UNKNOWN as UNKNOWN
from xform._hlo._text import Computation as Computation
from xform._hlo._text import Instruction as Instruction
from xform._hlo._text import Module as Module
from xform._hlo._text import parse as parse
from xform._hlo._twice import Twice as Twice
from xform._hlo._work import Work as Work
