"""Fields of a model's configuration over the defaults of its family, checked as they are asked for.

Owns what a field must be. What they mean is ``shapes``' and ``expertshapes``'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oobleckd.protocol.jobtable import JobError


class Fields:
    """Fields of a configuration over a family's defaults, each checked when it is asked for."""

    def __init__(self, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._given = given
        self._defaults = defaults

    def has(self, key: str) -> bool:
        """Whether the family has such a field."""
        return key in self._defaults

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; ``default`` where the field is null, or 0 and so is that."""
        value = self._value(key)
        if default is not None and (value is None or (value == default == 0)):
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise JobError(
                f"model.config.{key}", f"{value!r} is no whole number above 0", "see docs/models.md"
            )
        return value

    def share(self, key: str) -> float:
        """A number from 0 to below 1."""
        value = self._value(key) or 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise JobError(f"model.config.{key}", f"{value!r} is not in [0, 1)", "0 switches dropout off")
        return float(value)

    def numbers(self, key: str) -> frozenset[int]:
        """A list of whole numbers; null is an empty one."""
        value = self._value(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(each, int) for each in value):
            raise JobError(f"model.config.{key}", f"{value!r} is no list of whole numbers", "write [0, 2]")
        return frozenset(value)

    def flag(self, key: str) -> bool:
        """Yes or no."""
        return bool(self._value(key))

    def _value(self, key: str) -> Any:
        return self._given.get(key, self._defaults[key])


def dividing(fields: Fields, key: str, whole: str) -> int:
    """The field ``key``, which divides the field ``whole``."""
    number, width = fields.count(key), fields.count(whole)
    if width % number:
        raise JobError(
            f"model.config.{key}", f"{number} does not divide {whole} = {width}", "change one of the two"
        )
    return number
