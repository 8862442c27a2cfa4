"""`[[sink]]` of a job.toml: what may be in it, and that a job without one stays what it was."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from oobleckd.protocol.canonical import digest
from oobleckd.protocol.job import Job, parse_job, table_of
from oobleckd.protocol.jobtable import JobError
from tests.helpers.cluster import tiny_job

PLAIN = tiny_job("plain", train={"global_batch": 12}, resources={"device_memory": "10MiB"})


def with_sinks(*sinks: dict[str, Any]) -> Job:
    return parse_job(table_of(PLAIN) | {"sink": list(sinks)})


def test_a_job_without_sinks_is_encoded_as_before() -> None:
    assert "sink" not in msgspec.json.decode(msgspec.json.encode(PLAIN))
    assert "sink" not in table_of(PLAIN)
    assert PLAIN.sinks == ()
    # As e66917fe, which knew no sinks, had it.
    assert digest(PLAIN) == "5bbcbd89d226bc7c9263c3c899dcbb466d91881e12e584e05b37329f39147dc6"


def test_sinks_change_no_digest() -> None:
    sunk = with_sinks({"kind": "csv"}, {"kind": "wandb", "project": "p", "tags": ["a"]})
    assert digest(sunk) == digest(PLAIN)
    assert parse_job(table_of(sunk)) == sunk
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sunk), type=Job) == sunk
    assert [sink.kind for sink in sunk.sinks] == ["csv", "wandb"]


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        (({"kind": "csv"}, {"kind": "csv"}), "sink[1].kind: 'csv' is there twice"),
        (({"kind": "csv", "project": "p"},), "sink[0].project: is for wandb, and this is csv"),
        (({"kind": "csv", "options": {"path": "/etc"}},), "sink[0].options: csv has none"),
        (({"kind": "../csv"},), "sink[0].kind: is '../csv', and has to be text of another form"),
        (({"kind": "csv", "path": "/etc"},), "sink[0].path: unknown key"),
        (({"kind": "mine", "options": {"a": [1]}},), "sink[0].options"),
    ],
)
def test_what_cannot_be(sinks: tuple[dict[str, Any], ...], said: str) -> None:
    with pytest.raises(JobError) as wrong:
        with_sinks(*sinks)
    assert str(wrong.value).startswith(said)


def test_on_event_in_a_job_is_refused() -> None:
    with pytest.raises(JobError, match=r"on_event: unknown key: .* under \[\[daemon.on_event\]\]") as wrong:
        parse_job(table_of(PLAIN) | {"on_event": [{"command": ["id"]}]})
    assert wrong.value.hint == "see docs/sinks.md#when-something-happens"
