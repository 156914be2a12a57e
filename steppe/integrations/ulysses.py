"""Ulysses sequence parallelism for Hugging Face models: each of D ranks holds S/D tokens, attention sees S.

Around any model's attention an all-to-all turns [heads, S/D] into [heads/D, S] and back. The model gets local tokens
and local `position_ids`; global positions are gathered once a forward, since packed documents are known by them.
Local `labels` are shifted across the ranks' borders.
Source: Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from steppe.core.errors import ConfigError, ConflictError
from steppe.integrations.attention import Documents, document_bounds, packed_attention
from steppe.runtime import collectives
from steppe.runtime.collectives import Group

IGNORED = -100  # transformers' label of tokens without a loss
_serial = itertools.count()


class Ulysses:
    """Sequence parallelism joined to one model; `detach()` gives the model its own attention back."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = model, group
        self.num_ranks, self.rank = collectives.size(group), collectives.rank(group)
        _check_heads(model.config, self.num_ranks)
        self._before = model.config._attn_implementation
        self.name = f"steppe_ulysses_{next(_serial)}"
        # Dynamo would trace into the collectives and break the graph at each of their lines, instead of once here.
        _register(self.name, torch.compiler.disable(self.attend))
        model.set_attn_implementation(self.name)
        self._hook = model.register_forward_pre_hook(self._positions, with_kwargs=True)

    def detach(self) -> None:
        self._hook.remove()
        self.model.set_attn_implementation(self._before)

    def _positions(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give the model local positions that count globally, and note the documents they make up."""
        if (mask := kwargs.pop("attention_mask", None)) is not None and not bool(mask.all()):
            raise ConflictError(
                "sequence parallelism", got="an attention mask with padding", allowed="packed documents",
                remedy="pack documents and pass position_ids that restart at 0 for each",
            )  # fmt: skip
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):  # newer and older transformers
            raise ConflictError(
                "sequence parallelism", got="a cache of keys and values", allowed="whole forwards",
                remedy="detach() before generating: each rank then has whole sequences",
            )  # fmt: skip
        tokens = (
            next(kwargs[n] for n in ("input_ids", "inputs_embeds") if kwargs.get(n) is not None)
            if not args
            else args[0]
        )
        local = kwargs.get("position_ids")
        if local is None:
            length = tokens.shape[1]
            local = torch.arange(self.rank * length, (self.rank + 1) * length, device=tokens.device)
            local = local.expand(tokens.shape[0], length)
        local = local.expand(tokens.shape[0], -1).contiguous()
        local.steppe_documents = self._documents(local)
        if (labels := kwargs.get("labels")) is not None and kwargs.get("shift_labels") is None:
            kwargs["shift_labels"] = self._shifted(labels)
        return args, {**kwargs, "position_ids": local, "use_cache": False}

    def _shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """[B,S/D] each token's next label: the last one's is the next rank's first, and a sequence's end has none."""
        following = collectives.all_gather(labels[:, :1].contiguous(), self.group)  # [D,B,1]
        last = following[self.rank + 1] if self.rank + 1 < self.num_ranks else torch.full_like(labels[:, :1], IGNORED)
        return torch.cat([labels[:, 1:], last], dim=1)

    def _documents(self, local: torch.Tensor) -> Documents:
        gathered = collectives.all_gather(local, self.group)  # [D,B,S/D]
        return document_bounds(gathered.transpose(0, 1).reshape(local.shape[0], -1))

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """[B,heads,S/D,d] local heads in, [B,S/D,heads,d] out; transformers' attention interface."""
        assert position_ids is not None, "transformers passes position_ids to every attention"
        # A recompute whose positions came back as another tensor gathers again, on every rank alike.
        documents = getattr(position_ids, "steppe_documents", None) or self._documents(position_ids)
        key, value = (_spread(x, query.shape[1], self.num_ranks) for x in (key, value))
        query, key, value = (_ToHeads.apply(x, self.group) for x in (query, key, value))
        own = query.shape[1]
        sinks = None if s_aux is None else s_aux[self.rank * own : (self.rank + 1) * own]
        out = packed_attention(
            query, key, value, documents, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window, sinks=sinks, dropout=dropout,
        )  # fmt: skip
        return _ToTokens.apply(out, self.group).transpose(1, 2).contiguous(), None


def _register(name: str, attend: Any) -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(name, attend)
    # Without a mask function of the same name transformers would drop masks silently; ours are built in `attend`.
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _check_heads(config: Any, num_ranks: int) -> None:
    heads = config.num_attention_heads
    if heads % num_ranks:
        allowed = [d for d in range(1, heads + 1) if heads % d == 0]
        raise ConfigError("sequence group size D", got=num_ranks, allowed=f"a divisor of {heads} heads: {allowed}",
                          remedy="choose D among these")  # fmt: skip


def _spread(x: torch.Tensor, num_heads: int, num_ranks: int) -> torch.Tensor:
    """Repeat key or value heads until every rank gets the ones that its query heads want."""
    kv_heads = x.shape[1]
    if kv_heads % num_ranks == 0:
        return x
    repeats = num_ranks // kv_heads if num_ranks % kv_heads == 0 else num_heads // kv_heads
    return x.repeat_interleave(repeats, dim=1)


def _to_heads(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[B,heads,S/D,d] -> [B,heads/D,S,d]."""
    ranks = collectives.size(group)
    batch, heads, local, width = x.shape
    rows = x.view(batch, ranks, heads // ranks, local, width).transpose(0, 1).contiguous()
    out = torch.empty_like(rows)
    collectives.all_to_all(out, rows, [1] * ranks, [1] * ranks, group, "ulysses to heads").wait()
    return out.permute(1, 2, 0, 3, 4).reshape(batch, heads // ranks, ranks * local, width)


def _to_tokens(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[B,heads/D,S,d] -> [B,heads,S/D,d]."""
    ranks = collectives.size(group)
    batch, heads, length, width = x.shape
    rows = x.reshape(batch, heads, ranks, length // ranks, width).permute(2, 0, 1, 3, 4).contiguous()
    out = torch.empty_like(rows)
    collectives.all_to_all(out, rows, [1] * ranks, [1] * ranks, group, "ulysses to tokens").wait()
    return out.transpose(0, 1).reshape(batch, ranks * heads, length // ranks, width)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _to_heads(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_tokens(grad, ctx.group), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _to_heads(grad.contiguous(), ctx.group), None
