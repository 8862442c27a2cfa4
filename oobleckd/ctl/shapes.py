"""The shape of a job's model, with what the folder that it starts from says. Owns reading config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oobleckd.core import shapes
from oobleckd.host import anyfile
from oobleckd.planner.costs.analytic import Shape
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobtable import JobError


def shape_of(job: Job) -> Shape:
    """The shape of the model of ``job``. Raises JobError naming the key that is wrong, or not known."""
    return shapes.shape_of(job, _stored(job))


def _stored(job: Job) -> dict[str, Any]:
    """What config.json in the checkpoint's folder says; nothing without a checkpoint."""
    if not job.model.checkpoint:
        return {}
    path = Path(job.model.checkpoint).expanduser() / "config.json"
    try:
        stored = json.loads(anyfile.text(path))
    except FileNotFoundError as error:
        raise JobError(
            "model.checkpoint", f"{path}: {error.strerror}", "name a folder with config.json"
        ) from error
    except anyfile.FileError as error:
        raise JobError("model.checkpoint", f"{path}: {error}", "name a folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise JobError("model.checkpoint", f"{path} is not JSON", "download the folder again") from error
    if not isinstance(stored, dict):
        raise JobError("model.checkpoint", f"{path} is no configuration", "download the folder again")
    return stored
