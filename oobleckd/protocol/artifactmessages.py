"""Messages that carry compiled layers: between devices and their agent, and between agents and the daemon."""

from __future__ import annotations

from oobleckd.protocol.message import Message


class ArtifactMade(Message, frozen=True):
    """A device tells its agent that what ``key`` names is in the file ``path``, which is the agent's from now
    on. It never travels to the daemon.
    """

    key: str
    path: str


class ArtifactHere(Message, frozen=True):
    """The agent's answer to ``WantArtifact`` of a device: it is in the file ``path``, which is the device's
    from now on; "": the device is to compile it. The daemon never says so.
    """

    key: str
    path: str


class WantArtifact(Message, frozen=True):
    """Who has the artifact ``key`` (``protocol.artifacts``)? Of a device to its agent, and of that to the
    daemon, which answers with ``ArtifactKept`` when it is there, or when the asker is to make it.

    ``making``: the node was told so by an earlier daemon or on an earlier connection, and is at it.
    ``damaged``: bytes that came with this checksum are not those that it is of.
    """

    key: str
    making: bool = False
    damaged: str = ""


class GetArtifact(Message, frozen=True):
    """Send ``ArtifactPart`` of ``key`` from ``offset`` on."""

    key: str
    offset: int


class PutArtifact(Message, frozen=True):
    """Bytes of an artifact that the node has made, ``num_bytes`` in all, from ``offset`` on; the next ones
    follow ``ArtifactTaken``.
    """

    key: str
    num_bytes: int
    sha256: str
    offset: int
    data: bytes


class NoArtifact(Message, frozen=True):
    """Who was to make the artifact ``key`` does not."""

    key: str


OfArtifacts = WantArtifact | GetArtifact | PutArtifact | NoArtifact


class ArtifactKept(Message, frozen=True):
    """There is an artifact ``key``, of ``num_bytes`` with this checksum; 0: there is none, and the node that
    asked is to make it.
    """

    key: str
    num_bytes: int = 0
    sha256: str = ""


class ArtifactPart(Message, frozen=True):
    """Bytes of the artifact ``key`` from ``offset`` on, ``protocol.artifacts.PART_BYTES`` at most (none: it
    is not there any more).
    """

    key: str
    offset: int
    data: bytes


class ArtifactTaken(Message, frozen=True):
    """Of the artifact ``key`` all up to ``offset`` is here: go on from there; -1: no more of it is wanted."""

    key: str
    offset: int
