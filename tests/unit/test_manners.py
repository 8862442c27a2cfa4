"""What a manner asks of a running job's pipelines: what the planner makes of it passes, anything else does
not.
"""

from __future__ import annotations

import pytest

from oobleckd.core.pipelineviews import pipelines_of
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS, Situation
from oobleckd.protocol.jobviews import PipelineView
from oobleckd.protocol.nodeviews import LayerRange
from tests.helpers.manners import BY_NAME
from tests.helpers.torn import manner_of_torn, tables_of
from tests.unit.planner.build import profile_of, setup_of

TWO = BY_NAME["varuna-decoupled-2-flushed-once"]
NUM_LAYERS = 8
"""As the kill matrix's job has it, six blocks between light ends: two chunks a device for four devices in a
pipeline at most.
"""


@pytest.mark.parametrize(("num_nodes", "forms"), [(4, {(4, 8)}), (5, {(5, 5)}), (6, {(3, 6)})])
def test_the_depth_of_least_cost_passes_with_two_chunks_or_without(
    num_nodes: int, forms: set[tuple[int, int]]
) -> None:
    block, end = (1e-3, 2e-3, 10, 20, 1000), (1e-4, 2e-4, 10, 20, 1000)
    profile = profile_of([end, *[block] * (NUM_LAYERS - 2), end])
    setup = setup_of(profile, min_nodes=3, nodes_now=num_nodes, num_micro_batches=6, decoupled=True, chunks=2)
    nodes = tuple(f"node-{number}" for number in range(1, num_nodes + 1))
    plan = adapt("varuna", setup, prepare("varuna", setup), Situation(nodes, {}, ())).plan
    assert {(len(pipeline.nodes), len(pipeline.segments)) for pipeline in plan.pipelines} == forms
    TWO.check_pipelines("job", pipelines_of(plan, Lanes(1, 0)))


def pipeline(devices: str) -> PipelineView:
    """A stage on each of ``devices``, of one layer but for the last, which has the rest."""
    bounds = [*range(len(devices)), NUM_LAYERS]
    stages = tuple(LayerRange(device, bounds[at], bounds[at + 1]) for at, device in enumerate(devices))
    return PipelineView(0, tuple(sorted(set(devices))), stages, (0,))


@pytest.mark.parametrize("devices", ["abba", "abcddcba", "abcde"])
def test_as_many_chunks_as_layers_suffice_for(devices: str) -> None:
    TWO.check_pipelines("job", [pipeline(devices)])


@pytest.mark.parametrize("devices", ["ab", "abcd", "abcdea", "aa"])
def test_other_forms_are_refused(devices: str) -> None:
    with pytest.raises(AssertionError, match=r"stages on|one device"):
        TWO.check_pipelines("job", [pipeline(devices)])


@pytest.mark.parametrize("seed", range(8))
def test_a_torn_checkpoint_leaves_a_job_with_redundant_layers_its_room(seed: int) -> None:
    manner = manner_of_torn(seed)
    resources = tables_of(manner)["resources"]
    if manner.policy in WITH_REDUNDANT_LAYERS:
        assert resources == manner.tables()["resources"]  # with less it needs more nodes than there are
    else:
        assert resources == {"device_memory": "12MiB"}
