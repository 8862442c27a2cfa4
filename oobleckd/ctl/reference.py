"""The reference run of a job: the same job, run without failures, to compare with.

Owns how a reference run is made (on the cluster, or in one process), and where it is kept, so that a job is
not run twice for two calls of ``verify``. Does not own the comparison (``compare``).
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path

import msgspec

from oobleckd import __version__
from oobleckd.client import Client
from oobleckd.ctl.compare import (
    CompareError,
    RunEvidence,
    StepFact,
    read_checkpoint,
    read_manifest,
    read_steps,
)
from oobleckd.ctl.evalfacts import EvalFact, read_evaluations
from oobleckd.ctl.liveline import followed, live_line
from oobleckd.ctl.output import FAILED, Failure, fail, note
from oobleckd.ctl.programs import run_worker
from oobleckd.ctl.waiting import until_final
from oobleckd.host.durable import write_whole
from oobleckd.protocol.canonical import canonical
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.job import Job, table_of
from oobleckd.protocol.jobviews import JobView, StepView
from oobleckd.protocol.traits import KIND
from oobleckd.protocol.unreadable import UNREADABLE
from oobleckd.words import being, count

_TRIES = 3


class ReferenceRun(msgspec.Struct, frozen=True):
    """A finished reference run: its steps, its last checkpoint ("": it stopped before the end, as too many
    steps in a row were skipped), and what decides the bits of the devices that it ran on: in short
    (``kinds``), and all that does (``traits``).
    """

    checkpoint: str
    steps: tuple[StepFact, ...]
    kinds: tuple[str, ...]
    traits: tuple[dict[str, str], ...] = ()
    evaluations: tuple[EvalFact, ...] = ()


def run_of(
    job: JobView, steps: Sequence[StepView], evaluations: Sequence[EvaluationView] = ()
) -> RunEvidence:
    """A job of the daemon that is over, as evidence. Raises CompareError."""
    if not (job.checkpoint or stopped(job)):
        raise CompareError(f"{job.name} has no checkpoint, so its weights cannot be compared")
    place = "" if stopped(job) else job.checkpoint
    first, evals = job.start_step + 1, eval_facts_of(evaluations)
    return evidence(job.spec, facts_of(steps), place, first=first, evaluations=evals)


def stopped(job: JobView) -> bool:
    """Whether it ended before its last step, as too many in a row were skipped."""
    return job.state == "failed" and job.cause in {"not-finite", "spikes"}


def facts_of(steps: Sequence[StepView]) -> tuple[StepFact, ...]:
    """What is compared of the steps of a job."""
    return tuple(StepFact(s.step, s.loss, s.loss_hex, s.samples, s.ledger, s.outcome) for s in steps)


def eval_facts_of(evaluations: Sequence[EvaluationView]) -> tuple[EvalFact, ...]:
    """What is compared of the evaluations of a job."""
    return tuple(
        EvalFact(done.step, each.source, each.loss_hex, each.targets)
        for done in evaluations
        for each in done.losses
    )


def evidence(
    job: Job,
    steps: tuple[StepFact, ...],
    place: str,
    *,
    first: int = 1,
    evaluations: tuple[EvalFact, ...] = (),
) -> RunEvidence:
    """Steps, from ``first`` on, evaluations and checkpoint of a run of ``job``; ``place`` is "" where it
    stopped before its end. Raises CompareError, also when it is not the final checkpoint.
    """
    sizes = job.batch_sizes
    if not place:
        last = max((fact.step for fact in steps), default=0)
        return RunEvidence(steps, None, last, sizes, first, evaluations)
    checkpoint = Path(place)
    counters = read_manifest(checkpoint).get("counters")
    if not isinstance(counters, dict) or counters.get("step") != job.train.steps:
        raise CompareError(
            f"{checkpoint}: is not the checkpoint after the last step, {job.train.steps}",
            "was the job's folder pruned or written by another job?",
        )
    return RunEvidence(steps, read_checkpoint(checkpoint), job.train.steps, sizes, first, evaluations)


def kinds_of(client: Client, job: JobView) -> tuple[str, ...]:
    """What decides the bits of the devices that a job ran on: of its own nodes, or of all where it no longer
    names any.
    """
    nodes = client.nodes()
    own = [node for node in nodes if node.name in job.nodes] or nodes
    return tuple(sorted({kind for node in own for kind in node.bits or node.kinds}))


def traits_of(client: Client, job: JobView) -> tuple[dict[str, str], ...]:
    """All that decides the bits of the devices that trained ``job``, those that are alike once. Of a job
    whose daemon did not keep that: of the nodes that there are now.
    """
    if job.kinds:
        return job.kinds
    nodes = client.nodes()
    own = [node for node in nodes if node.name in job.nodes] or nodes
    found: list[dict[str, str]] = []
    for node in own:
        each = node.traits or [{KIND: kind} for kind in node.bits or node.kinds]
        found += [traits for traits in each if traits not in found]
    return tuple(found)


def kept_file(client: Client, job: JobView, *, single: bool) -> Path:
    """Where the reference run of ``job`` is noted. One of another version of the program does not count.

    One that ran in a single process serves every job that trains the same, under whichever policy and
    schedule: neither may show in a bit.
    """
    name = f"{training(job.spec)}-{__version__}-single" if single else f"{job.digest}-{__version__}-cluster"
    return Path(client.status().state_dir) / "verify" / f"{name}.json"


def training(job: Job) -> str:
    """Names what decides the bits of ``job``: SHA-256 of its model, data, training, optimizer and, where it
    has any, evaluations.
    """
    names = ("model", "data", "train", "optimizer", *(("eval",) if job.eval.wanted else ()))
    return hashlib.sha256(canonical(job, names)).hexdigest()


@contextmanager
def made_once(file: Path) -> Iterator[None]:
    """Hold the reference run that ``file`` notes to oneself: who else wants it waits, and finds it kept."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for another verify, which runs the same job without failures")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def recall(file: Path) -> ReferenceRun | None:
    """A reference run that was kept and is still whole enough to be read; None otherwise."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=ReferenceRun)
    except (OSError, *UNREADABLE):
        return None
    whole = not kept.checkpoint or (Path(kept.checkpoint) / "manifest.json").exists()
    return kept if whole else None


def keep(file: Path, kept: ReferenceRun) -> None:
    """Note a reference run, whole or not at all."""
    write_whole(file, msgspec.json.encode(kept))


# --------------------------------------------------------------------------- on the cluster


def reference_of(job: Job) -> Job:
    """The same training under another name; it keeps its last checkpoint and writes no others."""
    place = msgspec.structs.replace(job.checkpoint, every=0, keep=1)
    return msgspec.structs.replace(job, name=f"{job.name[:53]}-reference", checkpoint=place)


# An ordinary job, so that the reference run goes through everything but failures; a single process shows
# that the cluster itself leaves no trace. (D-exactness-006)
def run_on_cluster(client: Client, job: JobView) -> ReferenceRun:
    """Make the reference run as a job, with a line of how far it is on a terminal. One that met failures
    itself proves nothing, so it is run again.
    """
    reference = reference_of(job.spec)
    for _ in range(_TRIES):
        note(f"running {reference.name}, the same job without failures")
        job_id = client.submit(reference).id
        done = followed(job_id, partial(_seen_to_its_end, client, job_id))
        if done.state != "done" and not stopped(done):
            fail(f"{reference.name} {being(done.state)} at step {done.step}", done.reason, FAILED)
        if not done.incidents:
            last = "" if stopped(done) else done.checkpoint
            facts = facts_of(client.steps(done.id))
            evals = eval_facts_of(client.evaluations(done.id)) if done.spec.eval.wanted else ()
            return ReferenceRun(last, facts, kinds_of(client, done), traits_of(client, done), evals)
        note(f"{reference.name} lost nodes itself ({count(done.incidents, 'incident')}); once more")
    raise Failure(
        f"{reference.name} met failures {_TRIES} times", "try again when the cluster is quiet", FAILED
    )


def _seen_to_its_end(client: Client, job: str) -> JobView:
    with live_line() as show:
        return until_final(client, job, show)


# --------------------------------------------------------------------------- in one process


def run_single(job: Job, out: Path) -> ReferenceRun:
    """Make the reference run in one process on this machine; it leaves its checkpoint under ``out``."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    note("running the same job in a single process")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(to_toml(table_of(job)), encoding="utf-8")
        run_worker("oobleckd.worker.tools.reference", "--job", str(file), "--out", str(out))
    checkpoints = sorted(out.glob("step-*/manifest.json"))
    bits, steps = (out / "bits").read_text(encoding="utf-8"), read_steps(out / "steps.jsonl")
    evaluations = read_evaluations(out / "evaluations.jsonl")
    traits = msgspec.json.decode((out / "traits.json").read_bytes(), type=dict[str, str])
    if not checkpoints and _stops(job, steps):
        return ReferenceRun("", steps, (bits,), (traits,), evaluations)
    if not checkpoints:
        raise Failure(
            f"the single process left no checkpoint in {out}", "is the disk full? try again", FAILED
        )
    return ReferenceRun(str(checkpoints[-1].parent), steps, (bits,), (traits,), evaluations)


def _stops(job: Job, steps: Sequence[StepFact]) -> bool:
    """Whether a run of ``job`` ends with ``steps``, though they may not be all."""
    row = takewhile(lambda fact: fact.outcome == "skipped", reversed(steps))
    return job.may_stop_after(sum(1 for _ in row))


def to_toml(table: dict[str, object], path: str = "") -> str:
    """TOML of a table of strings, numbers, booleans, tables, and lists of these; None is left out."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict) and value is not None}
    lines = [f"[{path}]"] if path and plain else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    text = "".join(f"{line}\n" for line in lines)
    for key, value in table.items():
        if isinstance(value, dict):
            text += to_toml(value, f"{path}.{_key(key)}" if path else _key(key))
    return text


def _key(key: str) -> str:
    return key if key.replace("_", "a").replace("-", "a").isalnum() and key.isascii() else _value(key)


def _value(value: object) -> str:
    # TOML's strings, numbers, booleans and arrays are JSON's, but for floats that JSON would round to none.
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        inner = [f"{_key(key)} = {_value(each)}" for key, each in value.items() if each is not None]
        return f"{{ {', '.join(inner)} }}"
    return msgspec.json.encode(value).decode()
