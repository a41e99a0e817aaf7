"""Operations whose inside the user programs: one file is one primitive's whole life."""

from typing import TYPE_CHECKING

from xform._later import later
from xform.primitives import masks as masks
from xform.primitives import scores as scores
from xform.primitives.attention import Aux as Aux
from xform.primitives.attention import flex_attention as flex_attention
from xform.primitives.attention import flex_attention_p as flex_attention_p
from xform.primitives.attention import which as which
from xform.primitives.masks import Mask as Mask
from xform.primitives.masks import causal as causal
from xform.primitives.masks import documents as documents
from xform.primitives.masks import prefix as prefix
from xform.primitives.masks import sliding_window as sliding_window

if TYPE_CHECKING:
    from xform.primitives.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from xform.primitives.cross_entropy import linear_cross_entropy_p as linear_cross_entropy_p
    from xform.primitives.drop_in import dot_product_attention as dot_product_attention
    from xform.primitives.drop_in import flash_attention as flash_attention
    from xform.primitives.inference import decode_attention as decode_attention
    from xform.primitives.inference import merge as merge
    from xform.primitives.inference import paged_attention as paged_attention

_MODULES, __getattr__, __dir__ = later(
    __name__,
    {
        "cross_entropy": ("linear_cross_entropy", "linear_cross_entropy_p"),
        "drop_in": ("dot_product_attention", "flash_attention"),
        "inference": ("decode_attention", "merge", "paged_attention"),
    },
)
