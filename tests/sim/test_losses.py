"""Losses one by one, each followed to its end: the job must end as one without failures does."""

import pytest

from oobleckd.core import view
from tests.helpers.world import World


def running(num_nodes=6, seed=0, step=3, **spec):
    """A world whose job has committed a few steps."""
    config = spec.pop("config", {})
    world = World(seed, num_nodes, **config)
    world.run_for(1.0)
    world.submit(**{"steps": 12, "f": 1, "memory": 350} | spec)
    world.until_step(step)
    return world


def test_the_cap_gives_pipelines_of_two_nodes_and_more():
    world = running()
    assert world.job().n0 == 2
    assert [len(p.nodes) for p in world.view().pipelines] in ([2, 2, 2], [3, 3], [2, 4], [4, 2])
    assert world.view().tolerance >= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("silent", [False, True])
def test_one_node_lost(seed, silent):
    world = running(seed=seed)
    world.kill("n02", silent=silent)
    world.run(lambda: world.job().state == "recovering")
    world.until_state("running")
    world.until_state("done")
    world.check_done()
    (incident,) = world.incidents()
    assert not incident.open
    assert incident.nodes == ("n02",)
    assert [phase.phase for phase in incident.phases] == ["detect", "plan", "reconfigure", "copy", "resume"]
    assert incident.steps_lost == 0
    assert 0 < incident.committed_s < incident.total_s
    assert incident.layer_gradients < incident.step_layer_gradients
    assert incident.reason
    assert world.job().steps_lost == 0
    assert "n02" not in world.view().nodes
