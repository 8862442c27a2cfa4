"""Changes as data: what is written is read, what earlier versions wrote too, and what a newer one writes is
kept as it came.
"""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.core.entries import Noted, note, noted
from oobleckd.protocol.changes import (
    NO_DATA,
    PAYLOADS,
    AnyPayload,
    Change,
    IncidentBegan,
    IncidentOver,
    NodeLetIn,
    NodeLost,
    PlanDeployed,
    StepCommitted,
)
from oobleckd.protocol.incidentviews import IncidentView, ReasonView

VIEW = IncidentView(
    id="inc-1", job="j", cause="n2: signal 9", nodes=("n2",), at=1.0, epoch=2, step=7, open=False, phases=(),
    total_s=0.5, reason="shrink", parts=ReasonView(plan="shrink"),
)  # fmt: skip
EACH: tuple[AnyPayload, ...] = (
    NodeLost("n2", "signal 9"),
    NodeLetIn("n2", job="j"),
    StepCommitted("j", 7, None, "skipped", 3),
    PlanDeployed("j", 3, (("n1", "n3"),), 100, 0),
    IncidentBegan("inc-1", ("n2",), 2, "n2: signal 9"),
    IncidentOver("inc-1", VIEW),
)


def change(kind: str, text: str, data: str) -> Change:
    """As it arrives."""
    document = {"seq": 3, "at": 1.0, "kind": kind, "level": "warn", "text": text, "story": []}
    return msgspec.json.decode(
        msgspec.json.encode({**document, "data": msgspec.Raw(data.encode())}), type=Change
    )


@pytest.mark.parametrize("data", EACH, ids=lambda data: type(data).__name__)
def test_what_is_told_is_read(data: AnyPayload) -> None:
    told = Change(3, 1.0, data.kind, "info", "words", ("job:j",), data)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Change) == told
    entry = msgspec.msgpack.decode(msgspec.msgpack.encode(note(told)), type=Noted)
    assert noted(entry) == told


def test_every_payload_has_a_type_of_its_own_and_a_kind() -> None:
    assert len({each.__struct_config__.tag for each in PAYLOADS}) == len(PAYLOADS)
    assert all(each.kind for each in PAYLOADS)


def test_a_copy_edit_changes_no_data() -> None:
    data = msgspec.json.encode(NodeLost("n2", "signal 9")).decode()
    assert change("node", "n2 is gone for good", data).data == NodeLost("n2", "signal 9")


def test_what_earlier_versions_wrote_is_upgraded() -> None:
    assert change("node", "n2 lost: signal 9", '{"node":"n2"}').data == NodeLost("n2", "signal 9")
    began = change("incident", "inc-1: n2: signal 9", '{"incident":"inc-1","nodes":["n2"],"epoch":2}')
    assert began.data == IncidentBegan("inc-1", ("n2",), 2, "n2: signal 9")
    view = msgspec.json.encode(VIEW).decode()
    over = change("incident", "inc-1: recovered in 0.500 s", f'{{"incident":"inc-1","view":{view}}}')
    assert over.data == IncidentOver("inc-1", VIEW)
    step = change("step", "j: step 7", '{"job":"j","step":7,"loss":null,"outcome":"skipped","epoch":3}')
    assert step.data == StepCommitted("j", 7, None, "skipped", 3)


@pytest.mark.parametrize(
    "data",
    [
        '{"node":"n2"}',
        '{"type":"node-dreams","node":"n2","of":["sheep"]}',
        '{"type":"node-lost","node":7}',
        '{"step":"one"}',
    ],
)
def test_what_nobody_knows_stays_what_it_is(data: str) -> None:
    told = change("node", "n2 has a spare ready", data)
    assert isinstance(told.data, msgspec.Raw)
    again = msgspec.json.decode(msgspec.json.encode(told))
    assert again["data"] == msgspec.json.decode(data)
    assert noted(note(told)) == told


def test_a_change_may_have_none() -> None:
    told = Change(3, 1.0, "gap", "warn", "changes were missed", ())
    assert told.data == NO_DATA
    assert msgspec.json.decode(msgspec.json.encode(told))["data"] == {}
