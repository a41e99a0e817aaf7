"""Programmable attention, transforms of jaxprs that keep a promise or refuse, sharding rules."""

from typing import TYPE_CHECKING

from xform import jaxpr as jaxpr
from xform import primitives as primitives
from xform._later import later
from xform.primitives import masks as masks
from xform.primitives import scores as scores
from xform.primitives.attention import Aux as Aux
from xform.primitives.attention import flex_attention as flex_attention
from xform.primitives.attention import which as which
from xform.primitives.masks import Mask as Mask
from xform.primitives.masks import causal as causal
from xform.primitives.masks import documents as documents
from xform.primitives.masks import prefix as prefix
from xform.primitives.masks import sliding_window as sliding_window

if TYPE_CHECKING:
    from xform import numerics as numerics
    from xform import sharding as sharding
    from xform._cost import cost as cost
    from xform._cost_rules import Work as Work
    from xform._cost_rules import cost_rule as cost_rule
    from xform._costs import Cost as Cost
    from xform._costs import Costs as Costs
    from xform._devices import Device as Device
    from xform._devices import device as device
    from xform._explain import Report as Report
    from xform._explain import explain as explain
    from xform._explain import no_host_gap as no_host_gap
    from xform._fuse import FusionError as FusionError
    from xform._fuse import fuse as fuse
    from xform._fuse import fuse_rule as fuse_rule
    from xform._memory import Memory as Memory
    from xform._memory import memory as memory
    from xform._precision import FORMATS as FORMATS
    from xform._precision import POLICIES as POLICIES
    from xform._precision import LossScale as LossScale
    from xform._precision import Policy as Policy
    from xform._precision import Products as Products
    from xform._precision import all_finite as all_finite
    from xform._precision import native as native
    from xform._precision import precision as precision
    from xform._precision import quantise as quantise
    from xform._precision import stochastic_round as stochastic_round
    from xform._remat import BudgetError as BudgetError
    from xform._remat import remat as remat
    from xform._roofline import hfu as hfu
    from xform._roofline import mfu as mfu
    from xform._roofline import roofline as roofline
    from xform._stages import Stages as Stages
    from xform._stages import stages as stages
    from xform.primitives.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from xform.primitives.drop_in import dot_product_attention as dot_product_attention
    from xform.primitives.drop_in import flash_attention as flash_attention
    from xform.primitives.inference import decode_attention as decode_attention
    from xform.primitives.inference import paged_attention as paged_attention

_MODULES, __getattr__, __dir__ = later(
    __name__,
    {
        "numerics": (),
        "sharding": (),
        "_cost": ("cost",),
        "_cost_rules": ("Work", "cost_rule"),
        "_costs": ("Cost", "Costs"),
        "_devices": ("Device", "device"),
        "_explain": ("Report", "explain", "no_host_gap"),
        "_fuse": ("FusionError", "fuse", "fuse_rule"),
        "_memory": ("Memory", "memory"),
        "_precision": (
            *("FORMATS", "POLICIES", "LossScale", "Policy", "Products", "all_finite", "native"),
            *("precision", "quantise", "stochastic_round"),
        ),
        "_remat": ("BudgetError", "remat"),
        "_roofline": ("hfu", "mfu", "roofline"),
        "_stages": ("Stages", "stages"),
        "primitives.cross_entropy": ("linear_cross_entropy",),
        "primitives.drop_in": ("dot_product_attention", "flash_attention"),
        "primitives.inference": ("decode_attention", "paged_attention"),
    },
)
