"""Two runs of one job, compared bit by bit: every loss, every sample count, every tensor of the checkpoints,
and every evaluation (``evalfacts``).

Owns the comparison, and believes no digest that somebody wrote down: tensors are compared by their bytes in
the safetensors files (read here, without torch), and a file that is not what its manifest says is a finding
of its own. Does not own where the second run comes from (``verify``).
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.ctl.evalfacts import EvalFact, compare_evaluations
from oobleckd.protocol.batchramp import BatchSizes
from oobleckd.protocol.inputs import Inputs, of_corpus
from oobleckd.protocol.unreadable import UNREADABLE, problem_of
from oobleckd.words import count

# Bytes are read, and no hash that somebody wrote down: that can be wrong in the same way as the data.
# (D-exactness-005)
_CHUNK = 1 << 20
_WEIGHT = "param/"
_MAX_FINDINGS = 10


class CompareError(ValueError):
    """A run cannot be read, so nothing can be said. ``hint`` says what to do."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


class StepFact(msgspec.Struct, frozen=True):
    """What a run says of one committed step (a subset of ``StepView`` and of a line of steps.jsonl).

    JSON has no NaN and no infinity: the loss is None there, and ``loss_hex`` alone says it. All NaN are one.
    ``outcome`` may not be known.
    """

    step: int
    loss: float | None
    loss_hex: str
    samples: int
    ledger: str
    outcome: str = ""

    @property
    def bits(self) -> bytes:
        """The 64 bits of the loss."""
        if self.loss is None or not math.isfinite(self.loss):
            return _bits_of_hex(self.loss_hex)
        return struct.pack("<d", self.loss)


class TensorPlace(msgspec.Struct, frozen=True):
    """Where the bytes of a tensor lie: ``file[start:stop]``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class CheckpointState(msgspec.Struct, frozen=True):
    """A checkpoint: its tensors by name, and what its files say besides (the exponents of the sums)."""

    tensors: dict[str, TensorPlace]
    notes: dict[str, dict[str, str]]


class RunEvidence(msgspec.Struct, frozen=True):
    """One run as it is compared. ``sizes``: how many samples each step must have counted;
    ``first``: its first step, another than 1 where it went on from the checkpoint of another job.
    ``state`` is None of one that stopped before its end, as too many steps in a row were skipped: it has no
    last checkpoint.
    """

    steps: tuple[StepFact, ...]
    state: CheckpointState | None
    num_steps: int
    sizes: BatchSizes
    first: int = 1
    evaluations: tuple[EvalFact, ...] = ()


class Verdict(msgspec.Struct, frozen=True):
    """What the comparison found. ``findings`` is empty exactly when ``identical``."""

    identical: bool
    sentence: str
    losses: int
    num_losses: int
    weights: int
    num_weights: int
    samples: int
    ledger: str
    findings: tuple[str, ...]
    evaluations: int = 0
    num_evaluations: int = 0


def compare(run: RunEvidence, reference: RunEvidence) -> Verdict:
    """Compare ``run`` with ``reference``, the run without failures. Reads every tensor of both."""
    # What went before is of the job that wrote the checkpoint; the weights in the end tell of it, too.
    num_losses, num_weights = reference.num_steps - run.first + 1, 0
    same_losses, findings = _compare_steps(run, reference)
    evals = compare_evaluations(
        run.evaluations, reference.evaluations, range(run.first - 1, reference.num_steps + 1)
    )
    findings += evals.findings
    since = f" from step {run.first:,} on" if run.first > 1 else ""
    same_weights, counts = 0, f"{same_losses} of {count(num_losses, 'loss')}{since}"
    if evals.total:
        counts += f", {evals.same} of {count(evals.total, 'evaluation')}"
    if run.state is None or reference.state is None:
        findings += _compare_ends(run, reference)
        counts += (
            " are bit-identical to the run without failures, up to where both stopped; of weights "
            "nothing is compared"
        )
    else:
        num_weights = sum(map(is_weight, reference.state.tensors))
        same_weights, more = _compare_tensors(run.state.tensors, reference.state.tensors)
        findings += more + _compare_notes(run.state.notes, reference.state.notes)
        counts += (
            f" and {same_weights} of {count(num_weights, 'weight tensor')} are bit-identical to the run "
            "without "
            "failures"
        )
    samples = sum(fact.samples for fact in run.steps)
    skipped = sum(fact.outcome == "skipped" for fact in run.steps)
    without = f"; {skipped} of {count(len(run.steps), 'step')} were skipped in both" if skipped else ""
    sentence = (
        f"verified: {counts}; every sample counted once{without}"
        if not findings
        else f"different: {counts}; first difference: {findings[0]}"
    )
    return Verdict(
        identical=not findings,
        sentence=sentence,
        losses=same_losses,
        num_losses=num_losses,
        weights=same_weights,
        num_weights=num_weights,
        samples=samples,
        ledger=ledger_of(run.steps),
        findings=tuple(findings[:_MAX_FINDINGS]),
        evaluations=evals.same,
        num_evaluations=evals.total,
    )


def is_weight(name: str) -> bool:
    """Whether a tensor is a weight, and not a moment of the optimizer."""
    return name.startswith(_WEIGHT)


def ledger_of(steps: Iterable[StepFact]) -> str:
    """One digest over the sample ledgers of all steps, in step order."""
    digest = hashlib.sha256()
    for fact in sorted(steps, key=lambda fact: fact.step):
        digest.update(f"{fact.step} {fact.samples} {fact.ledger}\n".encode())
    return digest.hexdigest()


# --------------------------------------------------------------------------- steps


def _compare_steps(run: RunEvidence, reference: RunEvidence) -> tuple[int, list[str]]:
    findings = [*_gaps(run, "the run"), *_gaps(reference, "the run without failures")]
    if run.num_steps != reference.num_steps:
        findings.append(f"{count(run.num_steps, 'step')} here, {reference.num_steps} without failures")
    others = {fact.step: fact for fact in reference.steps}
    same = 0
    for fact in sorted(run.steps, key=lambda fact: fact.step):
        other = others.get(fact.step)
        if other is None:
            continue  # a gap of the reference run, or a step past its end: named above
        of_loss = _compare_losses(fact, other)
        same += not of_loss
        findings += of_loss + _compare_samples(fact, other, run.sizes.size(fact.step - 1))
    return same, findings


def _compare_ends(run: RunEvidence, reference: RunEvidence) -> list[str]:
    """Whether both stopped before their end."""
    ends = {True: "stopped there", False: "went on to its end"}
    here, there = (each.state is None for each in (run, reference))
    return (
        [] if here == there else [f"step {run.num_steps}: {ends[here]} here, {ends[there]} without failures"]
    )


def _gaps(run: RunEvidence, whose: str) -> list[str]:
    counted = Counter(fact.step for fact in run.steps)
    findings = [
        f"{whose} has no step {step}" for step in range(run.first, run.num_steps + 1) if not counted[step]
    ]
    findings += [f"{whose} has step {step} {n} times" for step, n in sorted(counted.items()) if n > 1]
    findings += [
        f"{whose} has a step {step}" for step in sorted(counted) if not run.first <= step <= run.num_steps
    ]
    return findings


def _compare_losses(fact: StepFact, other: StepFact) -> list[str]:
    at = f"step {fact.step}"
    findings = []
    for one, whose in ((fact, "here"), (other, "without failures")):
        if one.bits != _bits_of_hex(one.loss_hex):
            findings.append(f"{at}: loss {one.loss!r} {whose} is not its own bits {one.loss_hex}")
    if fact.bits != other.bits:
        findings.append(f"{at}: loss {fact.loss_hex} here, {other.loss_hex} without failures")
    return findings


def _compare_samples(fact: StepFact, other: StepFact, batch: int) -> list[str]:
    at = f"step {fact.step}"
    findings = []
    for one, whose in ((fact, "here"), (other, "without failures")):
        if one.samples != batch:
            findings.append(f"{at}: {count(one.samples, 'sample')} counted {whose}, the step has {batch}")
    if fact.outcome != other.outcome and fact.outcome and other.outcome:
        findings.append(f"{at}: {fact.outcome} here, {other.outcome} without failures")
    if fact.ledger != other.ledger:
        findings.append(
            f"{at}: other samples counted: ledger {fact.ledger} here, {other.ledger} without failures"
        )
    return findings


def _bits_of_hex(text: str) -> bytes:
    try:
        return struct.pack("<d", float.fromhex(text))
    except (ValueError, OverflowError):
        return b""


# --------------------------------------------------------------------------- tensors


def _compare_tensors(
    ours: Mapping[str, TensorPlace], theirs: Mapping[str, TensorPlace]
) -> tuple[int, list[str]]:
    findings, same = [], 0
    for name in sorted(ours.keys() | theirs.keys(), key=lambda name: (not is_weight(name), name)):
        if name not in ours:
            finding = f"tensor {name} is missing here"
        elif name not in theirs:
            finding = f"tensor {name} is missing without failures"
        else:
            finding = _compare_tensor(name, ours[name], theirs[name])
        if finding:
            findings.append(finding)
        else:
            same += is_weight(name)
    if not any(map(is_weight, theirs)):
        findings.append("the run without failures has no weight tensor")
    return same, findings


def _compare_notes(ours: Mapping[str, dict[str, str]], theirs: Mapping[str, dict[str, str]]) -> list[str]:
    return [
        f"{file}: {ours.get(file)} here, {theirs.get(file)} without failures"
        for file in sorted(ours.keys() | theirs.keys())
        if ours.get(file) != theirs.get(file)
    ]


def _compare_tensor(name: str, ours: TensorPlace, theirs: TensorPlace) -> str:
    """The first difference, or the empty string."""
    if ours.file == theirs.file:
        return f"tensor {name}: both runs show the same file {ours.file}, which proves nothing"
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return (
            f"tensor {name}: {ours.dtype} {list(ours.shape)} here, "
            f"{theirs.dtype} {list(theirs.shape)} without failures"
        )
    num_bytes = ours.stop - ours.start
    if not num_bytes:
        return ""
    with _mapped(ours.file) as one, _mapped(theirs.file) as other:
        for offset in range(0, num_bytes, _CHUNK):
            upto = min(offset + _CHUNK, num_bytes)
            left = one[ours.start + offset : ours.start + upto]
            right = other[theirs.start + offset : theirs.start + upto]
            if left != right:
                at = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
                return (
                    f"tensor {name}: byte {offset + at} is {left[at]:#04x} here, {right[at]:#04x} "
                    "without "
                    "failures"
                )
    return ""


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


# --------------------------------------------------------------------------- reading


def read_steps(lines: Path) -> tuple[StepFact, ...]:
    """The steps of a ``steps.jsonl``. Raises CompareError."""
    try:
        return tuple(
            msgspec.json.decode(line, type=StepFact) for line in lines.read_bytes().splitlines() if line
        )
    except (OSError, *UNREADABLE) as error:
        raise CompareError(f"{lines}: cannot be read: {problem_of(error)}") from error


def read_checkpoint(directory: Path) -> CheckpointState:
    """Everything in a checkpoint folder, after its files were found to be what the manifest says.

    Raises CompareError when the folder is torn, or damaged since it was written.
    """
    files = manifest_files(directory)
    state = CheckpointState({}, {})
    for name, (num_bytes, sha256) in sorted(files.items()):
        file = directory / name
        _check_file(file, num_bytes, sha256)
        tensors, state.notes[name] = read_file(file)
        for tensor in sorted(tensors.keys() & state.tensors.keys()):
            raise CompareError(f"{file}: has tensor {tensor}, and so has {state.tensors[tensor].file}")
        state.tensors.update(tensors)
    return state


def manifest_files(directory: Path) -> dict[str, tuple[int, str]]:
    """File name -> (size in bytes, SHA-256), of every bucket of the manifest. Raises CompareError."""
    manifest = read_manifest(directory)
    try:
        return {
            part["file"]: (part["num_bytes"], part["sha256"]) for part in manifest["buckets"] if part["file"]
        }
    except (KeyError, TypeError) as error:
        raise CompareError(f"{directory / 'manifest.json'}: is no manifest of a checkpoint") from error


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises CompareError."""
    path = directory / "manifest.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise CompareError(f"{directory}: is no complete checkpoint: it has no manifest.json") from error
    except (OSError, *UNREADABLE) as error:
        raise CompareError(f"{path}: cannot be read: {problem_of(error)}") from error


def inputs_of(directory: Path) -> Inputs:
    """What the run of a checkpoint folder had read, as far as its manifest knows. Raises CompareError."""
    manifest = read_manifest(directory)
    try:
        found = msgspec.convert(manifest.get("inputs", ()), Inputs)
    except msgspec.ValidationError as error:
        raise CompareError(f"{directory / 'manifest.json'}: cannot be read: {problem_of(error)}") from error
    return found or of_corpus(str(manifest.get("corpus", "")))


def _check_file(file: Path, num_bytes: int, sha256: str) -> None:
    try:
        with file.open("rb") as opened:
            size, found = file.stat().st_size, hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CompareError(f"{file}: cannot be read: {error.strerror}") from error
    if (size, found) != (num_bytes, sha256):
        raise CompareError(
            f"{file}: is not what was written: {size} bytes, SHA-256 {found[:12]}…; "
            f"the manifest says {num_bytes} bytes, {sha256[:12]}…",
            "the file was changed or the disk is failing; an older checkpoint may be whole",
        )


def read_file(file: Path) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Tensors and metadata of a safetensors file (8 bytes length, JSON header, data). Raises CompareError."""
    with file.open("rb") as opened:
        head = opened.read(8)
        length = int.from_bytes(head, "little") if len(head) == 8 else -1
        size = file.stat().st_size
        if not 0 < length <= size - 8:
            raise CompareError(f"{file}: is no safetensors file")
        header = _decode_header(file, opened.read(length))
    notes = header.pop("__metadata__", {})
    places = {name: _place(file, name, entry, 8 + length) for name, entry in header.items()}
    _check_cover(file, list(places.values()), 8 + length, size)
    return places, notes


def _decode_header(file: Path, data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE as error:
        raise CompareError(f"{file}: its header cannot be read: {problem_of(error)}") from error


def _place(file: Path, name: str, entry: Any, base: int) -> TensorPlace:
    try:
        start, stop = entry["data_offsets"]
        return TensorPlace(file, entry["dtype"], tuple(entry["shape"]), base + start, base + stop)
    except (KeyError, TypeError, ValueError) as error:
        raise CompareError(f"{file}: tensor {name} has a damaged entry") from error


def _check_cover(file: Path, places: Sequence[TensorPlace], base: int, size: int) -> None:
    """The tensors must lie side by side and fill the file, so that no byte goes unread."""
    at = base
    for place in sorted(places, key=lambda place: (place.start, place.stop)):
        if place.start != at:
            raise CompareError(f"{file}: has bytes that belong to no tensor, or to two")
        at = place.stop
    if at != size:
        raise CompareError(f"{file}: ends at byte {size}, its header says {at}")
