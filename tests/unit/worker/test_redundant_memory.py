"""What a device with redundant layers holds, against what the planner counts for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from oobleckd.core.memory import held_besides
from oobleckd.planner.plan import Range, Route, Segment
from oobleckd.planner.policy import Setup
from oobleckd.planner.reroute.redundant import graphs_of
from oobleckd.planner.schedules.jobshop import base_bytes
from oobleckd.protocol.job import Checkpoint, FaultTolerance, Model
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.device.measure import measure
from oobleckd.worker.models import load_spec
from oobleckd.worker.round.redundant_forward import RedundantForwards
from oobleckd.worker.round.round import Graph
from oobleckd.worker.round_machine.tasks import Task
from oobleckd.worker.sums import Chunked, Sum
from oobleckd.worker.training.executor import Executor
from tests.helpers.engine import World
from tests.helpers.engine_jobs import job, ran_ahead

STAGES = {"a": [(0, 2), (2, 4), (4, 6)]}
CONFIG: dict[str, bool | int | float | str | None] = {
    "n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 32, "vocab_size": 128, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    """One pipeline of three devices whose blocks are large beside what Python keeps of them."""
    folder: Path = tmp_path_factory.mktemp("memory")
    spec = msgspec.structs.replace(
        job(folder, sequence=32, precision=request.param),
        model=Model("gpt2", CONFIG),
        schedule=Schedule(boundary_memory=0, redundant_memory="1GiB"),
        fault_tolerance=FaultTolerance(policy="bamboo"),
        checkpoint=Checkpoint(every=0, dir=str(folder / "ckpt")),  # no copy of the state for one
    )
    return World(spec, STAGES, 1, folder, redundant=True)


def setup_of(world: World) -> Setup:
    """As the daemon has it, from a profile that is measured here."""
    profile = measure(load_spec(world.job), world.job, torch.device("cpu"))
    return Setup(profile, world.job.num_micro_batches, 0, 0, 1, 3, held=held_besides(world.job, profile))


def saved_bytes(graph: Graph, params: set[int]) -> int:
    """Of every tensor that the graph's nodes hold, storages once, parameters not."""
    found: dict[int, int] = {}
    for held in graph:
        saved = [tensor for node in nodes_of(held.out) for tensor in saved_by(node)]
        for tensor in (held.into, *saved):
            if tensor is not None and tensor.untyped_storage().data_ptr() not in params:
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def nodes_of(out: Tensor) -> Iterator[object]:
    waiting, seen = [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
            yield node


def saved_by(node: object) -> Iterator[Tensor]:
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            yield from (
                each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor)
            )


def state_bytes(executor: Executor) -> int:
    """Weights and rounded copies of them, moments, own sums, mean gradients: once all is reduced."""
    store, reducer = executor.store, executor.reducer
    held = sum(tensor.nbytes for state in store.buckets.values() for tensor in state.tensors())
    held += sum(leaf.nbytes for state in store.buckets.values() for leaf in state.rounded.values())
    held += sum(region.nbytes for part in reducer.parts.values() for region in regions(part))
    return held + sum(grad.nbytes for part in reducer.reduced.values() for grad in part.grads)


def regions(part: Sum) -> list[Tensor]:
    return part._regions if isinstance(part, Chunked) else [part._memory.flat]


def test_state_and_what_is_run_ahead_are_as_modelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(world)
    ran_ahead(world)
    ahead: dict[str, int] = {}
    for device in world.live():
        executor = world.nodes[device].executor
        states = executor.store.buckets.values()
        params = {p.untyped_storage().data_ptr() for s in states for p in (*s.params, *s.rounded.values())}
        graphs = [executor.now.graphs[task] for task in executor.now.board.redundant_done]
        assert len(graphs) == world.job.num_micro_batches
        ahead[device] = sum(saved_bytes(graph, params) for graph in graphs)
        assert executor.now.redundant_forwards.held_bytes == pytest.approx(ahead[device], rel=0.1)
    held: dict[str, int] = {}
    vote = Executor._vote

    def watched(self: Executor) -> None:
        held.setdefault(self.device, state_bytes(self))
        vote(self)

    monkeypatch.setattr(Executor, "_vote", watched)
    world.run()
    modelled = graphs_of(world.first, setup)
    for device, layers in world.first.holdings.items():
        whole = held[device] + ahead[device]
        counted = base_bytes(setup, layers) + modelled[device]
        print(
            f"{device}: {held[device]:,} and {ahead[device]:,} bytes; modelled {base_bytes(setup, layers):,} "
            f"and {modelled[device]:,}"
        )
        assert whole == pytest.approx(counted, rel=0.1)
        assert ahead[device] == pytest.approx(modelled[device], rel=0.1)
        assert held[device] == pytest.approx(base_bytes(setup, layers), rel=0.1)


def test_what_layers_of_a_pass_share_is_counted_once() -> None:
    """The mask of a micro-batch: each layer saves it, and all save the same one."""
    task = Task(Route(0, 1, (Segment("a", Range(1, 3)),)), 0)
    forwards = RedundantForwards(1 << 20)
    x, mask = torch.ones(4, 8, requires_grad=True), torch.ones(4, 8)
    assert forwards.expect(task, x.detach())
    assert forwards.begins(task)
    for _ in task.layers.layers():
        with forwards.saving(task, x, [x], [mask]):
            out = x * mask
    assert forwards.held_bytes == mask.nbytes
    with forwards.saving(task, x, [x], [mask]):
        out = out * torch.full((4, 8), 2.0)  # of its own
    assert forwards.held_bytes == 2 * mask.nbytes
    forwards.clear()
    assert forwards.held_bytes == 0
