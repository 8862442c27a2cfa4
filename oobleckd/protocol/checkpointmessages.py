"""Messages of devices about their shares of a checkpoint."""

from __future__ import annotations

from oobleckd.protocol.message import Message
from oobleckd.protocol.parts import (
    Counters,
)


class CheckpointPart(Message, frozen=True):
    """One bucket of the checkpoint of ``counters`` is written (and synced) as ``file`` in ``directory``.

    ``tensors``: tensor name -> SHA-256 of its bytes. ``corpus``: digest of the text that was trained on.
    The daemon completes the checkpoint when every bucket has arrived.
    """

    device: str
    job: str
    counters: Counters
    directory: str
    bucket: int
    num_buckets: int
    file: str
    num_bytes: int
    sha256: str
    tensors: dict[str, str]
    corpus: str = ""


class CheckpointFailed(Message, frozen=True):
    """A device cannot write its share of the checkpoint of ``counters`` in ``directory``, and keeps all of
    its state.

    ``needed_bytes``: its share, ``free_bytes``: what was free there (-1: nobody knows). Of the ``last`` one
    of a job, which is its result, it says so once and tries again by itself; any other is given up. ``error``
    is for people; ``errno`` is what programs tell causes apart by, the name of the system's error ("ENOSPC";
    "": it was none, or the device is of a version that does not say).
    """

    device: str
    job: str
    counters: Counters
    directory: str
    error: str
    needed_bytes: int = 0
    free_bytes: int = -1
    last: bool = False
    errno: str = ""
