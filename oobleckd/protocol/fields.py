"""What a field of ``[model.config]`` can be: a number, a word, a list of them, or a table of these.

Owns the type and how deep it goes, not which fields there are (``oobleckd.worker.models.config``).
"""

from __future__ import annotations

_Scalar = bool | int | float | str
_List = list[_Scalar | list[_Scalar]]
ConfigValue = _Scalar | _List | dict[str, _Scalar | _List | dict[str, _Scalar | _List | None] | None] | None
"""Tables are at most two deep, such as one for each kind of layer; and so are lists."""

HINT = "a field is a number, a word, a list, or a table of these, tables included; nothing nests deeper"


def misfit(value: object, path: str, *, tables: int = 2, lists: int = 2) -> tuple[str, str] | None:
    """Where in ``value``, the field ``path``, something is no ``ConfigValue``, and what it is; None where all
    is.
    """
    match value:
        case bool() | int() | float() | str() | None:
            return None
        case dict() if tables:
            inner = [
                misfit(each, f"{path}.{key}", tables=tables - 1, lists=lists) for key, each in value.items()
            ]
        case list() if lists:
            inner = [
                misfit(each, f"{path}[{index}]", tables=0, lists=lists - 1)
                for index, each in enumerate(value)
            ]
        case _:
            return path, {"dict": "table"}.get(type(value).__name__, type(value).__name__)
    return next(filter(None, inner), None)
