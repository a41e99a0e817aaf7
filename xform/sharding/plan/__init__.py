"""What a layout costs before it is launched: memory, time, use of the devices, and faults."""

from xform.sharding.plan._compiled import compiled_memory as compiled_memory
from xform.sharding.plan._faults import FAULTS as FAULTS
from xform.sharding.plan._faults import Faults as Faults
from xform.sharding.plan._layout import Layout as Layout
from xform.sharding.plan._layout import reasons_against as reasons_against
from xform.sharding.plan._machine import FABRICS as FABRICS
from xform.sharding.plan._machine import RATES as RATES
from xform.sharding.plan._machine import Fabric as Fabric
from xform.sharding.plan._machine import Machine as Machine
from xform.sharding.plan._machine import Rates as Rates
from xform.sharding.plan._machine import machine as machine
from xform.sharding.plan._memory import Memory as Memory
from xform.sharding.plan._model import LLAMA_3_405B as LLAMA_3_405B
from xform.sharding.plan._model import Model as Model
from xform.sharding.plan._model import Traced as Traced
from xform.sharding.plan._plan import Plan as Plan
from xform.sharding.plan._plan import predict as predict
from xform.sharding.plan._precision import PRECISIONS as PRECISIONS
from xform.sharding.plan._precision import Precision as Precision
from xform.sharding.plan._published import PUBLISHED as PUBLISHED
from xform.sharding.plan._published import Checked as Checked
from xform.sharding.plan._published import Published as Published
from xform.sharding.plan._published import check_published as check_published
from xform.sharding.plan._search import Plans as Plans
from xform.sharding.plan._search import search as search
from xform.sharding.plan._time import Step as Step
