"""What a compiled program runs, and a promise that it never waits for the host."""

from xform._explain._host import no_host_gap as no_host_gap
from xform._explain._measure import Event as Event
from xform._explain._measure import Run as Run
from xform._explain._report import LAUNCH_SECONDS as LAUNCH_SECONDS
from xform._explain._report import Line as Line
from xform._explain._report import Report as Report
from xform._explain._report import explain as explain
