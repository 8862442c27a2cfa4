"""What msgspec raises for bytes that it cannot read."""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""The second where a text is not UTF-8: it is no DecodeError."""
