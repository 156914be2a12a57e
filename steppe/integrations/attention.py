"""Causal attention over packed documents, with sliding windows and sinks, one document and one slice at a time.

No [S,S] mask and no [S,S] score matrix exists: a document is attended by itself, a window by its band, and sinks (which
have no fused kernel) by slices of rows that are recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

Documents = Sequence[Sequence[tuple[int, int]]]

SLICE_BYTES: Final = 64 * 2**20  # of float32 scores with sinks, on all heads of a rank


def document_bounds(position_ids: torch.Tensor) -> Documents:
    """[B,S] positions -> for each row the (start, end) of its packed documents: a new one begins where a position
    isn't its predecessor's successor. One device-to-host copy."""
    bounds = []
    for row in position_ids.cpu():
        starts = [0, *((row[1:] != row[:-1] + 1).nonzero()[:, 0] + 1).tolist()]
        bounds.append(list(zip(starts, [*starts[1:], len(row)], strict=True)))
    return bounds


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    *,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    slice_bytes: int = SLICE_BYTES,
) -> torch.Tensor:
    """Causal attention of [B,heads,S,d] within each document; key and value heads divide the query's.

    Peak: one document's fused attention; with a window a [slice, slice + window] mask; with sinks `slice_bytes`.
    Exactness: reordered over softmax(q k' scaling + mask) v on the whole sequence.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))
    rows = []
    for b, row in enumerate(documents):
        parts = []
        for start, end in row:
            q, k, v = (x[b : b + 1, :, start:end] for x in (query, key, value))
            if sinks is not None:
                parts.append(_with_sinks(q, k, v, sinks, scaling, window, dropout, slice_bytes))
            elif window is not None and end - start > window:
                parts.append(_banded(q, k, v, scaling, window, dropout))
            else:
                parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, dropout_p=dropout))
        rows.append(torch.cat(parts, dim=2))
    return torch.cat(rows)


def _visible(start: int, end: int, first: int, window: int | None, device: torch.device) -> torch.Tensor:
    """[end-start, end-first] which keys from `first` on the queries start..end see."""
    ahead = torch.arange(start, end, device=device)[:, None] - torch.arange(first, end, device=device)[None, :]
    return (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)


def _banded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int, dropout: float
) -> torch.Tensor:
    parts = []
    for start in range(0, q.shape[2], window):
        end, first = min(start + window, q.shape[2]), max(0, start - window + 1)
        mask = _visible(start, end, first, window, q.device)
        part = scaled_dot_product_attention(
            q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], mask, scale=scaling, dropout_p=dropout
        )
        parts.append(part)
    return torch.cat(parts, dim=2)


def _with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scaling: float, window: int | None,
    dropout: float, slice_bytes: int,
) -> torch.Tensor:  # fmt: skip
    length = q.shape[2]
    step = max(1, min(length, slice_bytes // (4 * q.shape[1] * length)))
    parts = []
    for start in range(0, length, step):
        end = min(start + step, length)
        first = 0 if window is None else max(0, start - window + 1)
        args = (q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], sinks, scaling, dropout)
        # The scores of a slice live in its forward and its backward only.
        parts.append(checkpoint(_sink_slice, *args, start, end, first, window, use_reentrant=False))
    return torch.cat(parts, dim=2)


def _sink_slice(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scaling: float, dropout: float,
    start: int, end: int, first: int, window: int | None,
) -> torch.Tensor:  # fmt: skip
    scores = (q @ k.transpose(2, 3)) * scaling
    scores = scores.masked_fill(~_visible(start, end, first, window, q.device), float("-inf"))
    sink = sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    seen = torch.softmax(torch.cat([scores, sink.to(scores.dtype)], dim=-1), dim=-1)[..., :-1]
    return drop(seen, dropout, training=dropout > 0).to(v.dtype) @ v
