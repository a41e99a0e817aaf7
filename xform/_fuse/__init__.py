"""One kernel forward and one backward, or an error that says what stands in the way.

Reading order: `_rules` (how the dims of operations relate), `_region` (what rows are, and what is
refused), `_core` (what a program is made of before), `_primitive` (derivatives, vmap), `_lower`
(platforms and meshes), `_verify` (reads the compiled program). Kernels are in `xform.lowering`:
`_region` (what it is handed), `row_blocks` (any CPU), `mosaic_gpu._rows` (Hopper).
"""

from xform._fuse._api import fuse as fuse
from xform._fuse._error import FusionError as FusionError
from xform._fuse._rules import fuse_rule as fuse_rule
