"""One recovery, timed: from the first evidence to the first step of the layout that follows.

Phases: *detect* evidence to report; *plan* report to decision; *reconfigure* decision to the new layout being
sent (the interrupted step commits in it); *copy* until every device has its layers; *resume* until the
first step of the new layout. A second loss begins with *detect* again. Owns the times, not the acts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from oobleckd.planner.policy import Proposal
from oobleckd.protocol.incidentviews import (
    IncidentView,
    LossView,
    Phase,
    PhaseView,
    ReasonView,
    RejectedView,
    RollbackView,
    SourceView,
)
from oobleckd.words import count


@dataclass(slots=True)
class Incident:
    """An open incident. ``round`` is the first one not known to be committed at the loss, ``last_round`` the
    one with whose commit it is over (-1: not known yet). ``sent_bytes``: by devices, of the layers that
    others hold by the new plan.
    """

    id: str
    job: str
    cause: str
    nodes: tuple[str, ...]
    at: float
    epoch: int
    step: int
    round: int
    step_layer_gradients: int
    marks: list[tuple[Phase, float]] = field(default_factory=list)
    parts: ReasonView = field(default_factory=ReasonView)
    losses: tuple[LossView, ...] = ()
    steps_lost: int = 0
    copied_bytes: int = 0
    layer_gradients: int = 0
    layer_forwards: int = 0
    committed_s: float = 0.0
    decided: bool = False
    last_round: int = -1
    cost_s: float = 0.0
    rejected: tuple[RejectedView, ...] = ()
    sent_bytes: Counter[str] = field(default_factory=Counter)

    def enter(self, phase: Phase, now: float) -> None:
        """The present phase is over and ``phase`` begins; nothing if it is the present one."""
        if not self.marks or self.marks[-1][0] != phase:
            self.marks.append((phase, now))

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self.marks[-1][0]

    def view(self, now: float, *, still_open: bool = True) -> IncidentView:
        """As it stands at ``now``."""
        ends = [start for _, start in self.marks[1:]] + [now]
        phases = tuple(
            PhaseView(phase, start - self.at, end - start)
            for (phase, start), end in zip(self.marks, ends, strict=True)
        )
        return IncidentView(
            id=self.id,
            job=self.job,
            cause=self.cause,
            nodes=self.nodes,
            at=self.at,
            epoch=self.epoch,
            step=self.step,
            open=still_open,
            phases=phases,
            total_s=now - self.at,
            reason=sentence(self.parts),
            steps_lost=self.steps_lost,
            copied_bytes=self.copied_bytes,
            layer_gradients=self.layer_gradients,
            step_layer_gradients=self.step_layer_gradients,
            committed_s=self.committed_s,
            layer_forwards=self.layer_forwards,
            cost_s=self.cost_s,
            rejected=self.rejected,
            sources=tuple(SourceView(device, sent) for device, sent in self._most_first()),
            parts=self.parts,
            losses=self.losses,
        )

    def _most_first(self) -> list[tuple[str, int]]:
        return sorted(self.sent_bytes.items(), key=lambda pair: (-pair[1], pair[0]))


def rejected_views(proposal: Proposal) -> tuple[RejectedView, ...]:
    """The ways that a policy did not take, as the API shows them."""
    return tuple(RejectedView(**msgspec.structs.asdict(each)) for each in proposal.rejected)


def sentence(parts: ReasonView) -> str:
    """The reason of an incident, for people."""
    rerouted = f"micro-batches of {', '.join(parts.rerouted)} go to other holders of their layers"
    ways = (parts.back, parts.plan, rerouted if parts.rerouted else "")
    return "; then ".join(filter(None, ways)) + precopied_words(parts.staged_bytes)


def back_words(back: RollbackView, lost_before: int, *, trusted: bool) -> str:
    """How far a job goes ``back``, and to what. ``lost_before``: steps, in the same incident; ``trusted``: it
    has a checkpoint, which cannot be.
    """
    far = count(back.steps_lost, "step")
    if lost_before:
        far += f" ({lost_before + back.steps_lost} in all)"
    if back.source != "init":
        return f"back {far} to the checkpoint of step {back.step}"
    return f"back {far} to fresh weights: no checkpoint {'that can be trusted' if trusted else 'yet'}"


def precopied_words(staged_bytes: int) -> str:
    """What is added to a sentence where so much had been copied before the stop."""
    return f"; {size_of(staged_bytes)} had been pre-copied" if staged_bytes else ""


def size_of(num_bytes: int) -> str:
    """Bytes for a sentence."""
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"


def reopened(view: IncidentView, round_: int, now: float) -> Incident:
    """An incident that was open when the daemon stopped. Its clock may have been ahead of the present one."""
    began = min(view.at, now)
    return Incident(
        view.id,
        view.job,
        view.cause,
        view.nodes,
        began,
        view.epoch,
        view.step,
        round_,
        view.step_layer_gradients,
        [("detect", began)],
        view.parts if view.parts != ReasonView() else ReasonView(plan=view.reason),
        cost_s=view.cost_s,
        rejected=view.rejected,
        losses=view.losses,
    )
