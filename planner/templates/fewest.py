"""How many nodes would be enough for a model if its blocks were computed again in the backward.

Owns that answer, for errors that say a model is too large; makes no template.
"""

from __future__ import annotations

import msgspec

from oobleckd.planner.policy import Setup
from oobleckd.planner.templates.redundant import fitting_redundant
from oobleckd.planner.templates.template import fewest_nodes


def fewest_recomputing(setup: Setup, n0: int, *, redundant: bool = False) -> int:
    """The fewest nodes that hold the model of ``setup`` with ``schedule.recompute`` "auto"; 0 where these are
    not fewer than ``n0``. ``redundant``: each device holds its successor's stage, too.
    """
    if setup.recompute == "auto":
        return 0
    setup = msgspec.structs.replace(setup, recompute="auto")
    if redundant:
        found = min(fitting_redundant(setup, setup.device_memory_bytes), default=n0)
    else:
        found = fewest_nodes(setup) or n0
    return found if found < n0 else 0
