"""The stacked-expert MLP of one chunk: forward, recompute and hand-written backward over the chunk's own rows.

Rows are grouped by expert: `segments` lists (place in the stack, first row, end row). All matrix products write into
the workspace; the elementwise middle runs in float32 on tiles of rows and rounds once before the next product. The
route weight is folded in before the second product, so its gradient needs no second product again: the recompute is
the first product only (2/3 of a pass).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from steppe.flatteners.dispatch.gradients import GradientSums, accumulate, row_tiles
from steppe.flatteners.dispatch.weights import ExpertStack
from steppe.flatteners.dispatch.workspace import Workspace, sum_dtype

Segments = list[tuple[int, int, int]]


@dataclass(frozen=True)
class ChunkRows:
    """One chunk's rows inside the workspace: tokens x [R,H], route weights w [R], and in backward gradients g [R,H]."""

    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor
    dw: torch.Tensor
    segments: Segments


class ChunkMath:
    """The arithmetic of chunks over one workspace; counts its floating-point operations."""

    def __init__(self, workspace: Workspace, tile_elements: int) -> None:
        self.workspace, self.tile_elements = workspace, tile_elements
        self.flops = 0

    def forward(self, stack: ExpertStack, rows: ChunkRows) -> None:
        """y = weight * (act(x @ first) @ second), written over x."""
        hidden, act = self._inner("h", len(rows.x)), self._inner("a", len(rows.x))
        self._first(stack, rows, hidden)
        for place, start, stop in self._tiles(stack, rows.segments):
            gate, up = _gate_and_up(stack, hidden, place, start, stop)
            weighted = stack.form.gate.forward(gate, up)
            act[start:stop] = weighted.mul_(rows.w[start:stop, None])
        self._grouped(act, [(stack.second(p), a, b) for p, a, b in rows.segments], rows.x)
        if stack.down_bias is not None:
            self._add_down_bias(stack.down_bias, rows)

    def backward(self, stack: ExpertStack, rows: ChunkRows, sums: GradientSums | None) -> None:
        """From gradients g of y: weight gradients into `sums`, token gradients over g, route-weight gradients in dw."""
        hidden, act, d_act = (self._inner(name, len(rows.x)) for name in ("h", "a", "da"))
        self._first(stack, rows, hidden)
        self._grouped(rows.g, [(stack.second(p).t(), a, b) for p, a, b in rows.segments], d_act)
        for place, start, stop in self._tiles(stack, rows.segments):
            self._middle(stack, rows, (hidden, act, d_act), place, start, stop)
        for segment in rows.segments if sums is not None else ():
            self._weight_gradients(sums, rows, hidden, act, *segment)
        self._grouped(hidden, [(stack.first(p).t(), a, b) for p, a, b in rows.segments], rows.g)

    def _first(self, stack: ExpertStack, rows: ChunkRows, hidden: torch.Tensor) -> None:
        self._grouped(rows.x, [(stack.first(p), a, b) for p, a, b in rows.segments], hidden)

    def _middle(
        self, stack: ExpertStack, rows: ChunkRows, inner: tuple[torch.Tensor, ...], place: int, start: int, stop: int
    ) -> None:
        """One tile: gate and up are replaced by their gradients, the weighted activation is made again."""
        hidden, act, d_act = inner
        gate, up = _gate_and_up(stack, hidden, place, start, stop)
        grad = d_act[start:stop].to(gate.dtype)
        grads = stack.form.gate.backward(gate, up, grad, rows.w[start:stop, None])
        act[start:stop] = grads.weighted
        d_gate, d_up = _columns(hidden[start:stop], stack.form.interleaved)
        d_gate.copy_(grads.gate)
        d_up.copy_(grads.up)
        rows.dw[start:stop] = grads.weight
        if stack.down_bias is not None:
            rows.dw[start:stop] += rows.g[start:stop].to(gate.dtype) @ stack.down_bias[place].to(gate.dtype)

    def _weight_gradients(
        self, sums: GradientSums, rows: ChunkRows, d_hidden: torch.Tensor, act: torch.Tensor, place: int, a: int, b: int
    ) -> None:
        """x^T dh and act^T g added in place, biases by column sums."""
        target = sums.target(place)
        accumulate(target.gate_up, rows.x[a:b], d_hidden[a:b], target.form.transposed, self.tile_elements)
        accumulate(target.down, act[a:b], rows.g[a:b], target.form.transposed, self.tile_elements)
        if target.gate_up_bias is not None:
            target.gate_up_bias.add_(d_hidden[a:b].sum(0, dtype=target.gate_up_bias.dtype))
        if target.down_bias is not None:
            for tile in row_tiles(a, b, rows.g.shape[1], self.tile_elements):
                target.down_bias.addmv_(rows.g[tile].to(rows.w.dtype).t(), rows.w[tile])
        sums.added(place)
        self.flops += 2 * (b - a) * (rows.x.shape[1] * d_hidden.shape[1] + act.shape[1] * rows.g.shape[1])

    def _add_down_bias(self, bias: torch.Tensor, rows: ChunkRows) -> None:
        for place, a, b in rows.segments:
            for tile in row_tiles(a, b, rows.x.shape[1], self.tile_elements):
                number = rows.w.dtype
                rows.x[tile] = torch.addcmul(rows.x[tile].to(number), rows.w[tile, None], bias[place].to(number))

    def _grouped(self, rows: torch.Tensor, products: list[tuple[torch.Tensor, int, int]], out: torch.Tensor) -> None:
        """out[a:b] = rows[a:b] @ matrix for every (matrix, a, b)."""
        for matrix, a, b in products:
            torch.mm(rows[a:b], matrix, out=out[a:b])
            self.flops += 2 * (b - a) * matrix.shape[0] * matrix.shape[1]

    def _inner(self, name: str, rows: int) -> torch.Tensor:
        return self.workspace[name][:rows]

    def _tiles(self, stack: ExpertStack, segments: Segments) -> Iterator[tuple[int, int, int]]:
        """Tiles of rows for the elementwise middle; a biased one stays within one expert."""
        if not segments:
            return
        if stack.gate_up_bias is None and stack.down_bias is None:
            segments = [(0, segments[0][1], segments[-1][2])]
        for place, start, stop in segments:
            for tile in row_tiles(start, stop, stack.form.width, self.tile_elements):
                yield place, tile.start, tile.stop


def _gate_and_up(
    stack: ExpertStack, hidden: torch.Tensor, place: int, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up columns of a tile in the dtype of sums, bias added there."""
    tile = hidden[start:stop]
    gate, up = (part.to(sum_dtype(tile.dtype)) for part in _columns(tile, stack.form.interleaved))
    if stack.gate_up_bias is not None:
        gate_bias, up_bias = _columns(stack.gate_up_bias[place : place + 1], stack.form.interleaved)
        gate, up = gate + gate_bias, up + up_bias
    return gate, up


def _columns(tile: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the gate and the up columns."""
    if interleaved:
        return tile[:, 0::2], tile[:, 1::2]
    half = tile.shape[1] // 2
    return tile[:, :half], tile[:, half:]
