"""Blocks that are computed again in the backward: the bits of those that are not, whoever dies, and what is
held from the forward to the backward.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oobleckd.planner.plan import Layout, Range, Recompute
from oobleckd.planner.profile import Profile
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.device.measure import measure
from oobleckd.worker.models import FAMILIES, Layer, gradients, load_spec, seed_layer
from oobleckd.worker.models.config import TIED
from oobleckd.worker.recompute import products
from oobleckd.worker.recompute.block import BlockInput, Held, LayerGraph, computed, recompute_of
from oobleckd.worker.recompute.products import Products
from oobleckd.worker.round.passes import Passes
from oobleckd.worker.round.round import Graph, Work
from oobleckd.worker.round_machine.tasks import Task
from tests.helpers.engine import World
from tests.helpers.engine_jobs import (
    STAGES,
    Reference,
    check,
    job,
    ran_ahead,
    random_deaths,
    stays_re_routed,
)
from tests.helpers.models import (
    CPU,
    GPT2,
    held_layers,
    layered_step,
    small_config,
    small_job,
    some_batch,
)
from tests.unit.worker.test_engine_chunks import BOTH_V
from tests.unit.worker.test_families import three_blocks

POINTS = ["forward", "backward", "weights", "reduce", "reduced", "frozen"]
BACKWARDS = ["fused", "decoupled"]
MODES: list[Recompute] = ["selective", "blocks"]


def llama(folder: Path, **schedule: Any) -> World:
    """In bf16, on one device."""
    plain = job(folder, schedule, precision="bf16")
    config = small_config("llama", vocab_size=128, hidden_size=16)
    model = msgspec.structs.replace(plain.model, family="llama", config=config)
    return World(msgspec.structs.replace(plain, model=model), {"x": [(0, 4)]}, 0, folder)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def plain(
    request: pytest.FixtureRequest, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """What a job comes to where nothing is computed again: of GPT-2 with dropout, or of Llama in bf16."""
    if request.param == "gpt2":
        return reference
    world = llama(tmp_path_factory.mktemp("llama"))
    world.run()
    return world.job, world.losses, world.weights()


def again(
    plain: Reference,
    folder: Path,
    seed: int,
    stages: Any = STAGES,
    *,
    redundant: bool = False,
    **schedule: Any,
) -> World:
    changed = msgspec.structs.replace(plain[0], schedule=Schedule(**schedule))
    return World(changed, stages, seed, folder, go_on=seed % 2 == 1, redundant=redundant)


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("recompute", MODES)
def test_it_does_not_show(plain: Reference, tmp_path: Path, recompute: Recompute, backward: str) -> None:
    world = again(plain, tmp_path, 2, recompute=recompute, backward=backward)
    world.run()
    check(world, plain)
    assert world.redone == world.forwards_again == 0  # nobody takes it for what a loss costs


@pytest.mark.thin(16)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", ["a0/0", "a1/0", "b1/0"])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("recompute", MODES)
def test_a_kill_does_not_show(
    plain: Reference, tmp_path: Path, recompute: Recompute, backward: str, victim: str, point: str
) -> None:
    seed = zlib.crc32(f"{point} {victim}".encode()) % 1000
    world = again(plain, tmp_path, seed, recompute=recompute, backward=backward)
    if point == "frozen":  # in answer to the death of another one, whose layers are elsewhere, too
        world.nodes["b2/0" if victim == "a0/0" else "b0/0"].faults.arm("backward", 2)
    world.nodes[victim].faults.arm(point, 2)
    world.run()
    check(world, plain)


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("recompute", MODES)
def test_deaths_of_devices_with_two_chunks_do_not_show(
    plain: Reference, tmp_path: Path, seed: int, recompute: Recompute
) -> None:
    world = again(plain, tmp_path, seed, BOTH_V, recompute=recompute, backward=BACKWARDS[seed // 2 % 2])
    random_deaths(world)
    world.run()
    check(world, plain)


@pytest.mark.thin(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("recompute", MODES)
def test_deaths_of_devices_with_redundant_layers_do_not_show(
    plain: Reference, tmp_path: Path, seed: int, recompute: Recompute
) -> None:
    schedule = {"recompute": recompute, "backward": BACKWARDS[seed // 2 % 2]}
    world = again(plain, tmp_path, seed, redundant=True, **schedule)
    if world.go_on:
        stays_re_routed(world)
    else:
        random_deaths(world)
        world.run()
    check(world, plain)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_shows_it(family: str, precision: str, backward: str, recompute: Recompute) -> None:
    config = three_blocks(family, tied=family in TIED, dropout=0.2)
    tables = {"train": {"precision": precision}, "schedule": {"backward": backward}}
    spec = load_spec(small_job(family, config, **tables))
    layers, batch = held_layers(spec, Range(0, 5)), some_batch(spec)
    loss, grads = layered_step(spec, layers, batch)
    other, others = layered_step(spec, layers, batch, recompute)
    assert torch.equal(loss, other)
    assert [key for key in grads if not torch.equal(grads[key], others[key])] == []


@pytest.mark.parametrize(
    ("recompute", "backward", "kinds"), [("selective", "fused", {"B"}), ("blocks", "decoupled", {"I"})]
)
def test_a_report_while_a_block_is_computed_again(
    deep: Reference,
    tmp_path: Path,
    recompute: Recompute,
    backward: str,
    kinds: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass halts behind the block, and the next attempt goes on with the one before it."""
    run, second, gone_on, reported = Passes._run, BlockInput.again, set(), set()

    def watched(self: Passes, work: Work) -> None:
        if work.num_pieces:
            gone_on.add(work.kind)
        run(self, work)

    def dies_meanwhile(self: BlockInput, *args: Any) -> LayerGraph:
        if not world.dead and world.nodes["a1/0"].executor.counters.round == 2:
            under_way = world.nodes["a1/0"].executor.now.under_way
            if under_way is not None and under_way.kind in {"B", "I"}:
                world.kill("b0/0")
                reported.add(under_way.kind)
        return second(self, *args)

    monkeypatch.setattr(Passes, "_run", watched)
    monkeypatch.setattr(BlockInput, "again", dies_meanwhile)
    stages = {"a": [(0, 3), (3, 6)], "b": [(0, 2), (2, 6)]}
    world = again(deep, tmp_path, 0, stages, recompute=recompute, backward=backward)
    world.run()
    check(world, deep)
    assert reported == kinds
    assert gone_on <= {*kinds, "W"}


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_every_forward_has_a_graph(
    reference: Reference, tmp_path: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a layer below what a loss took away, too: without one another kernel may be chosen."""
    computes, with_graph, below = Layer._computed, set(), Passes._layer_forward

    def watched(self: Layer, *args: Any) -> Tensor:
        with_graph.add(torch.is_grad_enabled())
        return computes(self, *args)

    lowest = set()

    def noted(self: Passes, task: Task, layer: int, *args: Any) -> Any:
        lowest.add(layer < task.lowest)
        return below(self, task, layer, *args)

    monkeypatch.setattr(Layer, "_computed", watched)
    monkeypatch.setattr(Passes, "_layer_forward", noted)
    world = again(reference, tmp_path, 5, recompute=recompute, boundary_memory=0)
    world.nodes["b1/0"].faults.arm("reduce", 2)
    world.run()
    check(world, reference)
    assert lowest == {False, True}
    assert with_graph == {True}


def test_the_planner_is_asked_where_the_job_leaves_it_open(reference: Reference) -> None:
    layout = Layout(1, 4, {}, (), recompute={"a/0": "blocks"})

    def said(recompute: str, device: str) -> Recompute:
        changed = msgspec.structs.replace(reference[0], schedule=Schedule(recompute=recompute))
        return recompute_of(changed, layout, device)

    assert said("auto", "a/0") == "blocks"
    assert said("auto", "b/0") == "none"
    assert said("selective", "a/0") == "selective"
    assert said("none", "a/0") == "none"


# ---------------------------------------------------------------------- memory


WIDE: dict[str, Any] = {**GPT2, "n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64}


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of what was made within and lives, and the most that did."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._note(tensor.untyped_storage())
        return value

    def _note(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(storage.data_ptr())
        if known is None or not known.alive:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            self._known[storage.data_ptr()] = weakref.finalize(storage, self._gone, storage.nbytes())

    def _gone(self, num_bytes: int) -> None:
        self.now -= num_bytes


def measured(precision: str, recompute: str) -> tuple[Profile, list[Layer]]:
    """The blocks of a job that are computed again, and what they cost."""
    train = {"precision": precision, "sequence": 64}
    asked = small_job("gpt2", WIDE, train=train, schedule={"recompute": recompute})
    spec = load_spec(asked)
    return measure(spec, asked, CPU), held_layers(spec, Range(1, 5))


def in_flight(layers: list[Layer], recompute: Recompute) -> tuple[int, int]:
    """What three micro-batches hold between forward and backward, and how much more it is at most while these
    run.
    """
    with Living() as living:
        graphs = [forward(layers, torch.randn(2, 64, 64), recompute) for _ in range(3)]
        held = living.peak = living.now
        for graph in graphs:
            g = torch.zeros(2, 64, 64)
            for layer in reversed(layers):
                g = backward(layer, graph.pop(), g)
    return held, living.peak - held


def forward(layers: list[Layer], x: Tensor, recompute: Recompute) -> Graph:
    graph: Graph = []
    for layer in layers:
        into = x.detach().requires_grad_()
        if recompute == "none":
            x = layer(into, None)
            graph.append(LayerGraph(into, x, None))
        else:
            x, held = computed(layer, into, None, 1.0, keeps_products=recompute == "selective")
            graph.append(held)
    return graph


def backward(layer: Layer, held: Held, g: Tensor) -> Tensor:
    ran = held.again(layer, lambda: None) if isinstance(held, BlockInput) else held
    assert ran.into is not None
    return gradients(ran.out, [*layer.leaves, ran.into], g)[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_held_is_what_was_measured(precision: str) -> None:
    """Of every micro-batch in flight each block's input, or that and its products; and while the backward
    runs one block's whole graph.
    """
    profile, layers = measured(precision, "auto")
    embedding, block = profile.layers[0], profile.layers[1]
    everything, most = in_flight(layers, "none")
    assert everything == pytest.approx(3 * 4 * block.activation_bytes, rel=0.1)
    for recompute, num_bytes in (
        ("selective", block.selective_bytes),
        ("blocks", embedding.output_bytes),
    ):
        held, more = in_flight(layers, recompute)
        assert held == pytest.approx(3 * 4 * num_bytes, rel=0.1)
        assert more <= most + 1.1 * block.activation_bytes
    assert embedding.output_bytes < 0.5 * block.selective_bytes < 0.5 * block.activation_bytes


@pytest.mark.parametrize("backward", BACKWARDS)
def test_one_block_at_a_time_has_a_graph(
    deep: Reference, tmp_path: Path, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None has one before its backward, and when the next is computed again that of the last one is gone."""
    second, made = BlockInput.again, []

    def watched(self: BlockInput, *args: Any) -> LayerGraph:
        for node in world.nodes.values():
            held = [each for graph in node.executor.now.graphs.values() for each in graph]
            graphs = [each for each in held if isinstance(each, LayerGraph)]
            assert [each for each in graphs if each.into is not None and each.out.dim()] == []
        assert [out() for out in made if out() is not None] == []
        found = second(self, *args)
        made.append(weakref.ref(found.out))
        return found

    monkeypatch.setattr(BlockInput, "again", watched)
    stages = {"a": [(0, 5), (5, 6)]}
    world = again(deep, tmp_path, 0, stages, recompute="blocks", backward=backward)
    world.run()
    check(world, deep)
    assert len(made) == 4 * 4 * len(world.losses)


def test_costs_are_measured_where_somebody_asks() -> None:
    jobs = {mode: small_job("gpt2", GPT2, schedule={"recompute": mode}) for mode in ("none", *MODES, "auto")}
    profiles = {mode: measure(load_spec(asked), asked, CPU) for mode, asked in jobs.items()}
    asked = [mode for mode, profile in profiles.items() if profile.layers[1].selective_bytes]
    assert asked == ["selective", "auto"]
    assert profiles["none"].key == profiles["blocks"].key != profiles["auto"].key == profiles["selective"].key
    costs = profiles["auto"].layers
    assert all(block.selective_s > 0 for block in costs[1:-1])
    assert costs[0].selective_bytes == costs[-1].selective_bytes == 0
    assert costs[0].selective_s == costs[-1].selective_s == 0


@pytest.mark.parametrize("recompute", ["selective", pytest.param("blocks", marks=pytest.mark.slow)])
def test_what_is_run_ahead_holds_inputs_alone(
    reference: Reference, tmp_path: Path, recompute: Recompute
) -> None:
    """So more fits the bound: all passes, where one without would take it."""
    limit = 40_000
    ran = {}
    for mode in ("none", recompute):
        world = again(reference, tmp_path, 1, redundant=True, recompute=mode, redundant_memory=limit)
        ran_ahead(world)
        ran[mode] = sum(len(world.nodes[device].executor.now.board.redundant_done) for device in world.live())
        world.run()
        check(world, reference)
    assert 0 < 2 * ran["none"] <= ran[recompute]


def test_of_what_is_run_ahead_inputs_are_counted(deep: Reference, tmp_path: Path) -> None:
    world = again(deep, tmp_path, 1, {"a": [(0, 1), (1, 5), (5, 6)]}, redundant=True, recompute="blocks")
    ran_ahead(world)
    now = world.nodes["a0/0"].executor.now
    num_bytes = 2 * 16 * 16 * 4
    assert len(now.board.redundant_done) == 4
    assert now.redundant_forwards.held_bytes == 4 * 4 * num_bytes


def test_what_comes_out_of_a_pass_ahead_is_made_again_for_who_asks(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hop behind it has not got it, and who ran ahead holds inputs alone."""
    out, made = Passes._out, []

    def watched(self: Passes, task: Task, graph: Graph) -> Tensor:
        made.append(isinstance(graph[-1], BlockInput))
        return out(self, task, graph)

    monkeypatch.setattr(Passes, "_out", watched)
    world = again(reference, tmp_path, 5, redundant=True, recompute="blocks")
    world.nodes["b1/0"].faults.arm("forward", 2)
    world.run()
    check(world, reference)
    assert True in made


# ---------------------------------------------------------------------- products


def test_products_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pass multiplies nothing and attends to nothing again."""
    _, layers = measured("fp32", "auto")
    x, counted = torch.randn(2, 64, 64, requires_grad=True), []

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.extend([func] * (func in products.KEPT))
            return func(*args, **(kwargs or {}))

    with Counting():
        _, held = computed(layers[0], x, None, 1.0, keeps_products=True)
        assert len(counted) >= 4
        counted.clear()
        held.again(layers[0], lambda: None)
    assert counted == []


def test_what_was_written_to_is_computed_again() -> None:
    """As where a linear module adds its bias to its product in place, in another view of it."""
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def block() -> Tensor:
        product = torch.ops.aten._unsafe_view(x @ weight, [2, 8])
        return product.add_(1) * (x @ weight).reshape(2, 8)

    plain, kept = block(), Products(CPU)
    with kept.kept():
        first = block()
    assert len(kept.tensors) == 1
    with kept.given():
        second = block()
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert torch.equal(*(torch.autograd.grad(out.sum(), weight)[0] for out in (plain, second)))


def test_what_draws_and_is_kept_leaves_the_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention with dropout does on a GPU, in one operation: dropout behind it is the same."""
    dropout = torch.ops.aten.native_dropout.default
    monkeypatch.setattr(products, "KEPT", products.KEPT | {dropout})
    x, kept = torch.ones(64, requires_grad=True), Products(CPU)

    def block() -> Tensor:
        seed_layer(0, 0, 0, 1, CPU)
        return torch.nn.functional.dropout(torch.native_dropout(x, 0.5, True)[0], 0.5)

    with kept.kept():
        first = block()
    with kept.given():
        second = block()
    assert torch.equal(first, second)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (first, second)))
    assert set(first.tolist()) == {0.0, 4.0}


def test_keeping_results_does_not_load_torch_s_compiler() -> None:
    """torch wraps a mode's dispatch by default: at the first operation within, a device would load the
    compiler for a second, in the middle of a recovery.
    """
    program = """
import sys
import torch
from oobleckd.worker.recompute.products import Products

a, kept = torch.ones(2, 2), Products(torch.device("cpu"))
with kept.kept():
    torch.mm(a, a)
with kept.given():
    torch.mm(a, a)
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=300)
