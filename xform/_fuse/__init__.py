"""One kernel forward and one backward, or an error that says what stands in the way."""

from xform._fuse._api import fuse as fuse
from xform._fuse._error import FusionError as FusionError
from xform._fuse._rules import fuse_rule as fuse_rule
