"""How often the host reads of tensors in a step, where each read waits for a GPU; and that what is read so
late is found in time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.planner.plan import Layers, Range
from oobleckd.protocol.job import Job, Model
from oobleckd.worker import sums
from oobleckd.worker.models import load_spec
from oobleckd.worker.optimizers import choice
from oobleckd.worker.optimizers.registry import rule_of
from oobleckd.worker.round_machine.exchange import Contribution, Exchange
from oobleckd.worker.state.store import Store
from oobleckd.worker.sums.guard import SumsChanged
from tests.helpers.engine import Died, World
from tests.helpers.engine_jobs import STAGES, Reference, check, job, scheduled
from tests.helpers.models import small_config, small_job, some_batch
from tests.helpers.reads import HostReads, kernels_of

ALONE = {"a": [(0, 4)]}
ROUND = 2
"""In which memory changes."""
CPU = torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are kept as in the memory of a GPU."""
    monkeypatch.setattr(sums, "empty", sums.Whole)


def of_family(family: str, tmp_path: Path) -> Job:
    plain = job(tmp_path)
    if family == "gpt2":
        return plain
    config = {
        "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32,
        "vocab_size": 128, "max_position_embeddings": 16,
    }  # fmt: skip
    return msgspec.structs.replace(plain, model=Model(family=family, config=config))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("stages", "reads"), [(ALONE, 1), (STAGES, 2)], ids=["alone", "replicas"])
def test_the_host_reads_once_a_step_and_once_more_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None, stages: Any, reads: int, family: str
) -> None:
    """Before the vote; nothing in a micro-batch, at the end of the last one, or when sums come."""
    choice.update_of(rule_of("adamw"), "cpu")  # its trial, the first time in a process, reads too
    found = HostReads(monkeypatch)
    world = World(of_family(family, tmp_path), stages, 0, tmp_path)
    world.run()
    steps = range(world.job.train.steps - 1)  # behind the last a checkpoint is written
    assert {key: dict(found.by_round[key]) for key in found.by_round if key[1] in steps} == {
        (device, step): {"CastVote": reads} for device in world.nodes for step in steps
    }


def test_an_embedding_reads_nothing_and_computes_no_angles() -> None:
    for family in ("biogpt", "bloom", "convbert", "gemma2", "gpt2", "llama", "modernbert", "rembert"):
        spec = load_spec(small_job(family, small_config(family)))
        store, held = Store(spec, CPU), Layers.of(Range(0, 1))
        store.adopt(held, {bucket: store.fresh(bucket) for bucket in store.needed(held)})
        embedding, batch = store.layers[0], some_batch(spec)
        kernels = kernels_of(lambda: embedding(None, batch))  # noqa: B023 - called at once
        assert kernels.isdisjoint({"_local_scalar_dense", "cos", "sin", "where", "le"}), family


# --------------------------------------------------------------------------- bits and what is wrong with them


@pytest.mark.parametrize(
    ("victim", "point", "schedule"),
    [
        ("b0/0", "reduce", {}),
        ("b2/0", "reduced", {}),
        ("a1/0", "backward", {"sum_copies": 3}),
        ("b0/0", "reduced", {"update": "staggered", "backward": "decoupled"}),
    ],
)
def test_sums_as_on_a_gpu_have_the_bits_of_a_cpu_also_after_deaths(
    reference: Reference, tmp_path: Path, as_on_a_gpu: None, victim: str, point: str, schedule: dict[str, Any]
) -> None:
    for seed in range(2):
        world = scheduled(reference, tmp_path, seed, **schedule)
        world.nodes[victim].faults.arm(point, ROUND)
        world.run()
        check(world, reference)
        assert world.fired


def change(world: World, victim: str, *, dies: bool) -> None:
    """The memory of all that ``victim`` has added up in ``ROUND`` changes before it contributes; it ``dies``
    before it looks at that.
    """
    executor = world.nodes[victim].executor
    reducer, own, look = executor.reducer, executor.reducer._own, executor.reducer.look

    def wrong(bucket: int) -> tuple[Contribution, list[Tensor]]:
        if executor.counters.round == ROUND:
            for (of, _), part in reducer.parts.items():
                if of == bucket and (memory := part.memory()) is not None:
                    memory.view(-1).view(torch.int64)[0] ^= 1 << 20
        return own(bucket)

    def looks() -> bool:
        if dies and executor.counters.round == ROUND:
            raise Died("look")
        return look()

    executor.reducer._own, executor.reducer.look = wrong, looks  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", ["a1/0", "b0/0"])
def test_who_finds_its_own_memory_changed_casts_no_vote(
    reference: Reference, tmp_path: Path, as_on_a_gpu: None, victim: str
) -> None:
    world = World(reference[0], STAGES, 0, tmp_path)
    change(world, victim, dies=False)
    with pytest.raises(SumsChanged):
        world.run()
    machine = world.nodes[victim].executor.machine
    assert (machine.counters.round, machine.commit.own) == (ROUND, None)
    assert all(node.executor.counters.round == ROUND for node in world.nodes.values())


@pytest.mark.parametrize("victim", ["a0/0", "b2/0"])
def test_what_a_peer_gave_of_changed_memory_is_used_by_nobody(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None, victim: str
) -> None:
    """It dies before it says so; whoever had taken it for reduced makes it anew."""
    forgotten: list[tuple[str, int]] = []
    forget = Exchange.forget

    def noted(self: Exchange, bucket: int) -> None:
        forgotten.append((self.device, bucket))
        forget(self, bucket)

    monkeypatch.setattr(Exchange, "forget", noted)
    for seed in range(3):
        world = World(reference[0], STAGES, seed, tmp_path)
        change(world, victim, dies=True)
        world.run()
        check(world, reference)
        assert (victim, "look") in world.fired
    assert forgotten
