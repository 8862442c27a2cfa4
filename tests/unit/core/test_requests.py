"""Answers to users: what is refused, with which kind, and that every act is audited."""

import msgspec
import pytest

from oobleckd.core import view
from oobleckd.protocol.agentmessages import Inject
from oobleckd.protocol.changes import Audited
from oobleckd.protocol.inputs import Input
from oobleckd.protocol.job import Train
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.requests import Accepted, Control, Delete, Denied, Drain, Kill, Submit
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


@pytest.fixture
def world():
    world = World(1, 3)
    world.run_for(1.0)
    return world


def denied(world, request, kind):
    answer = world.ask(request)
    assert isinstance(answer, Denied)
    assert answer.kind == kind
    return answer


def test_submit_checks_the_job(world):
    bad = make_job()
    bad = bad.__class__(name="bad", train=Train(steps=1, global_batch=8, micro_batch=3, sequence=8))
    assert "does not divide" in denied(world, Submit(bad), "invalid").problem


def test_a_job_that_compiles_needs_a_compiler_on_every_node_that_is_not_drained(world):
    job = make_job()
    job = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, compile=True))
    node = world.machine.core.members.nodes["n02"]
    lacks = {"device": "cpu", "torch": "2.13"}
    node.devices = tuple(msgspec.structs.replace(each, traits=lacks) for each in node.devices)
    refused = denied(world, Submit(job), "invalid")
    assert refused.problem == "train.compile: n02 can compile nothing: no C++ compiler (g++)"
    assert "install g++" in refused.hint
    world.ask(Drain("n02"))
    assert isinstance(world.ask(Submit(job)), Accepted)


def test_submit_starts_or_queues(world):
    assert world.ask(Submit(make_job(memory=350))) == Accepted("job-1", "job-1 starts now")
    second = world.ask(Submit(make_job(memory=350)))
    assert second == Accepted("job-2", "job-2 is queued: waits for job-1 to end")
    assert isinstance(world.ask(Control("job-2", "cancel")), Accepted)
    assert world.job("job-2").state == "cancelled"
    assert "over" in denied(world, Control("job-2", "cancel"), "conflict").problem


def test_what_is_over_is_deleted_for_good(world):
    """Also for the daemon that is started next; its number is taken, and its checkpoint can be named."""
    world.ask(Submit(make_job(steps=4, f=0, memory=350)))
    world.until_state("done")
    kept = world.job("job-1").checkpoint
    assert kept
    assert world.ask(Delete("job-1", "root")) == Accepted(
        "job-1", f"job-1 is deleted; its newest checkpoint stays: {kept}"
    )
    assert world.told(Audited)[-1] == Audited("root", "delete", "job-1")
    world.daemon.stop()
    world.daemon.start()
    core = world.machine.core
    assert view.job_views(core) == []
    assert view.status(core).jobs == 0
    denied(world, Delete("job-1"), "not-found")
    denied(world, Control("job-1", "cancel"), "not-found")
    assert "no job named" in denied(world, Submit(make_job(), resume="latest"), "invalid").problem
    assert world.ask(Submit(make_job(steps=6, f=0, memory=350), resume=kept)).id == "job-2"
    assert [job.id for job in view.job_views(core)] == ["job-2"]


def test_what_is_not_over_is_not_deleted(world):
    world.ask(Submit(make_job(memory=350)))
    world.ask(Submit(make_job(memory=350)))
    for job in ("job-1", "job-2"):
        refused = denied(world, Delete(job), "conflict")
        assert "only what is over is deleted" in refused.problem
        assert refused.hint == f"`oobleckctl cancel {job} --wait` ends it first"
    denied(world, Delete("job-9"), "not-found")


def test_resume_needs_a_checkpoint_that_can_be_read(world):
    assert "no job named job" in denied(world, Submit(make_job(), resume="latest"), "invalid").problem
    assert "manifest.json" in denied(world, Submit(make_job(), resume="some/where"), "invalid").problem
    world.complete["some/where"] = dict.fromkeys(range(len(world.buckets)), (6, 0, 0))
    world.ask(Submit(make_job(steps=9, f=0, memory=350), resume="some/where", counters=Counters(9, 7, 6)))
    world.nans = (6,)  # one of the seven steps of that history was skipped
    world.until_state("done")
    assert [step.step for step in world.job().steps] == [7, 8]


def test_a_job_that_is_resumed_at_its_end_has_nothing_to_write(world):
    world.complete["some/where"] = dict.fromkeys(range(len(world.buckets)), (6, 0, 0))
    world.nans = (6,)
    world.ask(Submit(make_job(steps=7, f=0, memory=350), resume="some/where", counters=Counters(9, 7, 6)))
    world.until_state("done")
    assert (world.job().steps, world.job().checkpoint) == ([], "")


def test_controls_that_make_no_sense_now(world):
    denied(world, Control("job-9", "pause"), "not-found")
    world.submit(steps=100, f=0, memory=350)
    assert "does not train yet" in denied(world, Control("job-1", "pause"), "conflict").problem
    denied(world, Control("job-1", "checkpoint"), "conflict")
    denied(world, Control("job-1", "resume"), "conflict")
    world.until_step(2)
    assert isinstance(world.ask(Control("job-1", "pause")), Accepted)
    denied(world, Control("job-1", "pause"), "conflict")
    denied(world, Control("job-1", "checkpoint"), "conflict")
    # Taken back before the boundary: the job does not stand still for long.
    assert isinstance(world.ask(Control("job-1", "resume")), Accepted)
    world.until_step(10)


def test_drain_and_its_undo(world):
    denied(world, Drain("n09"), "not-found")
    denied(world, Drain("n01", undo=True), "conflict")
    assert "kept out of plans" in world.ask(Drain("n01", "fan", who="kim")).message
    denied(world, Drain("n01"), "conflict")
    assert world.node("n01").state == "drained"
    assert isinstance(world.ask(Drain("n01", undo=True)), Accepted)
    drained, undrained = world.told(Audited)[-2:]
    assert drained == Audited("kim", "drain", nodes=("n01",), reason="fan")
    assert undrained.act == "undrain"


def test_kill_only_where_it_is_allowed(world):
    denied(world, Kill("n09"), "not-found")
    told = []
    world.network.tell = told.append
    assert isinstance(world.ask(Kill("n02", "device", "backward", 4)), Accepted)
    assert Inject("device", "n02/0", "backward", 4) in [tell.message for tell in told]
    world.kill("n02", silent=True)
    world.run(lambda: world.node("n02").state == "lost")
    denied(world, Kill("n02"), "conflict")
    guarded = World(1, 1)
    guarded.machine.core.config = guarded.config.__class__(allow_injection=False)
    denied(guarded, Kill("n01"), "forbidden")


def test_one_device_of_several_by_its_number():
    world = World(1, 2, num_devices=2)
    world.run_for(1.0)
    told = []
    world.network.tell = told.append
    answer = world.ask(Kill("n02", "device", "reduce", device=1))
    assert answer.message == "fault device is on its way to n02"
    assert Inject("device", "n02/1", "reduce") in [tell.message for tell in told]
    world.ask(Kill("n02", "hang", device=1))
    assert Inject("hang", "n02/1") in [tell.message for tell in told]
    assert "2 devices, numbered from 0" in denied(world, Kill("n02", "device", device=2), "invalid").hint
    denied(world, Kill("n02", "sigkill", device=1), "invalid")


def test_a_host_is_all_nodes_on_it_and_only_what_can_end_has_a_time(world):
    told = []
    world.network.tell = told.append
    world.machine.core.members.nodes["n03"].host = "another"
    answer = world.ask(Kill("n02", "host"))
    assert answer.message == "fault host is on its way to n01, n02"
    assert sorted(tell.node for tell in told) == ["n01", "n02"]
    denied(world, Kill("n02", "sigkill", seconds=3.0), "invalid")
    assert isinstance(world.ask(Kill("n02", "sigstop", seconds=3.0)), Accepted)
    assert told[-1].message == Inject("sigstop", "n02/0", seconds=3.0)


@pytest.mark.parametrize(
    ("how", "at", "said"),
    [
        ("device", "bakward", "no fault point 'bakward'"),
        ("sigkill", "backward", "sigkill does not wait for a fault point"),
    ],
)
def test_a_fault_that_would_never_strike_is_refused(world, how, at, said):
    told = []
    world.network.tell = told.append
    answer = world.ask(Kill("n02", how, at))
    assert isinstance(answer, Denied)
    assert (answer.kind, answer.problem) == ("invalid", said)
    assert told == []


def test_slow_is_by_how_much(world):
    told = []
    world.network.tell = told.append
    assert world.ask(Kill("n02", "slow")).message == "fault slow is on its way to n02"
    assert told[-1].message == Inject("slow", "n02/0", times=3.0)
    assert isinstance(world.ask(Kill("n02", "slow", times=5.0, seconds=9.0)), Accepted)
    assert told[-1].message == Inject("slow", "n02/0", seconds=9.0, times=5.0)
    denied(world, Kill("n02", "hang", times=5.0), "invalid")


def test_a_job_that_is_resumed_from_a_folder_is_to_read_what_that_was_made_from(world):
    """The HTTP layer has read its manifest. Where another job of this journal wrote it the journal knows."""
    made_from = (Input("data", "/t", 1, 8, "b", "8-aa"),)
    world.ask(Submit(make_job(), "/a/step-00000004", "tester", Counters(4, 4, 4), inputs=made_from))
    job = world.job()
    assert (job.inputs, job.counters.step) == (made_from, 4)
    world.ask(Control("job-1", "cancel"))
    world.ask(Submit(make_job(), "/a/step-00000004", "tester", Counters(4, 4, 4)))
    assert world.job("job-2").inputs == ()
    submitted = [said for said in world.told(Audited) if said.act == "submit"]
    assert [said.as_named for said in submitted if said.resumed] == [False, True]
