"""Buffers of a chunk, allocated once at the bound and shared by all layers, and the hooks that tests use.

A pool is handed to every layer. It lends its buffers to one pass of one layer at a time; nothing in them outlives the
chunk that wrote it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from steppe.core.errors import WorkingSetError
from steppe.flatteners.dispatch.budget import LayerShape, row_buffers
from steppe.flatteners.dispatch.weights import ExpertForm, ExpertStack
from steppe.runtime.lanes import Lane, open_lane

Tensors = tuple[torch.Tensor, ...]
_NUMBERS = ("w", "dw")  # buffers of one sum-typed number a row


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are added up: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Workspace:
    """Row buffers by name (see budget.row_buffers), [rows, width] or [rows]."""

    rows: int
    buffers: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.buffers[name]

    def poison(self) -> None:
        """Fill every buffer with NaN: a row that is read before it is written shows."""
        for buffer in self.buffers.values():
            buffer.fill_(float("nan"))


@dataclass
class SpillSlots:
    """Two sets of foreign experts, sums of their gradients, and one expert's slot where gradients come home."""

    weights: list[ExpertStack]
    sums: list[ExpertStack]
    home: ExpertStack


@dataclass
class WorkspacePool:
    """Owner of all buffers of the dispatch. One pool serves all layers of a model.

    `max_tokens`: the declared N; more are refused. `overlap`: with one rank, pack and combine on a lane beside compute
    (None: on accelerators). `poison` fills buffers with NaN before each use; `delay` gives seconds to sleep before each
    post, wait and lane job; both are for tests.
    """

    max_tokens: int | None = None
    overlap: bool | None = None
    poison: bool = False
    delay: Callable[[], float] | None = None
    timeout_s: float = 60.0
    counters: Counter[str] = field(default_factory=Counter)
    _workspace: Workspace | None = None
    _slots: tuple[tuple[Any, ...], list[Tensors]] | None = None
    _lane: Lane | None = None
    _lent: bool = False

    def overlaps(self, device: torch.device) -> bool:
        """Whether one rank packs and combines on a lane."""
        return device.type != "cpu" if self.overlap is None else self.overlap

    def lane(self, device: torch.device) -> Lane:
        """The lane of pack and combine, opened at first use."""
        if self._lane is None:
            delay = self.delay if device.type == "cpu" else None
            self._lane = open_lane("dispatch", device, delay=delay, timeout_s=self.timeout_s)
        return self._lane

    @contextmanager
    def lend(self, layer: LayerShape, rows: int, like: torch.Tensor) -> Iterator[Workspace]:
        """The buffers for `rows` rows, to one pass at a time."""
        assert not self._lent, "the dispatch workspace is lent already"
        workspace = self._fitting(layer, rows, like)
        self._lent = True
        try:
            if self.poison:
                workspace.poison()
            yield workspace
        finally:
            self._lent = False

    def wait_limit_s(self, device: torch.device) -> float | None:
        """The time limit of a wait. Only on the CPU: on an accelerator a limit makes the host wait for the device, and
        the communicator's own watchdog says when a peer is late."""
        return self.timeout_s if device.type == "cpu" else None

    def pause(self) -> None:
        """Sleep as long as the test's `delay` says."""
        if self.delay is not None:
            time.sleep(self.delay())

    @torch.inference_mode(False)
    def slots(self, form: ExpertForm, num_slots: int, like: torch.Tensor) -> SpillSlots:
        """Slots for `num_slots` foreign experts in two sets."""
        key = (form.shapes(num_slots // 2), like.dtype, like.device)
        if self._slots is None or self._slots[0] != key:
            self._slots = None
            self._slots = key, _slot_tensors(form, num_slots // 2, like)
            for tensors in self._slots[1] if self.poison else ():
                for tensor in tensors:
                    tensor.fill_(float("nan"))
        stacks = [form.stack(*tensors) for tensors in self._slots[1]]
        return SpillSlots(weights=stacks[:2], sums=stacks[2:4], home=stacks[4])

    def check_tokens(self, most: int) -> None:
        """Raises: WorkingSetError if any rank holds more tokens than were declared."""
        if self.max_tokens is not None and most > self.max_tokens:
            raise WorkingSetError(
                "tokens on one rank", got=most, allowed=f"at most {self.max_tokens}, declared at launch",
                remedy="declare a larger working set, or send shorter batches",
            )  # fmt: skip

    def close(self) -> None:
        """Give all buffers back."""
        if self._lane is not None:
            self._lane.close()
        self._workspace = self._slots = self._lane = None

    @torch.inference_mode(False)  # buffers outlive the call: made by an evaluation, they serve training as well
    def _fitting(self, layer: LayerShape, rows: int, like: torch.Tensor) -> Workspace:
        widths = dict(row_buffers(layer))
        held = self._workspace
        if held is None or rows > held.rows or not _fits(held, widths, like):
            self._workspace = None
            self._workspace = held = Workspace(rows, {n: _buffer(n, w, rows, like) for n, w in widths.items()})
            self.counters["allocations"] += 1
        return held


def _slot_tensors(form: ExpertForm, half: int, like: torch.Tensor) -> list[Tensors]:
    """Two sets of weights, two of sums, one expert's sums."""
    sums = sum_dtype(like.dtype)
    sets = [(half, like.dtype)] * 2 + [(half, sums)] * 2 + [(1, sums)]
    return [form.empty(count, like=like, dtype=dtype).tensors for count, dtype in sets]


def _is_number(name: str) -> bool:
    return name.removesuffix("2").rpartition("_")[2] in _NUMBERS


def _buffer(name: str, row_bytes: int, rows: int, like: torch.Tensor) -> torch.Tensor:
    if _is_number(name):
        return like.new_empty(rows, dtype=sum_dtype(like.dtype))
    return like.new_empty((rows, row_bytes // like.element_size()))


def _fits(held: Workspace, widths: dict[str, int], like: torch.Tensor) -> bool:
    x = held["x"]
    same = (x.dtype, x.device) == (like.dtype, like.device) and held.buffers.keys() == widths.keys()
    return same and all(_is_number(n) or held[n].shape[1] * x.element_size() == w for n, w in widths.items())
