"""Sequence parallelism equals the whole sequence on one rank, for every attention of the six families."""

from __future__ import annotations

import pytest
import torch

from steppe.core.errors import ConfigError, ConflictError
from steppe.integrations.attention import document_bounds, packed_attention
from steppe.integrations.ulysses import Ulysses
from steppe.runtime import collectives
from tests.support.exactness import assert_reordered
from tests.support.float64 import FAMILIES, toy_config, toy_model
from tests.support.ranks import run_ranks

LENGTH = 48
DOCUMENTS = ([(0, 7), (7, 40), (40, 48)], [(0, 48)])


def _positions() -> torch.Tensor:
    return torch.tensor([[i - start for start, end in row for i in range(start, end)] for row in DOCUMENTS])


def _whole_attention(q, k, v, scaling, window, sinks):  # type: ignore[no-untyped-def]
    """The same numbers with a whole [S,S] mask and score matrix."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    document = torch.tensor([[n for n, (start, end) in enumerate(row) for _ in range(start, end)] for row in DOCUMENTS])
    ahead = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    mask = (ahead >= 0) & (ahead < (window or LENGTH)) & (document[:, :, None] == document[:, None, :])
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~mask[:, None], float("-inf"))
    if sinks is None:
        return torch.softmax(scores, -1) @ v
    sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1] @ v


def test_documents_are_found_where_positions_restart() -> None:
    assert [list(row) for row in document_bounds(_positions())] == [list(row) for row in DOCUMENTS]
    shifted = torch.arange(100, 110)[None]
    assert document_bounds(shifted) == [[(0, 10)]]


@pytest.mark.parametrize("window", [None, 5, 16, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_attention_is_whole_attention_without_the_whole_mask(window: int | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    shapes = [(2, 4, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 8)]
    truth_in = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    upstream = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64)

    def run(fn, dtype):  # type: ignore[no-untyped-def]
        inputs = [x.detach().to(dtype).requires_grad_() for x in (*truth_in, *([sinks] if with_sinks else []))]
        out = fn(*inputs[:3], inputs[3] if with_sinks else None)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(x.grad for x in inputs)]

    def ours(q, k, v, s):  # type: ignore[no-untyped-def]
        # few rows a slice, so that slices end in the middle of documents and windows
        return packed_attention(q, k, v, DOCUMENTS, scaling=0.25, window=window, sinks=s, slice_bytes=4 * 4 * 40 * 7)

    def plain(q, k, v, s):  # type: ignore[no-untyped-def]
        return _whole_attention(q, k, v, 0.25, window, s)

    truth = run(plain, torch.float64)
    for what, mine, theirs, true in zip(
        ("out", "q", "k", "v", "sinks"), run(ours, torch.float32), run(plain, torch.float32), truth, strict=False
    ):
        assert_reordered(mine, theirs, true, length=LENGTH, what=what)


def _parity(rank: int, world_size: int, family: str, packed: bool) -> dict[str, torch.Tensor]:
    """Loss gradients of all parameters, summed over ranks, and this rank's logits."""
    model = toy_model(family, num_attention_heads=4).train()
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 256
    positions = _positions() if packed else torch.arange(LENGTH).expand(2, LENGTH)
    group = collectives.world()
    Ulysses(model, group)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    own = slice(rank * LENGTH // world_size, (rank + 1) * LENGTH // world_size)
    kwargs = {"position_ids": positions[:, own]} if packed else {}
    logits = model(input_ids=ids[:, own], **kwargs).logits
    logits.square().sum().backward()
    grads = {n: collectives.all_reduce(p.grad, group) for n, p in model.named_parameters() if p.grad is not None}
    whole = collectives.all_gather(logits.detach(), group)
    return {"logits": whole.transpose(0, 1).flatten(1, 2), **grads}


def _one_process(family: str, packed: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model on one process with an explicit mask (gpt-oss would let packed documents see each other)."""
    from steppe.integrations.float64 import float64_truth

    model = toy_model(family, num_attention_heads=4).train()
    if dtype == torch.float64:
        model = float64_truth(model)
    else:
        model.set_attn_implementation("eager")
    positions = _positions() if packed else torch.arange(LENGTH).expand(2, LENGTH)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 256
    masks = _masks(model, positions, dtype)
    logits = model(input_ids=ids, position_ids=positions, attention_mask=masks).logits
    logits.square().sum().backward()
    return {"logits": logits.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def _masks(model, positions, dtype):  # type: ignore[no-untyped-def]
    document = torch.cumsum(positions == 0, dim=1)
    ahead = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]

    def additive(window: int) -> torch.Tensor:
        seen = (ahead >= 0) & (ahead < window) & (document[:, :, None] == document[:, None, :])
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]

    if model.config.model_type != "gpt_oss":
        return additive(LENGTH)
    return {"full_attention": additive(LENGTH), "sliding_attention": additive(model.config.sliding_window)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("world_size", "packed"), [(1, True), (2, False), (4, True)])
def test_ulysses_equals_the_whole_sequence_on_one_rank(family: str, world_size: int, packed: bool) -> None:
    ours = run_ranks(_parity, world_size, family, packed)[0]
    plain = _one_process(family, packed, torch.float32)
    truth = _one_process(family, packed, torch.float64)
    assert ours.keys() == plain.keys() == truth.keys()
    for name, value in ours.items():
        assert_reordered(value, plain[name], truth[name], length=LENGTH * 2 * world_size, what=f"{family} {name}")


def test_more_ranks_than_heads_allow_are_refused() -> None:
    from steppe.integrations.ulysses import _check_heads

    with pytest.raises(ConfigError, match=r"divisor of 4 heads: \[1, 2, 4\]"):
        _check_heads(toy_config("qwen3_moe"), 3)


def test_padding_is_refused_with_the_remedy() -> None:
    model = toy_model("qwen3_moe")
    handle = Ulysses(model, None)
    with pytest.raises(ConflictError, match="pack documents"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), attention_mask=torch.tensor([[0, 1, 1, 1]]))
    handle.detach()


def test_detaching_gives_the_models_own_attention_back() -> None:
    model = toy_model("qwen3_moe").eval()
    ids = torch.arange(LENGTH)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        handle = Ulysses(model, None)
        model(input_ids=ids)
        handle.detach()
        assert torch.equal(model(input_ids=ids).logits, before)
