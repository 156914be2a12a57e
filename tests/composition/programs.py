"""One toy batch trained by the plain program in one process, by its float64 truth, and by ranks with flatteners."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from steppe.compose import Flattened, flatten_peaks
from steppe.core.shapes import MeshShape
from steppe.integrations.float64 import float64_truth
from steppe.planner.plan import policy_class
from steppe.runtime import collectives
from tests.composition.covering import SUBSETS, WORLDS, Row
from tests.support.exactness import assert_error, assert_reordered, relative_error
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

ROWS, LENGTH, STEPS = 4, 24, 5
BATCHES = 12  # over which the plain bfloat16 program shows its own error
LR = {"float32": 0.02, "bfloat16": 0.002}
LABELS = ROWS * (LENGTH - 1)
SMALL = {"dispatch": {"chunk_tokens": 7}, "boundary": {"min_bytes": 0}, "optimizer": {"bucket_bytes": 4096}}
Seen = dict[str, torch.Tensor]


def policies(names: tuple[str, ...], **changes: dict[str, Any]) -> dict[str, Any]:
    """Policies so small that a toy goes through several chunks, strips and buckets; `changes` by flattener."""
    return {name: policy_class(name)(**SMALL.get(name, {}) | changes.get(name, {})) for name in names}


def tokens(step: int) -> torch.Tensor:
    """[ROWS, LENGTH] of all ranks."""
    return torch.randint(256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def own(mesh: MeshShape, rank: int) -> tuple[slice, slice]:
    """This rank's rows and its slice of each; ranks of a sequence are neighbours."""
    rows, length = ROWS * mesh.sequence // mesh.world, LENGTH // mesh.sequence
    row, part = rank // mesh.sequence, rank % mesh.sequence
    return slice(row * rows, (row + 1) * rows), slice(part * length, (part + 1) * length)


def weights_of(family: str, dtype: str) -> Any:
    """The toy in its type. In bfloat16 its routes are settled: else a rounding moves a token to another expert, and
    two right programs differ by a whole token. What its family keeps in float32 stays there, as it does when
    transformers loads it."""
    model: Any = toy_model(family).train()
    if dtype == "float32":
        return model
    wide = tuple(model._keep_in_fp32_modules_strict or ())
    return narrowed(settle(model), dtype, wide)


def narrowed(model: Any, dtype: str, wide: tuple[str, ...]) -> Any:
    """The model in another type, save the parameters and buffers whose names end in `wide`."""
    kept = {name: t.detach().clone() for name, t in model.state_dict().items() if name.endswith(wide)} if wide else {}
    model.to(getattr(torch, dtype))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in kept:
            tensor.data = kept[name]
    return model


@torch.no_grad()
def settle(model: Any) -> Any:
    """Every token's embedding leads to two experts by a margin that no rounding crosses; the first ones are hot."""
    embedding = model.get_input_embeddings().weight
    num_experts = 8
    for token, row in enumerate(embedding):
        row *= 2
        first = token % num_experts if token % 3 else token % 2  # a third of the tokens go to two experts alone
        second = first ^ 1  # of one group, where a router chooses groups first
        row[first] += 1.0
        row[second] += 0.6
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.gate.weight", "router.weight")):
            weight[:, :num_experts] += 0.5 * torch.eye(num_experts)
    return model


def train(model: Any, optimizer: Any, mine: tuple[slice, slice], total: Callable[[torch.Tensor], torch.Tensor]) -> Seen:
    """STEPS of AdamW: each step's loss over all ranks, and the first step's gradients, whole."""
    seen: Seen = {}
    for step in range(STEPS):
        ids = tokens(step)[mine]
        loss = model(input_ids=ids, labels=ids, num_items_in_batch=LABELS, use_cache=False).loss
        loss.backward()
        seen[f"loss {step}"] = total(loss.detach().reshape(1).clone())
        if step == 0:
            for name, parameter in model.named_parameters():
                seen[name] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return seen


def whole(gradient: Any) -> torch.Tensor:
    """A gradient of all ranks, copied."""
    full: torch.Tensor = getattr(gradient, "full_tensor", gradient.clone)()
    return full.detach().clone()


def flattened_toy(row: Row) -> Flattened:
    """The row's model with its flatteners on its groups; bfloat16 gradients are summed over ranks in float32."""
    model = weights_of(row.family, row.dtype)
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return flatten_peaks(model, policies(row.names), mesh=row.mesh, mp_policy=precision)


def flattened(rank: int, world_size: int, row: Row) -> Seen:
    made = flattened_toy(row)
    optimizer = made.optimizer(LR[row.dtype], weight_decay=0.1)
    group = collectives.world()
    seen = train(made.model, optimizer, own(row.mesh, rank), lambda loss: collectives.all_reduce(loss, group))
    assert made.stats().keys() >= set(row.names)
    made.detach()
    return seen if rank == 0 else {}


@cache
def plain(family: str, dtype: str, *, exact: bool = False) -> Seen:
    """The plain program on the whole batch in one process; `exact`: in float64, from the same weights."""
    model = weights_of(family, dtype)
    model = float64_truth(model) if exact else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR[dtype], weight_decay=0.1)
    return train(model, optimizer, (slice(None), slice(None)), lambda loss: loss)


@cache
def of_ranks(row: Row) -> Seen:
    """The row's run, once for all tests that ask."""
    found: Seen = run_ranks(flattened, row.world, row)[0]
    return found


@cache
def own_errors(family: str) -> dict[str, float]:
    """How far the plain bfloat16 program is from float64 by itself: what one more batch's relative error of the loss
    and of each kind of gradient may be, after BATCHES batches and all layers. One draw of a router's or a norm's few
    numbers may be ten times nearer than the next."""
    seen: dict[str, list[float]] = {}
    narrow, exact = weights_of(family, "bfloat16"), float64_truth(weights_of(family, "bfloat16"))
    for batch in range(BATCHES):
        theirs, truth = (gradients(model, tokens(batch)) for model in (narrow, exact))
        for name, value in theirs.items():
            seen.setdefault(kind(name), []).append(relative_error(value, truth[name]))
    judgements = len(SUBSETS) * len(WORLDS) * sum(map(len, seen.values())) // BATCHES  # of the grid's rows of a family
    return {name: one_more(errors, judgements) for name, errors in seen.items()}


def one_more(errors: list[float], judgements: int) -> float:
    """What one more draw of the same distribution stays below, but for one in `judgements`: these many are made, and
    the largest of a dozen draws would be passed by one in thirteen of a right program's. Logs of relative errors,
    which are norms of many roundings, are nearly normal."""
    logs = [math.log(error) for error in errors if error > 0]
    if len(logs) < 2:
        return max(errors)
    beyond = NormalDist.from_samples(logs).inv_cdf(1 - 1 / judgements)
    return max(*errors, math.exp(beyond))


def kind(name: str) -> str:
    """A tensor's name without its layer's number."""
    return re.sub(r"\.\d+\.", ".", name)


def gradients(model: Any, ids: torch.Tensor) -> Seen:
    """The loss and all gradients of one batch."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=LABELS, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: whole(p.grad) for name, p in model.named_parameters()}}


def judge(row: Row) -> None:
    """Raise AssertionError where a loss or a gradient is farther from the truth than the plain program's may be."""
    ours, theirs, truth = of_ranks(row), plain(row.family, row.dtype), plain(row.family, row.dtype, exact=True)
    assert ours.keys() == theirs.keys() == truth.keys()
    if row.dtype == "bfloat16":
        judge_rounded(row, ours, theirs, truth)
        return
    for name, value in ours.items():
        # After AdamW's steps a loss is a function of every gradient: the sums behind it are as long as all of them.
        length = ROWS * LENGTH * 256 if name.startswith("loss") else ROWS * LENGTH * row.world
        assert_reordered(value, theirs[name], truth[name], length=length, what=f"{row.title} {name}")


def judge_rounded(row: Row, ours: Seen, theirs: Seen, truth: Seen) -> None:
    """Each tensor against the plain program's own errors, and all gradients together against this batch's."""
    errors = own_errors(row.family)
    losses = [name for name in ours if name.startswith("loss")]
    of_loss = max(errors["loss"], *(relative_error(theirs[name], truth[name]) for name in losses))
    for name in losses:
        assert_error(ours[name], truth[name], of_loss, length=ROWS * LENGTH * 256, what=f"{row.title} {name}")
    rest = [name for name in ours if name not in losses]
    for name in rest:
        allowed = max(errors[kind(name)], relative_error(theirs[name], truth[name]))
        assert_error(ours[name], truth[name], allowed, length=ROWS * LENGTH * row.world, what=f"{row.title} {name}")
    mine, plains, trues = (torch.cat([unit(seen, truth, name) for name in rest]) for seen in (ours, theirs, truth))
    together = relative_error(plains, trues)
    length, dtype = ROWS * LENGTH * row.world, torch.bfloat16
    assert_error(mine, trues, together, length=length, dtype=dtype, what=f"{row.title}, all gradients")


def unit(seen: Seen, truth: Seen, name: str) -> torch.Tensor:
    """A gradient in units of its true norm, so that every tensor weighs the same."""
    value, norm = seen[name].flatten().double(), truth[name].norm()
    return value if norm == 0 else value / norm
