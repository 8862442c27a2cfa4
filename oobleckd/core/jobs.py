"""A job's way in and out: the queue, the profile, the templates; done, failed, cancelled.

Owns what happens before the first plan and after the last step. Between the two: ``steer``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec

from oobleckd.core import incidents, room
from oobleckd.core.context import Core
from oobleckd.core.entries import ProfileMeasured, TemplatesMade
from oobleckd.core.events import Discard
from oobleckd.core.memory import held_besides, min_device_bytes
from oobleckd.core.run import PlannerRequest, Preloads, Preparation, Run
from oobleckd.core.state import JobRecord
from oobleckd.planner.costs.sharded import UNKNOWN, NodeLink, Sharding, possible, sharded, sharded_setup
from oobleckd.planner.plan import Template, node_of
from oobleckd.planner.policy import GradientExchange, PlanError, Setup
from oobleckd.planner.profile import Profile, sum_bytes
from oobleckd.protocol.changes import TemplatesReady
from oobleckd.protocol.datamessages import StopPreparing
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobparts import lacks_folder
from oobleckd.protocol.messages import Measure, Measured
from oobleckd.protocol.parts import DeviceInfo, JobCause
from oobleckd.words import count


def profile_key(spec: Job, device: DeviceInfo) -> str:
    """Names (model, shapes, precision, checks, kind of device): jobs that agree in these share a profile."""
    what = msgspec.json.encode([spec.costs_depend_on, device.kind, device.name], order="deterministic")
    return hashlib.sha256(what).hexdigest()[:32]


def _key_of(job: JobRecord, device: DeviceInfo) -> str:
    """As ``profile_key``, for one job alone where a folder decides what its model is: there may be another
    model in it by the next one.
    """
    key = profile_key(job.spec, device)
    return f"{key}/{job.id}" if job.spec.model.checkpoint else key


def as_linked(profile: Profile, spec: Job) -> Profile:
    """``profile`` with the link that the job says it has: no device measures what lies between two nodes."""
    # The job says it: a measurement between two idle nodes says little of a loaded fabric, and which pair
    # will copy is not known. (D-planner-009)
    said = spec.resources.link_bytes_per_s
    return msgspec.structs.replace(profile, link_bytes_per_s=said) if said else profile


def exchange_of(spec: Job) -> GradientExchange:
    """How holders of a layer exchange gradients in ``spec``, and over what: its link, where it says one."""
    # Not the link that copies are planned with where nobody said one: of a guess every step of every plan
    # would be longer, and the number of pipelines hang on it. (D-planner-014)
    every, said = spec.fault_tolerance.check_every, spec.resources.link_bytes_per_s
    return GradientExchange(sum_bytes(spec.train.exact), every, said)


def start_next(core: Core) -> None:
    """Give the place to the next job of the queue, if it is free and there is a node at all; the others are
    told what they wait for.
    """
    if core.run is None:
        job = next(_queue(core), None)
        if job is not None and core.candidates(job):
            core.run = Run(job)
            # In its turn: whatever trains has all processors of its nodes until then. (D-daemon-029)
            core.move(job, "prepare" if lacks_folder(job.spec) else "start")
    _say_what_for(core)


def queue_reason(core: Core) -> tuple[str, JobCause]:
    """Why a job of the queue does not start now, for people and for programs."""
    if core.run is not None:
        return f"waits for {core.run.job.id} to end", "job-ahead"
    nodes = core.members.nodes.values()
    if any(node.alive for node in nodes):
        here = "those that are here are not ready, drained or about to end; see oobleckctl get nodes"
        return f"waits for nodes: {here}", "nodes-not-ready"
    here = "none is left" if nodes else "none has joined"
    return f"waits for nodes: {here}; start some with oobleck-worker", "no-nodes"


def _queue(core: Core) -> Iterator[JobRecord]:
    return (job for job in core.state.jobs.values() if job.state == "queued")


def _say_what_for(core: Core) -> None:
    """Keep the reason of those who wait true. Asked after every event, so jobs are looked at only when there
    is another one to give.
    """
    # After every event, without an event of its own: it was that of the submit, "waits for job-1 to end"
    # long after job-1 had. (D-daemon-015)
    reason, cause = queue_reason(core)
    if reason == core.queue_reason:
        return
    core.queue_reason = reason
    for job in _queue(core):
        core.explain(job, reason, cause)


def prepare(core: Core, run: Run) -> None:
    """Get a profile, then templates; nothing while the answer is under way."""
    device = _measurable(core, run)
    if device is None:
        return
    key = _key_of(run.job, device)
    profile = core.state.profiles.get(key)
    if profile is None:
        if run.measuring != device.device:
            run.measuring = device.device
            core.tell(device.device, Measure(device.device, run.job.id, run.job.spec))
        return
    if run.job.state == "profiling":
        core.move(run.job, "measured")
    if run.asked is None:
        _ask_templates(core, run, as_linked(profile, run.job.spec))


def _ask_templates(core: Core, run: Run, profile: Profile) -> None:
    """Have templates made, of stages of as many devices as the job says, or of the best number."""
    spec = run.job.spec
    try:
        first, *others = _setups(core, run.job, profile)
    except PlanError as error:
        fail(core, run.job, error.problem, error.hint, "no-plan")
        return
    ticket = core.ask_plan(spec.fault_tolerance.policy, first, others=tuple(others))
    run.asked, run.sized = PlannerRequest(ticket, first), core.candidates(run.job)


def other_setups(core: Core, run: Run) -> tuple[Setup, ...]:
    """What could be planned in place of the job's setup: the same with other numbers of devices a stage."""
    now, device = run.job.setup, _first_device(core, core.candidates(run.job))
    profile = core.state.profiles.get(_key_of(run.job, device)) if device is not None else None
    if now is None or profile is None:
        return ()
    try:
        found = _setups(core, run.job, as_linked(profile, run.job.spec))
    except PlanError:  # nodes whose devices do not divide so: what there is stays
        return ()
    number = now.profile.devices_per_stage
    return tuple(
        # Templates depend on how many nodes there were, and are kept: they serve the next question, too.
        msgspec.structs.replace(setup, nodes_now=now.nodes_now)
        for setup in found
        if setup.profile.devices_per_stage != number
    )


def _setups(core: Core, job: JobRecord, profile: Profile) -> list[Setup]:
    """What is planned: for each number of devices that its stages may have. Raises PlanError."""
    spec = job.spec
    nodes = [core.members.nodes[name] for name in core.candidates(job)]
    members = [node for node in core.members.nodes.values() if node.alive]
    cap = spec.resources.device_memory_bytes  # of the job: the runtime's share comes on top
    # Several processes on one GPU see each other's memory as the runtime's; a cap that is meant for the
    # model would then fit nothing. (D-devices-001)
    cap_bytes = cap + profile.reserve_bytes if cap else 0
    setup = Setup(
        profile=profile,
        num_micro_batches=spec.num_micro_batches,
        f=spec.fault_tolerance.f,
        device_memory_bytes=min_device_bytes(nodes, members, cap_bytes),
        devices_per_node=min(len(node.devices) for node in nodes),
        max_nodes=spec.resources.max_nodes,
        min_nodes=spec.resources.min_pipeline_nodes,
        decoupled=spec.schedule.apart,
        chunks=spec.schedule.num_chunks,
        staggered=spec.schedule.update == "staggered",
        held=held_besides(spec, profile),
        nodes_now=len(nodes),
        dealt=spec.batch_sizes.ramp_steps > 0,
        recompute=spec.schedule.recompute,
        exchange=exchange_of(spec),
    )
    on_cpus = all(device.kind == "cpu" for node in nodes for device in node.devices)
    wanted = spec.resources.devices_per_stage
    if wanted == "auto":
        # Not every GPU can read another one's memory, and none has done it yet: so who wants it says it.
        # (D-devices-023)
        numbers = possible(setup.devices_per_node) if on_cpus or core.config.simulated else (1,)
    else:
        numbers = (wanted,)
    return [_of_stages(setup, spec, number) for number in numbers]


def _of_stages(setup: Setup, spec: Job, devices_per_stage: int) -> Setup:
    """``setup`` with stages of so many devices. Raises PlanError."""
    # What lies between the devices of a node nobody measures; planned with too slow a link stages have too
    # few devices, and not too many. (D-planner-020)
    # A GPU reads another one at least as fast as the host's memory, which is measured.
    beside = setup.profile.host_bytes_per_s
    link = NodeLink(beside) if beside else UNKNOWN
    sharding = Sharding(devices_per_stage, link, spec.train.exact)
    held = held_besides(spec, sharded(setup.profile, sharding))
    return sharded_setup(msgspec.structs.replace(setup, held=held), sharding)


def _measurable(core: Core, run: Run) -> DeviceInfo | None:
    """The device to measure on: the one that is at it, while it lives."""
    nodes = core.candidates(run.job)
    if run.measuring and node_of(run.measuring) in nodes:
        return core.members.device(run.measuring)
    run.measuring = ""
    return _first_device(core, nodes)


def _first_device(core: Core, nodes: Iterable[str]) -> DeviceInfo | None:
    members = [core.members.nodes[name] for name in nodes]
    devices = [device for node in members for device in node.devices if device.device not in node.fallen]
    return min(devices, key=lambda device: device.device, default=None)


def on_measured(core: Core, message: Measured) -> None:
    """Journal the profile that a device has measured."""
    run = core.run
    device = core.members.device(message.device)
    if run is None or run.measuring != message.device or message.job != run.job.id or device is None:
        return
    key = _key_of(run.job, device)
    core.record(ProfileMeasured(key, message.profile))
    run.measuring = ""


def on_templates(core: Core, run: Run, setup: Setup, templates: tuple[Template, ...]) -> None:
    """Journal the templates that the policy has prepared."""
    core.record(TemplatesMade(run.job.id, setup, templates))
    sizes = tuple(template.num_nodes for template in templates)
    each = setup.profile.devices_per_stage
    stages = f", stages of {count(each, 'device')}" if each > 1 else ""
    text = f"{run.job.id}: templates for {sizes[0]} to {count(sizes[-1], 'node')}{stages}"
    core.announce(text, TemplatesReady(run.job.id, sizes), (f"job:{run.job.id}",))


def release(core: Core, run: Run) -> None:
    """Every device that has anything of the job drops it."""
    devices = set(run.job.survivors())
    if run.candidate is not None:
        devices |= set(run.candidate.deploys)
    devices |= run.guests
    run.guests, run.preloads, run.pre_copy = set(), Preloads(), None
    known = (info for node in core.members.nodes.values() for info in node.devices)
    devices |= {info.device for info in known if info.job == run.job.id}
    for device in sorted(devices):
        core.release(device, run.job.id)


def stop_preparing(core: Core, run: Run) -> None:
    """Whoever prepares the job's data need not any more."""
    if run.preparation.node:
        core.tell(run.preparation.node, StopPreparing(run.job.id))
    run.preparation = Preparation()


def end(core: Core, run: Run, trigger: str, reason: str = "", cause: JobCause = "") -> None:
    """End the job (``trigger``: finish, fail or cancel) and free its place."""
    assert trigger in {"finish", "fail", "cancel"}
    if run.incident is not None:
        incidents.close(core, run)
    stop_preparing(core, run)
    release(core, run)
    core.outbox.append(Discard(room.folder(core, run.job)))
    core.move(run.job, trigger, reason, cause)  # type: ignore[arg-type]
    core.run = None


def fail(core: Core, job: JobRecord, error: str, hint: str, cause: JobCause = "") -> None:
    """End a job that cannot go on for a reason that a user must mend. ``cause``: what a program should know
    of it.
    """
    reason = f"{error} ({hint})" if hint else error
    if core.run is not None and core.run.job is job:
        end(core, core.run, "fail", reason, cause)
    else:
        core.move(job, "fail", reason, cause)
