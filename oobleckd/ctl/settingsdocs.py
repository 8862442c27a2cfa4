"""Writes docs/settings.md from the programs' settings: ``python -m oobleckd.ctl.settingsdocs [FILE]``.

Owns the page's words around the tables. [ctl] and [daemon] come from ``CtlConfig`` and ``Config``, [worker]
from ``python -m oobleckd.worker.tools.docs``, for nothing here may import a worker.
"""

from __future__ import annotations

import sys
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from oobleckd.ctl.docs import default, explain
from oobleckd.ctl.main import main as ctl
from oobleckd.ctl.options import CtlConfig
from oobleckd.ctl.programs import run_worker
from oobleckd.daemon.app import main as daemon
from oobleckd.daemon.config import Config
from oobleckd.host.settings import PREFIX
from oobleckd.protocol.sinks import EVENTS, EventRule

RELOADED = ("log_level",)
"""What a daemon takes over without a restart (``Service.reload``)."""

_HEAD = """\
# Settings

Generated from `oobleckd/ctl/options.py`, `oobleckd/daemon/config.py` and `worker/agent/main.py` by `make docs`; do not edit.

What programs do is set here; what a job does is in [job.toml](job-toml.md).

```toml
[ctl]
output = "json"

[daemon]
endpoint = "tcp://10.0.0.1:7077"

[worker]
daemon = "tcp://10.0.0.1:7077"
bind = "10.0.0.2"
```

## Which value wins
For each key on its own, the first of these that has a value:

1. the flag on the command line
2. the variable `OOBLECK_*`
3. `oobleck.toml` in the folder in which the program was started
4. `~/.config/oobleck/config.toml`
5. `/etc/oobleck/config.toml`
6. the default

`oobleckctl config show --origin` shows the values of `[ctl]` and `[daemon]`, and where each comes from. Booleans are `true` or `false`, in
variables too. A value that cannot be is an error; so is a table or key that nobody knows, and the error names the file. Each program
looks at the keys of its own table. `oobleckctl` and `oobleckd` also refuse a variable whose name is almost one of theirs.
"""

_READERS = """\
## Who reads it
| Table | Read by |
|---|---|
| `[ctl]` | `oobleckctl`, with every verb; without `socket` it [looks for a daemon](oobleckctl.md) |
| `[daemon]` | `oobleckd`; `oobleckctl config show` and `oobleckctl doctor`, to say what a daemon would have that is started here |
| `[worker]` | `oobleck-worker` |
| `[console]` | nobody: the table may be there, but `oobleck-console` has [options](console.md) alone, and `OOBLECK_SOCKET` |

`oobleckctl up` starts daemon and workers with flags for folders, keys, endpoint, node, devices, kind, spare and `allow_injection`, which
therefore win; everything else they read as if you had started them.
"""

_RULES = """\
What follows when something happens, a table for each rule, in files alone ([how](sinks.md#when-something-happens)).
"""

_RELOAD = """\
## Reload and restart
**oobleckctl** reads its settings anew at every call.

**oobleckd** reads files again at a reload: `systemctl reload oobleckd`, or SIGHUP. Flags and variables stay those of its start. It takes over

- {taken};
- the keys that may join (`authorized` in the key folder), where `curve` is on;
- the tokens of the API on TCP; none, where `api` is no longer set.

Keys and tokens are read from the folder that the settings name at the reload. Every other setting takes effect at the next start, which
training does not notice, and the log names those that have changed. The certificate of the API and the daemon's own key pair are read at
a start alone, too. Where settings, keys or tokens cannot be used, the log says what to mend, and settings stay as they were.

**oobleck-worker** reads its settings at its start alone. SIGHUP has it read the files of its keys again, from the same places
([how keys change](security.md)).
"""


class SettingRow(NamedTuple):
    """One setting, as it is on the page."""

    key: str
    type: str
    default: str
    flags: str
    meaning: str


def page(worker: Iterable[tuple[str, str, str, str, str]]) -> str:
    """The whole page; ``worker``: the rows of [worker]."""
    tables = {
        "ctl": _rows(CtlConfig, ctl),
        "daemon": _rows(Config, daemon),
        "worker": [SettingRow(*row) for row in worker],
    }
    parts = [
        _HEAD,
        _shared(tables.values()),
        _READERS,
        *(_table(name, rows) for name, rows in tables.items()),
        _rules(),
    ]
    return "\n".join([*parts, _RELOAD.format(taken=" and ".join(f"`{key}`" for key in RELOADED))])


def rows_of_program(name: str) -> list[SettingRow]:
    """The settings of ``ctl``, ``daemon`` or ``worker``."""
    match name:
        case "ctl":
            return _rows(CtlConfig, ctl)
        case "daemon":
            return _rows(Config, daemon)
        case _:
            return msgspec.json.decode(run_worker("oobleckd.worker.tools.docs"), type=list[SettingRow])


def _rows(model: type[msgspec.Struct], command: click.Command) -> list[SettingRow]:
    return list(_rows_of(model, {option.name: option for option in command.params}))


def _rows_of(model: type[msgspec.Struct], options: dict[str | None, click.Parameter]) -> Iterator[SettingRow]:
    hints = typing.get_type_hints(model, include_extras=True)
    for field in msgspec.structs.fields(model):
        kind, bounds, meaning = explain(hints[field.name])
        option = options.get(field.name)  # None for what is in files alone
        flags = " ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts)) if option else ""
        yield SettingRow(
            field.name, kind, default(field), flags, f"{meaning} ({bounds})" if bounds else meaning
        )


def _table(name: str, rows: Iterable[SettingRow]) -> str:
    lines = [
        f"## `[{name}]`",
        "| Key | Type | Default | Flag | Variable | Meaning |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            f"`{row.key}`",
            row.type,
            row.default,
            row.flags,
            f"`{variable(row.key)}`" if row.flags else "",
            row.meaning,
        )
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join([*lines, ""])


def _rules() -> str:
    """The keys of a rule, which has a table of its own."""
    hints = typing.get_type_hints(EventRule, include_extras=True)
    lines = ["## `[[daemon.on_event]]`", _RULES, "| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(EventRule):
        kind, bounds, meaning = explain(hints[field.name])
        said = f"{meaning} ({bounds})" if bounds else meaning
        lines.append(f"| `{field.name}` | {kind} | {default(field)} | {_cell(said)} |")
    return "\n".join([*lines, "", f"Events: {', '.join(f'`{event}`' for event in EVENTS)}.", ""])


def _shared(tables: Iterable[list[SettingRow]]) -> str:
    """Variables that are of more than one program."""
    times = Counter(row.key for rows in tables for row in rows)
    names = ", ".join(f"`{variable(key)}`" for key, count in times.items() if count > 1)
    return f"A variable has no table in its name: {names} count for every program below that has the key.\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def variable(key: str) -> str:
    """The variable of a setting."""
    return PREFIX + key.upper()


def main() -> None:
    """Write the page to the file named, or to docs/settings.md of the current folder."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/settings.md")
    target.write_text(page(rows_of_program("worker")), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
