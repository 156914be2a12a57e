"""One tile of logits: made, folded into row states, and turned into its own gradient, in place.

A strip is [R, C]: R rows of hidden states against C rows of the vocabulary. It is the only tensor of that size that
exists. Elementwise work goes by groups of rows that fit a small scratch (on the CPU: its cache), so the strip is walked
through once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from steppe.flatteners.vocab.objective import Objective, Slopes

Tensor = torch.Tensor
_FAR = -1000.0  # exp is 0 from here on in float32 and float64, so a product with it may be told any finite distance


class StripSpace:
    """The memory of one strip at a time, and its scratch, allocated once a call.

    Peak: strip_bytes + scratch_bytes * (2 where the entropy is asked for, else 1).
    """

    def __init__(
        self, strip_bytes: int, scratch_bytes: int, objective: Objective, like: Tensor, dtype: torch.dtype
    ) -> None:
        self.objective = objective
        item = dtype.itemsize
        self._flat = like.new_empty(-(-strip_bytes // item), dtype=dtype)
        self._scratch = [
            like.new_empty(-(-scratch_bytes // item), dtype=dtype) for _ in range(1 + objective.has("tilt"))
        ]

    def strip(self, rows: int, columns: int) -> Tensor:
        """[rows, columns], uninitialised; the previous strip is gone."""
        return self._flat[: rows * columns].view(rows, columns)

    def _groups(self, strip: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Groups of the strip's rows with scratch of the same shape."""
        rows, columns = strip.shape
        step = max(1, self._scratch[0].numel() // max(1, columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield (
                slice(start, stop),
                [flat[: (stop - start) * columns].view(stop - start, columns) for flat in self._scratch],
            )

    def cap_(self, strip: Tensor) -> None:
        """z = cap tanh(u / cap) for strips that hold u / cap."""
        if self.objective.softcap is not None:
            for rows, _ in self._groups(strip):
                strip[rows].tanh_().mul_(self.objective.softcap)

    def fold(self, strip: Tensor, columns: Tensor, start: int, class_weight: Tensor | None) -> Tensor:
        """[R,K]: the state of these logits alone. `columns` [R] are the labels counted from this strip's first column,
        which is column `start` of the vocabulary; labels elsewhere are below 0 or too large. The strip is unchanged."""
        objective = self.objective
        state = strip.new_empty((strip.shape[0], len(objective.fields)))
        if strip.shape[1] == 0:
            return state.zero_().index_fill_(1, torch.zeros(1, dtype=torch.int64, device=strip.device), float("-inf"))
        hit, own = _mine(strip, columns)
        objective.read(state, "target").copy_(torch.where(hit, strip.gather(1, own[:, None])[:, 0], 0.0))
        if objective.weighted:
            assert class_weight is not None
            objective.read(state, "target_weight").copy_(torch.where(hit, class_weight[own], 0.0))
        if objective.has("mass"):
            mass = strip.shape[1] if class_weight is None else class_weight.sum()
            objective.read(state, "mass").copy_(torch.as_tensor(mass, dtype=strip.dtype, device=strip.device))
        for rows, scratch in self._groups(strip):
            self._fold_group(strip[rows], scratch, state[rows], start, class_weight)
        return state

    def _fold_group(
        self, logits: Tensor, scratch: list[Tensor], state: Tensor, start: int, class_weight: Tensor | None
    ) -> None:
        objective, work = self.objective, scratch[0]
        if objective.has("best"):
            peak, best = logits.max(1)
            objective.read(state, "best").copy_(best + start)
        else:
            peak = logits.amax(1)
        objective.read(state, "peak").copy_(peak)
        floor = peak.masked_fill(peak == float("-inf"), 0.0)  # all masked: every exp is 0, not exp(-inf + inf)
        torch.sub(logits, floor[:, None], out=work)
        if objective.has("spread"):
            spread = work.sum(1) if class_weight is None else work @ class_weight
            objective.read(state, "spread").copy_(spread)
        if objective.has("tilt"):
            torch.clamp(work, min=_FAR, out=scratch[1])  # p log p is 0 where p is 0
        objective.read(state, "total").copy_(work.exp_().sum(1))
        if objective.has("tilt"):
            objective.read(state, "tilt").copy_(scratch[1].mul_(work).sum(1))

    def gradient_(self, strip: Tensor, columns: Tensor, slopes: Slopes, class_weight: Tensor | None) -> Tensor:
        """Turn logits into the gradient of h W^T + bias, in place; (p - target) is formed before any rounding."""
        if strip.shape[1] == 0:
            return strip
        hit, own = _mine(strip, columns)
        target = torch.where(hit, slopes.target, 0.0)
        for rows, scratch in self._groups(strip):
            part = Slopes(*(vector[rows, None] for vector in slopes))
            self._gradient_group(strip[rows], scratch, part, own[rows], target[rows], class_weight)
        return strip

    def _gradient_group(
        self, logits: Tensor, scratch: list[Tensor], slopes: Slopes, own: Tensor, target: Tensor,
        class_weight: Tensor | None,
    ) -> None:  # fmt: skip
        objective, chain = self.objective, scratch[0]
        if objective.softcap is not None:  # d z / d u = scale (1 - (z / cap)^2)
            torch.mul(logits, 1 / objective.softcap, out=chain)
            chain.square_().neg_().add_(1).mul_(objective.logit_scale)
        logits.sub_(slopes.peak)
        if objective.has("tilt"):
            torch.exp(logits, out=scratch[1])
            logits.clamp_(min=_FAR).mul_(slopes.tilt).add_(slopes.slope).mul_(scratch[1])
        else:
            logits.exp_().mul_(slopes.slope)
        if objective.label_smoothing and class_weight is None:
            logits.sub_(slopes.smooth)
        elif objective.label_smoothing:
            logits.addcmul_(slopes.smooth, class_weight[None], value=-1)
        label = torch.arange(own.shape[0], device=own.device), own
        logits.index_put_(label, logits[label] - target)  # deterministic on every device
        if objective.softcap is not None:
            logits.mul_(chain)
        elif objective.logit_scale != 1:
            logits.mul_(objective.logit_scale)


def _mine(strip: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows have their label in this strip, and a column to read for every row."""
    hit = (columns >= 0) & (columns < strip.shape[1])
    return hit, torch.where(hit, columns, 0)
