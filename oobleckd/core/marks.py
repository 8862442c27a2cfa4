"""What happened to a run, for whoever draws its curve: incidents and rollbacks of a job, by the step.

Pure views over ``Core``, in the structs of the API.
"""

from __future__ import annotations

from oobleckd.core.context import Core
from oobleckd.core.entries import Noted, noted
from oobleckd.core.view import incident_views
from oobleckd.protocol.changes import JobWentBack
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.watch import CurveMark


def curve_marks(core: Core, job: str) -> list[CurveMark]:
    """Incidents and rollbacks of ``job`` as far as they are kept, in the order in which they happened."""
    known = [each for each in incident_views(core) if each.job == job]
    backs = [mark for each in core.state.history if (mark := _told_back(each, job)) is not None]
    told = {mark.id for mark in backs}
    # What was announced is kept for less long than incidents, which tell of their last rollback alone.
    backs += [_back_of(each) for each in known if each.parts.rollback is not None and each.id not in told]
    return sorted([*map(_incident, known), *backs], key=lambda mark: mark.at)


def _incident(found: IncidentView) -> CurveMark:
    """The step that it interrupted had not been committed."""
    return CurveMark(
        found.step - 1, found.at, "incident", found.id, found.nodes, found.total_s, found.steps_lost
    )


def _back_of(found: IncidentView) -> CurveMark:
    back = found.parts.rollback
    assert back is not None
    return CurveMark(back.step, found.at, "rollback", found.id, found.nodes, steps_lost=back.steps_lost)


def _told_back(entry: Noted, job: str) -> CurveMark | None:
    """The rollback that it announced, if that is what it did."""
    if entry.kind != "job" or f"job:{job}" not in entry.story:
        return None
    back = noted(entry).data
    if not isinstance(back, JobWentBack):
        return None
    incident = next((key for key in entry.story if key.startswith("incident:")), "").partition(":")[2]
    return CurveMark(back.step, entry.at, "rollback", incident, steps_lost=back.steps_lost)
