"""A job without failures: submit, profile, plan, deploy, run, done."""

from oobleckd.core import view
from tests.helpers.world import World


def test_a_job_runs_to_its_end():
    world = World(num_nodes=5, codec=True)
    world.run_for(1.0)
    assert world.submit(steps=6) == "job-1"
    world.until_state("done")
    world.check_done()
    core = world.machine.core
    assert [view.step_view(s).step for s in world.job().steps[-2:]] == [5, 6]
    assert world.incidents() == []
    assert {node.state for node in view.node_views(core)} == {"standby"}
