"""Why jobs wait or failed, and why nodes are in their states: every sentence, word for word, with its code.

Other tests look at the codes. ``python -m tests.sim.test_reasons`` writes the page anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec

from oobleckd.core import agents
from oobleckd.core.events import Heard, Planned, Tell
from oobleckd.protocol.agentmessages import Goodbye, Hello, Refused
from oobleckd.protocol.changes import LastCopyAwaited, NodeLost
from oobleckd.protocol.deaths import OUT_OF_MEMORY, Death, Memory
from oobleckd.protocol.messages import PROTOCOL, DeviceFailed, LinkDown
from oobleckd.protocol.parts import JobCause, NodeCause
from oobleckd.protocol.requests import Control, Drain, Kill
from tests.helpers.simjobs import UNPREPARED, make_job
from tests.helpers.simtext import WRONG
from tests.helpers.world import World

PAGE = Path(__file__).with_name("reasons.txt")
_FRACTION = re.compile(r"\d+\.\d+|\b\d+(?= m?s\b)")  # of seconds: they move with anything that takes time
GIB = 2**30
_EVERYTHING = 10_000

Said = tuple[str, str, str]
"""State, code and sentence."""


def job(world: World, job_id: str = "job-1") -> Said:
    view = world.view(job_id)
    return view.state, view.cause, view.reason


def node(world: World, name: str) -> Said:
    view = world.node(name)
    return view.state, view.cause, view.reason


def empty(num_nodes: int, seed: int = 1, **config) -> World:
    world = World(seed, num_nodes, **config)
    world.run_for(3.0)
    return world


def training(num_nodes: int = 6, step: int = 3, **spec) -> World:
    config = {key: spec.pop(key) for key in ("nans", "link_grace_s", "num_layers") if key in spec}
    world = empty(num_nodes, **config)
    world.submit(make_job(**{"steps": _EVERYTHING, "memory": 350} | spec))
    world.until_step(step)
    return world


def waiting(world: World) -> Said:
    world.until_state("waiting")
    return job(world)


def failed(world: World) -> Said:
    world.until_state("failed", limit_s=200.0)
    return job(world)


def lost(world: World, name: str) -> Said:
    world.run(lambda: world.node(name).state == "lost")
    return node(world, name)


def drained(world: World, name: str) -> Said:
    world.run(lambda: world.node(name).state == "drained")
    return node(world, name)


# ---------------------------------------------------------------------- jobs


def queued() -> Iterator[Said]:
    world = World(1, 0)
    world.run_for(0.1)
    world.submit(make_job("one", memory=350))
    yield job(world, "one-1")
    world = empty(2)
    for name in ("one", "two"):
        world.submit(make_job(name, steps=_EVERYTHING, f=0, memory=350))
    yield job(world, "two-2")
    for name in ("n01", "n02"):
        world.ask(Drain(name))
    world.ask(Control("one-1", "cancel"))
    yield job(world, "two-2")
    for name in ("n01", "n02"):
        world.kill(name)
    world.run(lambda: world.view("two-2").cause == "no-nodes")
    yield job(world, "two-2")


def too_few() -> Iterator[Said]:
    world = empty(1)
    world.submit(make_job(f=0, memory=350))
    yield waiting(world)
    world = empty(3)
    world.submit(make_job(f=1, memory=350))
    yield waiting(world)
    world = training(2, f=0)
    world.ask(Drain("n01"))
    yield waiting(world)
    world = training(4)
    world.kill("n04")
    world.until_state("recovering")
    for name in ("n01", "n02", "n03"):
        world.ask(Drain(name))
    yield waiting(world)
    world = training(4, 6, every=4)
    world.texts.put(WRONG)
    names = sorted(world.nodes)
    for name in names:
        world.kill(name)
    world.run_for(0.2)
    for name in names:
        world.add(name)
    world.run(lambda: world.machine.core.run.kept_out.keys() == set(names))
    yield job(world)


def no_plan() -> Iterator[Said]:
    world = empty(3)
    plan = world.daemon.plan

    def refuse(incarnation: int, command) -> None:
        if command.situation is None:
            plan(incarnation, command)
        else:
            world.daemon.feed(incarnation, Planned(command.ticket, error="no plan for three", hint="add one"))

    world.daemon.plan = refuse
    world.submit(make_job(f=0, memory=350))
    yield waiting(world)
    world = empty(4)
    world.submit(make_job(memory=50))
    yield failed(world)


def held_up() -> Iterator[Said]:
    """By a last copy, and by a last checkpoint."""
    world = training(3, 12, f=0, min_pipeline_nodes=3)
    world.held = True
    world.stop_device("n02")
    world.run(lambda: bool(world.told(LastCopyAwaited)))
    yield job(world)
    world = training(6, every=4, steps=12)
    world.disk_full = True
    world.run(lambda: world.view().cause == "checkpoint-unwritten")
    yield job(world)


def lost_a_node() -> Iterator[Said]:
    world = training()
    world.kill("n02")
    world.until_state("recovering")
    yield job(world)


def not_finite() -> Iterator[Said]:
    for every in (0, 1):
        yield failed(training(nans=(9, 10, 11), every=every))
    world = empty(6, nans=tuple(range(8, 18)))
    spec = make_job(memory=350)
    world.submit(msgspec.structs.replace(spec, train=msgspec.structs.replace(spec.train, on_nan="skip")))
    world.until_state("done")
    yield job(world)


def spiked() -> Iterator[Said]:
    world = empty(6, clips=(8, 9, 10), spikes=(8, 9, 10))
    spec = make_job(memory=350)
    limited = {"on_spike": "stop", "spike_factor": 0.0, "spike_grad_norm": 100.0}
    world.submit(msgspec.structs.replace(spec, train=msgspec.structs.replace(spec.train, **limited)))
    yield failed(world)


def data() -> Iterator[Said]:
    world = empty(2)
    world.texts.put(WRONG, ["n01"])
    world.submit(make_job())
    yield failed(world)
    world = training(4, every=4)
    world.run(lambda: any(kept.checked for kept in world.job().kept))
    world.texts.write(WRONG)
    yield failed(world)
    world = empty(4)
    world.texts.remove(["n01", "n02", "n03", "n04"])
    world.submit(make_job(memory=350))
    yield failed(world)


def preparing() -> Iterator[Said]:
    """While it goes on, and how it ends in vain."""
    world = empty(2)
    world.submit(make_job(data=UNPREPARED))
    world.run(lambda: world.folders.pieces == 2)
    world.run_for(0.1)
    yield job(world)
    for name in ("n01", "n02"):
        world.ask(Drain(name))
    yield job(world)
    for name in ("n01", "n02"):
        world.ask(Drain(name, undo=True))
    world.folders.bad = True
    yield failed(world)
    world = empty(2)
    world.folders.blind.update(world.nodes)
    world.submit(make_job(data=UNPREPARED))
    yield failed(world)
    world = empty(2)
    world.submit(make_job(data=UNPREPARED))
    while world.state() == "preparing":
        world.folders.kill()
        world.run_for(0.1)
    yield failed(world)


def devices() -> Iterator[Said]:
    memory = Memory(used=15 * GIB, capacity=16 * GIB, wanted=2 * GIB)
    hungry = Death(OUT_OF_MEMORY, "backward", "OutOfMemoryError", "job-1", 1, memory=memory)
    world = training()
    for name in ("n02", "n05"):
        world.kill_device(name, death=hungry)
    yield failed(world)
    world = training()
    for name in ("n02", "n05"):
        epoch = world.job().epoch
        error = "RuntimeError: shapes do not fit"
        world.kill_device(name, death=Death("RuntimeError", "forward", error, "job-1", epoch, "layer.py:80"))
        world.run(lambda: world.job().epoch > epoch or world.job().final)  # noqa: B023
    yield failed(world)
    world = training()
    world.machine.handle(
        Heard("n01", DeviceFailed("n01/0", "job-1", "no corpus", "name a folder")), world.now
    )
    yield job(world)
    world = training(every=4, policy="varuna")
    world.run(lambda: len(world.job().kept) == 2)
    world.damaged |= {kept.directory: 0 for kept in world.job().kept}
    world.kill("n02")
    yield failed(world)


# ---------------------------------------------------------------------- nodes


def lost_nodes() -> Iterator[Said]:
    world = training(step=12)
    world.network.close(world.nodes["n03"])
    world.nodes["n03"].alive = False
    world.run(lambda: world.node("n03").state == "disconnected")
    yield node(world, "n03")
    world = training()
    world.kill("n02")
    yield lost(world, "n02")
    world = training(step=12)
    world.kill("n03", silent=True)
    world.run(lambda: world.node("n03").state == "disconnected")
    yield node(world, "n03")
    yield lost(world, "n03")
    world = training()
    world.kill_device("n02", restart_s=5.0)
    yield lost(world, "n02")
    world = empty(3)
    world.daemon.stop()
    world.kill("n01")
    world.daemon.start()
    yield node(world, "n01")
    yield lost(world, "n01")


def given_up() -> Iterator[Said]:
    world = training(3, 12, f=0, min_pipeline_nodes=3)
    world.kill("n02", silent=True)
    world.run(lambda: bool(world.told(LastCopyAwaited)))
    world.ask(Kill("n02"))
    yield node(world, "n02")


def left() -> Iterator[Said]:
    world = empty(3)
    world.leave("n01")
    world.run(lambda: world.node("n01").state == "left")
    yield node(world, "n01")
    world.nodes["n02"].to_daemon(Goodbye(world.nodes["n02"].incarnation, "SIGTERM", overdue=True))
    world.run(lambda: world.node("n02").state == "left")
    yield node(world, "n02")


def out_of_plans() -> Iterator[Said]:
    world = training()
    world.ask(Drain("n05", "old disk"))
    yield drained(world, "n05")
    world.ask(Drain("n06"))
    yield drained(world, "n06")
    world.nodes["n04"].noticed("AWS announced: spot instance terminate", 20.0)
    world.run(lambda: world.node("n04").state == "draining")
    yield node(world, "n04")


def evicted() -> Iterator[Said]:
    world = training(link_grace_s=1.0)
    world.nodes["n01"].devices["n01/0"].tell(LinkDown("n01/0", "n02/0", "reset"))
    yield drained(world, "n02")
    (told,) = world.told(NodeLost)
    yield "lost", told.code, told.cause
    world = training(4)
    machine = world.machine
    agents._stumble(machine.core, machine.core.run, "n02/0", LinkDown("n01/0", "n02/0", "reset"))
    agents._stumble(machine.core, machine.core.run, "n02/0", LinkDown("n01/0", "n02/0", "reset"))
    yield "drained", machine.core.state.drain_causes["n02"], machine.core.state.drained["n02"]


def bad_devices() -> Iterator[Said]:
    for slow in ("report", "drain"):
        world = training(9, 12, slow=slow)
        world.nodes["n03"].slow = 3.0
        world.run(lambda: world.node("n03").cause == "slow")  # noqa: B023
        yield node(world, "n03")
    world = training(9, f=2, memory=300, min_pipeline_nodes=3)
    store = world.device("n05/0").executor.store
    store.flipped.add(min(store.buckets))
    yield drained(world, "n05")
    world = training(6, memory=300, min_pipeline_nodes=3)
    next(iter(world.device("n02/0").executor.reducer.parts.values())).flipped = True
    yield drained(world, "n02")


def standbys() -> Iterator[Said]:
    world = training(5, max_nodes=4)
    (name,) = set(world.nodes) - set(world.view().nodes)
    yield node(world, name)
    known = world.machine.core.members.nodes[name]
    known.devices = ()
    yield node(world, name)
    world = training(3, num_layers=3, f=0, memory=130)
    world.add("n04")
    world.run_for(1.0)
    world.run(lambda: world.node("n04").cause == "no-place")
    yield node(world, "n04")
    world = training(5, policy="varuna")
    (name,) = world.job().plan.idle
    state, cause, reason = node(world, name)
    yield state, cause, reason.replace(world.job().plan.reason, "(the reason of the plan)")
    world = training(4, 6, every=4)
    world.texts.put(WRONG)
    world.kill("n02")
    world.run_for(0.3)
    world.add("n02")
    world.run_for(0.3)
    world.run(lambda: world.node("n02").kept_out == "data-changed")
    yield node(world, "n02")


def without_a_compiler() -> Iterator[Said]:
    world = empty(5)
    plain = make_job(steps=_EVERYTHING, memory=350, max_nodes=4)
    world.submit(msgspec.structs.replace(plain, train=msgspec.structs.replace(plain.train, compile=True)))
    world.until_step(3)
    (name,) = set(world.nodes) - set(world.view().nodes)
    known = world.machine.core.members.nodes[name]
    lacks = {"device": "cpu", "torch": "2.13"}
    known.devices = tuple(msgspec.structs.replace(each, traits=lacks) for each in known.devices)
    yield node(world, name)


def refused() -> Iterator[Said]:
    world = empty(1)
    hello = Hello(PROTOCOL + 2, "n2", "1", "host", True, (), oldest=PROTOCOL + 1)
    told = [c.message for c in world.machine.handle(Heard("n2", hello), world.now) if isinstance(c, Tell)]
    for each in told:
        assert isinstance(each, Refused)
        yield "refused", each.cause, f"{each.reason} ({each.hint})"


Situation = Callable[[], Iterator[Said]]
JOBS: tuple[Situation, ...] = (
    queued, too_few, no_plan, held_up, lost_a_node, not_finite, spiked, data, preparing, devices,
)  # fmt: skip
NODES: tuple[Situation, ...] = (
    lost_nodes,
    given_up,
    left,
    out_of_plans,
    evicted,
    bad_devices,
    standbys,
    without_a_compiler,
    refused,
)


def gathered(situations: tuple[Situation, ...]) -> list[Said]:
    return [said for situation in situations for said in situation()]


def _indented(reason: str) -> str:
    return f"  {_FRACTION.sub('#.#', reason)}\n" if reason else ""


def page(jobs: list[Said], nodes: list[Said]) -> str:
    parts = []
    for title, said in (("Jobs", jobs), ("Nodes", nodes)):
        lines = [f"{state} [{cause}]\n{_indented(reason)}" for state, cause, reason in said]
        parts.append(f"{title}\n\n{''.join(lines)}")
    return "\n".join(parts)


def test_every_code_has_its_sentence_and_it_is_as_it_was() -> None:
    jobs, nodes = gathered(JOBS), gathered(NODES)
    assert set(get_args(JobCause)) == {cause for _, cause, _ in jobs}
    assert set(get_args(NodeCause)) <= {cause for _, cause, _ in nodes} | {""}
    assert page(jobs, nodes) == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(gathered(JOBS), gathered(NODES)), encoding="utf-8")
