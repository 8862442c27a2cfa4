"""What devices and their cards say of themselves, as a table: for ``describe node``.

Owns its columns; those of which no device says anything are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oobleckd.ctl.output import emit_line, emit_table, when
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.words import count, short, size


def show(figures: Sequence[DeviceFigures]) -> None:
    """Print the table; nothing where no device said anything."""
    if not figures:
        return
    known = [(head, cells) for head, cell in _COLUMNS if any(cells := [cell(each) for each in figures])]
    emit_line(f"devices at {when(max(each.at for each in figures))}:")
    rows = [[cell or "-" for cell in row] for row in zip(*(cells for _, cells in known), strict=True)]
    emit_table([head for head, _ in known], rows)


def _memory(said: DeviceFigures) -> str:
    if not said.used_bytes:
        return ""
    planned = f", planned {size(said.planned_bytes)}" if said.planned_bytes else ""
    return f"{size(said.used_bytes)} of {size(said.total_bytes)}{planned}"


def _power(said: DeviceFigures) -> str:
    limit = f" of {short(said.power_limit_w)}" if said.power_limit_w else ""
    return f"{short(said.power_w)}{limit} W" if said.power_w else ""


def _clock(said: DeviceFigures) -> str:
    if not said.clock_mhz:
        return ""
    limit = f" of {said.clock_max_mhz}" if said.clock_max_mhz else ""
    return f"{said.clock_mhz}{limit} MHz" + (f" ({', '.join(said.throttled)})" if said.throttled else "")


def _errors(said: DeviceFigures) -> str:
    found = [f"XID {xid}" for xid in said.xids]
    if said.ecc_uncorrected > 0:
        found.append(f"{said.ecc_uncorrected:,} uncorrected (ECC)")
    if said.ecc_corrected > 0:
        found.append(f"{said.ecc_corrected:,} corrected (ECC)")
    if not found and said.ecc_uncorrected >= 0:
        return count(0, "memory error")
    return ", ".join(found)


_COLUMNS: tuple[tuple[str, Callable[[DeviceFigures], str]], ...] = (
    ("DEVICE", lambda said: said.device),
    ("CARD", lambda said: said.card),
    ("MEMORY", _memory),
    ("RSS", lambda said: size(said.rss_bytes) if said.rss_bytes else ""),
    ("BUSY", lambda said: f"{said.utilisation:.0%}" if said.utilisation >= 0 else ""),
    ("POWER", _power),
    ("TEMPERATURE", lambda said: f"{said.temperature_c} °C" if said.temperature_c else ""),
    ("CLOCK", _clock),
    ("ERRORS", _errors),
)
