"""Silent data corruption: whoever is named is quarantined, and the job rolls back to a state that all agreed
on (docs/corruption.md).

Owns what is found in a disagreement, the quarantine, how far back to go, and what is still to be settled when
the same step is computed again. Who is to blame is ``blame``'s; the rollback is ``recovery``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from oobleckd.core import blame
from oobleckd.core.blame import Dispute
from oobleckd.core.context import Core
from oobleckd.core.entries import CorruptionFound, CorruptionSettled, NodeDrained
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import DisputeUnsettled, Evidence, NodeQuarantined
from oobleckd.protocol.corruption import Fingerprints, Odd, differing
from oobleckd.protocol.incidentviews import RollbackCause
from oobleckd.protocol.messages import Corrupted, StepDone
from oobleckd.protocol.parts import Counters


class Finding(msgspec.Struct, frozen=True):
    """Bits are wrong: ``cause`` says what and whose, for people, ``nodes`` may have them, and ``target`` can
    be trusted. ``code``: what is wrong, for programs.
    """

    cause: str
    nodes: tuple[str, ...]
    target: KeptCheckpoint
    code: RollbackCause = "corruption"


def heard(core: Core, message: Corrupted) -> Finding | None:
    """A device goes no further. Nothing follows where its layout, or its history, was given up already."""
    run = core.run
    if run is None or run.job.id != message.job or run.job.layout is None or run.phase == "adrift":
        return None
    layout = run.job.layout
    if message.device not in layout.holdings or message.epoch < layout.epoch:
        return None
    if message.own:
        return found(core, run, message.counters, (), {message.device: message.own})
    return found(core, run, message.counters, message.odds) if message.odds else None


def at_boundary(core: Core, run: Run) -> Finding | None:
    """What is wrong with the state that devices told of, who all hold at a boundary: no vote will
    compare it.
    """
    told = {device: run.held[device].digests for device in run.job.survivors()}
    odds = differing(told)
    if odds:
        return found(core, run, run.job.counters, odds)
    state = {bucket: digest for digests in told.values() for bucket, digest in digests.items()}
    if state:
        _settle(core, run.job, run.job.counters.step, Fingerprints(state, {}))
    return None


def found(
    core: Core, run: Run, at: Counters, odds: tuple[Odd, ...], own: Mapping[str, str] | None = None
) -> Finding:
    """Bits are wrong at the boundary ``at``: holders do not agree, or devices say what is wrong with their
    ``own``. Journals it, and quarantines who is named.
    """
    job = run.job
    named: dict[str, tuple[str, Evidence]] = {
        device: (why, "own-check") for device, why in (own or {}).items()
    }
    differ = f"its {_what(odds)} differ from those of most holders"
    named |= dict.fromkeys(blame.outvoted(odds), (differ, "outvoted"))
    if not named:
        often = blame.suspected((*job.disputes, Dispute(at.step, odds)))
        unsettled = f"it was in {blame.TOO_OFTEN} disagreements that nobody could settle"
        named = dict.fromkeys(often, (unsettled, "too-often"))
    core.record(CorruptionFound(job.id, at.step, odds, tuple(sorted(named)), core.now))
    for device, (why, evidence) in sorted(named.items()):
        quarantine(core, device, why, evidence)
    who = sorted(named) or sorted({device for odd in odds for device in odd.said})
    what = _what(odds) if odds else "gradient sums"
    cause = f"silent data corruption in step {at.step + 1}: {what} of {' or '.join(who)}"
    return Finding(cause, tuple(sorted({node_of(device) for device in who})), trusted(job, at.step))


def forgotten(job: JobRecord) -> Finding:
    """The journal has lost its end: whatever the devices hold came of decisions that nobody knows
    any more.
    """
    last = (
        KeptCheckpoint(job.checkpoint, job.checkpoint_counters)
        if job.checkpoint
        else KeptCheckpoint(job.origin, job.start)
    )
    return Finding(
        "the end of the daemon's journal is lost, and with it what its devices were told", (), last,
        "journal-lost",
    )  # fmt: skip


def trusted(job: JobRecord, step: int) -> KeptCheckpoint:
    """The last state that all agreed on before ``step``: a checkpoint that is not younger than the last
    comparison, or the start.
    """
    # The newest checkpoint older than the last comparison: with one in every step that is the newest, but
    # in a race of one step, for which two are known. (D-corruption-007)
    every = job.spec.fault_tolerance.check_every
    agreed = (step - 1) // every * every if every else step - 1
    known = [kept for kept in job.kept if kept.counters.step <= agreed]
    return known[-1] if known else KeptCheckpoint(job.origin, job.start)


def quarantine(core: Core, device: str, why: str, evidence: Evidence) -> None:
    """Keep the node of ``device`` out of all plans until somebody has looked at it."""
    node = node_of(device)
    if node in core.state.quarantined:
        return
    # A drain with a reason, lifted by hand: it is in the journal, get nodes shows it, and a machine that
    # flipped a bit once is tested by people. (D-corruption-006)
    reason = f"quarantined: {device}: {why}"
    core.record(NodeDrained(node, reason, undo=False, at=core.now, cause="corruption"))
    text = (
        f"{device} computes or keeps wrong bits: {why}; {node} is quarantined "
        f"(test its memory; `oobleckctl undrain {node}` lets it back)"
    )
    core.announce(text, NodeQuarantined(node, device, why, evidence), (f"node:{node}",), level="error")


def settle(core: Core, job: JobRecord, message: StepDone) -> None:
    """A step in which holders had disagreed was computed again: who had been wrong is known now."""
    if message.fingerprints is not None:
        _settle(core, job, message.counters.step, message.fingerprints)


def _settle(core: Core, job: JobRecord, step: int, truth: Fingerprints) -> None:
    # Exactness makes the re-run a judge at no price of its own, as the job has to roll back anyway; a third
    # device would need the state from one of the two. (D-corruption-002)
    for dispute in [each for each in job.disputes if each.step == step and each.covered_by(truth)]:
        named = blame.refuted(dispute, truth)
        core.record(CorruptionSettled(job.id, dispute.step, named, core.now))
        number, what = step + 1, _what(dispute.odds)
        for device in named:
            why = f"its {what} of step {number} are not what came out when it was computed again"
            quarantine(core, device, why, "recomputed")
        if not named:
            who = " nor ".join(sorted(dispute.devices()))
            text = (
                f"{job.id}: whose {what} were wrong in step {number} cannot be told: neither {who} had "
                "what came out now"
            )
            said = DisputeUnsettled(job.id, number, tuple(sorted(dispute.devices())))
            core.announce(text, said, (f"job:{job.id}",), level="warn")


def to_recheck(job: JobRecord) -> int:
    """The step whose fingerprints are wanted next (-1: of none)."""
    return min((dispute.step for dispute in job.disputes), default=-1)


def _what(odds: Sequence[Odd]) -> str:
    """What of the buckets, for people."""
    words = {"state": "weights or optimizer state", "means": "mean gradients", "gradients": "gradient sums"}
    return " and ".join(words[kind] for kind in words if kind in {odd.what for odd in odds})
