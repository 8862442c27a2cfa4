"""What others wrote, from where it comes in to everywhere that it is kept or shown: escaped."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from oobleckd.core import view
from oobleckd.core.entries import AnyEntry, NodeDrained, NodeOver
from oobleckd.core.events import Asked, Command, Heard, Record
from oobleckd.daemon import metrics
from oobleckd.daemon.config import Config
from oobleckd.daemon.service import Service, open_service
from oobleckd.host.journald import LineFormatter
from oobleckd.protocol.agentmessages import Goodbye, Hello
from oobleckd.protocol.messages import PROTOCOL, DeviceFailed
from oobleckd.protocol.parts import Notice
from oobleckd.protocol.requests import Drain
from oobleckd.protocol.text import all_visible, visible

RAW = "\x1b[2J\x1b]0;title\x07\r\nnode-1  active\u202e\u200b\x9b1m"


def opened(folder: Path) -> Service:
    return open_service(Config(state_dir=str(folder), curve=False, endpoint="tcp://127.0.0.1:0", replay_mb=0))


def is_harmless(found: object) -> bool:
    return all_visible(found) is found


def hear(service: Service, *events: Heard | Asked) -> list[Command]:
    now = service.clock.now()
    return [command for event in events for command in service.machine.handle(event, now)]


@pytest.mark.asyncio
async def test_what_nodes_and_users_say_is_escaped_where_it_is_kept(tmp_path: Path) -> None:
    """Host, zone, notice, reasons of drains, refusals and ends: in entries, views, changes and metrics."""
    service = opened(tmp_path)
    hello = Hello(PROTOCOL, "n1", "life", RAW, ready=True, devices=(), zone=RAW, notice=Notice(RAW, 20.0))
    failed = DeviceFailed("n1/0", "job-1", RAW, RAW)
    did = hear(
        service, Heard("n1", hello), Asked(1, Drain("n1", RAW, who=RAW)), Heard("n1", failed),
        Heard("n1", Goodbye("life", RAW)),
    )  # fmt: skip
    entries = [command.entry for command in did if isinstance(command, Record)]
    assert any(isinstance(entry, NodeDrained) and visible(RAW) in entry.reason for entry in entries)
    assert any(isinstance(entry, NodeOver) for entry in entries)
    assert all(is_harmless(command) for command in did)
    assert all(map(is_harmless, view.node_views(service.core)))
    assert is_harmless(tuple(view.changes(service.core)))
    assert "\x1b" not in (await metrics.render(service)).decode()
    await service.close()


@pytest.mark.asyncio
async def test_an_old_journal_with_raw_text_is_shown_escaped(tmp_path: Path) -> None:
    """What an older version wrote is made harmless where it is read."""
    service = opened(tmp_path)
    hear(service, Heard("n1", Hello(PROTOCOL, "n1", "life", "host", ready=True, devices=())))
    service.journal.append([NodeDrained("n1", RAW, undo=False, at=1.0, cause="operator")]).result()
    await service.close()
    again = opened(tmp_path)
    assert again.journal.read(AnyEntry)[-1].reason == RAW
    assert again.core.state.drained["n1"] == visible(RAW)
    await again.close()


def test_an_entry_of_the_log_is_one_line_whatever_is_in_it(caplog: pytest.LogCaptureFixture) -> None:
    """And a traceback is set in, so that nothing in it looks like an entry."""
    formatter = LineFormatter("%(levelname)s %(message)s")
    logger = logging.getLogger("test")
    try:
        int(RAW)
    except ValueError:
        logger.exception("refused %s", RAW)
    text = formatter.format(caplog.records[-1])
    first, *more = text.split("\n")
    assert first == f"ERROR refused {visible(RAW)}"
    assert more
    assert all(line.startswith("    ") and visible(line) == line for line in more)


def test_a_job_has_a_name_of_one_line() -> None:
    """The end of a pattern is the end of the text, and not of its last line."""
    from oobleckd.protocol.job import parse_job
    from oobleckd.protocol.jobtable import JobError

    raw = {"name": "job\n", "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 8}}
    with pytest.raises(JobError):
        parse_job(raw)
    assert msgspec.json.encode(parse_job(raw | {"name": "job"}))
