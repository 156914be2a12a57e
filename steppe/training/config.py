"""What a run is: `run.toml` read into frozen values, every one of them checked before anything starts."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from steppe.core.errors import ConfigError
from steppe.core.policy import OFF
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES, half
from steppe.planner.models import model_path, shipped_models
from steppe.training.tables import build, check_keys

Dtype = Literal["float32", "bfloat16"]
PYDOC = "pydoc_topics"


@dataclass(frozen=True)
class ModelConfig:
    """[model]: which mixture-of-experts model, and with which weights it starts."""

    config: str = ""  # config.json, a directory with one, or a shipped name; may be empty when `shape` has a model_type
    shape: Mapping[str, Any] = field(default_factory=dict)  # fields that replace those of the file
    weights: str = "random"  # or a directory of safetensors
    dtype: Dtype = "float32"  # the type that parameters are stored in
    attention: Literal["auto", "sdpa", "eager", "packed"] = "auto"  # packed: documents one by one, without masks
    experts: Literal["grouped_mm", "eager", "batched_mm"] = "grouped_mm"


@dataclass(frozen=True)
class DataConfig:
    """[data]: the text, how it becomes tokens, and how documents are packed into rows of `seq_len` (S)."""

    seq_len: int
    path: str = PYDOC  # the language reference that ships with Python, or a file or directory of your own
    kind: Literal["text", "jsonl", "parquet", "tokens"] = "text"
    validation: str = ""  # text of the same kind that is only ever evaluated; empty: nothing is
    text_field: str = "text"  # the key of a JSONL line or the column of a parquet file
    tokenizer: str = ""  # a tokenizer.json or a directory with one; empty: train a byte-level BPE on the text
    tokenizer_vocab: int = 16384  # the most entries that a trained tokenizer may have
    end_of_document: str = "<|endoftext|>"  # appended to each document if the tokenizer knows it
    token_dtype: Literal["uint16", "uint32", "int32"] = "uint16"  # of a raw .bin file of tokens
    end_of_document_id: int = -1  # cuts pre-tokenised streams into documents; -1: one document a file
    packing: Literal["cut", "whole", "stream"] = (
        "cut"  # cut documents at row ends, never split one, or ignore their ends
    )


@dataclass(frozen=True)
class TrainConfig:
    """[train]: how long, how fast, from which seed."""

    steps: int = 100
    batch: int = 1  # sequences on one rank and micro-batch
    micro_batches: int = 1
    lr: float = 3e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: int = 0  # steps
    min_lr_ratio: float = 0.1  # where the cosine ends
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0  # largest global gradient norm; 0: no clipping
    router_bias_rate: float = 0.0  # how far a step moves the biases of auxiliary-loss-free routers; 0: they stay
    seed: int = 0
    dtype: Dtype = "float32"  # the type of the matrix products
    evaluate_every: int = 0  # steps between evaluations on data.validation; 0: only after the last one
    evaluate_batches: int = 8  # micro-batches of one rank in an evaluation, the same ones each time
    checkpointing: bool = True  # recompute each block in the backward; the plain baseline of SCO


@dataclass(frozen=True)
class OutputConfig:
    """[output]: where metrics, checkpoints and the tokenised text go."""

    dir: str = "run"
    checkpoint_every: int = 0  # steps; 0: only after the last one
    keep: int = 2  # checkpoints that stay on disk
    resume: str = "latest"  # or the name of an earlier checkpoint (step-00000010), or "never": start afresh
    export: bool = False  # write Hugging Face safetensors after the last step
    lock_timeout_s: float = 30.0  # how long to wait for ranks of an earlier job to leave


@dataclass(frozen=True)
class LaunchConfig:
    """[launch]: how many ranks `steppe train` starts when it is not started by torchrun."""

    ranks: int = 1
    sequence: int = 1  # D, ranks that share a sequence
    expert: int = 1  # E_p, ranks that share the experts
    vocab: int = 1  # P, ranks that share the vocabulary
    timeout_s: float = 300.0  # of a collective: a lost rank ends the job within it
    device_memory: str = ""  # "80GB": refuse before step 1 what is predicted not to fit; empty: the accelerator's own

    def count(self, asked: int | None = None) -> int:
        """How many ranks to start: those asked for with --ranks, else the declared ones, in groups that divide them.

        Raises: ConfigError.
        """
        if asked is not None and asked < 1:
            raise ConfigError("--ranks", got=asked, allowed="1 or more", remedy="--ranks 1, or leave it out")
        return self.mesh(asked).world

    def mesh(self, ranks: int | None = None) -> MeshShape:
        """The groups over `ranks` (or the declared number of) ranks. Raises: ConfigError unless they divide."""
        return MeshShape(ranks or self.ranks, sequence=self.sequence, expert=self.expert, vocab=self.vocab)


@dataclass(frozen=True)
class RunConfig:
    """A whole run. `flatten` maps every flattener to its policy, `OFF` for the plain program."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    flatten: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(NAMES, OFF))

    def __post_init__(self) -> None:
        _check_numbers(self)

    @property
    def tokens_per_rank(self) -> int:
        """N: the most tokens of one micro-batch on one rank, fixed at launch."""
        return self.train.batch * self.data.seq_len // self.launch.sequence

    def with_flatten(self, **policies: Any) -> RunConfig:
        """The same run with some flatteners' policies replaced."""
        check_keys(policies, NAMES, "flatten")
        return dataclasses.replace(self, flatten={**self.flatten, **policies})

    def plain(self) -> RunConfig:
        """The same run with every flattener off."""
        return self.with_flatten(**dict.fromkeys(NAMES, OFF))

    @property
    def computes_in_copies(self) -> bool:
        """Whether weights are stored in one type and used in another."""
        return self.train.dtype != self.model.dtype

    def replace(self, section: str, **values: object) -> RunConfig:
        """The same run with fields of one section replaced: `config.replace("train", steps=5)`."""
        return dataclasses.replace(self, **{section: dataclasses.replace(getattr(self, section), **values)})


SECTIONS = {
    "model": ModelConfig, "data": DataConfig, "train": TrainConfig, "output": OutputConfig, "launch": LaunchConfig,
}  # fmt: skip


def load(path: str | Path) -> RunConfig:
    """Read and check a run.toml; relative paths in it are relative to the file.

    Raises: ConfigError for a file that can't be read, is not TOML, or holds anything unknown or out of range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(
            "run file", got=f"{path} ({failure})", allowed="a readable TOML file", remedy="check the path"
        ) from failure
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(
            "run file", got=f"{path}: {failure}", allowed="valid TOML", remedy="mend the line it names"
        ) from failure
    return parse(table, base=path.parent)


def parse(table: Mapping[str, Any], base: Path | None = None) -> RunConfig:
    """A RunConfig from the tables of a run.toml; `base` is what relative paths start from. Raises: ConfigError."""
    check_keys(table, (*SECTIONS, "flatten"), "run.toml")
    for needed in ("model", "data"):
        if needed not in table:
            raise ConfigError("run file", got=f"no [{needed}]", allowed="[model] and [data]", remedy=f"add [{needed}]")
    parts: dict[str, Any] = {name: build(cls, table.get(name, {}), name) for name, cls in SECTIONS.items()}
    _check_paths(RunConfig(**parts))
    parts["model"] = _shipped(parts["model"], base)
    if base is not None:
        parts["model"] = _rebase(parts["model"], base, config="", weights="random")
        parts["data"] = _rebase(parts["data"], base, path=PYDOC, tokenizer="", validation="")
        parts["output"] = _rebase(parts["output"], base, dir=None)
    return RunConfig(**parts, flatten=policies(table.get("flatten", {})))


def policy_class(name: str) -> type[Any]:
    """The policy of a flattener: the one dataclass in its `budget` whose name ends in Policy."""
    budget = half(name, "budget")
    (cls,) = {
        value
        for key, value in vars(budget).items()
        if key.endswith("Policy") and dataclasses.is_dataclass(value) and value.__module__ == budget.__name__
    }
    return cls  # type: ignore[return-value]


def policies(table: object) -> dict[str, Any]:
    """Every flattener's policy from a [flatten] table: "off", "on" or a table of its fields. Raises: ConfigError."""
    if not isinstance(table, Mapping):
        raise ConfigError("[flatten]", got=repr(table), allowed="a table", remedy='write e.g. boundary = "on"')
    check_keys(table, NAMES, "flatten")
    return {name: _policy(name, table.get(name, "off")) for name in NAMES}


def _policy(name: str, value: object) -> Any:
    if value in ("off", False):
        return OFF
    if value in ("on", True):
        return policy_class(name)()
    if isinstance(value, Mapping):
        return build(policy_class(name), value, f"flatten.{name}")
    raise ConfigError(
        f"flatten.{name}", got=repr(value), allowed='"off", "on" or a table of its policy',
        remedy=f'write {name} = "on" or [flatten.{name}]',
    )  # fmt: skip


def _shipped(model: ModelConfig, base: Path | None) -> ModelConfig:
    """`model` with the path of a shipped config in place of its name, unless a config of that name is there."""
    here = (base or Path()) / model.config
    if model.config not in shipped_models() or here.is_file() or (here / "config.json").is_file():
        return model
    return dataclasses.replace(model, config=str(model_path(model.config)))


def _rebase(section: Any, base: Path, **untouched: str | None) -> Any:
    """`section` with the named paths made absolute from `base`, save the values that aren't paths."""
    moved = {
        key: str((base / getattr(section, key)).resolve())
        for key, special in untouched.items()
        if getattr(section, key) != special
    }
    return dataclasses.replace(section, **moved)


def _check_paths(config: RunConfig) -> None:
    """Raises: ConfigError for a path that is written and empty: it would mean the folder of the run.toml."""
    paths = {"data.path": config.data.path, "output.dir": config.output.dir, "model.weights": config.model.weights}
    for name, value in paths.items():
        if not value:
            raise ConfigError(name, got="an empty path", allowed="a path", remedy=f"name one, or leave {name} out")


def _check_numbers(config: RunConfig) -> None:
    positive = {
        "data.seq_len": config.data.seq_len, "train.batch": config.train.batch, "launch.ranks": config.launch.ranks,
        "train.micro_batches": config.train.micro_batches, "train.lr": config.train.lr,
        "train.steps": config.train.steps,
        "output.keep": config.output.keep, "train.eps": config.train.eps, "launch.timeout_s": config.launch.timeout_s,
        "data.tokenizer_vocab": config.data.tokenizer_vocab, "train.evaluate_batches": config.train.evaluate_batches,
    }  # fmt: skip
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(name, got=value, allowed="more than 0", remedy=f"raise {name}")
    counts = {
        "train.warmup": config.train.warmup, "train.clip": config.train.clip, "train.seed": config.train.seed,
        "train.evaluate_every": config.train.evaluate_every,
        "train.weight_decay": config.train.weight_decay, "train.router_bias_rate": config.train.router_bias_rate,
        "output.checkpoint_every": config.output.checkpoint_every,
        "output.lock_timeout_s": config.output.lock_timeout_s,
    }  # fmt: skip
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(name, got=value, allowed="0 or more", remedy=f"raise {name}")
    for name, value in (("betas[0]", config.train.betas[0]), ("betas[1]", config.train.betas[1])):
        if not 0 <= value < 1:
            raise ConfigError(f"train.{name}", got=value, allowed="0 <= beta < 1", remedy="e.g. betas = [0.9, 0.95]")
    if not 0 <= config.train.min_lr_ratio <= 1:
        raise ConfigError("train.min_lr_ratio", got=config.train.min_lr_ratio, allowed="0 to 1", remedy="e.g. 0.1")
    if config.train.evaluate_every and not config.data.validation:
        raise ConfigError("train.evaluate_every", got=config.train.evaluate_every, allowed="0 without data.validation",
                          remedy="set data.validation to a text of its own, or leave evaluate_every out")  # fmt: skip
    _check_division(config)


def _check_division(config: RunConfig) -> None:
    mesh, length = config.launch.mesh(), config.data.seq_len
    if length % mesh.sequence:
        nearest = length - length % mesh.sequence
        raise ConfigError(
            "data.seq_len", got=f"{length} over {mesh.sequence} ranks of a sequence",
            allowed=f"a multiple of {mesh.sequence}", remedy=f"set seq_len = {nearest or mesh.sequence}",
        )  # fmt: skip
