"""The reference run: the whole job in one process on one device, without failures, for
``oobleckctl verify --single``.

The same executor as in a cluster, with one pipeline of one stage and nobody to talk to: what differs from a
cluster run is only who computes what, which must not show in a single bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TextIO

import click
import msgspec
import torch
from torch import Tensor

from oobleckd.host.checkpoint import complete
from oobleckd.host.jobfile import load_job
from oobleckd.planner.plan import Layout, Range, Route, Segment, holdings_of
from oobleckd.protocol.checkpoint import manifest_of
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.messages import FromWorker, StepDone
from oobleckd.protocol.modelnotes import words
from oobleckd.protocol.parts import Counters, EvalSum, bits_of
from oobleckd.worker.data.corpus import open_corpus
from oobleckd.worker.data.input_watch import LOOK_S, Eyes
from oobleckd.worker.data.rows import Misread
from oobleckd.worker.device.context import arithmetic, device_model
from oobleckd.worker.device.traits import traits
from oobleckd.worker.messaging.gather import Gathering
from oobleckd.worker.models import load_spec
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.faults import Faults
from oobleckd.worker.state.store import Store
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import Key, TensorMessage

DEVICE = "reference/0"
DATA_CHANGED = 7
"""The exit code of what reads data that has changed, as of a command that waits for such a job."""
PLACE = torch.device("cpu")


class LonePost:
    """A messenger for a device without peers."""

    def send(self, peer: str, key: Key, _tensors: Sequence[Tensor], _meta: bytes = b"") -> None:
        """There is nobody to send to."""
        raise AssertionError(f"the reference run has no peer {peer}: {key}")

    def recall(self, peer: str, _unwanted: Callable[[Key], bool]) -> list[Key]:
        """There is nobody to whom anything could be on its way."""
        raise AssertionError(f"the reference run has no peer {peer}")

    def take(self, key: Key) -> TensorMessage | None:
        """Nothing ever arrives."""
        raise AssertionError(f"the reference run has no message {key}")

    def has(self, _key: Key) -> bool:
        """Nothing ever arrives."""
        return False

    def waiting(self) -> list[Key]:
        """Nothing ever arrives."""
        return []

    def purge(self, unwanted: Callable[[Key], bool]) -> None:
        """Nothing to drop."""

    def gather(self, gathering: Gathering | None) -> None:
        """Nothing ever arrives."""


def lone_layout(num_layers: int, num_micro_batches: int) -> Layout:
    """Everything on one device."""
    segments = (Segment(DEVICE, Range(0, num_layers)),)
    routes = tuple(Route(micro_batch, 1, segments) for micro_batch in range(num_micro_batches))
    return Layout(1, num_layers, holdings_of(segments), routes)


class TextChanged(UserError):
    """What is read was written to meanwhile."""


def run(job: Job, out: Path, told: Callable[[FromWorker], None]) -> Input:
    """Train ``job`` to its end; every message that a device would send goes to ``told``. Returns what it has
    read. Raises TextChanged where that was written to meanwhile.
    """
    store = Store(load_spec(job), PLACE)
    for note in store.spec.notes:
        print(f"{job.model.checkpoint}: {words(note)}", file=sys.stderr)
    layout = lone_layout(store.spec.num_layers, job.num_micro_batches)
    layers = layout.holdings[DEVICE]
    store.adopt(layers, {bucket: store.fresh(bucket) for bucket in store.needed(layers)})
    corpus = open_corpus(job)
    executor = Executor(DEVICE, "", job, store, corpus, LonePost(), Faults(DEVICE, out), told)
    executor.adopt(layout, Counters())
    executor.resume()
    eyes, looked = Eyes(corpus.inputs), time.monotonic()
    while executor.advance():
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            eyes.look()
            _stop_if_changed(eyes, executor, only_if_suspect=True)
    _stop_if_changed(eyes, executor)
    return corpus.inputs.part


def _stop_if_changed(eyes: Eyes, executor: Executor, *, only_if_suspect: bool = False) -> None:
    """Raise TextChanged where the text is not what it was; before the end only where a look has shown
    something.
    """
    changed = eyes.verify() if eyes.suspect or not only_if_suspect else None
    if changed is not None:
        raise TextChanged(
            f"{changed.what}, while it was read, by step {executor.counters.step}: its losses are of no text",
            "put the text back, or name another one, and run it again",
        )


class ReferenceRecorder:
    """Writes ``steps.jsonl`` and ``evaluations.jsonl``, and, at the end, the final checkpoint's manifest.

    A line of evaluations is what a round of one found on a source: after how many ``step``s, and which of its
    rounds, from 0.
    """

    def __init__(self, job: Job, out: Path) -> None:
        self._job = job
        self._steps = (out / "steps.jsonl").open("w", encoding="utf-8")
        self._evaluations = (out / "evaluations.jsonl").open("w", encoding="utf-8")
        self._parts: dict[int, CheckpointPart] = {}
        self._last: list[CheckpointPart] = []

    def close(self) -> None:
        """Nothing more is told."""
        self._steps.close()
        self._evaluations.close()

    def __call__(self, message: FromWorker) -> None:
        """Take in one message of the device."""
        match message:
            case StepDone(outcome="repeated"):
                pass
            case StepDone(outcome="evaluated"):
                for found in message.evaluated:
                    self._say_evaluated(message.counters, found)
            case StepDone():
                line = {
                    "step": message.counters.step + 1,
                    "loss": message.loss,
                    "loss_hex": message.loss.hex(),
                    "ledger": message.ledger,
                    "samples": message.samples,
                    "outcome": message.outcome,
                }
                _write(self._steps, line)
            case CheckpointPart():
                self._parts[message.bucket] = message
                if len(self._parts) == message.num_buckets:
                    self._last = [self._parts.pop(bucket) for bucket in sorted(self._parts)]
            case _:
                pass

    def _say_evaluated(self, counters: Counters, found: EvalSum) -> None:
        line = {
            "step": counters.step,
            "round": counters.evaluated,
            "source": found.source,
            "loss_sum": found.loss_sum,
            "loss_sum_hex": found.loss_sum.hex(),
            "targets": found.targets,
        }
        _write(self._evaluations, line)

    def complete(self, read: Input) -> None:
        """The job is through, and has ``read`` this. Nothing is left where too many steps in a row were
        skipped.
        """
        if not self._last:
            return
        manifest = manifest_of(self._job, self._last, (read,))
        complete(Path(self._last[0].directory), manifest, keep=1)


def _write(file: TextIO, line: Mapping[str, object]) -> None:
    file.write(msgspec.json.encode(line).decode() + "\n")
    file.flush()


@click.command()
@click.option("--job", "job_file", type=click.Path(path_type=Path), required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(job_file: Path, out: Path) -> None:
    """Train a job in this one process; leaves OUT/step-…/, OUT/steps.jsonl, OUT/evaluations.jsonl, and what
    decides its bits: OUT/bits, in short, and OUT/traits.json.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    (out / "bits").write_text(bits_of(device_model(PLACE), arithmetic(PLACE)), encoding="utf-8")
    (out / "traits.json").write_bytes(msgspec.json.encode(traits(PLACE)))
    try:
        job = load_job(job_file)
        place = msgspec.structs.replace(job.checkpoint, dir=str(out), every=0)
        job = msgspec.structs.replace(job, checkpoint=place)
        with closing(ReferenceRecorder(job, out)) as recorder:
            recorder.complete(run(job, out, recorder))
    except (JobError, UserError) as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(DATA_CHANGED if isinstance(error, TextChanged | Misread) else 1)


if __name__ == "__main__":
    main()
