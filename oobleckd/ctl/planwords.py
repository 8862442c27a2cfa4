"""The answer of ``oobleckctl plan`` for people: tables, sentences, and the drawing of the schedule.

Owns the words. Numbers are those of ``oobleckd.protocol.forecast``.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from oobleckd.ctl.output import emit_fields, emit_line, emit_page, emit_table
from oobleckd.draw.lines import plain
from oobleckd.draw.schedule import LEGEND, Row, ScheduleMark, draw
from oobleckd.planner.costs.recompute import MODES
from oobleckd.planner.plan import RecomputeWanted
from oobleckd.planner.schedule import parse_op
from oobleckd.protocol.forecast import (
    ExchangeForecast,
    Forecast,
    Group,
    GuaranteeForecast,
    LossForecast,
    OpForecast,
    PlanForecast,
    RecomputeForecast,
    ScheduleForecast,
    StagesBecause,
    StagesForecast,
    TemplateForecast,
)
from oobleckd.protocol.modelnotes import AttentionNote
from oobleckd.words import bandwidth, count, layers, parameters, rate, seconds, size

_TEMPLATES_SHOWN = 8
_STAGES_SHOWN = 8
_WIDTH = (60, 140)
_MAX_ROWS = 24
_NONE = "-"
_BECAUSE: dict[StagesBecause, str] = {
    "asked": "as the job asks",
    "only": "the only number that has a plan on these nodes",
    "fastest": "the fastest of those that have a plan on these nodes",
    "can-lose": "the fastest of those that can lose as many nodes as the job asks for, or most",
}


def show(found: Forecast) -> None:
    """Print everything."""
    emit_fields(_headline(found))
    if found.change is not None:
        _title(f"without {_some(found.without)}")
        emit_fields(_change(found.change))
    _title("templates")
    emit_table(
        ("NODES", "STAGES", "FILL", "PERIOD", "IN PLAN", "LAYERS", "MEMORY"), _templates(found.templates)
    )
    if found.stage_options:
        _title("devices a stage")
        emit_table(
            ("DEVICES A STAGE", "FEWEST NODES", "STEP", "MEMORY", "CAN LOSE"),
            [_stage_option(each, found.devices_per_stage) for each in found.stage_options],
        )
    if found.recomputations:
        _recomputation(found)
    _title("plan")
    emit_fields(_plan(found))
    if found.pipelines:
        emit_line()
        emit_table(
            ("PIPELINE", "NODES", "MICRO-BATCHES"),
            [(str(p.index), ", ".join(p.nodes), str(len(p.micro_batches))) for p in found.pipelines],
        )
    if found.attention:
        _title("attention")
        emit_table(("BLOCKS", "KERNEL", "BECAUSE"), [_attention(each) for each in found.attention])
    _title("guarantee")
    emit_fields(_guarantee(found.guarantee))
    _title("after a loss")
    counted = found.plan.exchange.counted
    emit_table(
        (
            "LOST", "PIPELINES OF", "COPIED", "IN", "CAN LOSE", "STEP", "SAMPLES/S",
            *(("EXCHANGE",) if counted else ()), "BECAUSE",
        ),
        [_loss(loss, counted=counted) for loss in found.losses],
    )  # fmt: skip
    _title("schedule")
    _draw(found.schedule, found.devices_per_stage)


def _title(text: str) -> None:
    emit_page(f"\n{text.upper()}")


def _headline(found: Forecast) -> dict[str, str]:
    how = "measured" if found.measured else "estimated from its data sheet"
    limit = f"{size(found.memory_bytes)} a device" if found.memory_bytes else "no limit known"
    return {
        "job": f"{found.job}: {count(found.num_layers, 'layer')}, "
        f"{_micro_batches(found.micro_batches)} a step",
        **({"model": model} if (model := parameters(found.params, found.active_params)) else {}),
        "nodes": f"{found.num_nodes:,} of {count(found.devices_per_node, 'device')}",
        "device": f"{found.device}, times {how}",
        "memory": limit,
        **({"stages": _stages(found)} if found.stages_because else {}),
    }


def _stages(found: Forecast) -> str:
    """How many devices a stage has, and why."""
    why = _BECAUSE[found.stages_because]
    return f"of {count(found.devices_per_stage, 'device')} each, {why}"


def _stage_option(found: StagesForecast, chosen: int) -> Sequence[str]:
    number = str(found.devices_per_stage) + (" (chosen)" if found.devices_per_stage == chosen else "")
    if not found.n0:
        return number, "fits none", _NONE, _NONE, _NONE
    if not found.step_s:
        return number, str(found.n0), _NONE, _NONE, _NONE
    lost = f"{found.can_lose:,}"
    return number, str(found.n0), seconds(found.step_s), size(found.memory_bytes), lost


def _attention(found: AttentionNote) -> tuple[str, str, str]:
    return f"{found.blocks:,}", found.backend, found.why or _NONE


# --------------------------------------------------------------------------- templates and plan


def _templates(templates: Sequence[TemplateForecast]) -> list[Sequence[str]]:
    """All of them, or of many those in use, the smallest and the largest."""
    shown = list(templates)
    if len(shown) > _TEMPLATES_SHOWN:
        shown = [t for t in shown if t.instances or t in (templates[0], templates[-1])]
    return [_template(template) for template in shown]


def _template(template: TemplateForecast) -> Sequence[str]:
    stages = template.stages
    return (
        str(template.num_nodes), _num_stages(template), seconds(template.fill_s), seconds(template.period_s),
        str(template.instances) if template.instances else _NONE,
        _by_stage([layers(stage.start, stage.stop) for stage in stages]),
        _by_stage([size(stage.memory_bytes) for stage in stages]),
    )  # fmt: skip


def _recomputation(found: Forecast) -> None:
    """What each setting asks for, and each stage of the plan."""
    _title("recomputation")
    emit_table(
        ("RECOMPUTE", "FEWEST NODES", "STEP", "MEMORY"),
        [_setting(each, found.recompute) for each in found.recomputations],
    )
    stages = [
        (template, number, stage)
        for template in found.templates
        if template.instances
        for number, stage in enumerate(template.stages)
    ]
    modes = [each for each in MODES if all(each in stage.needed_bytes for _, _, stage in stages)]
    emit_line()
    emit_table(
        ("NODES", "STAGE", "LAYERS", "COMPUTES AGAIN", *(f"MEMORY WITH {mode.upper()}" for mode in modes)),
        [
            (
                str(template.num_nodes) if number == 0 else "",
                str(number),
                layers(stage.start, stage.stop),
                stage.recompute,
                *(size(stage.needed_bytes[mode]) for mode in modes),
            )
            for template, number, stage in stages
        ],
    )


def _setting(found: RecomputeForecast, job: RecomputeWanted) -> Sequence[str]:
    name = found.recompute + (" (the job's)" if found.recompute == job else "")
    if not found.n0:
        return name, "fits none", _NONE, _NONE
    if not found.step_s:
        return name, str(found.n0), _NONE, _NONE
    return name, str(found.n0), seconds(found.step_s), size(found.memory_bytes)


def _num_stages(template: TemplateForecast) -> str:
    return str(len(template.stages)) + (" (2 a device)" if template.chunks > 1 else "")


def _by_stage(parts: Sequence[str]) -> str:
    """A word for each stage, of many the first ones and the last."""
    shown = parts if len(parts) <= _STAGES_SHOWN else (*parts[: _STAGES_SHOWN - 1], "…", parts[-1])
    return " | ".join(shown)


def _plan(found: Forecast) -> dict[str, str]:
    plan = found.plan
    of = f" of {size(found.memory_bytes)}" if found.memory_bytes else ""
    standby = (
        {"standing by": f"{found.standby:,}: resources.max_nodes wants no more"} if found.standby else {}
    )
    return {
        "pipelines": "; ".join(_group(group) for group in plan.groups),
        "step": f"{seconds(plan.step_s)}: {_speed(plan)}, {rate(plan.tokens_per_s)} tokens/s",
        **({"MFU": f"{plan.mfu:.1%} of {found.peak_of}"} if plan.mfu else {}),
        **({"evaluation": _evaluation(plan)} if plan.evaluation_s else {}),
        "exchange": _exchange(plan.exchange),
        **({"gathers": _gathers(plan)} if plan.gathered_bytes else {}),
        "waiting": f"{plan.bubble:.1%} of the devices' time (bubble)",
        "memory": f"up to {size(plan.memory_bytes)}{of} a device",
        "idle": f"{plan.idle:,}: {plan.idle_reason}" if plan.idle else "none",
        **standby,
    }


def _gathers(plan: PlanForecast) -> str:
    """What moves inside stages of several devices."""
    return (
        f"{size(plan.gathered_bytes)} of weights to a device each step, and "
        f"{size(plan.shard_gradient_bytes)} of gradients from it, among the devices of its stage"
    )


def _exchange(found: ExchangeForecast) -> str:
    """Bytes of a device, and what shows of them, or would."""
    if not found.sent_bytes:
        return "none: no layer has a second holder"
    compared = f" ({size(found.checked_bytes)} where replicas are compared)"
    sent = f"{size(found.sent_bytes)} of gradients from a device each step"
    sent += compared if found.checked_bytes != found.sent_bytes else ""
    if found.counted:
        return f"{sent}; {seconds(found.shown_s)} of the step do not hide under the backward"
    would = f"{seconds(found.shown_s)} would show at {bandwidth(found.link_bytes_per_s)}"
    return f"{sent}; not in the step, as resources.link is not set ({would})"


def _evaluation(plan: PlanForecast) -> str:
    return f"{seconds(plan.evaluation_s)} each, {plan.evaluation_share:.1%} of the job's time"


def _group(group: Group) -> str:
    return f"{group.count:,} of {count(group.num_nodes, 'node')} with {_micro_batches(group.micro_batches)}"


def _micro_batches(number: int) -> str:
    return count(number, "micro-batch")


def _speed(plan: PlanForecast) -> str:
    return f"{rate(plan.samples_per_s)} samples/s"


def _sizes(groups: Sequence[Group]) -> str:
    """``"2 x 2, 1 x 3"``: pipelines by nodes, whatever their share."""
    counts: dict[int, int] = {}
    for group in groups:
        counts[group.num_nodes] = counts.get(group.num_nodes, 0) + group.count
    return ", ".join(f"{number:,} x {nodes}" for nodes, number in sorted(counts.items()))


# --------------------------------------------------------------------------- guarantee and losses


def _guarantee(promised: GuaranteeForecast) -> dict[str, str]:
    asked = f"asked for {promised.f}" + (
        "" if promised.can_lose >= promised.f else ", which needs more nodes"
    )
    if promised.rolls_back:
        return {
            "can lose": "none without going back to the last checkpoint",
            "waits": f"below {count(promised.n0, 'node')} (n0)",
            "sizes": f"all pipelines of one depth, of {promised.n0} to {count(promised.n_max, 'node')}",
        }
    gaps = ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in promised.idle)
    return {
        "can lose": f"any {count(promised.can_lose, 'node')} at once ({asked})",
        "copies": f"{promised.f + 1} of every layer down to {count(promised.full_down_to, 'node')}",
        "waits": f"below {count(promised.n0, 'node')} (n0)",
        "sizes": f"pipelines of {promised.n0} to {count(promised.n_max, 'node')}",
        "all used": f"at every number of nodes but {gaps}" if gaps else "at every number of nodes down to n0",
    }


def _loss(loss: LossForecast, *, counted: bool) -> Sequence[str]:
    """``counted``: whether the exchange is, and so has a column."""
    lost = _some(loss.nodes) + (f" (1 of {loss.alike:,} alike)" if loss.alike > 1 else "")
    if loss.plan is None:
        return lost, *(_NONE,) * (7 if counted else 6), loss.reason
    exchange = loss.plan.exchange
    return (
        lost, _sizes(loss.plan.groups), size(loss.copied_bytes),
        seconds(loss.copy_s) if loss.copied_bytes else _NONE, str(loss.plan.can_lose),
        seconds(loss.plan.step_s), rate(loss.plan.samples_per_s),
        *((f"{size(exchange.sent_bytes)}, {seconds(exchange.shown_s)}",) if counted else ()), _because(loss),
    )  # fmt: skip


def _because(loss: LossForecast) -> str:
    """What becomes of the pipelines: the part of the reason that no column says, and what is lost
    for good.
    """
    what = loss.summary or loss.reason
    if not loss.lost_layers:
        return what
    return f"{count(len(loss.lost_layers), 'layer')} without a copy: back to the last checkpoint; {what}"


def _change(change: LossForecast) -> dict[str, str]:
    copied = f"{size(change.copied_bytes)} in {seconds(change.copy_s)} on the busiest link"
    return {
        "then": _because(change),
        "copies": copied if change.copied_bytes else "nothing",
        "lost": _lost(change),
    }


def _lost(change: LossForecast) -> str:
    if change.rolls_back:
        return "the steps since the last checkpoint"
    return (
        f"{count(len(change.lost_layers), 'layer')}: back to the last checkpoint"
        if change.lost_layers
        else "nothing"
    )


def _some(names: Sequence[str]) -> str:
    shown = names if len(names) <= 6 else (*names[:5], f"{len(names) - 5} more")
    return ", ".join(shown)


# --------------------------------------------------------------------------- schedule


def _draw(schedule: ScheduleForecast, devices_per_stage: int) -> None:
    shown = _micro_batches(schedule.of_micro_batches)
    if devices_per_stage > 1:
        turns = count(schedule.of_micro_batches, "turn")
        shown = f"{turns} of {_micro_batches(devices_per_stage)} at once"
    if schedule.of_micro_batches > schedule.micro_batches:
        shown = f"the first {schedule.micro_batches} of {shown}"
    what = "decoupled schedule" if schedule.decoupled else "1F1B"
    nodes = count(schedule.num_nodes, "node")
    emit_line(f"{what} of a pipeline of {nodes}, {shown}, {seconds(schedule.makespan_s)}")
    name = "stages {0} and {1}" if schedule.chunks > 1 else "stage {0}"
    last = schedule.chunks * len(schedule.stages) - 1
    rows = [
        Row(name.format(number, last - number), [_mark(op) for op in ops])
        for number, ops in enumerate(schedule.stages)
    ]
    width = min(max(shutil.get_terminal_size((100, 24)).columns, _WIDTH[0]), _WIDTH[1])
    for line in (*draw(rows, width, _MAX_ROWS), LEGEND):
        emit_line(plain(line))


def _mark(op: OpForecast) -> ScheduleMark:
    parsed = parse_op(op.op)
    return ScheduleMark(parsed.micro_batch, parsed.kind != "F", op.start_s, op.stop_s)
