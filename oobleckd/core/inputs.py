"""What the active job reads, and where: its identity, the nodes that have another one, and up to which round
it is known to have been right.

Owns these facts and the questions about them. What follows from a word of a device is ``reading``'s, the
rollback ``recovery``'s. A checkpoint counts as *checked* once all who took part in it, and live, have read
all of their text again from after its last round, and found what was fixed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from oobleckd.core.context import Core
from oobleckd.core.entries import CheckpointChecked
from oobleckd.core.run import KeptOut, Run
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import NodeKeptOut, NodeLetIn
from oobleckd.protocol.datamessages import Identify
from oobleckd.protocol.inputs import Inputs, difference, same
from oobleckd.protocol.parts import Counters

# Those who are kept out, every second: the answer costs a stat as long as nothing changes. Nodes that join
# are not asked, as nearly all have the right text. (D-data-009)
ASK_AGAIN_S = 1.0
PATIENCE_S = 30.0
"""So long a job waits for its text to be put back, where too few nodes have it to go on."""
_NAMED = 3


def wrong(job: JobRecord, found: Inputs) -> str:
    """What of ``found`` is not what the job reads, for a sentence; "" where nothing is known to differ."""
    return difference(job.inputs, found)


# ---------------------------------------------------------------------- who is kept out


def keep_out(core: Core, run: Run, device: str, why: str) -> None:
    """The node of ``device`` has another text than the job, or none: no plan uses it until it says that it
    has.
    """
    name = node_of(device)
    kept = run.kept_out.setdefault(name, KeptOut(core.now))
    if kept.wrong.get(device) == why:
        return
    kept.wrong[device], kept.asked_at = why, core.now
    text = f"{name} is kept out of the plan of {run.job.id}: {why}"
    story = (f"job:{run.job.id}", f"node:{name}")
    core.announce(text, NodeKeptOut(name, device, run.job.id, "data-changed", why), story, level="warn")


def let_in(core: Core, run: Run, device: str) -> None:
    """``device`` has the job's text."""
    name = node_of(device)
    kept = run.kept_out.get(name)
    if kept is None or kept.wrong.pop(device, None) is None or kept.wrong:
        return
    del run.kept_out[name]
    core.joined_at = core.now
    text = f"{name} has the text of {run.job.id} and may be used again"
    core.announce(text, NodeLetIn(name, run.job.id), (f"job:{run.job.id}", f"node:{name}"))


def begin_anew(core: Core, name: str) -> None:
    """The node is in a new incarnation: what it reads now is another question."""
    if core.run is not None:
        core.run.kept_out.pop(name, None)


def ask_again(core: Core) -> None:
    """Ask those who are kept out what they would read by now."""
    run = core.run
    for name, kept in sorted(run.kept_out.items()) if run is not None else ():
        if core.now < kept.asked_at + ASK_AGAIN_S:
            continue
        kept.asked_at = core.now
        node = core.members.nodes.get(name)
        if node is not None and node.present:
            here = {info.device for info in node.devices if info.device not in node.fallen}
            ask(core, [device for device in sorted(kept.wrong) if device in here])


def ask(core: Core, devices: Iterable[str]) -> None:
    """Have ``devices`` say what they would read."""
    assert core.run is not None
    job = core.run.job
    for device in devices:
        core.tell(device, Identify(device, job.id, core.spec_of(job)))


def kept_words(run: Run) -> str:
    """Who is kept out and why, for the end of a sentence; "" where nobody is."""
    names = sorted(run.kept_out)
    if not names:
        return ""
    said = [f"{name} ({next(iter(run.kept_out[name].wrong.values()), '')})" for name in names[:_NAMED]]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"kept out for what they would read: {', '.join(said)}{more}"


def good(job: JobRecord) -> str:
    """The newest state that is known to come of the right text, for a sentence."""
    kept = trusted(job)
    if kept.directory == "init":
        return "nothing is kept that is known to come of the right text"
    return f"the last good checkpoint is {kept.directory} (step {kept.counters.step})"


# ---------------------------------------------------------------------- one text for all


@dataclass(slots=True)
class InputsGroup:
    """Nodes that read the same."""

    inputs: Inputs
    nodes: set[str] = field(default_factory=set)


def groups(said: dict[str, Inputs]) -> list[InputsGroup]:
    """Devices by what they read, the group of most nodes first. A node whose devices do not agree is in
    several.
    """
    found: list[InputsGroup] = []
    for device, inputs in sorted(said.items()):
        group = next((each for each in found if _all_same(each.inputs, inputs)), None)
        if group is None:
            group = InputsGroup(inputs)
            found.append(group)
        group.nodes.add(node_of(device))
    return sorted(found, key=lambda group: -len(group.nodes))


def _all_same(one: Inputs, other: Inputs) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(
        mine.kind == theirs.kind and same(mine, theirs) for mine, theirs in pairs
    )


# ---------------------------------------------------------------------- up to where it was right


def took_part(run: Run, incarnations: dict[str, str], at: Counters) -> None:
    """A layout is in force from ``at`` on: its devices read from now on."""
    for incarnation in incarnations.values():
        run.reads_since.setdefault(incarnation, at.round)


def note_checks(core: Core, run: Run) -> None:
    """Journal up to which checkpoint the text is known to have been right, if that is further than before."""
    job = run.job
    if not job.inputs or not all(each.whole for each in job.inputs):
        return
    alive = {d: incarnation for d, incarnation in job.readers.items() if core.members.living(d, incarnation)}
    told = {
        incarnation: run.checked[incarnation] for incarnation in alive.values() if incarnation in run.checked
    }
    if not told:
        return
    base = doubtful_base(job)
    if base is not None and not any(
        run.reads_since.get(incarnation, -1) < base.counters.round <= upto
        for incarnation, upto in told.items()
    ):
        return  # who has come since can vouch for nothing that was made from it
    # Who has come since has read nothing of what was before.
    upto = min(
        max(told.get(incarnation, -1), run.reads_since.get(incarnation, 0)) for incarnation in alive.values()
    )
    upto = min(upto, max(told.values()))
    new = [kept for kept in job.kept if not kept.checked and kept.counters.round <= upto]
    if new:
        core.record(CheckpointChecked(job.id, new[-1].counters, core.now))


def is_checked(job: JobRecord) -> bool:
    """Whether the newest checkpoint is known to come of the right text."""
    # The last checkpoint is the result, so a job is not done before it is checked: milliseconds with a
    # small text, as long as reading it with a large one. (D-data-006)
    return not job.inputs or bool(job.kept and job.kept[-1].checked)


def doubtful_base(job: JobRecord) -> KeptCheckpoint | None:
    """The checkpoint from which the job goes on, where nobody has said yet that its text was right."""
    if not job.inputs:
        return None
    return next((kept for kept in job.kept if kept.directory == job.source and not kept.checked), None)


def witnessed(core: Core, run: Run, kept: KeptCheckpoint) -> bool:
    """Whether somebody lives who has read for ``kept``, and will say whether that was right."""
    alive = (
        incarnation
        for device, incarnation in sorted(run.job.readers.items())
        if core.members.living(device, incarnation)
    )
    return any(run.reads_since.get(incarnation, -1) < kept.counters.round for incarnation in alive)


def vouches(core: Core, name: str) -> bool:
    """Whether a device of the node has yet to say that the checkpoint from which the job goes on comes of the
    right text.
    """
    job = core.run.job if core.run is not None else None
    base = doubtful_base(job) if job is not None else None
    if core.run is None or job is None or base is None:
        return False
    own = [incarnation for device, incarnation in job.readers.items() if node_of(device) == name]
    return any(core.run.checked.get(incarnation, -1) < base.counters.round for incarnation in own)


def trusted(job: JobRecord) -> KeptCheckpoint:
    """The newest state that is known to come of the right text: a checked checkpoint, or where
    the job began.
    """
    known = [kept for kept in job.kept if kept.checked or not job.inputs]
    return known[-1] if known else KeptCheckpoint(job.origin, job.start)


def rollback(core: Core, job: JobRecord) -> KeptCheckpoint | None:
    """Where to roll back to, if not to the newest checkpoint: nobody lives any more who could say that its
    text was right.
    """
    run = core.run
    if run is None or run.job is not job or not job.kept or is_checked(job):
        return None
    return None if witnessed(core, run, job.kept[-1]) else trusted(job)
