"""A checkpoint in a simulated cluster: what it takes, and what is told of it.

Owns the arithmetic. At which boundary one begins, and who waits for it, is ``training``'s.
"""

from __future__ import annotations

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.plan import Layout, node_of
from oobleckd.planner.profile import Profile
from oobleckd.protocol.checkpoint import PARTIAL, step_name
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.parts import Counters
from oobleckd.simulator.costs import Costs

_DIRECTORY = "checkpoints"


def copy_s(layout: Layout, profile: Profile, costs: Costs) -> float:
    """Seconds in which every device copies its share, while it does nothing else."""
    return _state_bytes(profile) / len(layout.holdings) / costs.snapshot_bytes_per_s


def write_s(layout: Layout, profile: Profile, costs: Costs) -> float:
    """Seconds in which a node writes the shares of its devices."""
    num_nodes = len({node_of(device) for device in layout.holdings})
    return _state_bytes(profile) / num_nodes / costs.write_bytes_per_s


def part(device: str, job: str, counters: Counters, profile: Profile) -> CheckpointPart:
    """All of a checkpoint of the boundary ``counters``, as if it were one bucket."""
    directory = f"{_DIRECTORY}/{job}/{step_name(counters.step)}{PARTIAL}"
    return CheckpointPart(device, job, counters, directory, 0, 1, "bucket", _state_bytes(profile), "", {})


def _state_bytes(profile: Profile) -> int:
    return sum(map(copy_bytes, profile.layers))
