"""No double work: with all four on, every product and every copy is that of the flatteners' own laws, no more."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steppe.compose import flatten_peaks
from steppe.core.shapes import MeshShape
from steppe.flatteners import NAMES
from steppe.runtime import collectives, scopes
from steppe.runtime.link import HostLink, _ServedLane
from tests.composition.programs import LABELS, LENGTH, ROWS, own, policies, tokens
from tests.support.float64 import toy_model
from tests.support.ranks import run_ranks

LAYERS, HIDDEN, WIDTH, VOCAB, CHOICES = 4, 32, 16, 256, 2
ROUTES = ROWS * LENGTH * CHOICES * LAYERS
EXPERT_PASS = 2 * ROUTES * 3 * HIDDEN * WIDTH  # multiply-adds twice, three matrices [H,I]
HEAD_PASS = 2 * LABELS * VOCAB * HIDDEN
HEAD_PASS_WHOLE = 2 * ROWS * LENGTH * VOCAB * HIDDEN  # plain cross-entropy makes the ignored rows' logits, too
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class Products(TorchDispatchMode):
    """Floating-point operations of every matrix product, by the label it ran under."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.removesuffix("_") in _PRODUCTS:
            matrices = [a for a in args if isinstance(a, torch.Tensor) and a.dim() >= 2][-2:]
            self.flops[scopes.current()] += 2 * matrices[0].numel() * matrices[1].shape[-1]
        return func(*args, **kwargs or {})


def _counted(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, Any]:
    """One step after another one; what the second did, summed over ranks where that makes sense."""
    moved: Counter[str] = Counter()
    _count_bytes(moved)
    groups = {size: world_size for name, size in (("dispatch", "expert"), ("vocab", "vocab")) if name in names}
    mesh = MeshShape(world_size, **groups)
    model = toy_model("qwen3_moe", num_hidden_layers=LAYERS).train()
    model.set_experts_implementation("eager")  # its products are plain ones, so that they can be counted
    chosen = policies(names, boundary={"min_bytes": 4096})  # a rank's [N,H], and no rotary table
    made = flatten_peaks(model, chosen, mesh=mesh, link=HostLink(torch.device("cpu"), rate=1e12))
    optimizer = made.optimizer(0.01)
    counted = {}
    for step in range(2):
        moved.clear()
        before = _totals(made)
        products = Products()
        with products:
            ids = tokens(step)[own(mesh, rank)]
            model(input_ids=ids, labels=ids, num_items_in_batch=LABELS, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = _totals(made)
        counted = {name: after[name] - before[name] for name in after}
    counted |= {f"flops of {label}": flops for label, flops in products.flops.items()}
    counted |= {f"bytes {lane}": num_bytes for lane, num_bytes in moved.items()}
    counted["elements"] = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
    made.close()
    names = sorted(counted)
    total = collectives.all_reduce(torch.tensor([counted[n] for n in names], dtype=torch.float64), collectives.world())
    return dict(zip(names, total.tolist(), strict=True))


def _totals(made: Any) -> dict[str, float]:
    """The flatteners' own counters."""
    totals: dict[str, float] = {}
    stats = made.stats()
    if "dispatch" in stats and (layers := stats["dispatch"]["layers"]):
        for name in ("forwards", "backwards", "recomputes"):
            totals[name] = sum(getattr(layer, name) for layer in layers)
        totals |= {name: stats["dispatch"]["counters"].get(name, 0) for name in ("flops", "wire_bytes")}
    if "vocab" in stats:
        totals["multiply_adds"] = stats["vocab"].multiply_adds
    if "boundary" in stats:
        totals |= {name: getattr(stats["boundary"], name) for name in ("bytes_offloaded", "bytes_reloaded")}
    return totals


def _count_bytes(moved: Counter[str]) -> None:
    """Every lane of every link of this process counts what it is asked to move, into the last counter given."""
    _Counting.moved = moved
    _ServedLane.run, _ServedLane.copy = _Counting.run, _Counting.copy


class _Counting:
    moved: Counter[str]
    _run, _copy = _ServedLane.run, _ServedLane.copy

    def run(self: Any, job: Any, **options: Any) -> Any:
        _Counting.moved[self.name] += options.get("num_bytes", 0)
        return _Counting._run(self, job, **options)

    def copy(self: Any, dst: torch.Tensor, src: torch.Tensor, **options: Any) -> Any:
        _Counting.moved[self.name] += src.numel() * src.element_size()
        return _Counting._copy(self, dst, src, **options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_four_do_the_work_of_their_laws_and_nothing_twice(world_size: int) -> None:
    found = run_ranks(_counted, world_size, NAMES)[0]
    # experts: one pass forward, the first product again and two passes of gradients
    assert found["forwards"] == found["backwards"] == LAYERS * world_size
    assert found["flops"] == found["flops of dispatch"] == round(EXPERT_PASS * (1 + 2 / 3 + 2))
    # vocabulary: logits once, two gradients
    assert 2 * found["multiply_adds"] == found["flops of vocab"] == 3 * HEAD_PASS
    # boundaries: every block's input but the last one's, once each way
    boundaries = (LAYERS - 1) * ROWS * LENGTH * HIDDEN * 4
    assert found["bytes_offloaded"] == found["bytes_reloaded"] == boundaries
    assert found["bytes boundary out"] == found["bytes boundary in"] == boundaries
    # optimizer: every gradient and every parameter once
    assert found["bytes gradients"] == found["bytes parameters"] == 4 * found["elements"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_flatteners_leave_to_the_model_is_computed_as_often_as_with_plain_checkpoints(world_size: int) -> None:
    """SCO alone is the plain checkpointed program: experts 4 passes with their recompute, the head 3."""
    alone = run_ranks(_counted, world_size, ("boundary",))[0]
    together = run_ranks(_counted, world_size, NAMES)[0]
    checkpointed = sum(flops for name, flops in alone.items() if name.startswith("flops of "))
    assert together["flops of other"] == checkpointed - 4 * EXPERT_PASS - 3 * HEAD_PASS_WHOLE
    assert together["bytes boundary out"] == alone["bytes boundary out"]
    wire = run_ranks(_counted, world_size, ("dispatch",))[0]
    assert together["wire_bytes"] == wire["wire_bytes"]
    assert (wire["wire_bytes"] > 0) == (world_size > 1)
