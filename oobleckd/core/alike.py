"""Says which devices of a job do not come to the same bits, and why; the journal keeps what trained it.

Such a plan is as good as any other and may be all that there is; what it cannot have is the promise of equal
bits, and replicas that are compared.
"""

from __future__ import annotations

from collections.abc import Collection

from oobleckd.core.context import Core
from oobleckd.core.entries import KindTrained
from oobleckd.core.run import Candidate, Run
from oobleckd.core.state import JobRecord
from oobleckd.protocol.changes import DevicesDiffer
from oobleckd.protocol.traits import CANARY, Difference, differences, nodes_of

_UNEXPLAINED = (
    "; nothing else that is known of them differs: a card or CPU that is defective would show so, too"
)


def _is_unexplained(found: Difference) -> bool:
    return found.traits.keys() == {CANARY}


def among(core: Core, devices: Collection[str]) -> tuple[Difference, ...]:
    """In what those of ``devices`` that are known differ."""
    infos = (core.members.device(device) for device in devices)
    return differences({info.device: info.all_traits for info in infos if info is not None})


def of_job(core: Core, job: JobRecord) -> tuple[Difference, ...]:
    """In what the devices differ that hold layers of ``job`` now."""
    return () if job.final else among(core, job.survivors())


def as_told(core: Core, run: Run, candidate: Candidate) -> bool:
    """Whether its devices were told to be compared, or not to be, as their canaries would have it: asked
    when all are ready, and have said theirs.
    """
    told = next(iter(candidate.deploys.values())).spec
    right = core.compared(core.spec_of(run.job), candidate.layout.holdings)
    return bool(told.fault_tolerance.check_every) == bool(right.fault_tolerance.check_every)


def deployed(core: Core, run: Run) -> None:
    """A layout is in force: keep the kinds of its devices, and say in what they differ, if that is news."""
    job = run.job
    infos = (core.members.device(device) for device in job.survivors())
    for info in infos:
        if info is not None and info.all_traits not in job.kinds:
            core.record(KindTrained(job.id, info.all_traits))
    # Said, and allowed: a cluster of two kinds is what some people have. What cannot be had on it is the
    # promise of equal bits, so nobody is left believing in it. (D-exactness-015)
    found = of_job(core, job)
    if found and found != run.told_of:
        what = "; ".join(map(str, found))
        text = (
            f"{job.id}: its devices do not come to the same bits: {what}; so replicas are not compared, "
            f"and neither are results{_UNEXPLAINED if any(map(_is_unexplained, found)) else ''}"
        )
        story = [f"job:{job.id}", *(f"node:{node}" for node in nodes_of(found))]
        core.announce(text, DevicesDiffer(job.id, found), story, level="warn")
    run.told_of = found
