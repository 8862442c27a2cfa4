"""Sizes and bandwidths as people write them."""

from __future__ import annotations

import math
import re

_SIZES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BITS = {"Kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}

_TIMES = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*(ms|sec|s|min|m|h|d)"


def parse_size(text: str | int) -> int:
    """Bytes of ``"48MiB"``, ``"2GB"`` or a number. Raises ValueError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None or match[2] not in _SIZES:
        raise ValueError(f"{text!r} is no size")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_rate(text: str | int) -> float:
    """Bytes a second of ``"2.5GB/s"``, ``"25Gbit/s"`` or a number. Raises ValueError."""
    if isinstance(text, int):
        return float(text)
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)/s\s*", text, re.ASCII)
    if match is None or match[2] not in _SIZES | _BITS:
        raise ValueError(f"{text!r} is no bandwidth")
    unit = _SIZES[match[2]] if match[2] in _SIZES else _BITS[match[2]] / 8
    return float(match[1]) * unit


def parse_seconds(text: str) -> float:
    """Seconds of ``"5m"``, ``"90s"``, ``"1h30m"``, ``"500ms"`` or a number. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        parts = re.findall(_TIME, text.lower(), re.ASCII)
        if not parts or re.fullmatch(rf"(?:{_TIME})+\s*", text.lower(), re.ASCII) is None:
            raise ValueError(f"{text!r} is no time") from None
        seconds = sum(float(number) * _TIMES[unit] for number, unit in parts)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is no time")
    return seconds
