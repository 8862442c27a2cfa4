"""How often a job with ``checkpoint.every = "auto"`` writes a checkpoint: the interval of Young and Daly, in
steps.

Pure: a function of what the journal says of the job, so a restarted daemon goes on with the same one. Owns
the estimates and their bounds; asking the devices for a checkpoint is ``steer``'s.

Work is lost at a failure since the last checkpoint, on average half an interval, and every checkpoint costs
something itself. The sum is least at sqrt(2 * C * M), where C is what one costs training and M the mean time
between the failures that need one (Young 1974; Daly 2006). Which failures these are follows from the policy:
under one that rolls back all losses, else losses of a layer's last copy. Either way each shows as a rollback
to a checkpoint. M is estimated as ``failures`` does it for all losses.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from oobleckd.core import failures
from oobleckd.core.state import RECENT_STEPS, JobRecord, Step, Written
from oobleckd.planner.profile import Profile
from oobleckd.protocol.jobviews import CadenceView

# Nobody wants a shared disk busy all the time because a copy is cheap, nor to find a day-old checkpoint
# because nothing ever failed. (D-checkpoints-008)
MIN_S = 10.0
"""No sooner than that, and twice what writing takes: the disk is others', too."""
MAX_S = 1800.0
"""At least so often, whatever the estimates say: what somebody may lose who has never seen a failure."""
MIN_COST_S = 0.05
"""Closer than that step times do not tell what a checkpoint costs."""
_GUESS_S, _GUESS_BYTES_PER_S = 0.5, 1e9  # what one costs, until one has been measured
LOOKS_BACK = 5  # checkpoints


def cadence(job: JobRecord) -> CadenceView | None:
    """The present interval of ``job``; None where none is computed, or no step has told yet how long it
    takes.
    """
    if job.spec.checkpoint.every != "auto" or job.setup is None or not job.step_s:
        return None
    write_s = max((written.took_s for written in job.written[-LOOKS_BACK:]), default=0.0)
    measured = _measured_s(job)
    num_devices = max(1, len(job.survivors()))
    cost_s = max(MIN_COST_S, _modelled_s(job.setup.profile, num_devices) if measured is None else measured)
    mtbf_s = _mtbf_s(job)
    interval_s = max(min(math.sqrt(2 * cost_s * mtbf_s), MAX_S), MIN_S, 2 * write_s)
    num_steps = max(1, round(interval_s / max(statistics.median(job.step_s), 1e-6)))
    return CadenceView(num_steps, interval_s, cost_s, mtbf_s, write_s, measured is not None)


def due(job: JobRecord) -> bool:
    """Whether a checkpoint is to be begun at the next boundary."""
    # A fixed number of steps stays with the devices, which must hit it while the daemon is away. An
    # interval that follows from the journal need not, and the journal is here. (D-checkpoints-004)
    if job.spec.checkpoint.every != "auto":
        return False
    if job.counters.skipped_in_row:
        return False  # nothing has changed since the step before these
    before = job.checkpoint_counters.step if job.checkpoint else job.start.step
    found = cadence(job)
    return found is not None and job.counters.step - before >= found.steps


def _mtbf_s(job: JobRecord) -> float:
    """The mean time between failures that lead back to a checkpoint, as of the last step."""
    # Rollbacks and not failures: a failure that a live copy answers needs no checkpoint. Under a policy
    # that rolls back every loss is one, so one rule serves both. (D-checkpoints-006)
    now = job.steps[-1].at if job.steps else job.submitted_at
    return failures.mean_between_s(job.rolled_back_at, failures.began_at(job), now)


def _modelled_s(profile: Profile, num_devices: int) -> float:
    """A copy of a device's share in memory, and what the writing disturbs."""
    num_bytes = profile.copied_bytes
    return _GUESS_S + num_bytes / num_devices / _GUESS_BYTES_PER_S


def _measured_s(job: JobRecord) -> float | None:
    """The median over the last checkpoints of how much longer the steps took while they were written."""
    # What a checkpoint costs beside its copy (memory, processor, network) shows in step times alone. The
    # median of five forgives a step that was slow for another reason. (D-checkpoints-007)
    costs = [written.cost_s for written in job.written[-LOOKS_BACK:] if written.cost_s is not None]
    return statistics.median(costs) if costs else None


def measure(job: JobRecord) -> None:
    """Note what checkpoints cost whose last step is committed: later its steps may not be in memory."""
    now = job.steps[-1].step if job.steps else -1
    job.written = [
        msgspec.structs.replace(each, cost_s=_cost_s(job, each), is_measured=True)
        if not each.is_measured and each.told_by <= now
        else each
        for each in job.written
    ]
    job.measuring = not all(each.is_measured for each in job.written)


def roll_back(job: JobRecord, step: int) -> None:
    """Forget checkpoints that were written after ``step``; one of which a step tells that is done again is
    measured anew.
    """
    job.written = [
        msgspec.structs.replace(each, cost_s=None, is_measured=False) if each.told_by >= step else each
        for each in job.written
        if each.until <= step
    ]
    job.measuring = not all(each.is_measured for each in job.written)


def _cost_s(job: JobRecord, written: Written) -> float | None:
    """Over what so many steps took before, of the same epoch and size: others take another time. None where
    nothing tells.
    """
    # By the numbers of steps, in steps of one generation: in the simulator one word stands for many steps,
    # and by places in the list no cost was ever measured there. (D-checkpoints-012)
    first, end = job.index_of(written.step), job.index_of(written.told_by) + 1
    during = job.steps[first:end]
    sizes = job.spec.batch_sizes  # a larger batch takes another time, too
    alike = during[0].epoch, sizes.size(during[0].step)
    before = [
        step
        for step in job.steps[max(0, first - RECENT_STEPS) : first]
        if (step.epoch, sizes.size(step.step)) == alike
    ]
    if not before or (during[-1].epoch, sizes.size(during[-1].step)) != alike:
        return None
    num_steps = during[-1].step + 1 - written.step
    normal_s = statistics.median(step.step_s for step in before)
    return max(0.0, _total_s(during, written.step) - num_steps * normal_s)


def _total_s(steps: Sequence[Step], first: int) -> float:
    """Of ``steps``, the first of which begins with the step ``first``: one that was told of may stand for
    several.
    """
    begin = [first, *(step.step + 1 for step in steps)]
    return sum((step.step + 1 - was) * step.step_s for step, was in zip(steps, begin, strict=False))
