"""Bytes, tokens and rates: parsed and printed so that GB and GiB are never mixed up.

GB is 10**9 bytes and GiB is 2**30, always. Sizes are printed in binary units. Token counts follow the field's habit:
K and M are binary ("128K" is 131,072 tokens, "1M" is 1,048,576).
"""

from __future__ import annotations

import math
import re
from typing import Final

from steppe.core.errors import ConfigError

KiB: Final = 2**10
MiB: Final = 2**20
GiB: Final = 2**30

_BYTE_UNITS: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_TOKEN_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20}
_DIGITS: Final = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*"  # a decimal comma is none of them
_NUMBER: Final = re.compile(rf"^\s*((?:{_DIGITS})(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*$")
_BITS: Final = re.compile(r"^[KMGT]i?b$")
_LARGEST: Final = 10**18  # beyond it somebody has slipped: an exabyte, or a context nobody trains


def _split(text: str, what: str, allowed: str) -> tuple[float, str]:
    found = _NUMBER.match(text)
    if found is None:
        raise ConfigError(what, got=repr(text), allowed=allowed, remedy="write a number, 0 or more, then a unit")
    return float(found.group(1).replace(",", "").replace("_", "")), found.group(2)


def _whole(value: float, text: str, what: str, allowed: str) -> int:
    if value > _LARGEST:
        raise ConfigError(what, got=repr(text), allowed=f"{allowed}, up to 10^18", remedy="check the number and unit")
    return round(value)


def parse_bytes(text: str | int) -> int:
    """`"141GB"` -> 141 * 10**9, `"80 GiB"` -> 80 * 2**30, a bare number -> bytes."""
    if isinstance(text, int):
        return text
    allowed = "a number and one of B, KB, MB, GB, TB (powers of 10) or KiB, MiB, GiB, TiB (powers of 2)"
    value, unit = _split(text, "size in bytes", allowed)
    if _BITS.match(unit):
        raise ConfigError(
            "size in bytes", got=f"{text!r}, which reads as bits", allowed=allowed,
            remedy="write GB with a capital B; 8 Gb are 1 GB",
        )  # fmt: skip
    if unit.upper() not in _BYTE_UNITS:
        raise ConfigError("size in bytes", got=repr(text), allowed=allowed, remedy="write GiB or GB in full")
    return _whole(value * _BYTE_UNITS[unit.upper()], text, "size in bytes", allowed)


def parse_tokens(text: str | int) -> int:
    """`"128K"` -> 131,072 tokens, `"1M"` -> 1,048,576 tokens, a bare number -> tokens."""
    if isinstance(text, int):
        return text
    allowed = "a number of tokens, with K (1,024) or M (1,048,576)"
    value, unit = _split(text, "number of tokens", allowed)
    if unit.upper() not in _TOKEN_UNITS:
        raise ConfigError("number of tokens", got=repr(text), allowed=allowed, remedy="write for example 65536 or 64K")
    return _whole(value * _TOKEN_UNITS[unit.upper()], text, "number of tokens", allowed)


def parse_rate(text: str | float) -> float:
    """`"16GB/s"` -> 16e9 bytes per second."""
    if isinstance(text, (int, float)):
        return float(text)
    body = text.strip().removesuffix("/s")
    if body == text.strip():
        allowed = "bytes per second, as 16GB/s or 12GiB/s"
        raise ConfigError("rate", got=repr(text), allowed=allowed, remedy="end it with /s")
    return float(parse_bytes(body))


def format_bytes(num_bytes: float) -> str:
    """Bytes in the binary unit that keeps the number readable: `"37.09 GiB"`, `"512.0 MiB"`, `"12 B"`."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    if size >= GiB:
        return f"{sign}{size / GiB:,.2f} GiB"
    if size >= MiB:
        return f"{sign}{size / MiB:.1f} MiB"
    if size >= KiB:
        return f"{sign}{size / KiB:.1f} KiB"
    return f"{sign}{math.floor(size)} B"


def format_tokens(num_tokens: int) -> str:
    """Tokens as people say them: `"1M"`, `"128K"`, otherwise with thousands separators."""
    for unit, factor in (("M", 2**20), ("K", 2**10)):
        if num_tokens >= factor and num_tokens % factor == 0:
            return f"{num_tokens // factor:,}{unit}"
    return f"{num_tokens:,}"
