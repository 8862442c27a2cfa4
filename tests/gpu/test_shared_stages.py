"""Stages of several devices on GPUs, or several on one: memory of another process, read where it lies, a real
kill in the middle of it, and a job whose bits show neither.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import torch

from oobleckd.worker.sharding.copier import copier_of
from oobleckd.worker.state.window import Handle, opened
from tests.helpers import gpu
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.matrix import survivable

pytestmark = pytest.mark.gpu
NUM_BYTES = (16 if gpu.REHEARSAL else 256) << 20
START_S = 300.0
OWNER = """
import sys, msgspec, torch
from oobleckd.worker.state.window import window
device = torch.device(sys.argv[1])
if device.type == "cuda":
    torch.cuda.set_device(device)
shown = window(int(sys.argv[2]), device)
shown.memory.fill_(int(sys.argv[3]))
if device.type == "cuda":
    torch.cuda.synchronize()
print(msgspec.json.encode(shown.handle).decode(), flush=True)
sys.stdin.read()
"""


class Owner:
    """A process on ``device`` with a window that is full of ``number``."""

    def __init__(self, device: str, number: int) -> None:
        command = [sys.executable, "-c", OWNER, device, str(NUM_BYTES), str(number)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.handle = msgspec.json.decode(self.process.stdout.readline(), type=Handle)

    def kill(self) -> None:
        with self.process:  # waits, and closes its pipes
            self.process.send_signal(signal.SIGKILL)


@pytest.fixture
def places() -> tuple[torch.device, str]:
    """Where a device is that reads, and one that is read."""
    here, there = gpu.devices(2)
    if here != "cpu":
        torch.cuda.set_device(here)
    return torch.device(here), there


def settled(device: torch.device) -> float:
    copier_of(device).settle()
    return time.perf_counter()


def test_a_kill_while_memory_of_another_process_is_read(places: tuple[torch.device, str]) -> None:
    """It can be read on, to the end; and then that of a new process. With times, as they are told in
    docs/sharded-stages.md.
    """
    device, there = places
    owner, copier = Owner(there, 3), copier_of(device)
    began = settled(device)
    found = opened(owner.handle, device)
    opened_s = settled(device) - began
    into = torch.empty(NUM_BYTES, dtype=torch.uint8, device=device)
    copier.now(lambda: into.copy_(found.memory[:NUM_BYTES]))
    began = settled(device)
    copier.now(lambda: into.copy_(found.memory[:NUM_BYTES]))
    rate = NUM_BYTES / (settled(device) - began)
    # On a card enough for half a second, so that the kill comes while they are under way.
    many = range(20 if gpu.REHEARSAL else 2000)
    waits = [copier.ahead(lambda: into.copy_(found.memory[:NUM_BYTES])) for _ in many]
    began = time.perf_counter()
    owner.kill()
    for wait in waits:
        wait()
    ended_s = settled(device) - began
    assert bool((into == 3).all())
    copier.now(lambda: into.copy_(found.memory[:NUM_BYTES]))  # nobody has said yet that it is dead
    assert bool((into == 3).all())
    with pytest.raises(FileNotFoundError):
        opened(owner.handle, device)
    found.close()

    began = time.perf_counter()
    owner = Owner(there, 5)
    found = opened(owner.handle, device)
    copier.now(lambda: into.copy_(found.memory[:NUM_BYTES]))
    assert bool((into == 5).all())
    print(
        f"another process's memory: opened in {opened_s * 1e3:.2f} ms, read at {rate / 1e9:.1f} GB/s; with "
        f"its owner killed reads ended after {ended_s:.3f} s; a new owner from nothing: "
        f"{time.perf_counter() - began:.3f} s"
    )
    found.close()
    owner.kill()


@pytest.mark.skipif(gpu.REHEARSAL, reason="memory of a CPU is the host's")
def test_memory_is_given_back(places: tuple[torch.device, str]) -> None:
    device, there = places
    settled(device)
    free = torch.cuda.mem_get_info(device)[0]
    for number in range(3):
        owner = Owner(there, number)
        found = opened(owner.handle, device)
        owner.kill()
        assert int(found.memory[NUM_BYTES - 1]) == number
        found.close()
        del found
    until = time.monotonic() + 10.0  # a killed process's own memory is given back a little later
    while free - torch.cuda.mem_get_info(device)[0] > NUM_BYTES // 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert free - torch.cuda.mem_get_info(device)[0] <= NUM_BYTES // 2


def test_layers_come_and_go_beside_what_is_computed(places: tuple[torch.device, str]) -> None:
    """Memory that one stream takes and gives back while another one computes with it; torch's allocator gives
    it all back to the card now and then.
    """
    device, _ = places
    copier, size = copier_of(device), 1 << (16 if gpu.REHEARSAL else 22)
    shards = [torch.full((size,), float(number), device=device) for number in range(8)]
    flats = [torch.empty(size, device=device) for _ in shards]
    for flat in flats:
        flat.untyped_storage().resize_(0)

    def gather(number: int) -> None:
        flats[number].untyped_storage().resize_(size * 4)
        flats[number].copy_(shards[number])

    sums = torch.zeros(len(shards), device=device, dtype=torch.float64)
    wait = copier.ahead(lambda: gather(0))
    for turn in range(200):
        number, after = turn % 8, (turn + 1) % 8
        wait()
        wait = copier.ahead(partial(gather, after))
        for _ in range(20):  # longer than a copy takes
            sums[number] += flats[number].sum(dtype=torch.float64)
        copier.drop(partial(flats[number].untyped_storage().resize_, 0))
        if turn % 50 == 49 and not gpu.REHEARSAL:
            torch.cuda.empty_cache()
    wait()
    assert sums.tolist() == [20 * 25 * size * float(number) for number in range(8)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if problem := gpu.problem():
        pytest.fail(problem, pytrace=False)
    with Cluster(tmp_path_factory.mktemp("gpu"), 3, kind=gpu.KIND, devices=2) as running:
        yield running


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("phase", ["gather", "gather-backward"])
def test_a_kill_in_a_gather_does_not_show(cluster: Cluster, phase: str, precision: str) -> None:
    cluster.heal()
    train = {"steps": 24, "precision": precision}
    resources = {"devices_per_stage": 2}
    job = cluster.client.submit(tiny_job(f"{phase}-{precision}", train=train, resources=resources)).id
    view = cluster.at_step(job, 2, START_S)
    victim = next(node for p in view.pipelines for node in p.nodes if survivable(view, {node}))
    before = len(cluster.fired())
    cluster.client.kill(victim, "device", device=1, at=phase, round=view.step + 4)
    done = cluster.job_in(job, "done", timeout_s=START_S)
    assert any(hit["point"] == phase for hit in cluster.fired()[before:]), "the kill did not fire"
    assert (done.step, done.steps_lost) == (done.steps, 0)
    cluster.ctl("verify", job)  # against a run of the same job, on the same GPU, in which nothing failed
