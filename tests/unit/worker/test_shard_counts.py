"""What a device of a stage of several holds, and what it has of the others in a step: by counters, beside
what is promised and what the planner counts on.
"""

from __future__ import annotations

import math
import queue
import threading
from pathlib import Path

import pytest

from oobleckd.planner.costs.exchange import sent_bytes
from oobleckd.planner.costs.sharded import NodeLink, Sharding, sharded, stage_bytes
from oobleckd.planner.policy import GradientExchange
from oobleckd.planner.profile import FLOAT_BYTES, Profile
from oobleckd.protocol.job import Job, parse_job
from oobleckd.worker.device.measure import measure, profile_key
from oobleckd.worker.sharding.group import GRADIENTS
from oobleckd.worker.state.gathered import GatheredLayer
from oobleckd.worker.training.executor import Executor
from tests.helpers.engine import Cuts, World
from tests.helpers.engine_jobs import GATHERS, check
from tests.helpers.models import CPU
from tests.helpers.resident import GatheredNow, ResidentWorld

SMALL = {
    "vocab_size": 128, "max_position_embeddings": 16, "hidden_size": 64, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
LARGE = SMALL | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024}
"""Two blocks of a million parameters: each is cut into enough slices for eight devices."""
ONE: dict[str, Cuts] = {"a": [(0, 4)]}
TWO_STAGES: dict[str, Cuts] = {"a": [(0, 2), (2, 4)]}
TWO_PIPELINES: dict[str, Cuts] = {"a": [(0, 4)], "b": [(0, 4)]}
MICRO_BATCHES = 8
_MEASURED: dict[str, Profile] = {}
BESIDE = 1.02
"""Figures and marks, which go with means to all holders, over the bytes of sums and means."""


def spec(folder: Path, precision: str = "fp32", config: dict[str, int] = SMALL) -> Job:
    text = folder / "text"
    text.write_bytes(bytes(range(32, 127)) * 40)
    return parse_job(
        {
            "name": "counted",
            "model": {"family": "llama", "config": config},
            "data": {"source": "text", "path": str(text)},
            "train": {
                "steps": 1, "global_batch": MICRO_BATCHES, "micro_batch": 1, "sequence": 8,
                "precision": precision,
            },
            "fault_tolerance": {"check_every": 0},
            "checkpoint": {"dir": str(folder / "checkpoints"), "every": 0},
        }
    )  # fmt: skip


def num_params(world: World) -> int:
    return sum(math.prod(shape) for bucket in world.spec.buckets for shape in bucket.shapes)


def planned(world: World) -> Profile:
    key = profile_key(world.job, CPU)
    if key not in _MEASURED:  # which takes a second
        _MEASURED[key] = measure(world.spec, world.job, CPU)
    return sharded(_MEASURED[key], Sharding(world.devices_per_stage, NodeLink(1e9)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("g", [1, 2, 4, 8])
def test_a_device_holds_its_part_of_24_bytes_a_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g: int, precision: str
) -> None:
    gathered = GatheredNow(monkeypatch)
    world = ResidentWorld(spec(tmp_path, precision, LARGE), ONE, 0, tmp_path, devices_per_stage=g)
    world.run()
    profile, params = planned(world), num_params(world)
    fullest = max(map(sum, world.resident.values()))
    assert len(world.resident) == g
    assert fullest <= (24 / g + 3) * params
    assert sum(layer.state_bytes for layer in profile.layers) / g == pytest.approx(fullest, rel=0.05)
    largest = max(layer.gathered_bytes for layer in profile.layers)
    assert (gathered.most > 0) == (g > 1)
    assert gathered.most <= 2 * largest


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gathered_layer_is_as_large_as_planned(tmp_path: Path, precision: str) -> None:
    world = World(spec(tmp_path, precision), ONE, 0, tmp_path, devices_per_stage=2)
    memory = world.nodes["a0/0"].executor.store.memory
    assert memory is not None
    for layer, cost in enumerate(planned(world).layers):
        flats = memory.layers[layer].leaves.values()
        assert sum(leaf.numel() * leaf.itemsize for leaf in flats) == cost.gathered_bytes
        assert memory.layers[layer].num_bytes == pytest.approx(cost.gathered_bytes, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stages", [ONE, TWO_STAGES, TWO_PIPELINES])
@pytest.mark.parametrize("g", [2, 4])
def test_a_stage_moves_as_many_bytes_as_planned(
    tmp_path: Path, g: int, stages: dict[str, Cuts], precision: str
) -> None:
    world = World(spec(tmp_path, precision), stages, 0, tmp_path, devices_per_stage=g)
    world.run()
    profile, share = planned(world), MICRO_BATCHES // len(stages)
    for name, cuts in stages.items():
        for hop, (start, stop) in enumerate(cuts):
            told = [world.in_stage[f"{name}{hop}/{rank}"] for rank in range(g)]
            gathered, gradients = (sum(step[0][what] for step in told) for what in (0, 1))
            wanted = stage_bytes(profile, range(start, stop), share)
            assert gathered == g * wanted.gathered
            losses = FLOAT_BYTES * (g - 1) * share if stop == world.spec.num_layers else 0
            assert gradients == g * wanted.gradients + losses


@pytest.mark.parametrize("g", [1, 2, 4])
def test_pipelines_exchange_as_many_bytes_as_planned(tmp_path: Path, g: int) -> None:
    """Of each parameter once, whichever of the stage's devices has it."""
    world = World(spec(tmp_path), TWO_PIPELINES, 0, tmp_path, devices_per_stage=g)
    world.run()
    sent = sum(num_bytes for steps in world.gradients.values() for _, num_bytes in steps)
    exchange = GradientExchange(sum_bytes=8, check_every=0)
    least = len(TWO_PIPELINES) * sent_bytes(exchange, len(TWO_PIPELINES)) * num_params(world)
    assert least <= sent <= BESIDE * least


def test_who_has_a_stage_alone_gathers_nothing(tmp_path: Path) -> None:
    world = World(spec(tmp_path), TWO_PIPELINES, 0, tmp_path)
    world.run()
    assert set(map(tuple, world.in_stage.values())) == {((0, 0),)}


def test_a_device_counts_how_long_it_waits_for_each_layer(tmp_path: Path) -> None:
    world = World(spec(tmp_path), ONE, 0, tmp_path, devices_per_stage=2)
    world.run()
    group = world.nodes["a0/0"].executor.group
    group.take_count()
    with group.weights(1):
        pass
    assert [wait.layer for wait in group.waits] == [1]
    count = group.take_count()
    assert count.waited_s > 0.0
    shard = world.nodes["a0/0"].executor.store.shard(1)
    others = planned(world).layers[1].gathered_bytes - FLOAT_BYTES * sum(map(math.prod, shard.shapes))
    assert count.gathered_bytes == others
    assert group.take_count() == (0, 0, 0.0)


def test_the_next_layer_comes_while_one_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is dropped where somebody goes on with another one."""
    world = World(spec(tmp_path), ONE, 0, tmp_path, devices_per_stage=2)
    world.run()
    executor = world.nodes["a0/0"].executor
    group, memory = executor.group, executor.store.memory
    assert memory is not None
    taken: queue.Queue[tuple[int, bool]] = queue.Queue()
    take = GatheredLayer.take

    def noted(layer: GatheredLayer) -> None:
        take(layer)
        taken.put((layer.layer, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(GatheredLayer, "take", noted)
    with group.weights(1, following=2):
        assert [taken.get(timeout=60), taken.get(timeout=60)] == [(1, True), (2, False)]
    with group.weights(2, following=3):
        assert taken.get(timeout=60) == (3, False)
    with group.weights(1, following=2):
        assert sorted([taken.get(timeout=60), taken.get(timeout=60)]) == [(1, True), (2, False)]
        assert not has_memory(memory.layers[3])
    group.adopt(world.layout)
    assert not any(map(has_memory, memory.layers.values()))


def test_what_came_in_vain_in_a_round_is_not_taken_for_the_next_one_s(tmp_path: Path) -> None:
    """A hop halts between two layers, and after the update the first layer asked for is the second one."""
    world = World(spec(tmp_path), ONE, 0, tmp_path, devices_per_stage=2)
    world.run()
    executor = world.nodes["a0/0"].executor
    group, store = executor.group, executor.store
    memory = store.memory
    assert memory is not None
    with group.weights(2, following=1):
        pass
    (bucket,) = world.spec.buckets_of(1)
    for param in store.buckets[bucket].params:
        param.detach().fill_(7.0)
    group.say(executor.counters.round)
    with group.weights(1):
        found = sum(int((leaf == 7.0).sum()) for leaf in memory.layers[1].leaves.values())
    assert found == sum(param.numel() for param in store.buckets[bucket].params) > 0


class Interleaved(World):
    """While a device computes a layer, another one of its group computes a piece of work. ``waiting``: the
    most gradients of others that waited where a device had just been through a layer.
    """

    inside = False
    waiting = 0

    def between(self, device: str) -> None:
        """``device`` has the weights of its next layer."""
        node = self.nodes[device]
        keys = [
            key for key in node.messenger.waiting() if key[:2] == (GRADIENTS, node.executor.counters.round)
        ]
        self.waiting = max(self.waiting, len(keys))
        if not self.inside:
            self.inside = True
            for fellow in node.executor.group.others.values():
                self._in(fellow, Executor.advance)
            self.inside = False


@pytest.mark.parametrize("g", [2, 4])
def test_gradients_of_others_wait_for_no_more_than_a_layer(
    tmp_path: Path, g: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a stage's whole backward pass would be as much as the state itself."""
    alone = World(spec(tmp_path), ONE, 0, tmp_path)
    alone.run()
    world = Interleaved(spec(tmp_path), ONE, 0, tmp_path, devices_per_stage=g)
    for device, node in world.nodes.items():

        def reached(point: str, _: int, device: str = device) -> None:
            if point in GATHERS:
                world.between(device)

        monkeypatch.setattr(node.faults, "reach", reached)
    world.run()
    check(world, (world.job, alone.losses, alone.weights()))
    assert world.waiting == 0


def has_memory(layer: GatheredLayer) -> bool:
    return any(leaf.untyped_storage().nbytes() for leaf in layer.leaves.values())
