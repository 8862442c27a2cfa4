"""JSON Schema of a job.toml, for editors: docs/job.schema.json, from the same model as docs/job-toml.md.

Owns what msgspec does not know of a job.toml: the names that keys have there.
What needs arithmetic (a micro-batch that divides the batch) only ``submit`` checks.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from oobleckd.protocol.job import Job
from oobleckd.protocol.jobschedule import FIRST_NAMES


def schema() -> dict[str, Any]:
    """The schema."""
    made = msgspec.json.schema(Job)
    defs: dict[str, Any] = made.pop("$defs")
    for first, name in FIRST_NAMES.items():
        for table in (defs["Schedule"], defs["Job"]["properties"]["schedule"]):
            holder = table["properties"] if "properties" in table else table["default"]
            holder[name] = holder.pop(first)
    top = defs.pop("Job")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "job.toml of oobleckd"}
    return head | {key: value for key, value in top.items() if key != "title"} | {"$defs": defs}


def page() -> str:
    """The file, with its line's end."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
