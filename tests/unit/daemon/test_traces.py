"""Traces of recoveries: what is in a span, and that nobody waits for a collector."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from oobleckd.daemon.traces import Traces, TracesMissing, open_traces
from oobleckd.protocol.changes import AnyPayload, Change, IncidentBegan, IncidentOver
from oobleckd.protocol.incidentviews import IncidentView, PhaseView

AT = 1_900_000_000.25
NS = 1_000_000_000
INCIDENT = IncidentView(
    id="inc-3", job="tiny-1", cause="n2: signal 9", nodes=("n2",), at=AT, epoch=5, step=12, open=False,
    phases=(PhaseView("detect", 0.0, 0.5), PhaseView("plan", 0.5, 0.25), PhaseView("copy", 0.75, 1.0)),
    total_s=1.75, reason="shrink", copied_bytes=100,
)  # fmt: skip


@pytest.fixture
def spans() -> Iterator[tuple[Traces, InMemorySpanExporter]]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider)
    yield traces, exporter
    traces.close()


def said(data: AnyPayload) -> Change:
    return Change(7, AT, data.kind, "info", "recovered", (), data)


def test_a_recovery_is_a_span_with_one_for_each_phase(spans: tuple[Traces, InMemorySpanExporter]) -> None:
    traces, exporter = spans
    traces.listen(said(IncidentBegan("inc-3", ("n2",), 5, "n2: signal 9")))  # it has just begun
    traces.listen(said(IncidentOver("inc-3", INCIDENT)))
    *phases, whole = exporter.get_finished_spans()
    assert (whole.name, whole.parent) == ("recovery", None)
    assert (whole.start_time, whole.end_time) == (int(AT * NS), int((AT + 1.75) * NS))
    assert whole.attributes is not None
    assert whole.attributes["oobleck.incident"] == "inc-3"
    assert whole.attributes["oobleck.nodes"] == ("n2",)
    assert [span.name for span in phases] == ["detect", "plan", "copy"]
    assert {span.parent.span_id for span in phases if span.parent} == {whole.context.span_id}
    assert [(span.start_time, span.end_time) for span in phases][1] == (
        int((AT + 0.5) * NS),
        int((AT + 0.75) * NS),
    )


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracesMissing) as raised:
        open_traces("http://127.0.0.1:4318")
    assert "pip install 'oobleckd[otel]'" in raised.value.hint
