"""Pipelines: the schedule is a table that users write; it is proved, timed, drawn and run."""

from xform.sharding.pipeline._build import BUILDERS as BUILDERS
from xform.sharding.pipeline._build import build as build
from xform.sharding.pipeline._build import dualpipe_v as dualpipe_v
from xform.sharding.pipeline._build import gpipe as gpipe
from xform.sharding.pipeline._build import interleaved as interleaved
from xform.sharding.pipeline._build import one_f_one_b as one_f_one_b
from xform.sharding.pipeline._build import zb_h1 as zb_h1
from xform.sharding.pipeline._build import zb_v as zb_v
from xform.sharding.pipeline._greedy import greedy as greedy
from xform.sharding.pipeline._schedule import Action as Action
from xform.sharding.pipeline._schedule import Schedule as Schedule
from xform.sharding.pipeline._simulate import Timeline as Timeline
from xform.sharding.pipeline._simulate import simulate as simulate
from xform.sharding.pipeline._ticks import ticks as ticks
from xform.sharding.pipeline._times import Times as Times
from xform.sharding.pipeline._verify import Held as Held
from xform.sharding.pipeline._verify import Proof as Proof
from xform.sharding.pipeline._verify import ScheduleError as ScheduleError
from xform.sharding.pipeline._verify import verify as verify
