"""Numbers and their nouns as people read them. Pure, and below everything: whoever words a sentence, of the
planner as of the console, words its numbers here.

Owns digits, units and plurals: three digits and never an exponent, units that grow with the number, and no
text wider than ``CELLS``, so that columns stay columns. Times of day are ``draw.times``'.
"""

from __future__ import annotations

import math

# A number that each writer formats is one that Python formats somewhere, with an exponent or a wrong plural.
# (D-watching-018)
CELLS = 11
"""The most that ``seconds``, ``ms``, ``size`` or ``rate`` take of a column, up to years and exabytes.
"""
_MINUTE_S, _HOUR_S, _DAY_S, _YEAR_S = 60, 3600, 86_400, 365 * 86_400
_SAME_S = 5e-7  # less than anybody measures: what rounding leaves of a difference
_NO_S = ("s", "x", "z", "ch", "sh")
_IRREGULAR = {"epoch": "epochs", "is": "are", "has": "have", "was": "were", "does": "do", "begins": "begin"}
_AGES = ((2 * _MINUTE_S, 1, 0), (10 * _MINUTE_S, _MINUTE_S, 1), (3 * _HOUR_S, _MINUTE_S, 0),
    (8 * _HOUR_S, _HOUR_S, _MINUTE_S), (2 * _DAY_S, _HOUR_S, 0), (8 * _DAY_S, _DAY_S, _HOUR_S),
    (2 * _YEAR_S, _DAY_S, 0), (math.inf, _YEAR_S, _DAY_S))  # fmt: skip
_AMOUNTS = {1.0: "", 1e6: " M", 1e9: " B", 1e12: " T"}
_UNITS = {1: "s", _MINUTE_S: "m", _HOUR_S: "h", _DAY_S: "d", _YEAR_S: "y"}
"""Below the first so many seconds an age is told in the second, and what is left of it in the third."""


# --------------------------------------------------------------------------- nouns


def noun(number: float, what: str) -> str:
    """``what`` as it stands behind ``number``: "step" behind 1, else "steps"."""
    if number == 1:
        return what
    if what in _IRREGULAR:
        return _IRREGULAR[what]
    if what.endswith(_NO_S):
        return f"{what}es"
    if what.endswith("y") and what[-2] not in "aeiou":
        return f"{what[:-1]}ies"
    return f"{what}s"


def count(number: int, what: str) -> str:
    """``"1 step"``, ``"2 steps"``."""
    return f"{number:,} {noun(number, what)}"


def ordinal(number: int) -> str:
    """``"1st"``, ``"2nd"``, ``"3rd"``, ``"11th"``."""
    teens = number % 100 in {11, 12, 13}
    return f"{number:,}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def being(state: str) -> str:
    """That somebody is in ``state``: "is running", "is done", but "failed"."""
    return state if state == "failed" else f"is {state}"


def layers(start: int, stop: int) -> str:
    """Layers ``[start, stop)`` for people: ``"3-5"``."""
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"


def silence(number: int, longest_s: float) -> str:
    """``"2 not heard of for 3 s"``: so many of whom a sign of life may yet come, and how long the longest of
    them is silent.
    """
    return f"{number:,} not heard of for {seconds(longest_s)}"


NOT_FINITE = "loss or gradients not finite"
SPIKED = {"loss-spike": "a spike of the loss", "grad-norm": "beyond train.spike_grad_norm"}
"""Why a step was skipped whose loss and gradients are finite, by the code of its cause."""


def why_skipped(steps: int, spiked: int = 0) -> str:
    """Why so many steps made no update, of which so many were spikes."""
    if not spiked:
        return NOT_FINITE
    return "spikes" if spiked == steps else f"{NOT_FINITE}; {count(spiked, 'spike')}"


def skipped(steps: int, spiked: int = 0) -> str:
    """So many steps that made no update, and why, for people."""
    return f"{steps:,} of them skipped ({why_skipped(steps, spiked)})"


# --------------------------------------------------------------------------- numbers


def short(value: float) -> str:
    """Three digits, all of those before the point, three behind it at most, and no exponent."""
    if not math.isfinite(value):
        return _not_finite(value)
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return _trimmed(f"{value:.{digits}f}")


def plain(value: float) -> str:
    """A number that somebody wrote or may write: as short as it is exact, 1e9 and 1e-5 without more signs
    than they need.
    """
    text = f"{value:.12g}"
    head, e, exponent = (f"{value:.11e}" if text.endswith("000000") else text).partition("e")
    return f"{_trimmed(head)}e{int(exponent)}" if e else text


def learning_rate(value: float) -> str:
    """A learning rate: four digits that say something, ``0.0003`` or ``2.997e-5``."""
    return plain(float(f"{value:.4g}"))


def loss(value: float) -> str:
    """A loss: four digits behind the point, and its power of ten where that says nothing."""
    if not math.isfinite(value):
        return _not_finite(value)
    if value and not 1e-3 <= abs(value) < 1e6:
        head, _, exponent = f"{value:.3e}".partition("e")
        return f"{head}e{int(exponent)}"
    return f"{value:.4f}"


def rate(value: float) -> str:
    """``"812.4"``, ``"4,118"``."""
    return f"{value:,.1f}" if value < 999.95 else f"{value:,.0f}"


def done(part: float, whole: float, digits: int = 0) -> str:
    """``"62%"``: how far something is; all of it only where nothing is left."""
    if not whole:
        return "0%"
    scale = 10.0**digits
    return f"{math.floor(100 * scale * min(1.0, part / whole) + 1e-9) / scale:.{digits}f}%"


def many(value: float) -> str:
    """``"950"``, ``"12.4 M"``, ``"300 B"``, ``"1.98 P"``: an amount whose first three digits say enough."""
    for limit, unit in ((1e6, 1.0), (999.5e6, 1e6), (999.5e9, 1e9), (999.5e12, 1e12)):
        if abs(value) < limit:
            return f"{short(value / unit)}{_AMOUNTS[unit]}"
    return f"{short(value / 1e15)} P"


def parameters(total: int, active: int = 0) -> str:
    """``"163 M parameters"``, ``"46.7 B parameters, 12.9 B active"``; "" where nobody knows how many."""
    if not total:
        return ""
    rest = f", {many(active)} active" if 0 < active < total else ""
    return f"{many(total)} parameters{rest}"


def tick(value: float) -> str:
    """A number beside an axis, in few cells: ``"0.002"``, ``"2.5"``, ``"12.5k"``, ``"20M"``."""
    if not math.isfinite(value):
        return _not_finite(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{short(value / limit)}{unit}"
    return plain(float(f"{value:.4g}"))


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"


def _trimmed(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


# --------------------------------------------------------------------------- times and sizes


def ms(value_s: float) -> str:
    """Milliseconds of a phase: three digits below 100 ms, whole ones from there on; what takes minutes is no
    matter of milliseconds.
    """
    return f"{short(value_s * 1e3)} ms" if value_s < 100 else seconds(value_s)


def seconds(value_s: float) -> str:
    """``"38 ms"``, ``"2.13 s"``, ``"4 min 10 s"``, ``"3 h 5 min"``, ``"2 d 3 h"``."""
    if not math.isfinite(value_s):
        return _not_finite(value_s)
    if value_s < 0.9995:
        return f"{short(value_s * 1e3)} ms" if value_s else "0 s"
    if value_s < _MINUTE_S:
        return f"{short(value_s)} s"
    minutes, rest = divmod(round(value_s), _MINUTE_S)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        days, hours = divmod(hours, 24)
        return f"{days} d {hours} h" if days < 100 else f"{days:,} d"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def age(value_s: float) -> str:
    """Whole seconds: an age changes once a second and not with every frame."""
    return f"{int(value_s)} s" if value_s < _MINUTE_S else seconds(int(value_s))


def short_age(value_s: float) -> str:
    """An age for a column, as kubectl has it: ``"45s"``, ``"5m30s"``, ``"3h25m"``, ``"2d5h"``, ``"400d"``."""
    whole = max(0, int(value_s))
    unit, part = next((unit, part) for limit, unit, part in _AGES if whole < limit)
    number, rest = divmod(whole, unit)
    rest = rest // part if part else 0
    return f"{number}{_UNITS[unit]}" + (f"{rest}{_UNITS[part]}" if rest else "")


def than(extra_s: float) -> str:
    """By how much something takes longer: ``"2.1 s more"``, ``"40 ms less"``, ``"as long"``."""
    if abs(extra_s) < _SAME_S:
        return "as long"
    return f"{seconds(abs(extra_s))} {'more' if extra_s > 0 else 'less'}"


def size(num_bytes: float) -> str:
    """``"12.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1023.5:
            return f"{short(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{short(num_bytes)} TiB"


def bandwidth(bytes_per_s: float) -> str:
    """``"1 GB/s"``, ``"12.5 MB/s"``: in powers of ten, as makers of links count and a job.toml may."""
    power = next((p for p in (3, 2, 1) if bytes_per_s >= 1000**p), 0)
    return f"{short(bytes_per_s / 1000**power)} {('B', 'KB', 'MB', 'GB')[power]}/s"
