"""Programs as data: look at, rewrite, and run anew the jaxpr of any JAX function.

A jaxpr is a list of equations `out = primitive[params](in)`. Some primitives carry programs of
their own (a scan its body, a cond its branches), so a transform is a walk over a tree of jaxprs
with a table of rules keyed by primitive:

* `walk` visits every equation at every depth, with the user's source line: enough for a report.
* `interpret` runs the equations on values of the user's choosing: intervals, dual numbers, costs.
* `rewrite` replaces equations and gives a function back: a scan stays a scan, remat stays remat.
* `intern` gives equal programs one identity, so that a closure made afresh compiles nothing.

A key of a rule table is a primitive, its name (`"sin"`), or its name with its `name` parameter:
`("jit", "clip")` is `jnp.clip`. The most specific key wins.
"""

from xform.jaxpr._intern import intern as intern
from xform.jaxpr._interpret import Rule as Rule
from xform.jaxpr._interpret import Rules as Rules
from xform.jaxpr._interpret import eqn_rule as eqn_rule
from xform.jaxpr._interpret import interpret as interpret
from xform.jaxpr._interpret import run_body as run_body
from xform.jaxpr._rewrite import inline as inline
from xform.jaxpr._rewrite import rewrite as rewrite
from xform.jaxpr._trace import trace as trace
from xform.jaxpr._walk import Carried as Carried
from xform.jaxpr._walk import Site as Site
from xform.jaxpr._walk import carried as carried
from xform.jaxpr._walk import source_line as source_line
from xform.jaxpr._walk import sub_jaxprs as sub_jaxprs
from xform.jaxpr._walk import walk as walk
