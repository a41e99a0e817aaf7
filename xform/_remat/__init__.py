"""Recompute within a budget of bytes: a minimum cut between forward and backward pass."""

from xform._remat._api import remat as remat
from xform._remat._budget import BudgetError as BudgetError
from xform._remat._report import Report as Report
