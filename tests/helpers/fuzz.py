"""Damage for fuzzing: valid bytes, changed as broken or hostile programs change them. Everything follows from
a seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from oobleckd.planner.profile import LayerCost, Profile
from oobleckd.protocol import codec
from oobleckd.protocol.agentmessages import DeviceLost, FiguresTold, Goodbye, Heartbeat, LogTold
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.datamessages import PrepareDone, PrepareFailed, Preparing
from oobleckd.protocol.messages import (
    Corrupted,
    DeviceFailed,
    Emptied,
    Held,
    LinkDown,
    Measured,
    OpTimes,
    PreCopied,
    Progress,
    Ready,
    StepDone,
)
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import CardReport, Counters, Vote
from tests.helpers.agents import hello

_TOKENS = (
    b"", b"\x00", b"\xff", b"\xc1", b"\xc0", b"\x80", b"\x90", b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcb\x7f\xf0" + b"\0" * 6,
    b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"-1", b"99999999999999999999", b"1e999", b"NaN", b"null", b"[" * 2000, b'{"a":' * 2000, b"\xed\xa0\x80",
    b"\\ud800", b"%00", b"%ff",
    b"../../etc/passwd", b"\r\n\r\n", b"\r\nContent-Length: 5\r\n", b"\r\nTransfer-Encoding: chunked\r\n",
    b"A" * 9000,
)  # fmt: skip


def mutated(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of ``corpus``, changed in one to four places."""
    data = bytearray(dice.choice(corpus))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 1 if data:
                data[at % len(data)] = dice.randrange(256)
            case 2:
                data[at:at] = dice.choice(_TOKENS)
            case 3:
                del data[at : at + dice.randint(1, 40)]
            case 4:
                data = data[:at]
            case 5:
                other = dice.choice(corpus)
                data[at:] = other[dice.randrange(len(other)) :]
            case _:
                data[at:at] = data[at : at + dice.randint(1, 40)]
    return bytes(data)


def worker_frames(node: str) -> list[bytes]:
    """A valid message of every kind that an agent sends."""
    device, now = f"{node}/0", Counters(3, 3, 3)
    vote = Vote({0: (1.0, 2.0), 1: (0.5,)}, {0: 2.0, 1: 2.5}, digests={0: 2**63})
    layer = LayerCost("layer", 0.01, 0.02, 1, 1, 1, 1)
    messages: list[msgspec.Struct] = [
        hello(node),
        Heartbeat("incarnation.1"),
        DeviceLost("incarnation.1", device, "signal 9", spare=True),
        LinkDown(device, "node-9/0", "closed"),
        Measured(device, "job-1", Profile("p", "cpu", (layer,) * 3)),
        Ready(device, 1, 10, 20, (FolderNote("fresh", 9, ("w",)),)),
        PreCopied(device, 1, 2),
        Emptied(device, "daemon.1"),
        Progress(device, 1, now, {0: (0, 1)}, {0: (1, 1)}, vote, vote),
        Held(device, 1, now, digests={0: 5}),
        StepDone(device, "job-1", 1, now, "applied", 2.0, 1.0, 0.1, 4, "ledger", 0.1, 0.05),
        OpTimes(device, "job-1", 1, 1, now, 0.0, b"\x90"),
        CheckpointPart(device, "job-1", now, "/tmp/x.partial", 0, 2, "bucket", 9, "00", {"w": "00"}),
        DeviceFailed(device, "job-1", "no text", "write some"),
        Corrupted(device, "job-1", 1, now, own="sums"),
        Preparing("job-1", "d.1", "tokenize", "web", 1, 2, 3.0),
        PrepareDone("job-1", ("/folder", ""), "d.1"),
        PrepareFailed("job-1", "no text", "write some", died=True, order="d.1"),
        FiguresTold("incarnation.1", (DeviceFigures(device, 1.0, 5),), (CardReport(device, 1.0, xid=79),)),
        LogTold("ticket", ("a line",), complete=True),
        Goodbye("incarnation.1", "SIGTERM"),
    ]
    return [codec.encode(message) for message in messages]


def http_requests() -> list[bytes]:
    """Valid requests to every route."""
    job = {"name": "small", "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 8}}
    gets = [
        "/healthz", "/metrics", "/openapi.json", "/v1/status", "/v1/jobs", "/v1/jobs/small-1",
        "/v1/jobs/small-1/steps?since=3",
        "/v1/jobs/small-1/goodput", "/v1/nodes", "/v1/nodes/node-9/log?lines=5", "/v1/incidents",
        "/v1/incidents/inc-1/bundle",
        "/v1/pipelines?job=small-1",
        "/v1/templates", "/v1/layers?job=small-1", "/v1/story?key=node:node-1", "/v1/events?since=1&follow=0",
        "/v1/schedules",
        "/v1/schedule?step=1&modelled=1", "/v1/impact?nodes=node-1,node-2", "/v1/past?at=5.0&span=10",
    ]  # fmt: skip
    posts = {
        "/v1/jobs": {"job": job, "resume": "/nowhere"},
        "/v1/jobs/small-1/pause": {},
        "/v1/jobs/small-1/cancel": {},
        "/v1/nodes/node-1/drain": {"reason": "because"},
        "/v1/nodes/node-1/kill": {"how": "hang", "at": "backward", "round": 3, "seconds": 1.5},
    }
    found = [f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode() for path in gets]
    for path, body in posts.items():
        data = msgspec.json.encode(body)
        found.append(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
            + f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
    return found
