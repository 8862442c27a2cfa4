"""Copies of training state in the host's memory, made while training goes on.

Owns the copy and when it is safe: on a CPU it is made at once; beside a GPU by a thread and a stream of their
own, as pinning memory takes the host half a second a GiB the first time, and the copy the bus a while. What
is copied must not change before: the store knows of the copies that are under way, and whoever updates it
settles them first (``Store.settle``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from oobleckd.worker.runtime.errors import ends_the_process
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.store import Store

States = Mapping[int, BucketState]
Then = Callable[[States], object]


class Hosted:
    """Copies of ``buckets`` of ``store`` as they are when this is made. ``then`` is called with them, by
    whichever thread made them, and after that they have arrived.
    """

    def __init__(self, store: Store, buckets: Collection[int], then: Then = lambda _: None) -> None:
        self._arrived = threading.Event()
        self._under_way = threading.Event()
        self._copied: torch.cuda.Event | None = None
        self._states: States = {}
        sources = {bucket: store.buckets[bucket] for bucket in sorted(buckets)}
        if store.device.type != "cuda":
            self._states = {bucket: state.copied(Tensor.clone) for bucket, state in sources.items()}
            self._under_way.set()
            self._arrive(then)
            return
        # Pinning takes a host 0.44 s a GiB the first time: with 5.3 GiB the thread that trains stood still
        # for 4.3 s at the first copy, and for 6 ms with a thread of its own. (D-devices-009)
        boundary = torch.cuda.current_stream(store.device).record_event()
        exponents = {bucket: state.exponents for bucket, state in sources.items()}
        store.read_by(self.settle)
        threading.Thread(
            target=self._run,
            args=(store.device, boundary, sources, exponents, then),
            name="copies-to-host",
            daemon=True,
        ).start()

    @property
    def arrived(self) -> bool:
        """Whether the copies are there. Never waits."""
        return self._arrived.is_set()

    def states(self) -> States:
        """The copies, by bucket: on the CPU, in pinned memory beside a GPU. Waits until they are
        there.
        """
        self._arrived.wait()
        return self._states

    def settle(self) -> None:
        """Called before the sources change. Beside a GPU the current stream waits for the copy, not the
        caller.
        """
        self._under_way.wait()
        if self._copied is not None:
            # The stream waits, not the thread: the update is queued behind the copy. (D-devices-009)
            torch.cuda.current_stream().wait_event(self._copied)

    def _run(
        self,
        device: torch.device,
        boundary: torch.cuda.Event,
        sources: States,
        exponents: Mapping[int, tuple[int, ...]],
        then: Then,
    ) -> None:
        with ends_the_process("copy"), torch.cuda.device(device):
            beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            beside.wait_event(boundary)
            with torch.cuda.stream(beside):
                states = {bucket: state.copied(_to_host) for bucket, state in sources.items()}
            for bucket, state in sources.items():
                states[bucket].exponents = exponents[bucket]
                for tensor in state.storages():
                    tensor.record_stream(beside)  # it may be freed before it is read
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(beside)
            self._under_way.set()
            self._copied.synchronize()
            self._states = states
            self._arrive(then)

    def _arrive(self, then: Then) -> None:
        then(self._states)
        self._arrived.set()


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
