"""Where numbers break: the first NaN, the equation that lost the digits, the rewrite that will."""

from xform._single import single as single
from xform.numerics._compare import Comparison as Comparison
from xform.numerics._compare import Loss as Loss
from xform.numerics._compare import compare as compare
from xform.numerics._lint import Finding as Finding
from xform.numerics._lint import Lint as Lint
from xform.numerics._lint import lint as lint
from xform.numerics._nonfinite import NonFinite as NonFinite
from xform.numerics._nonfinite import Operand as Operand
from xform.numerics._nonfinite import Origin as Origin
from xform.numerics._nonfinite import find_nonfinite as find_nonfinite
