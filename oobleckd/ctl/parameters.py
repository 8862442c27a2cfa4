"""The answer of ``plan --parameters``: each parameter's group, rule and bytes. Owns the process that knows
names and shapes, and the table.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import msgspec

from oobleckd.ctl.output import FAILED, USAGE, Failure, emit_items, emit_line, emit_table, fail, note
from oobleckd.ctl.programs import run_worker
from oobleckd.protocol.job import Job, table_of
from oobleckd.protocol.paramgroups import ParameterRow
from oobleckd.words import count, plain, size

_NONE = "-"


def show_parameters(job: Job, source: Path, *, as_json: bool) -> None:
    """List the parameters of ``job``, of the file ``source``. Raises Failure."""
    rows = _rows(job, source)
    if as_json:
        emit_items("Parameter", rows)
        return
    columns = ("name", "shape", "group", "rule", "lr scale", "decay", "state")
    emit_table(columns, [_cells(row) for row in rows])
    emit_line()
    total, frozen = sum(row.state_bytes for row in rows), sum(row.frozen for row in rows)
    what = f"{count(len(rows), 'parameter')}, {frozen} frozen"
    emit_line(f"{what}: {size(total)} of weights and optimizer state")
    for number, group in enumerate(job.optimizer.group):
        if not any(row.group == group.match for row in rows):
            note(f"optimizer.group[{number}].match: {group.match!r} has no parameters; nodes would refuse it")


def _rows(job: Job, source: Path) -> list[ParameterRow]:
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        fail(
            "--parameters: a model is built to name its parameters, and there is no torch here",
            "ask on a machine with the worker's packages",
            FAILED,
        )
    from oobleckd.ctl.reference import to_toml  # no other verb needs what comes with it

    model = job.model
    if model.checkpoint:
        model = msgspec.structs.replace(model, checkpoint=str(Path(model.checkpoint).expanduser().absolute()))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "job.toml"
        file.write_text(to_toml(table_of(msgspec.structs.replace(job, model=model))), encoding="utf-8")
        try:
            told = run_worker("oobleckd.worker.tools.parameters", "--job", str(file))
        except Failure as failure:
            raise Failure(f"{source}: {failure}", failure.hint, USAGE) from failure
    return msgspec.json.decode(told, type=list[ParameterRow])


def _cells(row: ParameterRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.shape)) or "1"
    if row.frozen:
        return row.name, shape, row.group or _NONE, "frozen", _NONE, _NONE, size(row.state_bytes)
    scale, decay = plain(row.lr_scale), plain(row.weight_decay)
    return row.name, shape, row.group or _NONE, row.rule, scale, decay, size(row.state_bytes)
