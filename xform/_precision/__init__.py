"""A program's dtypes as a transform: what is computed in what, and how numbers are rounded."""

from xform._precision._formats import FORMATS as FORMATS
from xform._precision._formats import Native as Native
from xform._precision._formats import Quantised as Quantised
from xform._precision._formats import native as native
from xform._precision._formats import quantise as quantise
from xform._precision._loss_scale import LossScale as LossScale
from xform._precision._loss_scale import all_finite as all_finite
from xform._precision._policy import POLICIES as POLICIES
from xform._precision._policy import Policy as Policy
from xform._precision._policy import Products as Products
from xform._precision._rounding import stochastic_round as stochastic_round
from xform._precision._transform import precision as precision
