"""Mixtures of experts: each token to a few of many, which a mesh axis deals out."""

from xform.sharding.experts._parallel import ExpertParallel as ExpertParallel
from xform.sharding.experts._routing import Load as Load
from xform.sharding.experts._routing import Routes as Routes
from xform.sharding.experts._routing import Routing as Routing
from xform.sharding.experts._routing import auxiliary as auxiliary
from xform.sharding.experts._routing import balance_loss as balance_loss
from xform.sharding.experts._routing import load_of as load_of
from xform.sharding.experts._routing import route as route
from xform.sharding.experts._routing import total as total
from xform.sharding.experts._routing import z_loss as z_loss
