"""Parallelism that the user writes down: meshes, and rules for each axis."""

from typing import TYPE_CHECKING

from xform._later import later
from xform.sharding import data as data
from xform.sharding import fsdp as fsdp
from xform.sharding import loss as loss
from xform.sharding import norm as norm
from xform.sharding import random as random
from xform.sharding import ring as ring
from xform.sharding import tensor as tensor
from xform.sharding._audit import audit as audit
from xform.sharding._declare import declare as declare
from xform.sharding._describe import Description as Description
from xform.sharding._describe import describe as describe
from xform.sharding._findings import Audit as Audit
from xform.sharding._findings import AuditError as AuditError
from xform.sharding._parity import Parity as Parity
from xform.sharding._parity import ParityError as ParityError
from xform.sharding._parity import meshes as meshes
from xform.sharding._parity import parity as parity
from xform.sharding.mesh import AXES as AXES
from xform.sharding.mesh import check_divisible as check_divisible
from xform.sharding.mesh import cpu_devices as cpu_devices
from xform.sharding.mesh import make_mesh as make_mesh
from xform.sharding.mesh import place as place
from xform.sharding.mesh import settle as settle
from xform.sharding.mesh import shardings as shardings
from xform.sharding.tensor import TensorParallel as TensorParallel

if TYPE_CHECKING:
    from xform.sharding import context as context
    from xform.sharding import experts as experts
    from xform.sharding import pipeline as pipeline
    from xform.sharding import plan as plan

_MODULES, __getattr__, __dir__ = later(
    __name__, {"context": (), "experts": (), "pipeline": (), "plan": ()}
)
