"""The daemon's configuration: its fields, where values come from, and which one wins.

Owns the model and the precedence: flag > ``OOBLECK_*`` > ./oobleck.toml > ~/.config/oobleck/config.toml >
/etc/oobleck/config.toml > default. Files hold the fields in a table ``[daemon]``; tables of the other programs
are left alone. Owns neither the command line nor the folders it names.

Errors: ConfigError (a ValueError) with ``hint``.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

PREFIX = "OOBLECK_"
# Tables of oobleck.toml that belong to the other commands.
_OTHER_TABLES = frozenset({"ctl", "worker", "console"})


class ConfigError(ValueError):
    """A configuration that cannot be used: ``where`` it was read, what is wrong, and a hint."""

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem
        self.hint = hint


Seconds = Annotated[float, Meta(gt=0)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one daemon. Empty paths have defaults, which the ``*_path`` properties know."""

    state_dir: Annotated[str, Meta(description="Folder of journal, secrets and default checkpoints.")] = ""
    socket: Annotated[str, Meta(description="Unix socket of the HTTP API.")] = ""
    endpoint: Annotated[str, Meta(description="Where agents connect; port 0 takes a free one.")] = (
        "tcp://127.0.0.1:7077"
    )
    curve: Annotated[bool, Meta(description="Encrypt and authenticate the links of agents.")] = True
    keys_dir: Annotated[str, Meta(description="Key folder, as made by oobleckctl keygen.")] = ""
    group: Annotated[str, Meta(description="Unix group whose members may act.")] = "oobleck"
    allow_injection: Annotated[bool, Meta(description="Allow kill-node.")] = False
    beat_s: Annotated[Seconds, Meta(description="Seconds between signs of life of an agent.")] = 0.25
    lease_s: Annotated[
        Seconds, Meta(description="Longest silence of a node; what its beats teach is shorter.")
    ] = 10.0
    grace_s: Annotated[Seconds, Meta(description="Seconds after a restart in which no node is lost.")] = 5.0
    history: Annotated[int, Meta(ge=100, description="Changes kept for the event stream.")] = 10_000
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Log level.")] = (
        "info"
    )

    @property
    def state_path(self) -> Path:
        """The state folder: /var/lib/oobleck for root, else below XDG_STATE_HOME or ~/.local/state."""
        if self.state_dir:
            return Path(self.state_dir).expanduser().absolute()
        if os.geteuid() == 0:
            return Path("/var/lib/oobleck")
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "oobleck"

    @property
    def socket_path(self) -> Path:
        """The socket: under /run for root's default state, else under the state folder."""
        if self.socket:
            return Path(self.socket).expanduser().absolute()
        if not self.state_dir and os.geteuid() == 0:
            return Path("/run/oobleck/oobleckd.sock")
        return self.state_path / "run" / "oobleckd.sock"

    @property
    def keys_path(self) -> Path:
        """The key folder."""
        return Path(self.keys_dir).expanduser().absolute() if self.keys_dir else self.state_path / "keys"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each of its values comes from (a flag, a variable, a file, "default")."""

    config: Config
    origins: dict[str, str]


def config_files(home: Path, cwd: Path) -> tuple[Path, ...]:
    """Where files are looked for, the winning one first."""
    return (
        cwd / "oobleck.toml",
        home / ".config/oobleck/config.toml",
        Path("/etc/oobleck/config.toml"),
    )


def load_config(flags: Mapping[str, Any], env: Mapping[str, str], files: Iterable[Path]) -> Loaded:
    """Merge all sources; ``flags`` that are None were not given, ``files`` come winning first.

    Raises ConfigError for unknown keys, wrong values, and values that do not go together.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Config.__struct_fields__, "default")
    for origins_of, table in (
        *((_file_origin(path), _read(path)) for path in reversed(tuple(files))),
        (_env_origin, _from_env(env)),
        (_flag_origin, {key: value for key, value in flags.items() if value is not None}),
    ):
        for key, value in table.items():
            origins[key] = origins_of(key)
            values[key] = _convert(origins[key], key, value, text=origins_of is _env_origin)
    config = Config(**values)
    _check(config, origins)
    return Loaded(config, origins)


def is_loopback(endpoint: str) -> bool:
    """Whether ``tcp://host:port`` (or ipc) can be reached from this machine alone."""
    scheme, _, address = endpoint.partition("://")
    if scheme in {"ipc", "inproc"}:
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _file_origin(path: Path) -> Any:
    return lambda _key: str(path)


def _env_origin(key: str) -> str:
    return PREFIX + key.upper()


def _flag_origin(key: str) -> str:
    return "--" + key.replace("_", "-")


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"not TOML: {error}") from error
    for key, value in raw.items():
        if key != "daemon" and key not in _OTHER_TABLES:
            inside = " under [daemon]" if key in Config.__struct_fields__ else ""
            hint = f"write it{inside}" if inside else _suggest(key, {"daemon", *_OTHER_TABLES})
            raise ConfigError(str(path), f"unknown key {key!r}", hint)
        if not isinstance(value, dict):
            raise ConfigError(str(path), f"{key} is no table", f"write [{key}]")
    table: dict[str, Any] = raw.get("daemon", {})
    for key in table:
        if key not in Config.__struct_fields__:
            raise ConfigError(str(path), f"unknown key daemon.{key}", _suggest(key, Config.__struct_fields__))
    return table


def _from_env(env: Mapping[str, str]) -> dict[str, str]:
    names = {_env_origin(key): key for key in Config.__struct_fields__}
    for name in sorted(env):
        # Other commands and systemd have OOBLECK_ names of their own: only a likely slip is an error.
        if name.startswith(PREFIX) and name not in names:
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
            if close:
                raise ConfigError(name, "unknown variable", f"did you mean {close[0]}?")
    return {key: env[name] for name, key in names.items() if name in env}


def _convert(where: str, key: str, value: Any, *, text: bool) -> Any:
    kind = get_type_hints(Config, include_extras=True)[key]
    try:
        return msgspec.convert(value, kind, strict=not text)
    except msgspec.ValidationError as error:
        raise ConfigError(where, f"{key} = {value!r}: {str(error)[:1].lower()}{str(error)[1:]}") from error


def _suggest(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(names)}"


def _check(config: Config, origins: Mapping[str, str]) -> None:
    scheme, found, address = config.endpoint.partition("://")
    if not found or scheme not in {"tcp", "ipc"} or not address:
        raise ConfigError(
            origins["endpoint"], f"endpoint = {config.endpoint!r} is none", "write tcp://ADDRESS:PORT"
        )
    if scheme == "tcp" and not address.rpartition(":")[2].isdigit():
        raise ConfigError(
            origins["endpoint"], f"endpoint = {config.endpoint!r} has no port", "write tcp://ADDRESS:PORT"
        )
    if not config.curve and not is_loopback(config.endpoint):
        raise ConfigError(
            origins["endpoint"],
            f"{config.endpoint} reaches beyond this machine, and curve is off",
            "switch curve on and make keys with `oobleckctl keygen`, or bind to 127.0.0.1",
        )
    if config.lease_s < 2 * config.beat_s:
        raise ConfigError(
            origins["lease_s"],
            f"lease_s = {config.lease_s:g} is shorter than two beats of {config.beat_s:g} s",
            "a lost packet would cost a node: make lease_s at least 2 * beat_s",
        )
