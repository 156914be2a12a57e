"""Runs of a few seconds: toy models on a little text."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from steppe.training.config import RunConfig, parse
from tests.support.float64 import toy_config

_KEPT_OUT = (
    "dtype",
    "transformers_version",
    "architectures",
    "_attn_implementation",
    "rope_parameters",
    "id2label",
    "label2id",
)
TEXT = "\n\n".join(f"Section {n}. The {n * 37 % 101} steppes are as flat as {n * n} plains are." for n in range(400))


def toy_shape(family: str = "qwen3_moe", **changes: object) -> dict[str, Any]:
    """`model.shape` of a toy, without what transformers fills in by itself."""
    fields = toy_config(family, **{"vocab_size": 320, **changes}).to_dict()
    return {key: value for key, value in fields.items() if key not in _KEPT_OUT and value is not None}


def _write_texts(text: Path) -> None:
    """Whole or not there: several ranks may ask for one folder at once."""
    text.parent.mkdir(parents=True, exist_ok=True)
    fresh, half = Path(tempfile.mkdtemp(dir=text.parent)), len(TEXT) // 2
    (fresh / "a.txt").write_text(TEXT[:half])
    (fresh / "b.txt").write_text(TEXT[half:])
    try:
        fresh.rename(text)
    except OSError:  # another rank was first
        shutil.rmtree(fresh)


def toy_tables(folder: Path, family: str = "qwen3_moe", **shape: object) -> dict[str, Any]:
    """The tables of a run.toml: 2 blocks, rows of 32 tokens, two documents of real sentences."""
    text = folder / "texts"
    if not text.exists():
        _write_texts(text)
    return {
        "model": {"shape": toy_shape(family, **shape)},
        "data": {"path": str(text), "seq_len": 32, "tokenizer_vocab": 300},
        "train": {"steps": 6, "lr": 1e-2, "warmup": 2, "seed": 3},
        "output": {"dir": str(folder / "out")},
    }


def toy_run(folder: Path, family: str = "qwen3_moe", **sections: dict[str, Any]) -> RunConfig:
    """A RunConfig with fields of sections replaced: `toy_run(tmp_path, train={"steps": 3})`."""
    tables = toy_tables(folder, family)
    for name, fields in sections.items():
        tables[name] = {**tables.get(name, {}), **fields}
    return parse(tables)
