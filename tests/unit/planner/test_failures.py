"""Random failure sequences down to n0: a new plan loses nothing exactly when the guarantee says so,
and copies no byte more than its sizes need.

A seed that fails repeats with the command that the failure prints.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.plan import Layers, Plan, Template, device_name, node_of
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policy import PlanError, Proposal, Setup, Situation
from oobleckd.planner.templates.guarantee import can_replan, lost_layers, max_pipelines
from tests.unit.planner.build import profile_of, setup_of

QUICK, MANY = 100, 1500
NOTHING = Layers()


def random_setup(dice: random.Random) -> Setup:
    rows = [
        (dice.uniform(1, 9) / 1e3, dice.uniform(1, 9) / 1e3, dice.randint(5, 15), dice.randint(0, 40), 1000)
        for _ in range(dice.randint(2, 12))
    ]
    return setup_of(
        profile_of(rows),
        num_micro_batches=dice.randint(1, 24),
        f=dice.randint(0, 3),
        device_memory_bytes=dice.choice([0, 500, 700, 900, 1500]),
        devices_per_node=dice.choice([1, 1, 2]),
        max_nodes=dice.randint(1, 16),
    )


@dataclass
class Job:
    """A job whose nodes die, and what its devices hold."""

    setup: Setup
    templates: tuple[Template, ...]
    nodes: list[str]
    plan: Plan = field(init=False)
    held: dict[str, Layers] = field(init=False)
    lost: int = 0

    def __post_init__(self) -> None:
        self.plan = adapt("oobleck", self.setup, self.templates, Situation(tuple(self.nodes), {})).plan
        self.held = self.plan.holdings()

    @property
    def n0(self) -> int:
        return self.templates[0].num_nodes

    @property
    def num_layers(self) -> int:
        return len(self.setup.profile.layers)

    def lose(self, dead: list[str]) -> None:
        """Nodes die; the job plans anew as the daemon does. Checks what the guarantee says of it."""
        self.nodes = [node for node in self.nodes if node not in dead]
        self.held = {device: layers for device, layers in self.held.items() if node_of(device) in self.nodes}
        expected = can_replan(len(self.nodes), self.n0, self.held.values(), self.num_layers)
        try:
            proposal = self.adapted()
        except PlanError:
            assert len(self.nodes) < self.n0
            assert not expected
            return
        assert self.loses_nothing(proposal) == expected
        assert len(proposal.plan.pipelines) >= max_pipelines(len(self.nodes), self.n0, self.setup.f)
        if expected:
            assert sum(copy.num_bytes for copy in proposal.transfers) == self.min_bytes(proposal.plan)
        else:
            self.lost += 1
        self.plan, self.held = proposal.plan, proposal.plan.holdings()

    def adapted(self) -> Proposal:
        running = tuple(pipeline.nodes for pipeline in self.plan.pipelines)
        return adapt("oobleck", self.setup, self.templates, Situation(tuple(self.nodes), self.held, running))

    def loses_nothing(self, proposal: Proposal) -> bool:
        """Whether every device gets what it lacks from a live one that has it."""
        coming = {}
        for copy in proposal.transfers:
            assert copy.layer in self.held[copy.source]
            assert (copy.target, copy.layer) not in coming
            coming[copy.target, copy.layer] = copy
        return all(
            layer in self.held.get(device, NOTHING) or (device, layer) in coming
            for device, layers in proposal.plan.holdings().items()
            for layer in layers.layers()
        )

    def min_bytes(self, plan: Plan) -> int:
        """The fewest bytes over all ways to put the nodes on the places of ``plan``."""
        wanted = plan.holdings()
        devices = range(self.setup.devices_per_node)
        slots = [[wanted.get(device_name(node, i), NOTHING) for i in devices] for node in plan.nodes()]
        lacking = np.array([[self.lack(node, slot) for slot in slots] for node in self.nodes])
        return int(lacking[linear_sum_assignment(lacking)].sum())

    def lack(self, node: str, slot: list[Layers]) -> int:
        return sum(
            copy_bytes(self.setup.profile.layers[layer])
            for index, wanted in enumerate(slot)
            for layer in wanted.layers()
            if layer not in self.held.get(device_name(node, index), NOTHING)
        )


def random_job(seed: int) -> tuple[Job, random.Random]:
    dice = random.Random(seed)
    while True:
        setup = random_setup(dice)
        try:
            templates = prepare("oobleck", setup)
        except PlanError:
            continue
        num_nodes = templates[0].num_nodes + dice.randint(1, 12)
        return Job(setup, templates, [f"n{i:02}" for i in range(num_nodes)]), dice


def one_at_a_time(job: Job, dice: random.Random) -> None:
    while len(job.nodes) >= job.n0:
        job.lose([dice.choice(job.nodes)])


def simultaneous(job: Job, dice: random.Random) -> None:
    while len(job.nodes) >= job.n0:
        job.lose(dice.sample(job.nodes, dice.randint(1, min(4, len(job.nodes)))))


def play(sequence: Callable[[Job, random.Random], None], seeds: range) -> int:
    """The sequence for every seed; how many replans found layers lost."""
    lost = 0
    for seed in seeds:
        job, dice = random_job(seed)
        try:
            sequence(job, dice)
        except AssertionError as failed:
            failed.add_note(
                f"seed {seed}: PYTHONPATH=. python -c 'from tests.unit.planner.test_failures import *; "
                f"play({sequence.__name__}, range({seed}, {seed + 1}))'"
            )
            raise
        lost += job.lost
    return lost


@pytest.mark.parametrize("sequence", [one_at_a_time, simultaneous])
def test_random_sequences(sequence: Callable[[Job, random.Random], None]):
    assert play(sequence, range(QUICK)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [one_at_a_time, simultaneous])
def test_many_random_sequences(sequence: Callable[[Job, random.Random], None]):
    assert play(sequence, range(QUICK, QUICK + MANY)) > 0


@pytest.mark.parametrize("seed", range(20))
def test_statement_5_any_losses_but_one_for_each_pipeline(seed: int):
    job, dice = random_job(seed)
    copies = len(job.plan.pipelines)
    for dead in (dice.sample(job.nodes, copies - 1) for _ in range(10)):
        held = [layers for device, layers in job.held.items() if node_of(device) not in dead]
        assert lost_layers(held, job.num_layers) == ()
    layer = dice.randrange(job.num_layers)
    dead = [node_of(device) for device, layers in job.held.items() if layer in layers]
    held = [layers for device, layers in job.held.items() if node_of(device) not in dead]
    assert len(dead) == copies
    assert layer in lost_layers(held, job.num_layers)
