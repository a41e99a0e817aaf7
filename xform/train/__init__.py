"""The parts of a training loop. `import xform` never loads them: what they build on is heavy."""

from xform.train.data import NO_LABEL as NO_LABEL
from xform.train.data import Mixture as Mixture
from xform.train.data import Rows as Rows
from xform.train.data import Source as Source
from xform.train.data import batch as batch
from xform.train.data import batches as batches
from xform.train.data import count as count
from xform.train.data import decode as decode
from xform.train.data import encode as encode
from xform.train.data import order_of as order_of
from xform.train.data import pack as pack
from xform.train.data import rows_here as rows_here
