"""Kernels for NVIDIA's Hopper in Pallas: attention with the user's mods inside, cross entropy.

Read `_program` first (what of a mod runs inside), then `_forward` (the schedule), `_twins` (how the
interpreter runs it), `_attend` (what a call becomes); then `_derivative` (what a backward kernel
makes of a tile), `_backward`, `_backward_narrow` and `_backward_wide` (D and V up to 128, above 256
together), `_backward_pairs` (what pairs read), `_backward_lines` and `_lines` (what queries and
distances read) and `_gradient`. Of few queries: `_packed` (heads as rows), `_decode` and `_merge`
(the kernels), `_split_keys` (what a call becomes). Of cross entropy:
`_product`, `_logits` (how its tiles end), `_loss` (what a call becomes); of products in 8 bits:
`_scaled`. Of attention in 8 bits: `_forward_eight` (what differs), `_narrow` (the arrays),
`_tensor_cores`. Of `fuse`: `_row_geometry` (which rows a warpgroup has), `_row_memory`,
`_row_values` (what operations do), `_row_passes`, `_rows`.
"""

from xform.lowering.mosaic_gpu._attend import attend as attend
from xform.lowering.mosaic_gpu._attend import misfits as misfits
from xform.lowering.mosaic_gpu._gradient import gradient_misfits as gradient_misfits
from xform.lowering.mosaic_gpu._gradient import tile_sum as tile_sum
from xform.lowering.mosaic_gpu._split_keys import Few as Few
from xform.lowering.mosaic_gpu._split_keys import decode as decode
from xform.lowering.mosaic_gpu._split_keys import plan_if_few as plan_if_few
from xform.lowering.mosaic_gpu._split_keys import unsuited as unsuited
