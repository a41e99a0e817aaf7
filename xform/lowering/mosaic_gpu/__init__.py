"""Attention kernels for NVIDIA's Hopper in Pallas, with the user's mods compiled into them.

Read `_program` first (what of a mod runs inside), then `_forward` (the schedule), `_twins` (how the
interpreter runs it), `_attend` (what a call becomes).
"""

from xform.lowering.mosaic_gpu._attend import attend as attend
from xform.lowering.mosaic_gpu._attend import misfits as misfits
