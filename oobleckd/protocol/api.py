"""Structs of the HTTP API on the daemon's socket (JSON), shared by daemon, client, ctl and console.

Owns the shapes only. Every answer that a person may script against carries ``apiVersion``.
Times are POSIX seconds (``*_at``) or durations in seconds (``*_s``).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

API_VERSION = "oobleck/v1"


class LostRecords(msgspec.Struct, frozen=True):
    """The journal was damaged, and records of it are gone: ``what`` was found, and ``kept_as`` has what was
    left of it ("": nothing was).
    """

    at: float
    what: str
    kept_as: str = ""


class Status(msgspec.Struct, frozen=True):
    """Headline of the daemon.

    ``nodes`` are here (connected, and heard of lately), of those ``expected``: all that ever joined but for
    who left in order or was forgotten.
    ``lost``: how many of them are not here and not waited for. ``lost_records``: of the last seven days.
    """

    version: str
    daemon: str
    state_dir: str
    up_s: float
    nodes: int
    jobs: int
    line: str
    endpoint: str
    allow_injection: bool
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect
    expected: int = 0
    lost: int = 0
    lost_records: tuple[LostRecords, ...] = ()


Item = TypeVar("Item")


class Items(msgspec.Struct, Generic[Item], frozen=True):
    """A page of a list. ``cursor``: what to ask for the next one with ("": this is the last)."""

    items: tuple[Item, ...]
    apiVersion: str = API_VERSION  # noqa: N815 - the name scripts expect
    cursor: str = ""


class Problem(msgspec.Struct, frozen=True):
    """RFC 9457 problem+json. ``retry_s``: after which the same question may be answered (0: it was not asked
    too often).
    """

    title: str
    status: int
    detail: str
    hint: str = ""
    type: str = "about:blank"
    retry_s: float = 0.0
