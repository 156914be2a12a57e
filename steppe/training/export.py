"""Export to Hugging Face safetensors, one full tensor at a time, in a directory that `from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from steppe.runtime import collectives
from steppe.training.agreement import on_rank_zero

_SHARD_BYTES = 2 * 10**9


def shard_plan(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut into files of at most `shard_bytes` (or one tensor, where that alone is larger)."""
    files: list[list[str]] = []
    room = 0
    for name, num_bytes in sizes.items():
        if not files or num_bytes > room:
            files.append([])
            room = shard_bytes
        files[-1].append(name)
        room -= num_bytes
    return files


def export(
    model: Any, directory: Path, group: collectives.Group, *, tokenizer_file: str = "", shard_bytes: int = _SHARD_BYTES,
) -> None:  # fmt: skip
    """Write config, tokenizer and weights; all ranks take part, rank 0 writes.

    Peak: one file of `shard_bytes` and one full tensor, on the host of rank 0; one full tensor elsewhere.
    """
    if isinstance(model, FSDPModule):
        model.reshard()
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    tensors |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    files = shard_plan({name: t.numel() * t.element_size() for name, t in tensors.items()}, shard_bytes)
    work = directory.with_name(f".{directory.name}.tmp")
    on_rank_zero(lambda: _start(model, work, tokenizer_file), group)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        index |= dict.fromkeys(names, file)
        whole = {name: _full(tensors[name]) for name in names}
        on_rank_zero(lambda whole=whole, file=file: _write(whole, work / file), group)  # type: ignore[misc]
    on_rank_zero(lambda: _finish(index, tensors, work, directory), group)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.cpu().contiguous()


def _start(model: nn.Module, work: Path, tokenizer_file: str) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config: Any = model.config
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(work)
    if tokenizer_file:
        shutil.copyfile(tokenizer_file, work / "tokenizer.json")


def _write(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})


def _finish(index: Mapping[str, str], tensors: Mapping[str, torch.Tensor], work: Path, directory: Path) -> None:
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    body = {"metadata": {"total_size": total}, "weight_map": dict(index)}
    (work / "model.safetensors.index.json").write_text(json.dumps(body, indent=1, sort_keys=True))
    shutil.rmtree(directory, ignore_errors=True)
    work.rename(directory)
