"""Gradients leave the device while the backward runs, and are summed in float32 on the host.

A post-accumulate hook takes a gradient the moment it is complete, sends it off and drops it from its parameter, so
gradients never peak on the device. Every arrival is added into the parameter's float32 sum, so several micro-batches
and tied weights, which arrive more than once, are summed as one would want.

Note [squares]. The first arrival of a parameter is its whole gradient, so its squares are summed on the device at once.
A later arrival makes that sum void: then the squares come from the host sums, in the pass that adds the arrival, once
the last micro-batch is announced, and otherwise when the step begins. The announcement saves time; it never decides
what is right.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from steppe.flatteners.optimizer.crew import Crew
from steppe.flatteners.optimizer.kernel import Kernel
from steppe.flatteners.optimizer.norms import squares
from steppe.flatteners.optimizer.pipeline import Lines, copy_pairs
from steppe.flatteners.optimizer.rows import Row, check_gradient, flat_like
from steppe.flatteners.optimizer.schedule import Bucket, Piece, cut, shares, square_shares
from steppe.runtime import sharded
from steppe.runtime.arena import Arena, Block
from steppe.runtime.lanes import Ticket

Find = Callable[[torch.Tensor], Row | None]


class _Leaving(NamedTuple):
    """A piece of gradient on its way; the lane keeps the device memory alive until the ticket is done."""

    ticket: Ticket
    num_bytes: int
    slot: Block | None


class Arrivals:
    """Receives gradients during backward.

    Peak: `window_bytes` of gradients on the device beside the one that arrives, or that one alone if it is larger.
    Exactness: one arrival a parameter: bitwise that of a step without overlap; several: float32 sums.
    """

    def __init__(self, lines: Lines, crew: Crew, kernel: Kernel, arena: Arena, *, slots: int, with_norm: bool) -> None:
        self.lines, self.crew, self.kernel, self.arena = lines, crew, kernel, arena
        self.slots, self.with_norm = slots, with_norm
        self.is_last_backward = True
        self.slot_bytes = 0
        self._leaving: deque[_Leaving] = deque()
        self._hooks: dict[torch.Tensor, torch.utils.hooks.RemovableHandle] = {}

    def watch(self, parameters: Iterable[torch.Tensor], find: Find) -> None:
        """Hook exactly these parameters; hooks of parameters that have gone are removed."""
        wanted = dict.fromkeys(parameters)
        for parameter in [p for p in self._hooks if p not in wanted]:
            self._hooks.pop(parameter).remove()
        hook = _weak_hook(self, find)
        for parameter in wanted:
            if parameter not in self._hooks and parameter.requires_grad:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def unwatch(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, row: Row) -> None:
        """Send a parameter's gradient to its host sum and drop it from the device."""
        row.replace(parameter)  # its memory may have been laid out anew
        gradient = sharded.local_as(parameter.grad, parameter)
        check_gradient(gradient, row.own)
        flat = flat_like(gradient, row.own)
        parameter.grad = None
        row.squares = None
        on_device = flat.device.type != "cpu"
        if self.with_norm and self.is_last_backward and row.arrivals == 0 and on_device:
            row.squares = squares(flat, self.kernel)
        self._send(row, flat, fresh=row.arrivals == 0)
        row.arrivals += 1
        if self.with_norm and self.is_last_backward and row.squares is None:
            self.lines.updates[0].run(partial(self.measure, row), stage="squares", buffer=_name(row))

    def land(self) -> None:
        """Wait until all that left has been added; raises a lane's failure."""
        while self._leaving:
            self._admit_oldest()
        for lane in (self.lines.to_host, *self.lines.updates[:1]):
            if lane is not None:
                lane.drain()

    def measure(self, row: Row) -> None:
        """Sum the squares of a host sum, blocks shared out to the crew."""
        assert row.gradient is not None
        gradient = row.gradient
        dealt = square_shares([row.num_elements], len(self.crew))
        parts: list[list[float]] = [[] for _ in dealt]

        def share(worker: int) -> None:
            for _, start, stop in dealt[worker]:
                parts[worker] += self.kernel.squares(gradient[start:stop])

        self.crew.each([partial(share, worker) for worker in range(len(dealt))])
        row.squares = [value for part in parts for value in part]

    def _send(self, row: Row, flat: torch.Tensor, *, fresh: bool) -> None:
        ready = self.lines.to_host.mark() if self.lines.to_host else None
        for bucket in cut([flat.numel()], max(1, self.slot_bytes // flat.element_size())):
            (piece,) = bucket.pieces
            part = flat[piece.start : piece.stop]
            num_bytes = part.numel() * part.element_size()
            self._make_room(num_bytes)
            slot, after = None, ready
            if self.lines.to_host is not None:
                slot = self.arena.lend(self.slot_bytes, f"gradient of {_name(row)}")
                staged = slot.view((part.numel(),), part.dtype)
                after = self.lines.to_host.run(
                    partial(copy_pairs, [(staged, part)]), after=ready, stage="to_host", buffer=_name(row),
                    num_bytes=num_bytes,
                )  # fmt: skip
                part = staged
            ticket = self.lines.updates[0].run(
                partial(self._add, row, part, piece, fresh), after=after, stage="accumulate", buffer=_name(row)
            )
            self._leaving.append(_Leaving(ticket, num_bytes, slot))

    def _add(self, row: Row, part: torch.Tensor, piece: Piece, fresh: bool) -> None:
        assert row.gradient is not None
        total = row.gradient[piece.start : piece.stop]

        def share(pieces: Sequence[Piece]) -> None:
            for p in pieces:
                self.kernel.add(total[p.start : p.stop], part[p.start : p.stop], fresh=fresh)

        whole = Bucket((Piece(0, 0, part.numel(), 0),), part.numel())
        self.crew.each([partial(share, pieces) for pieces in shares(whole, len(self.crew))])

    def _make_room(self, num_bytes: int) -> None:
        """Block while the window is full: gradients of a backward that runs ahead would pile up on the device."""
        window, rings = self.slots * self.slot_bytes, 2 * self.slots  # the parameters' ring idles during a backward
        while self._leaving and (
            sum(each.num_bytes for each in self._leaving) + num_bytes > window
            or (self.lines.staged and len(self._leaving) >= rings)
        ):
            self._admit_oldest()

    def _admit_oldest(self) -> None:
        oldest = self._leaving.popleft()
        try:
            oldest.ticket.synchronize()
        finally:
            if oldest.slot is not None:
                oldest.slot.give_back()


def _name(row: Row) -> str:
    return f"parameter of shape {tuple(row.parameter.shape)}"


def _weak_hook(arrivals: Arrivals, find: Find) -> Callable[[torch.Tensor], None]:
    """A hook that doesn't keep the optimizer alive. A parameter without a row yet keeps its gradient: memory is never
    allocated inside a hook."""
    alive = weakref.ref(arrivals)
    finder = weakref.WeakMethod(find) if hasattr(find, "__self__") else (lambda: find)

    def hook(parameter: torch.Tensor) -> None:
        target, look_up = alive(), finder()
        row = look_up(parameter) if look_up is not None else None
        if target is not None and row is not None and parameter.grad is not None:
            target.take(parameter, row)

    return hook
