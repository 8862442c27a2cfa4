"""Records committed rounds as devices tell them, once each, compares and acknowledges them; and notes who
holds.

Every device tells every round, so that none is lost with a device; the first word is recorded and the
others must agree with it to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from oobleckd.core import checkpoints, corruption, deploy, evaluations, incidents, slow
from oobleckd.core.context import Core
from oobleckd.core.entries import Evaluated, StepEntry
from oobleckd.core.events import Announce
from oobleckd.core.pace import Paces
from oobleckd.core.run import Run, StageTraffic
from oobleckd.core.samples import Sample
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import node_of, standing_routes
from oobleckd.protocol.agentmessages import Ack
from oobleckd.protocol.changes import Change, EvalLoss, EvaluationDone, Level, LossDisputed, StepCommitted
from oobleckd.protocol.messages import Held, OpTimes, StepDone
from oobleckd.protocol.parts import SPIKES, EvalSum, RouterMeans
from oobleckd.words import SPIKED, loss, short


def on_step_done(core: Core, message: StepDone) -> None:
    """A device committed a round."""
    job = core.state.jobs.get(message.job)
    if job is None or job.final:
        core.tell(message.device, Ack(message.job, message.counters.round))
        return
    known = job.losses.get(message.counters.round)
    if message.epoch <= job.fence or job.layout is None:
        checkpoints.ack(core, job, message.device)
        return
    corruption.settle(core, job, message)
    core.routers.take(message, job.layout.num_layers)
    if message.counters.round >= job.counters.round:
        _in_order(core, job, message)
    elif message.outcome == "evaluated":
        _compare(core, job, message)
    elif known is not None and known != message.loss and not both_nan(known, message.loss):
        _conflict(core, job, message, known)
    if core.run is not None and core.run.job is job:
        _count(core, core.run, message)
    checkpoints.ack(core, job, message.device)


def _count(core: Core, run: Run, message: StepDone) -> None:
    """Count what the round cost this device."""
    incident = run.incident
    run.updates_early += message.early
    run.updates_taken_back += message.taken_back
    messages, num_bytes = run.gradients.get(message.device, (0, 0))
    run.gradients[message.device] = messages + message.gradient_messages, num_bytes + message.gradient_bytes
    if message.gathered_bytes or message.shard_gradient_bytes:
        was = run.in_stage.get(message.device, StageTraffic())
        run.in_stage[message.device] = StageTraffic(
            was.gathered_bytes + message.gathered_bytes,
            was.gradient_bytes + message.shard_gradient_bytes,
            was.waited_s + message.gather_wait_s,
        )
    run.told[message.device] = max(run.told.get(message.device, -1), message.counters.round)
    if incident is not None and message.counters.round >= incident.round:
        incident.layer_gradients += message.layer_gradients
        incident.layer_forwards += message.layer_forwards
    # An evaluation is forward alone, and no layer's forward takes the same share of its step.
    if message.epoch == run.job.epoch and not run.job.unsettled and message.outcome != "evaluated":
        _note_pace(core, run, message)
    incidents.told(core, run)


def _note_pace(core: Core, run: Run, message: StepDone) -> None:
    """What the round cost this device, compared with its peers; rounds of a repair are not comparable."""
    layout, setup, detours = run.job.layout, run.job.setup, run.job.detours
    if layout is None or setup is None or message.layer_forwards:
        return
    num, was = run.job.spec.batch_sizes.micro_batches(message.counters.step), run.paces
    same = was.layout == (layout.epoch if detours is None else run.job.epoch)
    if same and num < was.micro_batches:
        return  # late, and of a step before the batch grew
    if not same or num > was.micro_batches:
        if detours is not None:
            routes = standing_routes(layout, detours, detours.round)
            layout = msgspec.structs.replace(layout, epoch=run.job.epoch, routes=routes)
        layout = msgspec.structs.replace(layout, routes=layout.routes[:num])
        run.paces = Paces.of(layout, setup.profile).after(was, same_layout=same)
    news = run.paces.note(message.device, message.counters.round, message.busy_s, core.now)
    slow.tell(core, run, news)


def _in_order(core: Core, job: JobRecord, message: StepDone) -> None:
    """Record rounds without a gap.

    After a daemon's absence an agent's newest step can overtake those that another one, or it itself, has
    kept: it waits here for them. They come, since nobody drops a step that was not acknowledged.
    """
    early = core.run.early if core.run is not None and core.run.job is job else {}
    early.setdefault(message.counters.round, message)
    while (following := early.pop(job.counters.round, None)) is not None:
        _record(core, job, following)


def both_nan(a: float, b: float) -> bool:
    """Whether two losses are no number, which is an agreement too."""
    return a != a and b != b  # noqa: PLR0124 - the definition of a NaN


def _record(core: Core, job: JobRecord, message: StepDone) -> None:
    if message.outcome == "evaluated":
        _record_evaluated(core, job, message)
    else:
        _record_step(core, job, message)
    if core.run is not None and core.run.job is job:
        if message.epoch == job.epoch:
            core.members.witness(job.surviving_nodes(), core.now)
        if message.checkpoint:
            checkpoints.begun(core.run, job.counters)
        if message.skipped:
            checkpoints.skipped(core, core.run, job.counters)
        incidents.committed(core, core.run)


def _record_step(core: Core, job: JobRecord, message: StepDone) -> None:
    entry = StepEntry(
        job.id,
        message.counters,
        message.outcome,
        message.epoch,
        message.loss,
        message.grad_norm,
        message.lr,
        message.samples,
        message.ledger,
        message.step_s,
        core.now,
        core.state.seq + 1,
        message.cause,
        RouterMeans.over(message.routers.values()),
    )
    core.record(entry)
    core.outbox.append(Announce(_of_step(entry)))


def _record_evaluated(core: Core, job: JobRecord, message: StepDone) -> None:
    """A round of an evaluation; the last one has all of it."""
    is_last = job.spec.eval_rounds.is_last(message.counters)
    totals, seconds = job.evaluations.totals(message.evaluated, message.step_s) if is_last else ((), 0.0)
    entry = Evaluated(
        job.id, message.counters, message.epoch, message.evaluated, message.step_s, core.now, totals, seconds,
        core.state.seq + 1 if is_last else 0,
    )  # fmt: skip
    before = job.evaluations.given_up.get(message.counters.step, totals)
    core.record(entry)
    if (change := change_of(entry)) is not None:
        core.outbox.append(Announce(change))
    if is_last and job.spec.train.exact and not evaluations.same(before, totals):
        _another_result(core, job, message, before, totals)


def change_of(entry: StepEntry | Evaluated) -> Change | None:
    """What announces a committed round, now or in a later incarnation of the daemon; None for one of an
    evaluation that goes on.
    """
    if isinstance(entry, StepEntry):
        return _of_step(entry)
    return _of_evaluation(entry) if entry.totals else None


def _of_evaluation(entry: Evaluated) -> Change:
    step = entry.counters.step
    losses = tuple(
        EvalLoss(each.source, each.loss if math.isfinite(each.loss) else None, each.targets)
        for each in entry.totals
    )
    data = EvaluationDone(entry.job, step, losses, entry.seconds, entry.epoch)
    said = ", ".join(f"{each.source} {loss(each.loss)}" for each in entry.totals)
    text = f"{entry.job}: evaluated after step {step}, loss of {said}"
    return Change(entry.seq, entry.at, data.kind, "info", text, (), data)


def _of_step(entry: StepEntry) -> Change:
    step = entry.counters.step + 1
    known = entry.loss if math.isfinite(entry.loss) else None
    cause = entry.why
    data = StepCommitted(entry.job, step, known, entry.outcome, entry.epoch, cause)
    text = f"{entry.job}: step {step} {entry.outcome}, loss {loss(entry.loss)}"
    if cause in SPIKES:
        text += f", gradient norm {short(entry.grad_norm)}: {SPIKED[cause]}"
    level: Level = "info" if entry.outcome == "applied" else "warn"
    return Change(entry.seq, entry.at, data.kind, level, text, (), data)


def _conflict(core: Core, job: JobRecord, message: StepDone, known: float) -> None:
    text = (
        f"{job.id}: silent corruption: {message.device} says loss {message.loss!r} for round "
        f"{message.counters.round}, another device said {known!r}; the first is kept"
    )
    story = (f"job:{job.id}", f"node:{node_of(message.device)}")
    core.announce(text, LossDisputed(message.device, job.id), story, level="error")


def _compare(core: Core, job: JobRecord, message: StepDone) -> None:
    """What a device says of a round of an evaluation that another one told of."""
    known = job.evaluations.told.get(message.counters.round)
    if known is None or evaluations.same(known, message.evaluated):
        return
    text = (
        f"{job.id}: silent corruption: {message.device} says {_words(message.evaluated)} for evaluation "
        f"round {message.counters.round}, another device said {_words(known)}; the first is kept"
    )
    story = (f"job:{job.id}", f"node:{node_of(message.device)}")
    core.announce(text, LossDisputed(message.device, job.id), story, level="error")


def _another_result(
    core: Core,
    job: JobRecord,
    message: StepDone,
    before: Sequence[EvalSum],
    now: Sequence[EvalSum],
) -> None:
    """An evaluation that was done again after a rollback came to something else."""
    text = (
        f"{job.id}: the evaluation after step {message.counters.step} came to {_words(now)}, and before the "
        f"rollback to {_words(before)}: one of the two had wrong bits; the second is kept"
    )
    said = LossDisputed(message.device, job.id)
    core.announce(text, said, (f"job:{job.id}",), level="error")


def _words(sums: Sequence[EvalSum]) -> str:
    return " and ".join(f"{each.loss!r} of {each.source}" for each in sums)


def on_held(core: Core, message: Held) -> None:
    """A device stopped at a boundary; perhaps while the daemon was away, and others are still to be heard."""
    run = core.run
    if run is None or run.phase not in {"run", "adrift"} or message.epoch != run.job.epoch:
        return
    if message.device not in run.job.survivors():
        return
    if message.counters.round == run.resumed_round and not message.finished:
        deploy.resume_again(core, run, message.device)  # it was away when all others went on from there
    else:
        run.held[message.device] = message


def on_op_times(core: Core, message: OpTimes) -> None:
    """A device told when it did what in a round. Of another layout than the one in force nobody knows any
    more what was to run.
    """
    job = core.state.jobs.get(message.job)
    if job is None or job.layout is None or job.plan is None or job.layout.epoch != message.layout:
        return
    if job.spec.eval_rounds.evaluates(message.counters):
        return  # how steps run is what is looked at, and an evaluation would be drawn as the next one
    if message.device in job.layout.holdings:
        new = Sample(
            job.id, message.counters, message.epoch, job.layout, job.plan, job.detours, job.dead, core.now
        )
        core.samples.add(message, new)
