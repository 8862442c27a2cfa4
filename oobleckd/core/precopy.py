"""Pre-copies: state on its way to where a plan that is to come wants it, while training goes on
(docs/mechanisms/precopy.md); and where all of it is copied in the stop, what can be loaded before that.

Owns when they begin, for how long they are waited for, and when they are given up. They are nothing but a
faster transfer: no layout, journal or decision knows of them, a daemon that restarts has forgotten them, and
what is not there at the ``Deploy`` is copied then. Whether a plan is worth it is the policy's word
(``Proposal.precopy_s``).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from oobleckd.core import failures
from oobleckd.core.context import Core
from oobleckd.core.incident import size_of
from oobleckd.core.run import PreCopyUnderWay, Run
from oobleckd.planner.policy import Proposal
from oobleckd.protocol.changes import CopiesBegun
from oobleckd.protocol.messages import PreCopied, PreCopy

PATIENCE = 4.0
"""Times what is modelled that copies are waited for: a link that others use as well, or a target that is
always busy, takes so much longer or never ends.
"""
MIN_S, MIN_STEPS = 10.0, 8
"""So many seconds, and steps, are waited at least, as whoever joins has a model to open first. Training goes
on, so a wait in vain costs little.
"""
LAST_ROUNDS = 8
"""For so many rounds sources go on after that: the boundary at which all hold is a round or two away, more
where rounds are repeated.
"""


def over(core: Core, run: Run, proposal: Proposal) -> bool:
    """Whether it is time to stop for ``proposal``: what can be pre-copied is, has been waited for, or need
    not be; begins with it if need be.
    """
    if not proposal.begins:
        _preload(core, run, proposal)
        return True
    waits, found = proposal.precopy_s > 0, run.pre_copy
    if found is None or found.transfers != proposal.transfers:
        incarnations = _incarnations(core, proposal)
        if incarnations is not None:
            _begin(core, run, proposal, incarnations)
        return not waits
    return not waits or found.complete or run.job.counters.step >= found.until_step


def _incarnations(core: Core, proposal: Proposal) -> dict[str, str] | None:
    """Sources and targets with their incarnations; None while a spare is still taking the place of one of
    them.
    """
    incarnations = {}
    for device in sorted({end for copy in proposal.transfers for end in (copy.source, copy.target)}):
        info = core.members.device(device)
        if info is None or not core.members.living(device, info.incarnation):
            return None
        incarnations[device] = info.incarnation
    return incarnations


def _begin(core: Core, run: Run, proposal: Proposal, incarnations: dict[str, str]) -> None:
    job, devices = run.job, list(incarnations)
    assert job.layout is not None
    forget(core, run, besides=devices)
    step_s = failures.step_s(job) or proposal.plan.step_s
    wait_s = max(MIN_S, PATIENCE * proposal.precopy_s)
    # In steps and not in seconds: while training goes on steps pass, and while it does not nobody waits for
    # copies, so the core needs no timer. (D-precopy-008)
    steps = max(MIN_STEPS, math.ceil(wait_s / step_s)) if step_s > 0 else MIN_STEPS
    num_bytes = sum(copy.num_bytes for copy in proposal.transfers)
    text = f"{job.id}: {size_of(num_bytes)} are pre-copied, training goes on: {proposal.reason}"
    core.announce(text, CopiesBegun(job.id, num_bytes), (f"job:{job.id}",))
    targets = frozenset(copy.target for copy in proposal.transfers)
    # Of all that was ever announced the number is known to the journal, so no daemon uses it twice.
    run.pre_copy = PreCopyUnderWay(
        core.state.seq, proposal.transfers, incarnations, targets, job.counters.step + steps
    )
    run.guests |= set(devices)
    # Each of these looks at every device, so they are made once for all: with 10,000 devices the daemon would
    # have stood still for minutes. (D-precopy-015)
    survivors = frozenset(job.survivors())
    spec = core.compared(core.spec_of(job), survivors.union(devices))
    newcomers = [device for device in devices if device not in survivors]
    for device in devices:
        strange = [other for other in (newcomers if device in survivors else devices) if other != device]
        message = PreCopy(
            device=device,
            number=core.state.seq,
            job=job.id,
            spec=spec,
            transfers=proposal.transfers,
            rounds=steps + LAST_ROUNDS,
            peers=core.peers(strange),
            secret=core.secret(job.layout.epoch),
            devices_per_stage=job.layout.devices_per_stage,
        )
        core.tell(device, message)


def _preload(core: Core, run: Run, proposal: Proposal) -> None:
    """Have devices that are to join load the job now, so that the stop has only the copies."""
    # All waited 160 ms in the stop for a device that had waited for the end of the step. (D-precopy-016)
    job, preloads, turns = run.job, run.preloads, core.members.turns
    if preloads.proposal is proposal and preloads.turns == turns:
        return  # this comes after every event, and there may be thousands of devices
    precopied = run.pre_copy.targets if run.pre_copy is not None else frozenset()
    joining = {copy.target for copy in proposal.transfers}.difference(precopied, job.survivors())
    preloads.proposal, preloads.turns = proposal, turns
    told = [device for device in sorted(joining) if _is_to_load(core, run, device)]
    if not told:
        return
    run.guests.update(told)
    spec = core.compared(core.spec_of(job), (*job.survivors(), *told))
    for device in told:
        core.tell(device, PreCopy(device, 0, job.id, spec, (), 0, {}, "", preload=True))


def _is_to_load(core: Core, run: Run, device: str) -> bool:
    """Whether a device has not got the job and was not told to load it, in its present incarnation; a spare
    has one when it has taken the place.
    """
    info = core.members.device(device)
    if info is None or not core.members.living(device, info.incarnation):
        return False
    has_it = info.job == run.job.id and not info.layout
    if has_it or run.preloads.told.get(device) == info.incarnation:
        return False
    run.preloads.told[device] = info.incarnation
    return True


def on_precopied(core: Core, message: PreCopied) -> None:
    """Note that a target has its copies, and keeps them current."""
    found = core.run.pre_copy if core.run is not None else None
    if found is not None and message.number == found.number and message.device in found.targets:
        found.precopied.add(message.device)


def is_complete(run: Run) -> bool:
    """Whether all that is pre-copied is where it is to go."""
    return run.pre_copy is not None and run.pre_copy.complete


def check_lives(core: Core, run: Run) -> None:
    """A source or target whose incarnation is over takes the pre-copy with it."""
    found = run.pre_copy
    if found is not None and any(not core.members.living(*who) for who in sorted(found.incarnations.items())):
        forget(core, run)


def forget(core: Core, run: Run, *, besides: Collection[str] = ()) -> None:
    """Nothing is pre-copied any more. ``besides``: devices that are told of something else in its place."""
    found, run.pre_copy = run.pre_copy, None
    if found is None:
        return
    spec = core.spec_of(run.job)
    for device, incarnation in sorted(found.incarnations.items()):
        if device not in besides and core.members.living(device, incarnation):
            # An empty PreCopy and not a Release, which closes links and drops what copies of a deployment
            # that follows at once have brought. (D-precopy-007)
            none = PreCopy(device, found.number, run.job.id, spec, (), 0, {}, "")
            core.tell(device, none)
