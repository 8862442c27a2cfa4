"""The canary of a device: what it depends on, what it does not, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oobleckd.protocol.job import Job
from oobleckd.protocol.traits import CANARY, alike
from oobleckd.worker.canary import canary
from oobleckd.worker.canary.canary import Canary, Sung, kinds, shape_of, subject, sung
from oobleckd.worker.models import load_spec
from tests.helpers.experts import saved
from tests.helpers.models import CPU, GPT2, small_job

OWN = {"device": "cpu", "torch": "2.13"}
LARGE = {"n_layer": 2, "n_positions": 1024, "n_head": 4}  # as wide as GPT-2


def of(job: Job) -> str:
    found = sung(load_spec(job), CPU)
    assert found is not None
    return found.digest


@pytest.fixture
def math_attention() -> Iterator[None]:
    """Torch takes another kernel for attention, as after a change of library or flag: no version says so."""
    torch.backends.cuda.enable_flash_sdp(enabled=False)  # which is heeded by CPUs, too
    yield
    torch.backends.cuda.enable_flash_sdp(enabled=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["bert", "gemma2", "gpt2", "llama"])
def test_it_repeats_and_takes_less_than_a_second_of_cpu(family: str, precision: str) -> None:
    job = small_job(family, train={"precision": precision})
    began = time.process_time()
    first = of(job)
    assert time.process_time() - began < 1.0
    torch.manual_seed(7)
    assert of(job) == first


@pytest.mark.usefixtures("math_attention")
def test_another_kernel_for_attention_is_another_digest() -> None:
    with_math = of(small_job("llama"))
    torch.backends.cuda.enable_flash_sdp(enabled=True)
    assert of(small_job("llama")) != with_math


def test_one_bit_anywhere_is_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, finish = of(small_job()), canary.sums.finish

    def off(*args: Any, **kwargs: Any) -> Any:
        found = finish(*args, **kwargs)
        found[-1, -1] *= 1 + 2**-52
        return found

    monkeypatch.setattr(canary.sums, "finish", off)
    assert of(small_job()) != usual


@pytest.mark.parametrize(
    "table",
    [
        {"train": {"precision": "bf16"}},
        {"train": {"sequence": 16}},
        {"train": {"micro_batch": 1}},
        {"train": {"exact": False}},
        {"optimizer": {"name": "sgd", "momentum": 0.9}},
    ],
    ids=str,
)
def test_it_is_of_what_the_job_computes(table: dict[str, Any]) -> None:
    one, other = small_job("gpt2", GPT2), small_job("gpt2", GPT2, **table)
    assert subject(one) != subject(other)
    assert of(one) != of(other)


def test_what_leaves_bits_alone_is_no_part_of_it() -> None:
    one, other = small_job(), small_job(train={"steps": 9, "seed": 5}, fault_tolerance={"check_every": 0})
    assert subject(one) == subject(other)
    assert of(one) == of(other)


def test_each_kind_of_block_sings_once() -> None:
    assert kinds(load_spec(small_job("gpt2", {**GPT2, "n_layer": 5}))) == {0: 1, 1: 5, 6: 1}
    assert kinds(load_spec(small_job("gemma2"))) == {0: 1, 1: 1, 2: 1, 3: 1}  # local attention, and global


@pytest.mark.parametrize(
    ("width", "kind", "shape"),
    [
        (128, "cpu", (4, 1024)),
        (256, "cpu", (1, 128)),
        (768, "cpu", (1, 16)),
        (768, "cuda", (8, 1024)),
        (3072, "cpu", None),
        (3072, "cuda", (2, 1024)),
    ],
)
def test_shapes_are_shortened_by_what_they_cost(width: int, kind: str, shape: tuple[int, int] | None) -> None:
    train = {"micro_batch": 8, "global_batch": 8, "sequence": 1024}
    vocabulary = {} if width > 128 else {"vocab_size": 512}
    spec = load_spec(small_job("gpt2", {**LARGE, "n_embd": width, **vocabulary}, train=train))
    assert shape_of(spec, kinds(spec), kind) == shape


def test_one_that_would_take_too_long_is_not_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(canary._FLOPS, "cpu", 1e3)
    singer = Canary("n/0", CPU, {})
    singer.sing(load_spec(small_job()), OWN)
    assert (singer.said, singer.traits(OWN)) == ("", OWN)


def test_one_of_compiled_layers_has_the_shapes_that_they_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sung in tests/unit/worker/test_compiled.py."""
    monkeypatch.setitem(canary._FLOPS, "cpu", 1e3)
    job = small_job(train={"compile": True})
    spec = load_spec(job)
    assert shape_of(spec, kinds(spec), "cpu") == (job.train.micro_batch, job.train.sequence)
    assert subject(job) != subject(small_job())
    monkeypatch.setitem(canary._BYTES, "cpu", 1)
    assert sung(spec, CPU) is None


def test_nor_one_that_finds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(canary, "gradients", full)
    assert sung(load_spec(small_job()), CPU) is None


def test_folders_that_correct_their_routers_otherwise_are_another_digest(tmp_path: Path) -> None:
    """What nothing trains is compared by nobody else, and two nodes may have other files under one name."""
    model = saved("glm4_moe", tmp_path)
    correction = model.get_buffer("model.layers.1.mlp.gate.e_score_correction_bias")
    job = small_job("glm4_moe", {}, model={"checkpoint": str(tmp_path)})
    first = of(job)
    device = Canary("node-1/0", CPU, {})
    device.sing(load_spec(job), OWN)
    before = device.said
    assert before.startswith(first)
    with torch.no_grad():
        correction[0] += 2.0**-10
    model.save_pretrained(tmp_path)
    assert of(job) != first
    device.sing(load_spec(job), OWN)
    assert device.said != before


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The families that sing from now on."""
    families: list[str] = []

    def counts(spec: Any, device: torch.device) -> Sung | None:
        families.append(spec.job.model.family)
        return sung(spec, device)

    monkeypatch.setattr(canary, "sung", counts)
    return families


def test_a_device_computes_it_once_for_jobs_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    families, singer = counted(monkeypatch), Canary("n/0", CPU, {})
    for family in ("gpt2", "llama", "gpt2"):
        singer.sing(load_spec(small_job(family)), OWN)
    assert families == ["gpt2", "llama"]
    assert singer.said.endswith(subject(small_job("gpt2")))


def test_a_spare_has_that_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    families, before = counted(monkeypatch), Canary("n/0", CPU, {})
    before.sing(load_spec(small_job()), OWN)
    spare = Canary("n/0", CPU, before.traits(OWN))
    spare.sing(load_spec(small_job()), OWN)
    assert (spare.said, families) == (before.said, ["gpt2"])
    spare.sing(load_spec(small_job("llama")), OWN)
    assert families == ["gpt2", "llama"]


@pytest.mark.parametrize("before", [{}, OWN, {"torch": "2.12"}], ids=str)
def test_one_that_is_of_another_version_than_its_place_was_sings_itself(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str]
) -> None:
    families, singer = counted(monkeypatch), Canary("n/0", CPU, {})
    singer.sing(load_spec(small_job()), OWN)
    said = {CANARY: singer.said} if before != OWN else {}
    spare = Canary("n/0", CPU, OWN | before | said if before != {} else {})
    spare.sing(load_spec(small_job()), OWN)
    assert families == ["gpt2", "gpt2"]
    assert alike((spare.traits(OWN), singer.traits(OWN)))
