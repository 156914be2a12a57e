"""The three matrix products of a tile, their precision, and the count of what they multiply.

Products leave the GEMM in the statistics' dtype (float32; float64 for float64 inputs): products rounded to 16 bits
before they are added to a float32 accumulator cost more than the plain program's own rounding. CPU GEMMs can't do
that for 16-bit operands, so there the operands of a tile are cast first; on an accelerator they stay as they are.
"""

from __future__ import annotations

import torch

from steppe.flatteners.vocab.stats import RingStats

Tensor = torch.Tensor


def accumulator_dtype(hidden: Tensor) -> torch.dtype:
    """float32, and float64 for float64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def operand_dtype(hidden: Tensor) -> torch.dtype:
    """What tiles are multiplied in: the hidden states' dtype where the GEMM can give more than it is given."""
    return accumulator_dtype(hidden) if hidden.device.type == "cpu" else hidden.dtype


class Products:
    """Products of tiles; `operand` gives a tile in the dtype that is multiplied."""

    def __init__(self, hidden: Tensor, stats: RingStats) -> None:
        self.dtype, self.operands = accumulator_dtype(hidden), operand_dtype(hidden)
        self.widens = self.operands != self.dtype  # 16-bit operands, float32 products
        self._stats = stats
        self._casts: dict[str, Tensor] = {}

    def operand(self, tile: Tensor, what: str, most_rows: int) -> Tensor:
        """The tile as it is, or cast into the one buffer for `what`, which holds `most_rows` rows."""
        if tile.dtype == self.operands:
            return tile
        if what not in self._casts:
            self._casts[what] = tile.new_empty((most_rows, tile.shape[1]), dtype=self.operands)
        return self._casts[what][: tile.shape[0]].copy_(tile)

    def logits(self, out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, alpha: float) -> None:
        """out [R,C] = alpha (rows [R,H] weight [C,H]^T + bias [C])."""
        self._count(out.numel() * rows.shape[1])
        if self.widens:
            torch.mm(rows.to(weight.dtype), weight.T, out_dtype=self.dtype, out=out)
            if alpha != 1:
                out.mul_(alpha)
        else:
            out.addmm_(rows, weight.T, beta=0, alpha=alpha)
        if bias is not None:
            out.add_(bias, alpha=alpha)

    def add_hidden(self, out: Tensor, strip: Tensor, weight: Tensor) -> None:
        """out [R,H] += strip [R,C] weight [C,H]."""
        self._count(strip.numel() * weight.shape[1])
        self._add(out, strip, weight)

    def add_weight(self, out: Tensor, strip: Tensor, rows: Tensor) -> None:
        """out [C,H] += strip [R,C]^T rows [R,H]."""
        self._count(strip.numel() * rows.shape[1])
        self._add(out, strip.T, rows)

    def _add(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        if self.widens:
            out.add_(torch.mm(left.to(right.dtype), right, out_dtype=self.dtype))
        else:
            out.addmm_(left, right)

    def _count(self, multiply_adds: int) -> None:
        self._stats.multiply_adds += multiply_adds
