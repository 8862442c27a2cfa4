"""Settings: where a program's values come from, and which one wins.

Owns what daemon, worker and oobleckctl have in common, the precedence: flag > ``OOBLECK_*`` > ./oobleck.toml
> ~/.config/oobleck/config.toml > /etc/oobleck/config.toml > default. A file has one table a program; what the
keys of a table mean is the program's matter.

Errors: ConfigError (a ValueError) with ``hint``.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from oobleckd.host import anyfile
from oobleckd.protocol.units import parse_seconds
from oobleckd.protocol.unreadable import misfit

PREFIX = "OOBLECK_"
RENAMED = {"OOBLECK_BEAT_S": "OOBLECK_HEARTBEAT_S", "OOBLECK_ROAD": "OOBLECK_BACKEND"}
"""Variables by their old names."""
_RENAMED_KEYS = {"beat_s": "heartbeat_s"}
"""Keys of files by their old names."""
TABLES = frozenset({"console", "ctl", "daemon", "worker"})

FILES_ALONE = {"files": "alone"}
"""Of a field's ``Meta``: neither a flag nor a variable has it."""

Model = TypeVar("Model", bound=msgspec.Struct)


class ConfigError(ValueError):
    """A configuration that cannot be used: ``where`` it was read, what is wrong, and a hint."""

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem
        self.hint = hint


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[Model]):
    """A configuration, and where each of its values comes from (a flag, a variable, a file, "default")."""

    config: Model
    origins: dict[str, str]


def config_files(home: Path, cwd: Path) -> tuple[Path, ...]:
    """Where files are looked for, the winning one first."""
    return (
        cwd / "oobleck.toml",
        home / ".config/oobleck/config.toml",
        Path("/etc/oobleck/config.toml"),
    )


@functools.cache
def hints_of(model: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of its fields, with what is said of them; Python works them out anew each time."""
    return get_type_hints(model, include_extras=True)


def is_in_files_alone(model: type[msgspec.Struct], key: str) -> bool:
    """Whether neither a flag nor a variable may have it."""
    extras = getattr(hints_of(model)[key], "__metadata__", ())
    return any(getattr(extra, "extra", None) == FILES_ALONE for extra in extras)


def load(
    model: type[Model], table: str, flags: Mapping[str, Any], env: Mapping[str, str], files: Iterable[Path]
) -> LoadedSettings[Model]:
    """Merge all sources; ``flags`` that are None were not given, ``files`` come winning first.

    Raises ConfigError for unknown keys and wrong values.
    """
    fields = model.__struct_fields__
    check_renamed(env)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(fields, "default")
    for origin_of, found in (
        *((_file_origin(path), read_table(path, table, fields)) for path in reversed(tuple(files))),
        (_env_origin, _from_env([key for key in fields if not is_in_files_alone(model, key)], env)),
        (_flag_origin, {key: value for key, value in flags.items() if value is not None}),
    ):
        for key, value in found.items():
            origins[key] = origin_of(key)
            values[key] = _convert(model, origins[key], key, value, text=origin_of is _env_origin)
    return LoadedSettings(model(**values), origins)


def read_table(path: Path, table: str, known: Iterable[str]) -> dict[str, Any]:
    """The values of ``[table]`` in a file; none when the file is not there.

    Raises ConfigError for a file that cannot be read, an unknown table, or a key that is not ``known``.
    """
    known = sorted(known)
    raw = _read(path)
    for key, value in raw.items():
        if key not in TABLES:
            hint = f"write it under [{table}]" if key in known else suggest(key, TABLES)
            raise ConfigError(str(path), f"unknown key {key!r}", hint)
        if not isinstance(value, dict):
            raise ConfigError(str(path), f"{key} is no table", f"write [{key}]")
    values: dict[str, Any] = raw.get(table, {})
    for key in values:
        if key not in known:
            raise ConfigError(str(path), f"unknown key {table}.{key}", suggest(key, known))
    return values


def check_renamed(env: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that has another name today: unread, it would be a setting that is
    lost.
    """
    for old, new in RENAMED.items():
        if old in env:
            raise ConfigError(old, "this variable has a new name", f"set {new} instead, and unset {old}")


def suggest(key: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known."""
    if key in _RENAMED_KEYS:
        return f"it has a new name: write {_RENAMED_KEYS[key]!r}"
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(names)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return anyfile.toml(path, "mend this line, or remove it")
    except FileNotFoundError:
        return {}
    except anyfile.FileError as error:
        raise ConfigError(str(path), str(error), error.hint) from error


def _file_origin(path: Path) -> Callable[[str], str]:
    return lambda _key: str(path)


def _env_origin(key: str) -> str:
    return PREFIX + key.upper()


def _flag_origin(key: str) -> str:
    return "--" + key.replace("_", "-")


def _from_env(fields: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    names = {_env_origin(key): key for key in fields}
    for name in sorted(env):
        # Other commands and systemd have OOBLECK_ names of their own: only a likely slip is an error.
        if name.startswith(PREFIX) and name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
            if close:
                raise ConfigError(name, "unknown variable", f"did you mean {close[0]}?")
    return {key: env[name] for name, key in names.items() if name in env}


def _convert(model: type[Model], where: str, key: str, value: Any, *, text: bool) -> Any:
    kind = hints_of(model)[key]
    if key.endswith("_s") and isinstance(value, str):
        with suppress(ValueError):  # what is no time is refused below
            value = parse_seconds(value)
    if text and is_list(kind):
        value = listed(value)
    try:
        return msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError as error:
        raise ConfigError(
            where,
            f"{key} {misfit(error, kind, value).problem}",
            "mend this value, or leave it out",
        ) from error


def is_list(kind: Any) -> bool:
    """Whether a field has several values: text has them with commas between."""
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return get_origin(plain) is tuple


def listed(text: str) -> list[str]:
    """The values of such a text."""
    return [word for word in map(str.strip, text.split(",")) if word]
