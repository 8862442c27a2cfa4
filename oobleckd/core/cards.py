"""Takes in what nodes tell of their devices and cards, announces what cards report, and shows the figures.

Owns the words for an error of a card. What is kept is ``devicefigures``'; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from oobleckd.core.context import Core
from oobleckd.core.entries import noted
from oobleckd.core.membership import Node
from oobleckd.core.memory import planned_by_device
from oobleckd.protocol.agentmessages import FiguresTold
from oobleckd.protocol.changes import CardError, Level
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport
from oobleckd.protocol.text import all_visible
from oobleckd.protocol.xids import meaning
from oobleckd.words import count

_TAG = b'"card-error"'


def heard(core: Core, name: str, message: FiguresTold) -> None:
    """The node ``name`` told of its devices."""
    node = core.members.nodes.get(name)
    if node is None or not node.alive or node.incarnation != message.incarnation:
        return
    if not core.devices_told.recalled:
        # An agent says its last reports again and again, whichever daemon listens: what a daemon before this
        # one announced is in the journal. (D-watching-020)
        core.devices_told.recall(_announced(core))
    for report in core.devices_told.take(name, message, {info.device for info in node.devices}):
        _announce(core, name, all_visible(report))


def figures_of(core: Core, node: Node, planned: Mapping[str, int]) -> tuple[DeviceFigures, ...]:
    """What ``node`` told last of its devices, with the bytes that the plan counts on; nothing of a node that
    is over.
    """
    told = core.devices_told.of(node.name, node.incarnation) if node.alive else ()
    return tuple(msgspec.structs.replace(each, planned_bytes=planned.get(each.device, 0)) for each in told)


def planned(core: Core) -> dict[str, int]:
    """Device -> the bytes that the planner counts on for it, of the plan in force."""
    job = core.run.job if core.run is not None else None
    return planned_by_device(job, job.plan) if job is not None and job.plan is not None else {}


def _announced(core: Core) -> Iterator[tuple[str, CardReport]]:
    """Of which node what was announced of cards, as far as changes are kept."""
    for entry in core.state.history:
        if entry.kind == CardError.kind and entry.data.get("type") == _TAG:
            said = noted(entry).data
            if isinstance(said, CardError):
                report = CardReport(said.device, said.reported_at, said.card, said.xid, said.ecc_uncorrected)
                yield said.node, report


def _announce(core: Core, name: str, report: CardReport) -> None:
    of_card = f"the card of {report.device}" + (f" ({report.card})" if report.card else "")
    level: Level = "error"
    means = ""
    if report.xid:
        means, level = meaning(report.xid)
        text = f"{of_card} reported XID {report.xid}: {means}"
    else:
        errors = count(report.ecc_uncorrected, "memory error")
        text = f"{of_card} has had {errors} that could not be corrected (ECC) since its driver was loaded"
    said = CardError(name, report.device, report.card, report.xid, means, report.ecc_uncorrected, report.at)
    core.announce(text, said, (f"node:{name}",), level=level)
