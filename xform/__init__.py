"""Programmable attention, transforms of jaxprs that keep a promise or refuse, sharding rules."""

from xform import jaxpr as jaxpr
from xform import primitives as primitives
from xform import sharding as sharding
from xform.primitives.attention import Aux as Aux
from xform.primitives.attention import flex_attention as flex_attention
from xform.primitives.cross_entropy import linear_cross_entropy as linear_cross_entropy
from xform.primitives.masks import Mask as Mask
from xform.primitives.masks import causal as causal
from xform.primitives.masks import documents as documents
from xform.primitives.masks import prefix as prefix
from xform.primitives.masks import sliding_window as sliding_window
