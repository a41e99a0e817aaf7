"""Parallelism that the user writes down: meshes, and rules for each axis."""

from typing import TYPE_CHECKING

from xform._later import later
from xform.sharding.mesh import AXES as AXES
from xform.sharding.mesh import check_divisible as check_divisible
from xform.sharding.mesh import cpu_devices as cpu_devices
from xform.sharding.mesh import make_mesh as make_mesh
from xform.sharding.mesh import settle as settle
from xform.sharding.mesh import shardings as shardings

if TYPE_CHECKING:
    from xform.sharding import pipeline as pipeline

_MODULES, __getattr__, __dir__ = later(__name__, {"pipeline": ()})
