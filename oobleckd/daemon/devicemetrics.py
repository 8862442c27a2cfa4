"""Metrics of devices and their cards, for Prometheus: what they said last of themselves.

Owns names, types and help texts. What a device did not say has no sample. Made from values alone, so that a
thread may: there may be thousands of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from oobleckd.protocol.nodeviews import DeviceFigures

_MHZ = 1e6


def families(said: Sequence[DeviceFigures], xids: Mapping[tuple[str, int], float]) -> Iterator[Metric]:
    """Of all devices that ``said`` something. ``xids``: when each was reported last, by device and XID."""
    yield _memory(said)
    for name, text, value in _OF_DEVICE:
        found = GaugeMetricFamily(name, text, labels=("device",))
        for each in said:
            if (number := value(each)) is not None:
                found.add_metric((each.device,), number)
        yield found
    yield _throttled(said)
    errors = CounterMetricFamily(
        "oobleck_device_ecc_errors_total",
        "Memory errors of a card (ECC) since its driver was loaded.",
        labels=("device", "kind"),
    )
    for each in said:
        for kind, count in (("corrected", each.ecc_corrected), ("uncorrected", each.ecc_uncorrected)):
            if count >= 0:
                errors.add_metric((each.device, kind), float(count))
    yield errors
    told = GaugeMetricFamily(
        "oobleck_device_xid_timestamp_seconds",
        "When the driver of a card last told of an error of it, by XID.",
        labels=("device", "xid"),
    )
    for (device, xid), at in sorted(xids.items()):
        told.add_metric((device, str(xid)), at)
    yield told


def _memory(said: Iterable[DeviceFigures]) -> Metric:
    text = "Memory that a device computes in: of a card, or of its host."
    found = GaugeMetricFamily("oobleck_device_memory_bytes", text, labels=("device", "kind"))
    for each in said:
        for kind, num_bytes in (
            ("used", each.used_bytes), ("planned", each.planned_bytes), ("total", each.total_bytes),
        ):  # fmt: skip
            if num_bytes:
                found.add_metric((each.device, kind), float(num_bytes))
    return found


def _throttled(said: Iterable[DeviceFigures]) -> Metric:
    text = "1 while a card's clocks are held down, by reason."
    found = GaugeMetricFamily("oobleck_device_throttled", text, labels=("device", "reason"))
    for each in said:
        for reason in each.throttled:
            found.add_metric((each.device, reason), 1.0)
    return found


def _known(number: float) -> float | None:
    return number or None


_OF_DEVICE: tuple[tuple[str, str, Callable[[DeviceFigures], float | None]], ...] = (
    (
        "oobleck_device_rss_bytes",
        "Memory of the host that a device's process has.",
        lambda each: _known(each.rss_bytes),
    ),
    (
        "oobleck_device_utilisation_ratio",
        "Share of the last second in which a card computed.",
        lambda each: each.utilisation if each.utilisation >= 0 else None,
    ),
    ("oobleck_device_power_watts", "Power that a card draws.", lambda each: _known(each.power_w)),
    ("oobleck_device_power_limit_watts", "What it may draw.", lambda each: _known(each.power_limit_w)),
    (
        "oobleck_device_temperature_celsius",
        "Temperature of a card.",
        lambda each: _known(each.temperature_c),
    ),
    ("oobleck_device_clock_hertz", "Clock of its processors.", lambda each: _known(each.clock_mhz * _MHZ)),
    (
        "oobleck_device_clock_max_hertz",
        "The highest that it could have.",
        lambda each: _known(each.clock_max_mhz * _MHZ),
    ),
)
