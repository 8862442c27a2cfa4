"""A device without agent, daemon and peers, in this process: its executor, messenger, store, sums and guards.

    python -m benchmarks.alone --config FILE [--kind cuda] [--compile]

Owns how such a device is put together. As a program it trains the job of FILE when it is asked to
(``peers/serving.py``). FILE: JSON as of ``peers/train_plain.py``. ``--compile``: with ``train.compile``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.serving import serve
from oobleckd.planner.costs import flops
from oobleckd.planner.plan import Layers, Layout, Range, Route, Segment
from oobleckd.protocol.job import Job, parse_job
from oobleckd.protocol.messages import Deploy
from oobleckd.protocol.parts import Counters
from oobleckd.worker import sums
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.device.context import DeviceContext, device_model, torch_device
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.models import load_spec
from oobleckd.worker.reconfigure.deploy import Deployment
from oobleckd.worker.runtime.activity import ActivityPage
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.runtime.yielding_lock import YieldingLock
from oobleckd.worker.state.store import Store
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Mailbox
from oobleckd.worker.transport.transport import Transport

NAME = "alone/0"
Step = Callable[[], object]
"""Runs one step."""


@contextlib.contextmanager
def device_loop(job: Job, folder: Path, *, kind: str = "cpu", whole: bool = False) -> Iterator[Step]:
    """A device of ``kind`` that has all layers of ``job``. ``whole``: its sums are those of a GPU for which
    nothing is compiled, wherever it is.
    """
    device = torch_device(DeviceContext(NAME, kind, "here", "127.0.0.1", folder))
    spec, lock, mailbox = load_spec(job), YieldingLock(), Mailbox()
    transport = Transport(NAME, "here", mailbox, local_dir=folder, on_peer_lost=lambda *_: None)
    groups = GroupManager(NAME, mailbox, None, transport.send)
    messenger = TransportMessenger(transport, groups, Intake(mailbox), mailbox, device)
    faults, store = Faults(NAME, folder), Store(spec, device)
    every = Range(0, spec.num_layers)
    routes = tuple(Route(mb, 1, (Segment(NAME, every),)) for mb in range(job.num_micro_batches))
    layout = Layout(1, spec.num_layers, {NAME: Layers((every,))}, routes)
    message = Deploy(NAME, 1, "job", job, layout, Counters(), "init", (), {}, "", "")
    with contextlib.closing(transport):
        deployment = Deployment(message, store, messenger, faults)
        deployment.start()
        store.adopt(deployment.layers, deployment.incoming)
        executor = Executor(
            NAME, "job", job, store, open_corpus(job), messenger, faults, lambda _: None, ActivityPage(),
            lock.released,
        )  # fmt: skip
        with _whole_sums() if whole else contextlib.nullcontext():
            executor.adopt(layout, Counters())
        executor.resume()

        def step() -> None:
            was = executor.counters.step
            with lock:
                while executor.counters.step == was:
                    executor.advance()

        yield step


@contextlib.contextmanager
def _whole_sums() -> Iterator[None]:
    """``sums.empty`` makes what it makes on a GPU without kernels of our own."""
    usual = sums.empty
    sums.empty = sums.Whole
    try:
        yield
    finally:
        sums.empty = usual


def job_of(setting: Mapping[str, Any], *, compiles: bool) -> Job:
    """The job of ``setting``, with everything that it does not need to say left at its default."""
    shape = {key: setting[key] for key in ("global_batch", "micro_batch", "sequence")}
    train = {**shape, "steps": 1_000_000, "precision": "bf16", **({"compile": True} if compiles else {})}
    return parse_job({
        "name": "alone",
        "model": {"family": setting["family"], "config": setting["model"]},
        "train": train,
        "optimizer": {"lr": setting["lr"]},
        "fault_tolerance": {"f": 0},
        "checkpoint": {"every": 0},
    })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--kind", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = job_of(json.loads(args.config.read_text()), compiles=args.compile)
    spec = load_spec(job)
    with (
        tempfile.TemporaryDirectory(prefix="oobleck-") as folder,
        device_loop(job, Path(folder), kind=args.kind) as step,
    ):
        each = flops.per_token(spec.num_weights, spec.num_layers - 2, spec.attention, job.train.sequence)
        name = device_model(torch.device(args.kind))
        serve(lambda _: step, args.kind, flops_per_token=each, device=name)


if __name__ == "__main__":
    main()
