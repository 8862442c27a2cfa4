"""The exchange of gradients of buckets that are cut into slices: bits for any number of holders, bytes,
deaths in the middle of it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from oobleckd.protocol.job import Job
from oobleckd.worker.messaging.gather import KIND, MEANS
from oobleckd.worker.round.reduce import Reducer
from oobleckd.worker.training.executor import Executor
from oobleckd.worker.transport.mailbox import TensorMessage
from tests.helpers.engine import Cuts, World
from tests.helpers.engine_jobs import GOAL, Reference, check, job, random_deaths

SPLIT = {"a": [(0, 2), (2, 3)], "b": [(0, 1), (1, 3)], "c": [(0, 3)]}
"""Three holders of each layer, in pipelines of two and one."""
HEADER_BYTES = 4096
"""Of a step: figures, marks and losses, a few numbers a chunk."""


def wide(tmp_path: Path, *, check_every: int = 1, exact: bool = True) -> Job:
    """One block of 200,000 parameters, in seven slices, and tied embeddings of 66,000 in three."""
    spec = job(tmp_path, exact=exact)
    config = {**spec.model.config, "n_layer": 1, "n_embd": 128, "vocab_size": 500}
    return msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, config=config),
        fault_tolerance=msgspec.structs.replace(spec.fault_tolerance, check_every=check_every),
    )


def replicas(count: int) -> dict[str, Cuts]:
    """Pipelines of one device, all of which hold everything."""
    return {f"{chr(ord('a') + number)}": [(0, 3)] for number in range(count)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    tmp_path = tmp_path_factory.mktemp("alone")
    world = World(wide(tmp_path), replicas(1), 0, tmp_path)
    world.run()
    return world.job, world.losses, world.weights()


def compared(reference: Reference, check_every: int) -> Job:
    spec = reference[0]
    tolerance = msgspec.structs.replace(spec.fault_tolerance, check_every=check_every)
    return msgspec.structs.replace(spec, fault_tolerance=tolerance)


class Counted(World):
    """``sent``: device -> bytes of sums and of means."""

    sent: dict[str, Counter[str]]

    def deliver(self, source: str, target: str, message: TensorMessage) -> None:
        sent = self.__dict__.setdefault("sent", {}).setdefault(source, Counter())
        kind = str(message.key[0])
        sent[kind] += sum(tensor.nbytes for tensor in message.tensors)
        super().deliver(source, target, message)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("check_every", [0, 1])
def test_bits_do_not_show_the_number_of_holders_and_bytes_are_few(
    alone: Reference, tmp_path: Path, count: int, check_every: int
) -> None:
    world = Counted(compared(alone, check_every), replicas(count), count, tmp_path)
    store = world.nodes["a0/0"].executor.store
    assert sorted(len(store.slicing(bucket).slices) for bucket in store.buckets) == [1, 1, 2, 7]
    world.run()
    check(world, alone)
    num_params = sum(tensor.numel() for tensor in alone[2].values())
    made = {device: (sent[KIND], sent[MEANS]) for device, sent in world.sent.items()}
    sums, means = (sum(each) for each in zip(*made.values(), strict=True))
    most = 12 * (count - 1) / count if not check_every else (20 * count - 24) / count
    a_step = (sums + means) / (count * GOAL)
    assert a_step <= most * num_params + HEADER_BYTES
    if count <= world.job.num_micro_batches:  # else some have nothing to send
        assert a_step >= most * num_params
    if check_every and count == 2:
        assert means == 0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_float_sums_are_added_in_the_order_of_devices_whoever_makes_means(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one owner a bucket, with several, and where each mean is made twice."""
    found = []
    for check_every, split in ((0, 1 << 40), (0, 1), (1, 1)):
        monkeypatch.setattr("oobleckd.worker.round_machine.makers._SPLIT_NUMBERS", split)
        world = World(wide(tmp_path, check_every=check_every, exact=False), replicas(count), 3, tmp_path)
        world.run()
        found.append((world.losses, {key: tensor.tolist() for key, tensor in world.weights().items()}))
    assert found[0] == found[1] == found[2]


@pytest.mark.thin(8)
@pytest.mark.parametrize("point", ["reduce", "means", "reduced", "update"])
@pytest.mark.parametrize("check_every", [0, 2])
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b0/0", "b1/0", "c0/0"])
def test_a_death_in_the_exchange_does_not_show(
    alone: Reference, tmp_path: Path, point: str, check_every: int, victim: str
) -> None:
    seed = zlib.crc32(f"{point} {check_every} {victim}".encode()) % 1000
    world = World(compared(alone, check_every), SPLIT, seed, tmp_path, go_on=seed % 2 == 1)
    world.nodes[victim].faults.arm(point, 1 + seed % 3)
    world.run()
    assert (victim, point) in world.fired
    check(world, alone)


@pytest.mark.thin(10)
@pytest.mark.parametrize("seed", range(60))
def test_random_deaths(alone: Reference, tmp_path: Path, seed: int) -> None:
    world = World(compared(alone, seed % 3), SPLIT, seed, tmp_path, go_on=seed % 2 == 1)
    random_deaths(world)
    world.run()
    check(world, alone)


def test_survivors_give_each_other_what_each_has_of_a_bucket(
    alone: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner dies when it has given its means to one of two: nothing is made again where the others have
    all slices between them.
    """
    enter, donors = Reducer.enter, []

    def watched(self: Reducer) -> None:
        donors.extend(shares for shares in self.exchange.donors.values() if len(shares) > 1)
        enter(self)

    monkeypatch.setattr(Reducer, "enter", watched)
    world = World(compared(alone, 0), replicas(3), 13, tmp_path)  # a seed in which it comes to that
    world.nodes["b0/0"].faults.arm("means", 2)
    world.run()
    check(world, alone)
    assert donors


def test_a_device_votes_when_it_has_the_means_of_all_slices(
    alone: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vote, seen = Executor._vote, 0

    def voted(self: Executor) -> None:
        nonlocal seen
        exchange = self.machine.exchange
        assert all(here == of for here, of in exchange.told.values())
        assert exchange.told.keys() == self.store.buckets.keys()
        seen += 1
        vote(self)

    monkeypatch.setattr(Executor, "_vote", voted)
    world = World(compared(alone, 0), SPLIT, 1, tmp_path)
    world.run()
    assert seen == GOAL * len(SPLIT) + GOAL * 2
