"""A Plan: the groups and the policies of a run. It round-trips through TOML in the words of a run.toml."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from steppe.core.errors import ConfigError
from steppe.core.policy import OFF, Off
from steppe.core.shapes import BatchShape, Dtypes, MeshShape, RunShape
from steppe.flatteners import NAMES, half


@dataclass(frozen=True)
class Plan:
    """What to launch: sequence length and batch, groups, dtypes, and one policy (or OFF) for each flattener."""

    model: str  # a config.json, a folder with one, or a shipped name
    batch: BatchShape
    mesh: MeshShape
    dtypes: Dtypes = field(default_factory=Dtypes)
    policies: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(NAMES, OFF))
    shape: Mapping[str, Any] = field(default_factory=dict)  # keys of the config.json that the run replaces
    attention: str = "auto"  # or "eager", where scores are materialised because that was asked for

    @classmethod
    def of(
        cls, model: str, shape: RunShape, policies: Mapping[str, Any], changes: Mapping[str, Any] | None = None
    ) -> Plan:
        attention = "eager" if shape.attention == "materialised" else "auto"
        named = {name: policies.get(name, OFF) for name in NAMES}
        return cls(model, shape.batch, shape.mesh, shape.dtypes, named, dict(changes or {}), attention)

    def to_tables(self) -> dict[str, Any]:
        """The tables of a run.toml; what it doesn't name (data, rates) is added by the user."""
        told = {
            **({"attention": self.attention} if self.attention != "auto" else {}),
            **({"shape": dict(self.shape)} if self.shape else {}),
        }
        return {
            "model": {"config": self.model, "dtype": self.dtypes.weight, **told},
            "data": {"seq_len": self.batch.seq_len},
            "train": {
                "batch": self.batch.batch,
                "micro_batches": self.batch.micro_batches,
                "dtype": self.dtypes.activation,
            },
            "launch": {
                "ranks": self.mesh.world,
                "sequence": self.mesh.sequence,
                "expert": self.mesh.expert,
                "vocab": self.mesh.vocab,
            },
            "flatten": {name: policy_table(policy) for name, policy in self.policies.items()},
        }

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> Plan:
        """A Plan from the tables of a run.toml. Raises: ConfigError for what is missing, unknown or of a wrong kind."""
        _check_tables(tables)
        data, train, launch = (dict(tables.get(name, {})) for name in ("data", "train", "launch"))
        model = dict(tables.get("model", {}))
        if "config" not in model or "seq_len" not in data:
            raise ConfigError("plan", got=sorted(tables), allowed="model.config and data.seq_len", remedy="add them")
        flatten = dict(tables.get("flatten", {}))
        if unknown := sorted(set(flatten) - set(NAMES)):
            raise ConfigError("[flatten]", got=unknown, allowed=NAMES, remedy="use these names")
        weight = model.get("dtype", "bfloat16")
        return cls(
            model=model["config"],
            batch=BatchShape(data["seq_len"], train.get("batch", 1), train.get("micro_batches", 1)),
            mesh=MeshShape(launch.get("ranks", 1), **{k: launch.get(k, 1) for k in ("sequence", "expert", "vocab")}),
            dtypes=Dtypes(weight=weight, gradient=weight, activation=train.get("dtype", "bfloat16")),
            policies={name: policy_from(name, flatten.get(name, "off")) for name in NAMES},
            shape=dict(model.get("shape", {})),
            attention=model.get("attention", "auto"),
        )


_TABLES: Final = ("model", "data", "train", "output", "launch", "flatten")
_LAUNCH: Final = ("ranks", "sequence", "expert", "vocab", "timeout_s", "device_memory")
_COUNTS: Final = (
    ("data", "seq_len"), ("train", "batch"), ("train", "micro_batches"), *(("launch", name) for name in _LAUNCH[:4]),
)  # fmt: skip
_WORDS: Final = {
    ("model", "dtype"): ("float32", "bfloat16"), ("train", "dtype"): ("float32", "bfloat16"),
    ("model", "attention"): ("auto", "sdpa", "eager", "packed"),
}  # fmt: skip


def _check_tables(tables: Mapping[str, Any]) -> None:
    """Raises: ConfigError. What a plan doesn't read (data, rates, output) is `steppe train`'s to check."""
    for name, table in tables.items():
        if name not in _TABLES or not isinstance(table, Mapping):
            raise ConfigError(f"plan, [{name}]", got=repr(table), allowed=f"tables {', '.join(_TABLES)}",
                              remedy="check its name and that it is a table")  # fmt: skip
    if unknown := sorted(set(tables.get("launch", {})) - set(_LAUNCH)):
        raise ConfigError("plan, [launch]", got=unknown, allowed=", ".join(_LAUNCH), remedy="use these names")
    for name, key in _COUNTS:
        value = tables.get(name, {}).get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"plan, {name}.{key}", got=repr(value), allowed="a whole number, 1 or more",
                              remedy=f"correct {key}")  # fmt: skip
    for (name, key), words in _WORDS.items():
        if (value := tables.get(name, {}).get(key, words[0])) not in words:
            raise ConfigError(f"plan, {name}.{key}", got=repr(value), allowed=", ".join(words), remedy=f"correct {key}")
    config, shape = (tables.get("model", {}).get(key, empty) for key, empty in (("config", ""), ("shape", {})))
    if not isinstance(config, str) or not isinstance(shape, Mapping):
        raise ConfigError("plan, [model]", got=f"config = {config!r}, shape = {shape!r}",
                          allowed="config in quotes, shape as a table", remedy="correct them")  # fmt: skip


def write_plan(plan: Plan, path: str | Path, *, comments: tuple[str, ...] = ()) -> None:
    """Write a plan as TOML that `steppe train` takes; `comments` stand above it, a line each.

    Raises: ConfigError when tomli-w, which writes it, isn't installed, or for a model's path that is no text.
    """
    printable = ("".join(c if c.isprintable() else "?" for c in line) for line in comments)
    header = "".join(f"# {line}\n" for line in printable)
    try:
        written = (header + toml_writer().dumps(plan.to_tables())).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError("plan file", got=f"the model's path {plan.model!r}", allowed="a path in UTF-8",
                          remedy="rename it") from error  # fmt: skip
    Path(path).write_bytes(written)


def read_plan(path: str | Path) -> Plan:
    """Read a plan. Raises: ConfigError for a file that isn't there or isn't a plan."""
    try:
        return Plan.from_tables(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("plan file", got=f"{path}: {error}", allowed="a plan.toml", remedy="check it") from error


def toml_writer() -> ModuleType:
    try:
        import tomli_w
    except ImportError as missing:
        raise ConfigError(
            "writing TOML", got="tomli-w is not installed", allowed="tomli-w >= 1.1",
            remedy="pip install tomli-w, or pip install 'steppe[train]'",
        ) from missing  # fmt: skip
    return tomli_w


def policy_class(name: str) -> type[Any]:
    """The policy of a flattener: the dataclass in its `budget` whose name ends in Policy."""
    budget = half(name, "budget")
    kinds = [
        v for k, v in vars(budget).items() if k.endswith("Policy") and getattr(v, "__module__", "") == budget.__name__
    ]
    assert len(kinds) == 1, kinds
    return kinds[0]  # type: ignore[no-any-return]


def policy_table(policy: Any) -> Any:
    """A policy as a TOML value: "off", or a table without what is None (TOML has no word for it)."""
    if isinstance(policy, Off):
        return "off"
    return {key: value for key, value in dataclasses.asdict(policy).items() if value is not None}


def policy_from(name: str, value: Any) -> Any:
    """The policy that `policy_table` wrote. Raises: ConfigError for fields that the policy doesn't have."""
    if value in ("off", False):
        return OFF
    kind = policy_class(name)
    if value in ("on", True):
        return kind()
    allowed = [f.name for f in dataclasses.fields(kind)]
    if not isinstance(value, Mapping) or set(value) - set(allowed):
        raise ConfigError(
            f"[flatten.{name}]", got=value, allowed=f'"on", "off", or of {", ".join(allowed)}', remedy="use these"
        )
    try:
        return kind(**{key: _tuples(item) for key, item in value.items()})
    except TypeError as error:
        raise ConfigError(f"[flatten.{name}]", got=dict(value), allowed=f"values of {kind.__name__}'s own kinds",
                          remedy="write numbers without quotes") from error  # fmt: skip


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
