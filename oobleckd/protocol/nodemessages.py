"""Messages inside a node: between the agent and its devices and its spare. None goes to the daemon."""

from __future__ import annotations

import msgspec

from oobleckd.protocol.deaths import Death
from oobleckd.protocol.job import Job
from oobleckd.protocol.message import Message
from oobleckd.protocol.parts import (
    DeviceInfo,
)


class DeviceUp(Message, frozen=True):
    """A device process tells its agent where it stands: at its start and whenever ``info`` changes.

    The agent keeps the last one for its Hello; it never travels to the daemon as it is.
    """

    info: DeviceInfo


class LastWords(Message, frozen=True):
    """A device process that is about to end tells its agent why, which says it in its ``DeviceLost``. It
    never travels to the daemon.
    """

    death: Death


class SpareUp(Message, frozen=True):
    """A spare tells its agent that all is imported. It never travels to the daemon."""


class TakePlace(Message, frozen=True):
    """The agent tells its spare which device it is from now on. ``before``: all that decided the bits of the
    process whose place it takes.
    """

    device: str
    before: dict[str, str] = msgspec.field(default_factory=dict)


class LoadLayers(Message, frozen=True):
    """The agent tells its spare that devices of the node have the compiled layers of ``spec`` by now
    (``train.compile``), which the spare is to load.
    """

    spec: Job


class LayersLoaded(Message, frozen=True):
    """A spare has loaded so many ``kinds`` of layers of what it was told last. It never travels to the
    daemon.
    """

    kinds: int
