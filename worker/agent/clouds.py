"""What three clouds say before they take a machine away, by the metadata services that they document.

Owns the questions and the shapes of the answers: AWS (instance metadata v2, spot instance action), Google
Cloud (``preempted`` and ``maintenance-event``), Azure (scheduled events). Each question is one or two HTTP
requests to an address of the machine itself, never through a proxy. When to ask is ``notices``'.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import msgspec

from oobleckd.protocol.unreadable import UNREADABLE, problem_of

_TIMEOUT_S = 2.0
_MAX_BYTES = 2**20
LINK_LOCAL = "169.254.169.254"

Shape = TypeVar("Shape")


@dataclass(frozen=True, slots=True)
class End:
    """The machine will be taken away: why, and at what time (POSIX seconds)."""

    reason: str
    at: float


# --------------------------------------------------------------------------- AWS


class _SpotAction(msgspec.Struct, frozen=True):
    action: str
    time: datetime


@dataclass(slots=True)
class Aws:
    """A spot instance: two minutes before it is stopped, hibernated or terminated. 404 until then."""

    address: str = LINK_LOCAL
    poll_s: float = 5.0
    _token: str = ""

    def poll(self) -> End | None:
        """See ``notices.Source``. A token of IMDSv2 lives six hours, so it is asked for anew when it is
        refused.
        """
        status, body = self._action()
        if status in {400, 401}:
            self._token = self._new_token()
            status, body = self._action()
        if status == http.client.NOT_FOUND:
            return None
        said = _read(_wanted(status, body), _SpotAction)
        return End(f"AWS announced: spot instance {said.action}", _utc(said.time).timestamp())

    def _action(self) -> tuple[int, bytes]:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return _ask(self.address, "GET", "/latest/meta-data/spot/instance-action", headers)

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
        return _wanted(*_ask(self.address, "PUT", "/latest/api/token", headers)).decode("ascii")


# --------------------------------------------------------------------------- Google Cloud

_PREEMPTED_S = 30.0
_MAINTENANCE_S = 3600.0


@dataclass(slots=True)
class GoogleCloud:
    """A preempted or spot VM: 30 s; one with GPUs, which cannot be moved for maintenance: an hour."""

    address: str = "metadata.google.internal"
    poll_s: float = 1.0

    def poll(self) -> End | None:
        """See ``notices.Source``. The service does not say when: the time runs from now on."""
        if self._value("preempted") == "TRUE":
            return End("Google Cloud announced: preempted", time.time() + _PREEMPTED_S)
        if self._value("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return End("Google Cloud announced: host maintenance", time.time() + _MAINTENANCE_S)
        return None

    def _value(self, name: str) -> str:
        path, headers = f"/computeMetadata/v1/instance/{name}", {"Metadata-Flavor": "Google"}
        return _wanted(*_ask(self.address, "GET", path, headers)).decode("ascii").strip()


# --------------------------------------------------------------------------- Azure

_ENDING = frozenset({"Preempt", "Terminate", "Redeploy", "Reboot"})
_OVER = frozenset({"Completed", "Canceled"})


class _Event(msgspec.Struct, frozen=True, rename="pascal"):
    event_type: str
    resources: tuple[str, ...] = ()
    event_status: str = "Scheduled"
    not_before: str = ""


class _Events(msgspec.Struct, frozen=True, rename="pascal"):
    events: tuple[_Event, ...] = ()


@dataclass(slots=True)
class Azure:
    """Scheduled events of this VM; of a spot VM at least 30 s before. The service names all VMs of a scale
    set.
    """

    address: str = LINK_LOCAL
    poll_s: float = 1.0
    _name: str = ""

    def poll(self) -> End | None:
        """See ``notices.Source``. An event that has begun has no time any more: now."""
        self._name = (
            self._name
            or self._get("/metadata/instance/compute/name?api-version=2021-02-01&format=text").decode()
        )
        said = _read(self._get("/metadata/scheduledevents?api-version=2020-07-01"), _Events)
        for event in said.events:
            if (
                event.event_type in _ENDING
                and event.event_status not in _OVER
                and self._name in event.resources
            ):
                at = (
                    _utc(parsedate_to_datetime(event.not_before)).timestamp()
                    if event.not_before
                    else time.time()
                )
                return End(f"Azure announced: {event.event_type}", at)
        return None

    def _get(self, path: str) -> bytes:
        return _wanted(*_ask(self.address, "GET", path, {"Metadata": "true"}))


SOURCES: dict[str, Callable[[], Aws | GoogleCloud | Azure]] = {"aws": Aws, "gcp": GoogleCloud, "azure": Azure}


# --------------------------------------------------------------------------- HTTP


def _ask(address: str, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Status and body. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(_MAX_BYTES)
    finally:
        connection.close()


def _wanted(status: int, body: bytes) -> bytes:
    if status != http.client.OK:
        raise ValueError(f"the metadata service answers {status}: {body[:100].decode(errors='replace')}")
    return body


def _read(body: bytes, shape: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(body, type=shape)
    except UNREADABLE as error:
        raise ValueError(f"the metadata service says what nobody understands: {problem_of(error)}") from error


def _utc(when: datetime) -> datetime:
    """A time without a zone is meant as UTC."""
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
