"""Single events that worlds meet rarely."""

import random
import time

import msgspec
import pytest

from oobleckd.core import state, view
from oobleckd.core.config import CoreConfig
from oobleckd.core.events import Asked, Heard, LinkLost, ManifestWritten, Planned, Tell, Tick, WriteManifest
from oobleckd.core.machine import Machine
from oobleckd.core.steps import both_nan
from oobleckd.planner.plan import node_of
from oobleckd.protocol.agentmessages import Ack, Goodbye, Heartbeat, Hello, Refused
from oobleckd.protocol.canonical import digest
from oobleckd.protocol.changes import CheckpointGivenUp, LossDisputed, PlanRefused, SpareReady
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.messages import (
    PROTOCOL,
    DeviceFailed,
    Emptied,
    Held,
    LinkDown,
    Release,
    Resume,
    StepDone,
)
from oobleckd.protocol.parts import Counters, Spare
from oobleckd.protocol.requests import Control
from tests.helpers.simjobs import make_job
from tests.helpers.world import World


@pytest.fixture
def world():
    world = World(1, 4)
    world.run_for(1.0)
    world.submit(steps=200, memory=350)
    world.until_step(3)
    return world


def step_done(world, device="n01/0", job="job-1", **more):
    fields = {"round": 1, "loss": 0.0} | more
    counters = Counters(fields["round"], fields["round"], fields["round"])
    return StepDone(device, job, 1, counters, "applied", fields["loss"], 1.0, 0.1, 8, "x", 0.1, 0.1)


def known(world, device="n01/0"):
    return world.nodes[node_of(device)].devices[device].known


def hear(world, message, node="n01"):
    return world.machine.handle(Heard(node, message), world.now)


def acks(commands):
    return [c.message for c in commands if isinstance(c, Tell) and isinstance(c.message, Ack)]


def test_another_protocol_version_is_refused():
    machine = Machine(CoreConfig())
    (tell,) = machine.handle(Heard("n1", Hello(99, "n1", "1", "host", True, ())), 1.0)
    assert isinstance(tell.message, Refused)
    assert "install the same version" in tell.message.hint
    assert not machine.core.members.nodes


def test_a_spare_that_is_ready_is_announced_once():
    machine, said = Machine(CoreConfig()), []
    for spare in (Spare(7), Spare(7, ready=True), Spare(7, ready=True), Spare(8), Spare(8, ready=True)):
        commands = machine.handle(Heard("n1", Hello(PROTOCOL, "n1", "1", "host", True, (), spare)), 1.0)
        changes = [c.change.data for c in commands if hasattr(c, "change")]
        said.append([data for data in changes if isinstance(data, SpareReady)])
    ready = [SpareReady("n1")]
    assert said == [[], ready, [], [], ready]


def heartbeat_cost_s(num_nodes):
    """CPU seconds of a heartbeat, the best of a few rounds."""
    machine = Machine(CoreConfig())
    for number in range(num_nodes):
        machine.handle(Heard(f"n{number}", Hello(PROTOCOL, f"n{number}", "1", "host", True, ())), 1.0)
    costs = []
    for turn in range(5):
        began = time.process_time()
        for number in range(100):
            assert machine.handle(Heard(f"n{number}", Heartbeat("1")), 1.0 + turn / 100) == []
            machine.next_deadline()
        costs.append(time.process_time() - began)
    return min(costs) / 100


def test_a_heartbeat_costs_the_same_with_a_hundred_nodes_and_with_thousands():
    assert heartbeat_cost_s(4000) < 8 * heartbeat_cost_s(100)


def heartbeating(look_s, heartbeat_s, times):
    """A machine with one node that sends heartbeats so often."""
    machine, now = Machine(CoreConfig(look_s=look_s)), 1.0
    machine.handle(Heard("n1", Hello(PROTOCOL, "n1", "1", "host", False, ())), now)
    for _ in range(times):
        now += heartbeat_s
        assert machine.handle(Heard("n1", Heartbeat("1")), now) == []
    return machine, now


def test_a_heartbeat_in_time_leaves_due_what_was():
    machine, now = heartbeating(look_s=1.0, heartbeat_s=0.25, times=3)
    assert machine.next_deadline() == 2.0
    assert machine.core.members.nodes["n1"].lease.heard == machine.core.now == now
    machine.handle(Heard("n1", Heartbeat("1")), 2.25)
    assert machine.next_deadline() == 3.25
    assert machine.core.members.asleep_s == 0.25  # there was no Tick


def test_a_heartbeat_that_shortens_a_lease_is_asked_about_earlier():
    machine, now = heartbeating(look_s=60.0, heartbeat_s=0.25, times=20)
    assert now < machine.next_deadline() < now + 1.5


def test_a_heartbeat_of_another_incarnation_is_looked_at():
    machine, now = heartbeating(look_s=1.0, heartbeat_s=0.25, times=1)
    machine.core.members.evict("n1", "why", now, "links-down")
    assert not machine.core.members.nodes["n1"].alive
    commands = machine.handle(Heard("n1", Heartbeat("1")), now + 0.25)
    assert machine.core.members.nodes["n1"].alive
    assert commands
    machine.handle(Heard("n1", Heartbeat("another")), now + 0.5)
    assert machine.core.members.nodes["n1"].lease.heard == now + 0.5


def test_devices_that_disagree_on_a_loss_are_silent_corruption(world):
    commands = hear(world, step_done(world, loss=123.0))
    assert LossDisputed("n01/0", "job-1") in [c.change.data for c in commands if hasattr(c, "change")]
    assert world.job().losses[1] != 123.0
    assert both_nan(float("nan"), float("nan"))


def test_gradients_sent_are_added_up_by_device(world):
    run = world.machine.core.run
    for device, node in (("n01/0", "n01"), ("n01/0", "n01"), ("n02/0", "n02")):
        done = step_done(world, device, loss=world.job().losses[1])
        hear(world, msgspec.structs.replace(done, gradient_messages=3, gradient_bytes=1000), node)
    assert run.gradients["n01/0"] == (6, 2000)
    assert run.gradients["n02/0"] == (3, 1000)
    assert run.in_stage == {}


def test_what_devices_of_a_stage_have_of_each_other_is_added_up(world):
    run = world.machine.core.run
    for _ in range(2):
        done = step_done(world, "n01/0", loss=world.job().losses[1])
        done = msgspec.structs.replace(done, gathered_bytes=400, shard_gradient_bytes=200, gather_wait_s=0.25)
        hear(world, done, "n01")
    assert run.in_stage == {"n01/0": (800, 400, 0.5)}


def test_what_nobody_waits_for_is_acknowledged(world):
    assert acks(hear(world, step_done(world, job="gone-7", round=5))) == [Ack("gone-7", 5)]
    part = CheckpointPart("n01/0", "gone-7", Counters(6, 6, 6), "d", 0, 1, "f", 1, "00", {})
    assert acks(hear(world, part)) == [Ack("gone-7", 6)]


def test_parts_hold_back_acknowledgements_until_the_checkpoint_is_whole(world):
    counters = world.job().counters
    part = CheckpointPart("n01/0", "job-1", counters, "d.partial", 0, 2, "f", 1, "00", {})
    assert acks(hear(world, part)) == []
    late = step_done(world, loss=world.job().losses[1])
    assert acks(hear(world, late)) == [Ack("job-1", counters.round - 1)]
    commands = hear(world, msgspec.structs.replace(part, bucket=1))
    assert [c.directory for c in commands if isinstance(c, WriteManifest)] == ["d.partial"]
    assert acks(commands) == acks(hear(world, part)) == [], "kept until the checkpoint is on disk"
    assert world.job().checkpoint == ""
    commands = world.machine.handle(ManifestWritten("d.partial"), world.now)
    assert world.job().checkpoint == "d"
    assert len(acks(commands)) == len(world.view().nodes)
    assert world.machine.handle(ManifestWritten("d.partial"), world.now) == []
    ahead = msgspec.structs.replace(part, counters=Counters(999, 999, 999))
    hear(world, ahead)
    assert world.machine.core.run.parts == {}


def test_a_step_that_overtakes_others_waits_for_them(world):
    """An agent's newest step can come before those that it kept while the daemon was away."""
    job = world.job()
    first = job.counters.round
    for ahead in (2, 1):
        hear(world, step_done(world, round=first + ahead, loss=ahead))
        assert job.counters.round == first
    hear(world, step_done(world, round=first, loss=0.0))
    assert [job.losses[first + i] for i in range(3)] == [0.0, 1, 2]
    assert job.counters.round == first + 3


def test_a_checkpoint_that_cannot_be_completed_does_not_count(world):
    part = CheckpointPart("n01/0", "job-1", world.job().counters, "d.partial", 0, 1, "f", 1, "00", {})
    hear(world, part)
    commands = world.machine.handle(ManifestWritten("d.partial", "no such folder"), world.now)
    (said,) = [c.change for c in commands if hasattr(c, "change")]
    assert (said.level, said.data) == ("error", CheckpointGivenUp("job-1", "d.partial", "no such folder"))
    assert world.job().checkpoint == ""
    assert world.machine.core.run.parts == {}


def test_a_checkpoint_that_is_completed_late_does_not_replace_a_newer_one(world):
    new = world.job().counters
    old = Counters(new.round - 1, new.step - 1, new.applied - 1)
    for name, counters in (("old", old), ("new", new)):
        hear(world, CheckpointPart("n01/0", "job-1", counters, f"{name}.partial", 0, 1, "f", 1, "00", {}))
    for name in ("new", "old"):
        world.machine.handle(ManifestWritten(f"{name}.partial"), world.now)
    assert (world.job().checkpoint, world.job().checkpoint_counters) == ("new", new)


def test_a_damaged_checkpoint_that_nobody_loads_any_more_leads_to_nothing(world):
    (device, *_) = world.job().survivors()
    assert hear(world, DeviceFailed(device, "job-1", "torn", damaged="step-00000004")) == []
    assert world.state() == "running"


def test_a_device_that_cannot_fails_the_job_with_its_hint(world):
    hear(world, DeviceFailed("n01/0", "job-1", "no corpus", "name a folder"))
    assert world.state() == "failed"
    assert world.job().cause == "device-refused"
    why = world.job().reason
    assert world.machine.core.run is None
    hear(world, DeviceFailed("n02/0", "job-1", "again"))
    assert world.job().reason == why


def test_a_link_outside_the_layout_is_nobodys_evidence(world):
    hear(world, LinkDown("n01/0", "n09/0", "reset"))
    assert not world.machine.core.members.nodes["n01"].accused


def test_answers_to_old_questions_are_dropped(world):
    epoch = world.job().epoch
    assert world.machine.handle(Planned(999, error="late"), world.now) == []
    assert world.job().epoch == epoch


def test_a_plan_that_is_refused_leaves_the_present_one_in_force(world):
    world.daemon.plan = lambda incarnation, command: world.daemon.feed(
        incarnation, Planned(command.ticket, error="no", hint="why")
    )
    world.add("n05")
    world.run(lambda: PlanRefused("job-1", "no (why)") in world.told(PlanRefused))
    world.until_step(30)
    assert "n05" not in world.view().nodes


def test_a_daemon_that_slept_mourns_nobody(world):
    commands = world.machine.handle(Tick(), world.now + 60.0)
    assert all(node.alive for node in world.machine.core.members.nodes.values())
    assert not any(isinstance(c, Tell) for c in commands)


def test_a_grace_lasts_while_the_daemon_is_awake_whatever_rounding_does(world):
    """Late for every Tick, and once by a minute: only what lies between them counts."""
    dice, entries = random.Random(0), world.daemon.disk.entries()
    for _ in range(100):
        now, awake_s, late_s = dice.uniform(0.0, 1e9), 0.0, 60.0
        machine = Machine.restore(entries, now, world.config)
        while machine.core.run.phase == "adrift":
            awake_s += machine.due - now
            now = machine.due + late_s
            machine.handle(Tick(), now)
            late_s = dice.uniform(0.0, 0.1)
        assert awake_s == pytest.approx(world.config.grace_s, abs=1e-4)


def test_unknown_requests_are_a_bug():
    with pytest.raises(TypeError):
        Machine(CoreConfig()).handle(Asked(1, object()), 0.0)


def test_the_journal_rebuilds_the_state(world):
    world.kill("n02")
    world.until_state("recovering")
    world.until_state("running")
    again = Machine.restore(world.daemon.disk.entries(), world.now, world.config)
    ours, theirs = world.machine.core.state, again.core.state
    assert theirs.jobs == ours.jobs
    assert theirs.incidents == ours.incidents
    assert (theirs.seq, theirs.drained, theirs.quarantined) == (ours.seq, ours.drained, ours.quarantined)
    assert theirs.epoch == ours.epoch + 1, "one may have been told that is not in the journal"
    assert list(theirs.history) == list(ours.history)
    assert theirs.nodes == ours.nodes
    states = {node.name: node.state for node in view.node_views(again.core)}
    assert states.pop("n02") == "lost"
    assert set(states.values()) == {"disconnected"}


def test_a_look_at_a_job_does_not_name_it_anew(world, monkeypatch):
    """People look many times a second, and its digest took three quarters of each look."""
    core, job = world.machine.core, world.job()
    before = view.job_view(core, job).digest
    made = []
    monkeypatch.setattr(state, "digest", lambda spec: made.append(spec) or "another")
    assert view.job_view(core, job).digest == before
    assert not made
    job.spec = msgspec.structs.replace(job.spec, name="changed")
    assert [view.job_view(core, job).digest for _ in range(3)] == ["another"] * 3
    assert made == [job.spec]


def test_views(world):
    core = world.machine.core
    assert view.status(core).line.startswith("4 nodes, job-1 running, step ")
    assert view.status(core).line.endswith("can lose 1")
    assert sum(template.instances for template in view.template_views(world.job())) == 2
    assert {node.state for node in view.node_views(core)} == {"active"}
    assert view.job_view(core, world.job()).digest == digest(world.job().spec)
    assert digest(make_job("one")) == digest(make_job("two"))
    assert digest(make_job(steps=1)) != digest(make_job(steps=2))
    world.kill("n02")
    world.until_state("recovering")
    assert world.incidents()[0].open
    world.until_state("running")
    world.run(lambda: not world.incidents()[0].open)
    assert view.story(core, "incident:inc-1")[0].kind == "incident"
    assert view.story(core, "node:n02")
    assert view.status(Machine(CoreConfig()).core).line == "0 nodes, no job"
    assert len(view.pipeline_views(world.job())) == len(world.view().pipelines)


def test_the_memory_cap_does_not_count_what_the_runtime_takes():
    plain, on_gpu = World(1, 4), World(1, 4)
    on_gpu.profile = msgspec.structs.replace(on_gpu.profile, reserve_bytes=10_000)
    cuts = []
    for world in (plain, on_gpu):
        world.run_for(1.0)
        world.submit(steps=200, memory=350)
        world.until_step(3)
        layout = world.job().layout
        cuts.append(sorted(held.ranges for held in layout.holdings.values()))
    assert cuts[0] == cuts[1]
    assert len(set(cuts[0])) > 1


def told_releases(commands):
    return [
        (c.node, c.message.device) for c in commands if isinstance(c, Tell) and isinstance(c.message, Release)
    ]


def test_a_guest_of_a_deployment_that_was_dropped_is_not_released_before_the_next_one():
    """Copies of the next one may be with it already, ahead of the Release, which would take them along."""
    world = World(3, 5)
    world.run_for(1.0)
    world.submit(steps=200, memory=350)
    world.until_step(3)
    world.kill("n05")
    world.until_state("recovering")
    world.until_state("running")
    world.add("n05")
    guest = world.nodes["n05"].devices["n05/0"]
    world.run(lambda: guest.known.job == "job-1" and world.machine.core.run.phase == "deploy")
    world.kill_device("n01")
    world.run(lambda: world.machine.core.run.candidate is None)
    assert (guest.known.job, guest.known.layout) == ("job-1", 0)
    infos = (guest.known,)
    again = Hello(PROTOCOL, "n05", world.nodes["n05"].incarnation, "host", True, infos)
    assert told_releases(hear(world, again, "n05")) == []

    # But it is at the job's end, as all that have anything of it.
    ended = world.machine.handle(Asked(1, Control("job-1", "cancel", discard=True)), world.now)
    assert ("n05", "n05/0") in told_releases(ended)


def resumes(commands):
    return [c.message for c in commands if isinstance(c, Tell) and isinstance(c.message, Resume)]


def test_who_missed_a_resume_gets_it_when_it_says_that_it_holds(world):
    """Its connection took the order along. It says again that it holds where all others have gone on from."""
    run = world.machine.core.run
    job = run.job
    begun = msgspec.structs.replace(job.counters, round=run.resumed_round)
    told = resumes(hear(world, Held("n01/0", job.epoch, begun)))
    assert told == [Resume("n01/0", job.epoch, job.layout.epoch, run.resumed_round)]
    assert not run.held
    later = msgspec.structs.replace(begun, round=begun.round + 1)
    assert resumes(hear(world, Held("n01/0", job.epoch, later))) == []
    assert list(run.held) == ["n01/0"]


def test_who_holds_at_the_end_again_was_told_to_go_on_from_there(world):
    """As one that rolls back to the checkpoint of the last step."""
    run = world.machine.core.run
    begun = msgspec.structs.replace(run.job.counters, round=run.resumed_round)
    assert resumes(hear(world, Held("n01/0", run.job.epoch, begun, finished=True))) == []
    assert list(run.held) == ["n01/0"]


def test_nobody_plans_with_a_node_that_has_yet_to_drop_what_it_holds(world):
    """Copies for the next plan would come before the Release, which takes them along."""
    core = world.machine.core
    job, info = core.run.job, world.nodes["n01"].devices["n01/0"].known
    stranger = msgspec.structs.replace(info, device="n09/0", job="job-0")
    ours = msgspec.structs.replace(stranger, job="")

    def hello(info):
        return hear(world, Hello(PROTOCOL, "n09", "1", "host", True, (info,)), "n09")

    def orders(commands):
        found = [c.message.order for c in commands if isinstance(c, Tell) and isinstance(c.message, Release)]
        return found[0] if found else ""

    first = orders(hello(stranger))
    assert first
    assert "n09" not in core.candidates(job)
    second = orders(hello(stranger))  # still
    assert second not in {"", first}
    hear(world, Emptied("n09/0", first), "n09")
    assert "n09" not in core.candidates(job)
    world.machine.handle(LinkLost("n09"), world.now)
    third = orders(hello(ours))  # the last order, or its answer, is lost with the connection
    assert third
    assert "n09" not in core.candidates(job)
    hear(world, Emptied("n09/0", second), "n09")
    assert "n09" not in core.candidates(job)
    hear(world, Emptied("n09/0", third), "n09")
    assert "n09" in core.candidates(job)
    assert not orders(hello(ours))


@pytest.mark.parametrize("adrift", [True, False])
def test_who_is_back_drops_what_it_holds_if_anybody_has_acted_on_its_loss(world, adrift):
    """A daemon that has just started has not, and counts on it."""
    if adrift:
        world.daemon.stop()
        world.daemon.start()
        hear(world, Hello(PROTOCOL, "n01", world.nodes["n01"].incarnation, "host", True, (known(world),)))
    core = world.machine.core
    assert (core.run.phase == "adrift") == adrift
    core.members.evict("n01", "silent", world.now, "silent")
    world.machine.handle(Tick(), world.now)
    back = hear(world, Heartbeat(world.nodes["n01"].incarnation))
    assert told_releases(back) == ([] if adrift else [("n01", "n01/0")])
    assert core.members.nodes["n01"].alive


def test_who_has_dropped_a_job_is_looked_at_with_the_last(world):
    """At a job's end thousands say so at once."""
    core, info = world.machine.core, world.nodes["n01"].devices["n01/0"].known
    for name in ("n08", "n09"):
        stranger = msgspec.structs.replace(info, device=f"{name}/0", job="job-0")
        hear(world, Hello(PROTOCOL, name, "1", "host", True, (stranger,)), name)
    orders = {name: core.members.nodes[name].releasing[f"{name}/0"][1] for name in ("n08", "n09")}
    hear(world, Emptied("n08/0", orders["n08"]), "n08")
    assert core.members.touched == {"n08"}
    hear(world, Emptied("n09/0", orders["n09"]), "n09")
    assert not core.members.touched
    assert {"n08", "n09"} <= set(core.candidates(core.run.job))


def test_the_dead_owe_nothing(world):
    core, info = world.machine.core, world.nodes["n01"].devices["n01/0"].known
    stranger = msgspec.structs.replace(info, device="n09/0", job="job-0")
    hear(world, Hello(PROTOCOL, "n09", "1", "host", True, (stranger,)), "n09")
    assert core.members.owing == {"n09"}
    hear(world, Goodbye("1", "SIGTERM"), "n09")
    core.release("n09/0", "job-0")
    assert not core.members.owing


def test_a_new_incarnation_of_a_device_holds_nothing(world):
    core, info = world.machine.core, world.nodes["n01"].devices["n01/0"].known
    stranger = msgspec.structs.replace(info, device="n09/0", job="job-0")
    hear(world, Hello(PROTOCOL, "n09", "1", "host", True, (stranger,)), "n09")
    assert core.members.owes("n09/0")
    fresh = msgspec.structs.replace(stranger, job="", incarnation="another")
    hear(world, Hello(PROTOCOL, "n09", "1", "host", True, (fresh,)), "n09")
    assert not core.members.owes("n09/0")
    assert "n09" in core.candidates(core.run.job)


def test_a_guest_of_another_job_is_released(world):
    info = msgspec.structs.replace(
        world.nodes["n01"].devices["n01/0"].known, device="n09/0", job="job-0", layout=0
    )
    assert told_releases(hear(world, Hello(PROTOCOL, "n09", "1", "host", True, (info,)), "n09")) == [
        ("n09", "n09/0")
    ]


def test_a_worker_that_speaks_a_range_is_answered_in_what_both_speak():
    machine = Machine(CoreConfig())
    hello = Hello(PROTOCOL + 2, "n1", "1", "host", True, (), oldest=PROTOCOL - 1)
    (welcome,) = [c.message for c in machine.handle(Heard("n1", hello), 1.0) if isinstance(c, Tell)]
    assert welcome.protocol == PROTOCOL
    hello = Hello(PROTOCOL + 2, "n2", "1", "host", True, (), oldest=PROTOCOL + 1)
    (refused,) = [c.message for c in machine.handle(Heard("n2", hello), 1.0) if isinstance(c, Tell)]
    assert refused.cause == "other-protocol"
