"""Where numbers break: the first NaN, the equation that lost the digits, the rewrite that will."""

from xform.numerics._nonfinite import NonFinite as NonFinite
from xform.numerics._nonfinite import Operand as Operand
from xform.numerics._nonfinite import Origin as Origin
from xform.numerics._nonfinite import find_nonfinite as find_nonfinite
