"""Why a device died, where it knew: what it ran out of, or the error that it met. Pure words and values; what
follows is ``core.deaths``'.

A device that is killed knows nothing of it, so nobody speaks for it: such an end is nobody's fault, and is
never taken for one of these.
"""

from __future__ import annotations

from typing import Final

import msgspec

from oobleckd.protocol.job import Job
from oobleckd.words import size

OUT_OF_MEMORY: Final = "out-of-memory"
"""The kind of a death for want of memory. Of any other death it is the class of the error, such as
"RuntimeError".
"""
TO_MEND: Final = "to-mend"
"""The kind of a death for a reason that a user must mend."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes of a device that ran out of it. ``used``: the most that the process had; ``capacity``: of the
    device, for a CPU what its host or its limits leave it; ``wanted``: what it asked for last (0: not known);
    ``others``: what others have of it.
    """

    used: int
    capacity: int
    wanted: int = 0
    others: int = 0


class Death(msgspec.Struct, frozen=True):
    """The end of a device process in ``phase`` (such as "backward") of ``job`` ("": it had none).

    ``error``: one line, for people; ``where``: the line of code, such as "passes.py:63". ``epoch``: the
    highest that the device had heard of. ``hint``: what to do, where a user must mend something.
    """

    kind: str
    phase: str
    error: str
    job: str = ""
    epoch: int = 0
    where: str = ""
    hint: str = ""
    memory: Memory | None = None

    @property
    def what(self) -> str:
        """Deaths of which this is the same are of one kind."""
        return self.kind if self.kind == OUT_OF_MEMORY else f"{self.kind} at {self.where}"

    def __str__(self) -> str:
        if self.kind == OUT_OF_MEMORY:
            return f"out of memory in {self.phase}{account_of(self.memory)}"
        return self.error if self.kind == TO_MEND else f"{self.error} (in {self.phase})"


def account_of(memory: Memory | None, planned: int = 0) -> str:
    """For the end of a sentence: what was planned (0: not known) and what was used, of how much."""
    words = [f"planned {size(planned)}"] if planned else []
    if memory is not None:
        words.append(f"used {size(memory.used)} of {size(memory.capacity)}")
        words += [f"asked for {size(memory.wanted)} more"] if memory.wanted else []
        words += [f"{size(memory.others)} are held by others"] if memory.others else []
    return f": {', '.join(words)}" if words else ""


def ways_out(job: Job) -> str:
    """Three of them, of a job that does not fit, as a hint."""
    train = job.train
    ways = []
    if train.micro_batch > 1:
        ways.append(f"a smaller train.micro_batch than {train.micro_batch}")
    else:
        ways.append(f"a shorter train.sequence than {train.sequence}")
    cap = job.resources.device_memory
    ways.append(
        f"a lower resources.device_memory{f' than {cap}' if cap else ''}, or a higher "
        "resources.min_pipeline_nodes, and more nodes: each has "
        "fewer layers then"
    )
    if train.precision != "bf16":
        ways.append('train.precision = "bf16"')
    elif job.schedule.update == "staggered":
        ways.append('schedule.update = "flushed"')
    elif job.schedule.apart:
        ways.append('schedule.backward = "fused"')
    elif train.exact:
        ways.append(
            "train.exact = false, which takes 8 bytes less of every parameter, and promises no equal bits"
        )
    else:
        ways.append("a smaller schedule.boundary_memory")
    return f"try {'; or '.join(ways)}"
