"""Ranks agree on a call before anything is sent: lengths, options, labels, and whether one of them refuses.

One all-gather of a few integers and one look at them on the host. Everything after it is a function of these integers,
so that ranks can't take different numbers of steps; and whatever is wrong anywhere is raised everywhere, with the same
words, before the first block travels.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from steppe.core.errors import CollectiveTimeout, ConfigError, DataError, Refusal, ShapeError
from steppe.runtime import collectives
from steppe.runtime.collectives import Group

Tensor = torch.Tensor


@dataclass(frozen=True)
class Agreement:
    """Per rank: rows that count, vocabulary rows of its shard, lowest and highest label; and the smallest budget."""

    counted: tuple[int, ...]
    shards: tuple[int, ...]
    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    budget_bytes: int


def agree(
    labels: Tensor, valid: Tensor, *, shard_rows: int, budget_bytes: int, must_match: dict[str, object],
    refusal: Refusal | None, group: Group,
) -> Agreement:  # fmt: skip
    """Exchange the integers of a call; `must_match` are the things that may not differ between ranks.

    Raises: this rank's `refusal`, or one that quotes another rank's; ConfigError where ranks were called differently;
    CollectiveTimeout where another rank never came.
    """
    codes = [zlib.crc32(repr(value).encode()) for value in must_match.values()]
    own = labels.new_tensor([int(refusal is not None), shard_rows, budget_bytes, *codes])
    marked = torch.where(valid, labels, 0) if labels.numel() else labels.new_zeros(1)
    counted = torch.stack([valid.sum(), marked.amin(), marked.amax()])
    try:
        table = collectives.all_gather(torch.cat([own, counted]), group).tolist()
    except RuntimeError as failure:
        raise CollectiveTimeout(
            f"vocabulary head: rank {collectives.rank(group)} waited for the other ranks' lengths; one of them failed "
            f"or never came ({failure})"
        ) from failure
    if any(row[0] for row in table):
        _refuse(refusal, group)
    for place, name in enumerate(must_match, start=3):
        if len({row[place] for row in table}) > 1:
            raise ConfigError(
                f"vocabulary head on {len(table)} ranks: {name}", got="different values on different ranks",
                allowed="the same on every rank of the group", remedy=f"give every rank the same {name}",
            )  # fmt: skip
    columns = list(zip(*table, strict=True))
    return Agreement(columns[-3], columns[1], columns[-2], columns[-1], min(columns[2]))


def _refuse(refusal: Refusal | None, group: Group) -> None:
    told = collectives.all_gather_object(None if refusal is None else str(refusal), group)
    if refusal is not None:
        raise refusal
    rank, words = next((rank, words) for rank, words in enumerate(told) if words is not None)
    raise ShapeError(
        f"vocabulary head: rank {rank} refused its input", got=words, allowed="valid input on every rank",
        remedy=f"mend the input of rank {rank}",
    )  # fmt: skip


def check_labels(agreed: Agreement, vocab: int, ignore_index: int | None, what: str = "label") -> None:
    """The same DataError on every rank where any rank holds a label (or token id) outside the vocabulary."""
    for rank, (low, high) in enumerate(zip(agreed.lowest, agreed.highest, strict=True)):
        if low < 0 or high >= vocab:
            raise DataError(
                f"{what} out of range", got=f"{low if low < 0 else high} on rank {rank} of the vocabulary group",
                allowed=f"0 to {vocab - 1}" + ("" if ignore_index is None else f", or ignore_index {ignore_index}"),
                remedy="check the tokenizer against the model's vocabulary",
            )  # fmt: skip
