"""Who may look at whom, as values: masks that are called, combined, moved, printed and drawn.

A mask is a scalar function `mask(b, h, q_idx, kv_idx) -> bool` of the batch, head, query and key
index, where `h` is the query head. Any such Python function will do; the objects here add `& | ~`
(with plain functions on either side), `shift` and `slice`, a readable `repr`, a picture (`show`),
and numbers that may be traced arrays. A mask is a pytree: its arrays are leaves, so that a layer's
window can be scanned over; its Python numbers and functions are structure, as they are in the code.

A variant of one's own is a class of a few lines:

    @variant
    class prefix(Mask):
        n: ArrayLike

        def __call__(self, b, h, q_idx, kv_idx):
            return kv_idx < self.n

Variants compare on two sides, `lo < x` and `x <= hi`, where one might write `abs(x) < w`: interval
analysis finds the same tiles in both, and Hopper's assembler has miscompiled the second.
"""

from xform.primitives._objects import variant as variant
from xform.primitives.masks._bands import block_diagonal as block_diagonal
from xform.primitives.masks._bands import causal as causal
from xform.primitives.masks._bands import causal_lower_right as causal_lower_right
from xform.primitives.masks._bands import dilated as dilated
from xform.primitives.masks._bands import full as full
from xform.primitives.masks._bands import global_tokens as global_tokens
from xform.primitives.masks._bands import lengths as lengths
from xform.primitives.masks._bands import prefix as prefix
from xform.primitives.masks._bands import sliding_window as sliding_window
from xform.primitives.masks._bands import strided as strided
from xform.primitives.masks._grids import morton as morton
from xform.primitives.masks._grids import neighborhood as neighborhood
from xform.primitives.masks._grids import tiled as tiled
from xform.primitives.masks._mask import Mask as Mask
from xform.primitives.masks._mask import MaskMod as MaskMod
from xform.primitives.masks._mask import as_mask as as_mask
from xform.primitives.masks._tables import bigbird as bigbird
from xform.primitives.masks._tables import block_sparse as block_sparse
from xform.primitives.masks._tables import block_window as block_window
from xform.primitives.masks._tables import documents as documents
from xform.primitives.masks._tables import graph as graph
from xform.primitives.masks._tables import random_blocks as random_blocks
from xform.primitives.masks._tables import tree as tree
from xform.primitives.masks._view import MaskView as MaskView
from xform.primitives.masks._view import show as show
