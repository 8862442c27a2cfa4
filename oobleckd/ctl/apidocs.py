"""Writes docs/api.md from the operations of the HTTP API: ``python -m oobleckd.ctl.apidocs [FILE]``.

Owns the page's words around the tables; what is in the tables comes from ``oobleckd.daemon.openapi`` and the
structs that it names.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from oobleckd.ctl.docs import default, explain, structs_in
from oobleckd.daemon.openapi import OPERATIONS, Operation
from oobleckd.protocol.api import Problem
from oobleckd.protocol.changes import PAYLOADS, Change, Payload
from oobleckd.protocol.job import Job

_HEAD = """\
# HTTP API

Generated from `oobleckd/daemon/openapi.py` and `oobleckd/protocol` by `make docs`; do not edit. The daemon serves the same as OpenAPI 3.1 on `/openapi.json`.

What `oobleckctl` and the console use, on the daemon's unix socket, or over TCP with TLS and a token ([who may do what](security.md)):

```
curl --unix-socket /run/oobleck/oobleckd.sock http://d/v1/status
curl --cacert cert.pem -H "Authorization: Bearer $TOKEN" https://HOST:PORT/v1/nodes
```

- Answers are JSON with an `apiVersion`; lists are `{"apiVersion": …, "items": […], "cursor": …}`, in pages of `limit` rows (1000) and 256 KB at most: who sends the answer's `cursor` with the same question gets the next page, and the last page has an empty one. Fields may be added, so readers skip what they do not know. A query or a body with a value that is none of those below is refused.
- Errors are `application/problem+json` (RFC 9457) with a `hint` that says what to do next: 401 and 403 who is not let in, 404 what is not there, 409 what does not go now, 422 what cannot be read, 429 too often
  (`Retry-After` says how long to wait), 503 while the daemon stops or its disk does not take what it must write.
- An act is answered once it is durable. Answered by 503 it may still happen: look before asking again.
- `/v1/events` is a stream of server-sent events: `event` is a change's `kind`, `data` a `Change`, `id` its `seq`. `since`, or the header `Last-Event-ID`, goes on after a number; `follow=0` ends with the newest.
  A gap in `seq` means that the daemon no longer has what lies between: fetch a snapshot. Notices of kind `daemon` have no id.
- What a change says in words (`text`) its `data` says in fields. Which ones depends on `type` in it: `"node-lost"` has those of [NodeLost](#nodelost), and so on. More types may come, and a change may have none.

## Operations

| Operation | Query | Body | Answer | What |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = "\n".join(map(_row, OPERATIONS))
    return _HEAD + rows + "\n\n" + "\n".join(_structs())


def _row(op: Operation) -> str:
    query = ", ".join(f"`{name}`{_values(schema)}" for name, schema in op.asks.items())
    answer = f"`{op.answer}`" if isinstance(op.answer, str) else _link(op.answer)
    cells = (
        f"`{op.method.upper()} {op.path}`",
        query,
        _link(op.body) if op.body is not None else "",
        f"list of {answer}" if op.many else answer,
        f"Deprecated. {op.summary}" if op.deprecated else op.summary,
    )
    return f"| {' | '.join(cells)} |"


def _values(schema: dict[str, object]) -> str:
    allowed = schema.get("enum")
    return f" ({' or '.join(map(str, allowed))})" if isinstance(allowed, list) else ""


def _link(struct: type[msgspec.Struct]) -> str:
    return f"[{struct.__name__}](#{struct.__name__.lower()})"


def _structs() -> Iterator[str]:
    for struct in sorted(_reached(), key=lambda each: each.__name__):
        yield f"## {struct.__name__}\n{_meaning(struct)}\n\n{_fields(struct)}\n"


def _reached() -> set[type[msgspec.Struct]]:
    """What operations name, and what is in those."""
    waiting = [each for op in OPERATIONS for each in (op.answer, op.body) if isinstance(each, type)]
    waiting += PAYLOADS
    found: set[type[msgspec.Struct]] = {Problem, Change}
    while waiting:
        struct = waiting.pop()
        if struct not in found and struct is not Job:  # which has a page of its own
            found.add(struct)
            waiting += [each for hint in _hints(struct).values() for each in structs_in(hint)]
    return found


def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)


def _meaning(struct: type[msgspec.Struct]) -> str:
    paragraphs = (struct.__doc__ or "").replace("``", "`").split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def _fields(struct: type[msgspec.Struct]) -> str:
    hints = _hints(struct)
    lines = ["| Field | Type | Default |", "|---|---|---|"]
    if issubclass(struct, Payload):
        lines.append(f'| `type` | `"{struct.__struct_config__.tag}"` |  |')
    for field in msgspec.structs.fields(struct):
        name, bounds, _ = explain(hints[field.name])
        kind = " ".join(filter(None, [name, f"({bounds})" if bounds else ""]))
        lines.append(f"| `{field.encode_name}` | {kind} | {default(field)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the page to the file named, or to docs/api.md of the current folder."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/api.md")
    target.write_text(page(), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
