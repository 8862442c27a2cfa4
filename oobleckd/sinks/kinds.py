"""Which sink a kind is: those that are built in, and those that installed packages offer as entry points.

Owns the names. A package is imported where one of its sinks is made, and only if the daemon's configuration
names it.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from oobleckd.protocol.jobsinks import EXTRAS
from oobleckd.sinks.base import Sink

GROUP = "oobleckd.sinks"
"""Of entry points: the name is the kind, the object a class that derives from ``Sink``."""


class SinkMissing(Exception):
    """There is no such sink here."""


def sink_class(kind: str) -> type[Sink]:
    """The class of ``kind``. Raises SinkMissing."""
    try:
        match kind:
            case "csv":
                from oobleckd.sinks.csvfiles import CsvSink

                return CsvSink
            case "jsonl":
                from oobleckd.sinks.jsonlines import JsonLinesSink

                return JsonLinesSink
            case "tensorboard":
                from oobleckd.sinks.tensorboard import TensorBoardSink

                return TensorBoardSink
            case "wandb":
                import wandb  # noqa: F401 - whether it is there

                from oobleckd.sinks.wandbrun import WandbSink

                return WandbSink
            case _:
                return _offered(kind)
    except ImportError as error:
        hint = f": pip install 'oobleckd[{kind}]'" if kind in EXTRAS else ""
        raise SinkMissing(f"the sink {kind} cannot be used, {error}{hint}") from error


def _offered(kind: str) -> type[Sink]:
    for found in entry_points(group=GROUP, name=kind):
        made = found.load()
        if isinstance(made, type) and issubclass(made, Sink):
            return made
        raise SinkMissing(f"the sink {kind} is no class that derives from {Sink.__module__}.Sink")
    raise SinkMissing(f"no installed package offers a sink {kind} (entry points of the group {GROUP})")
