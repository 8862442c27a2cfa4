"""Exactness on a GPU: sums in any grouping, layers run twice, and the way through pinned memory."""

from __future__ import annotations

import math
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.worker import sums
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.groups.manager import GroupManager
from oobleckd.worker.messaging.gather import Intake
from oobleckd.worker.messaging.messenger import TransportMessenger
from oobleckd.worker.models import Batch, load_spec, seed_layer
from oobleckd.worker.models.config import EXPERTS
from oobleckd.worker.runtime.timing import timer_of
from oobleckd.worker.transport.mailbox import Mailbox
from oobleckd.worker.transport.transport import Transport
from tests.helpers import gpu
from tests.helpers.experts import tie_routers
from tests.helpers.finishing import finished
from tests.helpers.models import small_config, small_job
from tests.helpers.separate import packed_batch, places_of, separate_spec, some_tokens

pytestmark = pytest.mark.gpu
TIMEOUT_S = 60.0
WINDOWS = {"sliding_window": 3, "local_attention": 4}
ATTENTION = (
    "gpt2", "llama",  # causal, by a kernel for that
    "mistral", "gemma3_text",  # of a window
    "falcon",  # with a mask
    "bloom",  # with biases of distance
    "gemma2",  # with capped scores
    "bert", "modernbert",  # in both directions
)  # fmt: skip
"""A family of each kind of attention, or two."""
TERMS = 12
SHAPES = ((257, 130), (1000,))


@pytest.fixture
def device(tmp_path: Path) -> torch.device:
    """The device as a device process sets it up."""
    return torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))


def gradients(device: torch.device) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(7)
    return [[torch.randn(shape, generator=draw).to(device) for shape in SHAPES] for _ in range(TERMS)]


def grouped(terms: list[list[Tensor]], groups: list[list[int]], device: torch.device) -> list[Tensor]:
    """The total when each of ``groups`` is summed in one place, and the places are added up."""
    exponents = (sums.START_EXPONENT,) * len(SHAPES)
    parts = []
    for group in groups:
        part = sums.empty(SHAPES, True, device)
        for index in group:
            part.add(terms[index], exponents, TERMS)
        assert part.flags == (False, False)
        parts.append([tensor.clone() for tensor in part.tensors])
    return sums.mean_grads(sums.total(parts), exponents, TERMS, True)


def test_any_grouping_gives_the_same_bits(device: torch.device) -> None:
    terms = gradients(device)
    wanted = grouped(terms, [list(range(TERMS))], device)
    chance = random.Random(3)
    for _ in range(8):
        order = chance.sample(range(TERMS), TERMS)
        cut = sorted(chance.sample(range(1, TERMS), 2))
        groups = [order[: cut[0]], order[cut[0] : cut[1]], order[cut[1] :]]
        assert all(map(torch.equal, grouped(terms, groups, device), wanted))


def test_sums_are_those_of_a_cpu(device: torch.device) -> None:
    whole = [list(range(TERMS))]
    here = grouped(gradients(device), whole, device)
    cpu = torch.device("cpu")
    there = grouped(gradients(cpu), whole, cpu)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(here, there, strict=True))


def test_a_copy_lies_on_the_host_and_is_merged_on_the_gpu(device: torch.device) -> None:
    exponents = (sums.START_EXPONENT,) * len(SHAPES)
    own, other = sums.Whole(SHAPES, True, device), sums.Whole(SHAPES, True, device)
    for index, grads in enumerate(gradients(device)):
        (own if index < TERMS // 2 else other).add(grads, exponents, TERMS)
    copied = own.copy()
    assert {tensor.device.type for tensor in copied} == {"cpu"}
    other.merge(copied)
    cpu = torch.device("cpu")
    there = sums.Chunked(SHAPES, True, cpu)
    for grads in gradients(cpu):
        there.add(grads, exponents, TERMS)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(other.tensors, there.tensors, strict=True))


EDGES = (math.nan, math.inf, -math.inf, 2.0**48, -(2.0**47), 0.5, -0.5, 2.0**-149, 2.0**30 + 0.5)


@pytest.mark.parametrize("bad", EDGES)
@pytest.mark.parametrize("place", [0, -1])
def test_what_a_term_holds_is_seen_as_on_a_cpu(device: torch.device, place: int, bad: float) -> None:
    found = []
    for kind, on in ((sums.Chunked, torch.device("cpu")), (sums.Whole, device)):
        total = kind(SHAPES, True, on, guarded=True)
        for index in range(3):
            grads = [torch.ones(shape, device=on) for shape in SHAPES]
            if index == 1:
                grads[1][place] = bad
            total.add(grads, (0, 0), 8)
        found.append((total.flags, [tensor.cpu() for tensor in total.tensors]))
    (wanted, there), (flags, here) = found
    assert flags == wanted
    assert any(flags) or all(map(torch.equal, here, there))


def test_norms_and_exponents_are_those_of_a_cpu(device: torch.device) -> None:
    cpu = torch.device("cpu")
    there, here = sums.empty(SHAPES, True, cpu), sums.empty(SHAPES, True, device)
    exponents = (sums.START_EXPONENT,) * len(SHAPES)
    for one, on in ((there, cpu), (here, device)):
        for grads in gradients(on):
            one.add(grads, exponents, TERMS)
    (wanted_grads, wanted), (grads, found) = (
        finished(one.tensors, exponents, TERMS, num_contributions=TERMS) for one in (there, here)
    )
    assert all(map(torch.equal, wanted_grads, [grad.cpu() for grad in grads]))
    assert found.exponents == wanted.exponents
    assert found.norms == pytest.approx(wanted.norms, rel=1e-12)


def test_a_timer_has_the_time_at_which_the_gpu_got_there(device: torch.device) -> None:
    timer = timer_of(device)
    began = timer.now()
    width = 64 if gpu.REHEARSAL else 2048
    x = torch.randn(width, width, device=device)
    for _ in range(50):
        x = x @ x / width
    stopped = timer.now()
    told_s = time.perf_counter()
    settled_s = timer.settle()
    took_s = timer.seconds(stopped) - timer.seconds(began)
    assert took_s > 0
    assert timer.seconds(stopped) <= settled_s + 1e-3
    if not gpu.REHEARSAL:
        assert timer.seconds(stopped) > told_s  # whoever told it did not wait


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", [*ATTENTION, *EXPERTS])
def test_a_step_computed_twice_has_the_same_bits(device: torch.device, family: str, precision: str) -> None:
    job = small_job(family, small_config(family, **WINDOWS), train={"precision": precision})
    once, again = step(job, device), step(job, device)
    assert all(torch.isfinite(tensor).all() for tensor in once)
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("family", EXPERTS)
def test_routers_that_see_no_difference_choose_the_same_twice(
    device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tie_routers(monkeypatch)
    job = small_job(family)
    assert all(map(torch.equal, step(job, device), step(job, device)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "llama", "opt"])
def test_a_step_on_separate_documents_has_the_same_bits_twice(
    device: torch.device, family: str, precision: str
) -> None:
    job = separate_spec(family, precision).job
    once, again = step(job, device), step(job, device)
    assert all(torch.isfinite(tensor).all() for tensor in once)
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "llama", "opt"])
def test_masks_are_made_without_waiting_for_the_device(device: torch.device, family: str) -> None:
    spec = separate_spec(family, "bf16")
    batch = packed_batch(some_tokens(spec)).to(device)
    spec.calls(*places_of(batch))
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        spec.calls(*places_of(batch))
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def step(job: Job, device: torch.device) -> list[Tensor]:
    """Loss and gradients of one micro-batch through the whole model."""
    spec = load_spec(job)
    params = {
        key: value.requires_grad_()
        for bucket in spec.buckets
        for key, value in zip(bucket.keys, spec.init(bucket.index, device), strict=True)
    }
    tokens = torch.arange(2 * job.train.sequence).view(2, -1)
    batch = packed_batch(tokens) if job.data.is_separate else Batch(tokens, tokens)
    batch = batch.to(device)
    calls = spec.calls(*places_of(batch)) if job.data.is_separate else {}
    x: Tensor | None = None
    for index in range(spec.num_layers):
        keys = [key for bucket in spec.buckets_of(index) for key in spec.buckets[bucket].keys]
        layer = spec.layer(index, {key: params[key] for key in keys}, device)
        seed_layer(job.train.seed, 0, 0, index, device)
        x = layer(x, batch, calls.get(index))
    assert x is not None
    return [x.detach(), *torch.autograd.grad(x, list(params.values()))]


def test_staged_messages_come_back_with_the_same_bits(device: torch.device, tmp_path: Path) -> None:
    arrived = threading.Event()

    class Inbox(Mailbox):
        def put(self, message: object) -> None:
            super().put(message)  # type: ignore[arg-type]
            arrived.set()

    boxes = {"a/0": Mailbox(), "b/0": Inbox()}
    ends = {
        name: Transport(name, "here", box, local_dir=tmp_path, on_peer_lost=lambda *lost: None)
        for name, box in boxes.items()
    }
    for name, end in ends.items():
        end.configure({n: other.peer for n, other in ends.items() if n != name}, bytes(32))
    messengers = {
        name: TransportMessenger(
            end, GroupManager(name, boxes[name], None, end.send), Intake(boxes[name]), boxes[name], device
        )
        for name, end in ends.items()
    }
    tensors = [
        torch.randn(300, 500, device=device).t(),  # not contiguous
        torch.randn(77, device=device, dtype=torch.float64),
        torch.randn(2, 3, 5, device=device).to(torch.bfloat16),
        torch.tensor(3.5, device=device),
    ]
    messengers["a/0"].send("b/0", ("k", 1), tensors, b"meta")
    assert arrived.wait(TIMEOUT_S)
    message = messengers["b/0"].take(("k", 1))
    assert message is not None
    assert all(tensor.device == device for tensor in message.tensors)
    assert all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(tensors, message.tensors, strict=True)
    )
    for end in ends.values():
        end.close()
