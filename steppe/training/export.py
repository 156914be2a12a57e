"""Export to Hugging Face safetensors in a directory that `from_pretrained` loads; no rank ever holds a full tensor.

The files are laid out beforehand, and every rank writes its own elements to their place in them. So all ranks have to
see one directory, as they have to for checkpoints.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from steppe.core.errors import ConfigError
from steppe.integrations import checkpoint_files as files
from steppe.runtime import collectives
from steppe.runtime.sharded import answers_for
from steppe.training.agreement import on_rank_zero, together
from steppe.training.tokens import TOKENIZER_FILES, end_token_id, tokenizer_files

_SHARD_BYTES = 2 * 10**9
_CONFIGS = ("config.json", "generation_config.json")  # what save_pretrained of a configuration writes


def shard_plan(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut into files of at most `shard_bytes` (or one tensor, where that alone is larger)."""
    plan: list[list[str]] = []
    room = 0
    for name, num_bytes in sizes.items():
        if not plan or num_bytes > room:
            plan.append([])
            room = shard_bytes
        plan[-1].append(name)
        room -= num_bytes
    return plan


def export(
    model: Any, directory: Path, group: collectives.Group, *, tokenizer_file: str = "", shard_bytes: int = _SHARD_BYTES,
    piece_bytes: int = files.PIECE_BYTES,
) -> None:  # fmt: skip
    """Write config, tokenizer and weights, each rank its own part; names and shapes are those of `save_pretrained`.

    An earlier export in `directory` is replaced. Peak: one piece of `piece_bytes` on the host.
    Raises: ConfigError for a directory that holds anything else; OSError and RankFailure. On all ranks, and what stood
        in `directory` before is then still there.
    """
    directory = directory.resolve()
    on_rank_zero(lambda: check_target(directory), group)
    if isinstance(model, FSDPModule):
        model.reshard()
    tensors = files.tensors_of(model)
    regions = {region.key: region for region in files.regions(model, tensors)}
    sizes = {key: (r.stop - r.start) * tensors[r.owner].element_size() for key, r in regions.items()}
    plan, dtypes = shard_plan(sizes, shard_bytes), {name: t.dtype for name, t in tensors.items()}
    laid_out = [
        files.plan_file(f"model-{n:05d}-of-{len(plan):05d}.safetensors", [regions[key] for key in keys], dtypes)
        for n, keys in enumerate(plan, 1)
    ]
    mine = frozenset(name for name, tensor in tensors.items() if answers_for(tensor, group))
    work = directory.with_name(f".{directory.name}.tmp")
    on_rank_zero(lambda: _start(model, work, laid_out, sum(sizes.values()), tokenizer_file), group)
    together(lambda: [files.write_own(file, work, tensors, mine, piece_bytes) for file in laid_out], group)
    on_rank_zero(lambda: _finish(work, directory), group)


def check_target(directory: Path) -> None:
    """Raises: ConfigError where an export would take the place of anything but an earlier export."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise _taken(directory, "a file")
    foreign = sorted(path.name for path in directory.iterdir() if not (path.is_file() and _is_ours(path.name)))
    if foreign:
        raise _taken(directory, f"a directory with {foreign[0]!r} in it ({len(foreign)} in all that are no export's)")


def _is_ours(name: str) -> bool:
    return name.endswith(".safetensors") or name in (files.INDEX, *_CONFIGS, *TOKENIZER_FILES)


def _taken(directory: Path, got: str) -> ConfigError:
    return ConfigError(
        f"export to {directory}", got=got, allowed="a new or empty directory, or an earlier export, which is replaced",
        remedy="name a directory of its own",
    )  # fmt: skip


def _start(model: nn.Module, work: Path, laid_out: list[files.File], total: int, tokenizer_file: str) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if tokenizer_file:
        for path in tokenizer_files(tokenizer_file):
            shutil.copyfile(path, work / path.name)
        if getattr(config, "eos_token_id", None) is None:  # so that generation ends where documents do
            config.eos_token_id = end_token_id(tokenizer_file)
    config.save_pretrained(work)
    for file in laid_out:
        files.create(file, work)
    weight_map = {region.key: file.name for file in laid_out for region in file.regions}
    body = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (work / files.INDEX).write_text(json.dumps(body, indent=1, sort_keys=True))


def _finish(work: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    work.rename(directory)
