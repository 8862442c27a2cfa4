"""Copies weights of others beside what a device computes.

Owns what runs beside what, and that nobody computes with what is not there yet, or overwrites what somebody
still computes with. On a CPU a thread copies; a GPU has a stream for it, and the host waits for neither.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

Copy = Callable[[], object]
"""Takes memory, and fills it."""
Wait = Callable[[], object]
"""From now on the device has what was copied: whatever it is told to do comes behind it."""


class Copier(Protocol):
    """Of one device."""

    def ahead(self, copy: Copy) -> Wait:
        """Begin ``copy``, beside what the device computes from now on."""

    def now(self, copy: Copy) -> None:
        """``copy``, before what the device computes from now on."""

    def drop(self, drop: Copy) -> None:
        """``drop`` memory that was copied to, when what the device was told to compute so far does not need
        it any more.
        """

    def settle(self) -> None:
        """Whatever the device was told to do is done, for others to see."""


class ThreadCopier:
    """Of a CPU."""

    def __init__(self) -> None:
        # A thread copies while the other computes: where a device has a core besides, or a layer waits for
        # something else, nothing of it shows but the first layer of a hop. (D-exactness-025)
        self._thread = ThreadPoolExecutor(1, "gathers-weights")

    def ahead(self, copy: Copy) -> Wait:
        """In the thread."""
        return self._thread.submit(copy).result

    def now(self, copy: Copy) -> None:
        """Here: who waits for a thread of its own waits longer."""
        copy()

    def drop(self, drop: Copy) -> None:
        """It is computed."""
        drop()

    def settle(self) -> None:
        """It is."""


class Streams(Protocol):
    """The part of ``torch.cuda`` that is used."""

    def Stream(self, device: torch.device) -> Any:  # noqa: N802 - torch's name
        """A new stream."""

    def current_stream(self, device: torch.device) -> Any:
        """Where ``device`` computes."""

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        """While it is entered, what is called goes to ``stream``, and memory comes from its own."""


class StreamCopier:
    """Of the GPU ``device``."""

    def __init__(self, device: torch.device, cuda: Streams = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._beside = cuda.Stream(device)

    def ahead(self, copy: Copy) -> Wait:
        """In the stream, behind what the device was told to compute so far."""
        # torch gives back what is dropped at once, to the stream that it came from, though another one may
        # still read it: so it waits here and in ``drop``. (D-devices-023)
        computes = self._cuda.current_stream(self._device)
        self._beside.wait_stream(computes)
        with self._cuda.stream(self._beside):
            copy()
            copied = self._beside.record_event()
        return lambda: computes.wait_event(copied)

    def now(self, copy: Copy) -> None:
        """In the same stream, as the memory has to come from there."""
        self.ahead(copy)()

    def drop(self, drop: Copy) -> None:
        """At once. The stream that the memory goes back to waits: whoever gets it there, some other one of
        torch's streams that is the same to the GPU, or the driver, comes behind what still reads it.
        """
        self._beside.wait_stream(self._cuda.current_stream(self._device))
        drop()

    def settle(self) -> None:
        """The host waits, as another process knows nothing of streams here."""
        self._cuda.current_stream(self._device).synchronize()


def copier_of(device: torch.device) -> Copier:
    """That of ``device``."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()
