"""The comparison cannot be fooled: whatever differs between two runs, it fails and names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from oobleckd.ctl.compare import (
    CheckpointState,
    CompareError,
    RunEvidence,
    StepFact,
    compare,
    read_checkpoint,
    read_file,
    read_steps,
)
from oobleckd.ctl.evalfacts import EvalFact, read_evaluations
from oobleckd.protocol.batchramp import sizes_of
from tests.helpers.runs import NAMES, fact, facts, flip_bit, seal, write_checkpoint

Steps = tuple[StepFact, ...]
SIZES = sizes_of(4, 2)


def run_of(directory: Path, steps: Steps | None = None) -> RunEvidence:
    return RunEvidence(
        facts() if steps is None else steps, read_checkpoint(directory), num_steps=3, sizes=SIZES
    )


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "theirs")


def first(file: Path) -> Path:
    return next(iter(sorted(file.glob("*.safetensors"))))


def test_equal_runs_are_verified(ours: Path, theirs: Path) -> None:
    verdict = compare(run_of(ours), run_of(theirs))
    assert verdict.identical
    assert verdict.sentence == (
        "verified: 3 of 3 losses and 4 of 4 weight tensors are bit-identical to the run without failures; "
        "every sample counted once"
    )
    assert verdict.samples == 12


def test_of_a_run_that_was_resumed_its_own_steps_are_compared(ours: Path, theirs: Path) -> None:
    """What came before is of the job that wrote the checkpoint."""
    resumed = RunEvidence(facts()[1:], read_checkpoint(ours), num_steps=3, sizes=SIZES, first=2)
    verdict = compare(resumed, run_of(theirs))
    assert verdict.identical
    assert (verdict.losses, verdict.num_losses, verdict.samples) == (2, 2, 8)
    assert "2 of 2 losses from step 2 on" in verdict.sentence
    gap = msgspec.structs.replace(resumed, steps=facts()[2:])
    assert compare(gap, run_of(theirs)).findings == ("the run has no step 2",)
    early = msgspec.structs.replace(resumed, steps=facts())
    assert compare(early, run_of(theirs)).findings == ("the run has a step 1",)


def test_evaluations_are_compared_by_their_bits(ours: Path, theirs: Path) -> None:
    evals = tuple(
        EvalFact(step, source, (4.0 / (step + 1)).hex(), 32) for step in (0, 2) for source in ("a", "b")
    )
    run, other = (msgspec.structs.replace(run_of(place), evaluations=evals) for place in (ours, theirs))
    verdict = compare(run, other)
    assert (verdict.identical, verdict.evaluations, verdict.num_evaluations) == (True, 4, 4)
    assert "3 of 3 losses, 4 of 4 evaluations and 4 of 4 weight tensors" in verdict.sentence
    odd = (*evals[:3], msgspec.structs.replace(evals[3], loss_hex=(4.0 / 3 + 2**-51).hex()))
    findings = compare(msgspec.structs.replace(run, evaluations=odd), other).findings
    (finding,) = findings
    place, _, losses = finding.partition(": ")
    assert place == "evaluation after step 2, b"
    assert losses.startswith("loss 0x1.5555555555557p+0 of 32 targets here, loss 0x1.5555555555555p+0 of 32")
    fewer = msgspec.structs.replace(run, evaluations=evals[1:])
    assert compare(fewer, other).findings == ("evaluation after step 0, a: is missing here",)
    assert compare(other, fewer).findings == ("evaluation after step 0, a: is missing without failures",)


def test_of_a_run_that_was_resumed_its_own_evaluations_are_compared(ours: Path, theirs: Path) -> None:
    evals = tuple(EvalFact(step, "a", float(step).hex(), 32) for step in range(4))
    other = msgspec.structs.replace(run_of(theirs), evaluations=evals)
    resumed = RunEvidence(facts()[1:], read_checkpoint(ours), 3, SIZES, 2, evals[1:])
    verdict = compare(resumed, other)
    assert (verdict.identical, verdict.num_evaluations) == (True, 3)


def test_evaluations_of_one_process_are_added_up_exactly(tmp_path: Path) -> None:
    """As they would be in any order: 1 is not lost beside 1e17."""
    lines = tmp_path / "evaluations.jsonl"
    assert read_evaluations(lines) == ()
    sums = (1e17, 1.0, -1e17)
    rows = [
        {
            "step": 3,
            "round": number,
            "source": "a",
            "loss_sum": each,
            "loss_sum_hex": each.hex(),
            "targets": 4,
        }
        for number, each in enumerate(sums)
    ]
    lines.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    assert read_evaluations(lines) == (EvalFact(3, "a", (1.0 / 12).hex(), 12),)


def stopped(*skipped: StepFact) -> RunEvidence:
    steps = (fact(1, 5.0), *skipped)
    return RunEvidence(steps, None, num_steps=len(steps), sizes=SIZES)


def unread(step: int, loss: float) -> StepFact:
    """A skipped step as it comes out of JSON."""
    return StepFact(step, None, loss.hex(), 4, f"samples-of-{step}", "skipped")


def test_runs_that_stopped_at_skipped_steps_are_judged() -> None:
    ours, theirs = (
        stopped(unread(2, math.nan), unread(3, -math.inf)),
        stopped(unread(2, math.nan), unread(3, -math.inf)),
    )
    verdict = compare(ours, theirs)
    assert verdict.identical
    assert (verdict.losses, verdict.num_losses, verdict.num_weights) == (3, 3, 0)
    assert "up to where both stopped; of weights nothing is compared" in verdict.sentence
    assert verdict.sentence.endswith("2 of 3 steps were skipped in both")


@pytest.mark.parametrize(
    ("other", "finding"),
    [
        (stopped(unread(2, math.inf)), "step 2: loss nan here, inf without failures"),
        (stopped(msgspec.structs.replace(unread(2, math.nan), outcome="applied")), ("step 2: skipped here, "
                                                                                   "applied without")),
        (stopped(unread(2, math.nan), unread(3, math.nan)), "2 steps here, 3 without failures"),
        (msgspec.structs.replace(stopped(unread(2, math.nan)), state=CheckpointState({}, {})), ("stopped "
                                                                                               "there here, "
                                                                                               "went on to "
                                                                                               "its end "
                                                                                               "without")),
    ],
)  # fmt: skip
def test_runs_that_stopped_elsewhere_or_otherwise_differ(other: RunEvidence, finding: str) -> None:
    verdict = compare(stopped(unread(2, math.nan)), other)
    assert not verdict.identical
    assert any(finding in each for each in verdict.findings), verdict.findings


def test_a_loss_that_json_cannot_say_is_read(tmp_path: Path) -> None:
    lines = tmp_path / "steps.jsonl"
    lines.write_bytes(msgspec.json.encode(msgspec.structs.replace(unread(1, math.nan), loss=math.nan)))
    (found,) = read_steps(lines)
    assert found == unread(1, math.nan)
    assert found.bits == msgspec.structs.replace(found, loss=-math.nan).bits


def test_one_flipped_weight_bit(ours: Path, theirs: Path) -> None:
    for byte in range(-140, 0):  # every byte of the last tensor of the first bucket
        flip_bit(first(ours), byte)
        seal(ours)
        verdict = compare(run_of(ours), run_of(theirs))
        flip_bit(first(ours), byte)
        assert not verdict.identical
        assert (verdict.losses, verdict.weights) == (3, 3)
        assert f"tensor param/{NAMES[0]}: byte {140 + byte}" in verdict.sentence


def test_one_flipped_bit_of_the_optimizer(ours: Path, theirs: Path) -> None:
    flip_bit(first(ours), -141)
    seal(ours)
    verdict = compare(run_of(ours), run_of(theirs))
    assert not verdict.identical
    assert verdict.weights == 4
    assert f"tensor exp_avg/{NAMES[0]}" in verdict.sentence


def test_other_scales_of_the_sums(theirs: Path, tmp_path: Path) -> None:
    verdict = compare(run_of(write_checkpoint(tmp_path / "ours", exponents="[44]")), run_of(theirs))
    assert not verdict.identical
    assert "bucket-00000.safetensors: {'exponents': '[44]'} here" in verdict.sentence


def test_a_file_that_is_not_what_its_manifest_says(ours: Path) -> None:
    flip_bit(first(ours))
    with pytest.raises(CompareError, match="is not what was written"):
        read_checkpoint(ours)


@pytest.mark.parametrize(
    ("steps", "finding"),
    [
        (lambda s: (s[0], fact(2, math.nextafter(s[1].loss, 9)), s[2]), "step 2: loss"),
        (lambda s: (fact(1, -0.0), *s[1:]), "step 1: loss"),
        (lambda s: (msgspec.structs.replace(s[0], loss=4.0), *s[1:]), "is not its own bits"),
        (lambda s: (msgspec.structs.replace(s[0], loss_hex="soup"), *s[1:]), "is not its own bits"),
        (lambda s: (msgspec.structs.replace(s[0], samples=5), *s[1:]), ("step 1: 5 samples counted here, the "
                                                                       "step has 4")),
        (lambda s: (msgspec.structs.replace(s[0], ledger="0 1 1 3"), *s[1:]), ("step 1: other samples "
                                                                              "counted")),
        (lambda s: s[:2], "the run has no step 3"),
        (lambda s: (*s, s[1]), "the run has step 2 2 times"),
        (lambda s: (*s, fact(4, 1.0)), "the run has a step 4"),
        (lambda _: (), "the run has no step 1"),
    ],
)  # fmt: skip
def test_steps_that_differ(ours: Path, theirs: Path, steps: Callable[[Steps], Steps], finding: str) -> None:
    verdict = compare(run_of(ours, steps(facts())), run_of(theirs))
    assert not verdict.identical
    assert any(finding in found for found in verdict.findings)
    assert verdict.sentence.startswith("different: ")


def test_a_wrong_count_in_both_runs_is_no_excuse(ours: Path, theirs: Path) -> None:
    twice = tuple(msgspec.structs.replace(step, samples=5) for step in facts())
    assert not compare(run_of(ours, twice), run_of(theirs, twice)).identical


def test_a_loss_of_nan_equals_itself(ours: Path, theirs: Path) -> None:
    steps = (fact(1, math.nan), *facts()[1:])
    assert compare(run_of(ours, steps), run_of(theirs, steps)).identical


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_a_missing_tensor(tmp_path: Path, side: str) -> None:
    runs = {
        name: run_of(write_checkpoint(tmp_path / name, drop=NAMES[1:2] if name == side else ()))
        for name in ("ours", "theirs")
    }
    verdict = compare(runs["ours"], runs["theirs"])
    assert not verdict.identical
    assert f"param/{NAMES[1]} is missing" in verdict.sentence


def test_a_missing_file(ours: Path) -> None:
    first(ours).unlink()
    with pytest.raises(CompareError, match="cannot be read"):
        read_checkpoint(ours)


def test_a_run_compared_with_itself_proves_nothing(ours: Path) -> None:
    verdict = compare(run_of(ours), run_of(ours))
    assert not verdict.identical
    assert "proves nothing" in verdict.sentence


def test_runs_without_weights_prove_nothing() -> None:
    nothing = RunEvidence(facts(), CheckpointState({}, {}), num_steps=3, sizes=SIZES)
    assert not compare(nothing, nothing).identical


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:-3],
        lambda data: data + b"more",
        lambda data: (10**12).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"{" + b"x" * (len(data) - 9),
        lambda data: data.replace(b'"dtype"', b'"dtypo"', 1),
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1),
    ],
)
def test_torn_safetensors(ours: Path, damage: Callable[[bytes], bytes]) -> None:
    file = first(ours)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CompareError):
        read_file(file)


def test_a_folder_without_manifest(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="no complete checkpoint"):
        read_checkpoint(tmp_path)


def test_steps_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b"\n".join(msgspec.json.encode(step) for step in facts()) + b"\n")
    assert read_steps(file) == facts()
    file.write_text("soup")
    with pytest.raises(CompareError):
        read_steps(file)
