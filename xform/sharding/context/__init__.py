"""Context parallelism: attention over a sequence that a mesh axis splits, for any mask."""

from xform.sharding.context._attention import attention as attention
from xform.sharding.context._attention import whole as whole
from xform.sharding.context._parallel import ContextParallel as ContextParallel
from xform.sharding.context._plan import Plan as Plan
from xform.sharding.context._plan import which as which
from xform.sharding.context._tiles import Load as Load
from xform.sharding.context.layouts import Layout as Layout
from xform.sharding.context.layouts import balanced as balanced
from xform.sharding.context.layouts import contiguous as contiguous
from xform.sharding.context.layouts import zigzag as zigzag
