"""Whole logits from a sharded head, for generation: few rows, no gradient, no gathered weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from steppe.core.errors import ConfigError
from steppe.runtime import collectives
from steppe.runtime.collectives import Group

Tensor = torch.Tensor


def vocab_parallel_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """[...,H] -> [...,V]: the rows of all ranks meet every shard, and each rank gets its own rows' logits back.

    Peak: logits of this rank's rows, and of all ranks' rows over this shard.
    Exactness: bitwise but for the GEMM's choice of kernel by shape.
    Raises: ConfigError where gradients are wanted on more than one rank: that is what the loss is for.
    """
    if collectives.size(group) == 1:
        return F.linear(hidden, weight, bias)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        raise ConfigError(
            "logits of a sharded head", got="gradients enabled", allowed="torch.no_grad()",
            remedy="give labels, so that the loss goes through the ring, or switch gradients off",
        )  # fmt: skip
    rows = hidden.reshape(-1, hidden.shape[-1])
    ranks = range(collectives.size(group))
    table = collectives.all_gather(torch.tensor([rows.shape[0], weight.shape[0]], device=rows.device), group).tolist()
    lengths, shards = zip(*table, strict=True)
    starts = [sum(lengths[:rank]) for rank in (*ranks, len(ranks))]
    met = rows.new_empty((starts[-1], rows.shape[1]))
    places = [met[starts[rank] : starts[rank + 1]] for rank in ranks]
    own = rows.contiguous()
    collectives.exchange([(own, rank) for rank in ranks], list(zip(places, ranks, strict=True)), group).wait()
    mine = F.linear(met, weight, bias)
    parts = [mine.new_empty((rows.shape[0], shard)) for shard in shards]
    sends = [(mine[starts[rank] : starts[rank + 1]], rank) for rank in ranks]
    collectives.exchange(sends, list(zip(parts, ranks, strict=True)), group).wait()
    return torch.cat(parts, 1).view(*hidden.shape[:-1], sum(shards))
