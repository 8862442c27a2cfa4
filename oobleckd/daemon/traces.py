"""Traces of recoveries for an OpenTelemetry collector: a span an incident, with one for each of its phases.

Owns what is in a span, and that nobody waits for the collector: spans are sent by the library's own thread,
and what cannot be sent is lost. Needs the extra ``oobleckd[otel]``; its packages are imported only where a
collector is named.

Errors: TracesMissing, with ``hint``.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

from oobleckd import __version__
from oobleckd.protocol.changes import Change, IncidentOver
from oobleckd.protocol.incidentviews import IncidentView

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_END_S = 2.0
_EVERY_MS = 1000
_NS = 1_000_000_000


class TracesMissing(Exception):
    """A collector is named, and the packages that talk to it are not installed."""

    def __init__(self, error: ImportError) -> None:
        self.problem = f"traces are asked for, and OpenTelemetry is not installed: {error}"
        self.hint = "pip install 'oobleckd[otel]', or leave `traces` out of the settings"
        super().__init__(self.problem)


class Traces:
    """Of one incarnation of the daemon. ``listen`` is for the history's changes."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("oobleckd", __version__)

    def listen(self, change: Change) -> None:
        """A change was published: that of a recovery that is over becomes a trace."""
        # Steps are thousands a minute and are in metrics and op times; a recovery is what people ask "where
        # did the time go" about. (D-watching-013)
        if isinstance(change.data, IncidentOver):
            self.trace(change.data.view)

    def trace(self, incident: IncidentView) -> None:
        """Send the recovery. Its times are the daemon's clock, in nanoseconds since the epoch."""
        from opentelemetry.trace import set_span_in_context

        whole = self._tracer.start_span(
            "recovery", start_time=_ns(incident.at), attributes=_attributes(incident)
        )
        context = set_span_in_context(whole)
        for phase in incident.phases:
            began = incident.at + phase.start_s
            span = self._tracer.start_span(phase.phase, context=context, start_time=_ns(began))
            span.end(_ns(began + phase.duration_s))
        whole.end(_ns(incident.at + incident.total_s))

    def close(self) -> None:
        """Send what is left, for as long as a daemon may take to end."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(_END_S)


def open_traces(collector: str) -> Traces:
    """Traces for the ``collector`` (such as http://127.0.0.1:4318). Raises TracesMissing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesMissing(error) from error
    resource = Resource.create(
        {"service.name": "oobleckd", "service.version": __version__, "host.name": socket.gethostname()}
    )
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=f"{collector.rstrip('/')}/v1/traces", timeout=_END_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EVERY_MS))
    return Traces(provider)


def _attributes(incident: IncidentView) -> dict[str, str | int | float | list[str]]:
    return {
        "oobleck.incident": incident.id,
        "oobleck.job": incident.job,
        "oobleck.nodes": list(incident.nodes),
        "oobleck.cause": incident.cause,
        "oobleck.reason": incident.reason,
        "oobleck.generation": incident.generation,
        "oobleck.epoch": incident.epoch,  # its first name
        "oobleck.step": incident.step,
        "oobleck.steps_lost": incident.steps_lost,
        "oobleck.committed_s": incident.committed_s,
        "oobleck.copied_bytes": incident.copied_bytes,
        "oobleck.layer_gradients_redone": incident.layer_gradients,
    }


def _ns(at: float) -> int:
    return int(at * _NS)
