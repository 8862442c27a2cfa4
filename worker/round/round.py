"""The values of one round on a device: what it is run with, and what it cost.

Owns values only. Running the round is ``passes``'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from oobleckd.planner.plan import Range, Recompute
from oobleckd.protocol.job import Job
from oobleckd.worker.data.corpus import Corpus
from oobleckd.worker.messaging.messenger import Messenger
from oobleckd.worker.models import Owed
from oobleckd.worker.recompute.block import Held
from oobleckd.worker.round.weights import WeightsOf
from oobleckd.worker.round_machine.tasks import Kind, Task
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.runtime.timing import DeviceTimer, Moment
from oobleckd.worker.runtime.yielding_lock import Released
from oobleckd.worker.sharding.group import ShardGroup
from oobleckd.worker.state.store import Store

Graph = list[Held]
"""Of the layers of a hop whose forward has run and that need a gradient, in order."""
Debts = list[tuple[int, list[Tensor | None], Owed]]
"""Of the layers whose I has run, from the last to the first: (layer, gradients found, what W adds
to them).
"""
Pieces = Iterator[None]
"""A task at work: stops once in every layer, when it is computed and nobody has been told; and when its
micro-batch was frozen since.
"""
_ENDED = object()


@dataclass(slots=True)
class Work:
    """A task under way. ``num_pieces``: how often it stopped; of a forward pass, the layers computed."""

    kind: Kind
    task: Task
    pieces: Pieces = field(default_factory=lambda: iter(()))
    num_pieces: int = 0

    def compute(self) -> bool:
        """Put away what was found of the last layer, and compute the next unless it halts; False: that was
        the last.
        """
        more = next(self.pieces, _ENDED) is not _ENDED
        self.num_pieces += more
        return more


@dataclass(slots=True)
class RoundClock:
    """What the present round cost so far on this device."""

    began: float = field(default_factory=time.perf_counter)
    busy: list[tuple[Moment, Moment]] = field(default_factory=list)
    gradients: int = 0
    forwards: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class ComputeContext:
    """What a device has to compute with, the same in every round. ``group``: the shard group that it is in,
    by which it has weights. ``redundant_bytes``: by what its blocks
    compute again, layers -> what a forward pass through them took that was run ahead.
    """

    device: str
    job: Job
    store: Store
    corpus: Corpus
    weights_of: WeightsOf
    messenger: Messenger
    faults: Faults
    activity: ActivityPage
    group: ShardGroup
    released: Released = nullcontext
    redundant_bytes: dict[Recompute, dict[Range, int]] = field(default_factory=dict)
    timer: DeviceTimer = field(default_factory=DeviceTimer)
