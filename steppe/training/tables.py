"""From a TOML table to a frozen dataclass: unknown keys, wrong types and missing keys refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from steppe.core.errors import ConfigError

T = TypeVar("T")


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """Advice for a misspelt word: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it or use one of the known names"


def check_keys(table: Mapping[str, object], known: typing.Iterable[str], where: str) -> None:
    """Raises: ConfigError at the first key of `table` that is not known."""
    names = sorted(known)
    for key in table:
        if key not in names:
            allowed = ", ".join(names) or "no keys"
            raise ConfigError(f"unknown key in [{where}]", got=repr(key), allowed=allowed, remedy=nearest(key, names))


def build(cls: type[T], table: object, where: str) -> T:
    """An instance of the dataclass `cls` from a TOML table.

    Raises: ConfigError naming section and key for anything that doesn't fit.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"[{where}]", got=repr(table), allowed="a table", remedy=f"write [{where}] and keys below it")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    check_keys(table, fields, where)
    missing = [
        name
        for name, f in fields.items()
        if name not in table and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(
            f"missing key in [{where}]", got="nothing", allowed=f"{missing[0]} = ...", remedy=f"set {missing[0]}"
        )
    hints = typing.get_type_hints(cls)
    values = {key: convert(value, hints[key], f"{where}.{key}") for key, value in table.items()}
    return cls(**values)


def convert(value: object, hint: Any, where: str) -> Any:
    """`value` as `hint` wants it: numbers widened, lists made tuples, nested tables built. Raises: ConfigError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, args, where)
    if origin is typing.Literal:
        return _choice(value, args, where)
    if origin is tuple and isinstance(value, list | tuple):
        return _tuple(value, args, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    plain = origin or hint
    if plain is Any or not isinstance(plain, type):
        return value
    if not isinstance(value, plain) or (isinstance(value, bool) and plain is not bool):
        raise _wrong(value, plain, where)
    return _in_range(value, where)


def _in_range(value: Any, where: str) -> Any:
    """Raises: ConfigError for numbers that TOML can write and no setting means, and for text that no path holds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(where, got=value, allowed="a finite number", remedy="leave the key out for its default")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(where, got=value, allowed="64-bit whole numbers", remedy="choose a smaller number")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(where, got=repr(value), allowed="text without NUL characters", remedy="remove the NUL")
    return value


def _one_of(value: object, options: tuple[Any, ...], where: str) -> Any:
    for option in options:
        try:
            return convert(value, option, where)
        except ConfigError:
            continue
    raise _wrong(value, " or ".join(dict.fromkeys(_in_words(o) for o in options)), where)


def _choice(value: object, options: tuple[Any, ...], where: str) -> Any:
    if value not in options:
        words = [o for o in options if isinstance(o, str)]
        remedy = nearest(value, words) if isinstance(value, str) else "use one of these"
        raise ConfigError(where, got=repr(value), allowed=", ".join(map(repr, options)), remedy=remedy)
    return value


def _tuple(values: typing.Sequence[object], args: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(convert(value, args[0], f"{where}[{i}]") for i, value in enumerate(values))
    if args and len(args) != len(values):
        raise ConfigError(
            where, got=f"{len(values)} values", allowed=f"{len(args)} values", remedy=f"give {len(args)} values"
        )
    return tuple(convert(value, arg, f"{where}[{i}]") for i, (value, arg) in enumerate(zip(values, args)))


def _wrong(value: object, allowed: Any, where: str) -> ConfigError:
    return ConfigError(
        where, got=f"{value!r} ({type(value).__name__})",
        allowed=allowed if isinstance(allowed, str) else _in_words(allowed), remedy="change the value's type",
    )  # fmt: skip


_WORDS = {
    "str": "text in quotes", "int": "a whole number", "bool": "true or false", "float": "a number",
    "tuple": "a list", "Sequence": "a list", "Mapping": "a table", "dict": "a table", "NoneType": "no such key",
}  # fmt: skip


def _in_words(hint: Any) -> str:
    """A type as a run.toml writes it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return ", ".join(map(repr, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, args)))
    name = getattr(origin or hint, "__name__", str(hint))
    return _WORDS.get(name, name)
