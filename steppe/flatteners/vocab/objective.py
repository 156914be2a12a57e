"""What is asked of a row of logits: its statistics, how they merge, the values made of them and their gradient.

Note [row state]. A row's logits are met in pieces. What is kept of a piece is a few numbers, each of which merges with
those of another piece in any order; everything is held relative to the running maximum, so that an offset common to all
logits costs nothing:

    peak    m, the largest logit            target  the label's logit (0 in pieces without it)
    total   sum exp(z - m)                  mass    sum of the class weights (or the count of columns)
    spread  sum w (z - m)                   target_weight  the label's class weight
    tilt    sum exp(z - m) (z - m)          best    the lowest column that holds m

The state of no logits is peak -inf, everything else 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

Tensor = torch.Tensor
WANTS = ("loss", "logprob", "entropy", "lse", "num_correct")


@dataclass(frozen=True)
class Objective:
    """The options of one call that change values; `vocab` is V without padding."""

    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    weighted: bool = False  # class weights
    want: frozenset[str] = frozenset({"loss"})

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of the numbers kept for a row, in the order of the state's last axis."""
        names = ["peak", "total", "target"]
        if self.label_smoothing:
            names += ["mass", "spread"]
        if self.weighted:
            names += ["target_weight"]
        if "entropy" in self.want:
            names += ["tilt"]
        if "num_correct" in self.want:
            names += ["best"]
        return tuple(names)

    def has(self, name: str) -> bool:
        return name in self.fields

    def read(self, state: Tensor, name: str) -> Tensor:
        """One field of a state [..., K]."""
        return state[..., self.fields.index(name)]


def empty_state(num_rows: int, objective: Objective, like: Tensor, dtype: torch.dtype) -> Tensor:
    """[R,K]: rows that have met no logits yet."""
    state = like.new_zeros((num_rows, len(objective.fields)), dtype=dtype)
    state[:, 0] = float("-inf")
    return state


def merge(states: Tensor, objective: Objective) -> Tensor:
    """[S,R,K] -> [R,K]: the state of all logits met by the S parts (Note [row state])."""
    if states.shape[0] == 1:
        return states[0]
    old = {name: objective.read(states, name) for name in objective.fields}
    top = old["peak"].amax(0)
    floor = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    empty = old["peak"] == float("-inf")
    scale = torch.exp(old["peak"] - floor)
    drop = torch.where(empty, torch.zeros_like(scale), old["peak"] - floor).clamp(min=torch.finfo(scale.dtype).min)
    new = dict(old, peak=top, total=(old["total"] * scale).sum(0), target=old["target"].sum(0))
    if "mass" in old:
        new["mass"] = old["mass"].sum(0)
        new["spread"] = (old["spread"] + old["mass"] * drop).sum(0)
    if "target_weight" in old:
        new["target_weight"] = old["target_weight"].sum(0)
    if "tilt" in old:
        new["tilt"] = (scale * old["tilt"] + scale * old["total"] * drop).sum(0)  # scale first: drop may be huge
    if "best" in old:
        beaten = empty | (old["peak"] != top)
        new["best"] = old["best"].masked_fill(beaten, float("inf")).amin(0)
    return torch.stack([new[name] for name in objective.fields], dim=-1)


class RowValues(NamedTuple):
    """Values of R rows: each [R], or None where it was not asked for. `correct`: the label is the first maximum."""

    loss: Tensor  # unreduced
    logprob: Tensor  # of the label
    lse: Tensor
    entropy: Tensor | None
    correct: Tensor | None
    target_weight: Tensor | None


def row_values(state: Tensor, labels: Tensor, objective: Objective) -> RowValues:
    """The values of rows whose state has met the whole vocabulary."""
    read = objective.read
    log_total = read(state, "total").log()
    lse = read(state, "peak") + log_total
    logprob = read(state, "target") - read(state, "peak") - log_total
    loss = -logprob if not objective.weighted else -logprob * read(state, "target_weight")
    if objective.label_smoothing:
        uniform = read(state, "mass") * log_total - read(state, "spread")
        loss = (1 - objective.label_smoothing) * loss + objective.label_smoothing / objective.vocab * uniform
    if objective.z_loss:
        loss = loss + objective.z_loss * lse.square()
    entropy = log_total - read(state, "tilt") / read(state, "total") if objective.has("tilt") else None
    correct = read(state, "best") == labels if objective.has("best") else None
    target_weight = read(state, "target_weight").clone() if objective.weighted else None
    return RowValues(loss, logprob, lse, entropy, correct, target_weight)


class Slopes(NamedTuple):
    """How a row's logits get their gradient: e (slope + tilt d) - smooth w_v - target [v is the label], with
    d = z - peak and e = exp(d). Each [R]."""

    peak: Tensor
    slope: Tensor
    tilt: Tensor
    target: Tensor
    smooth: Tensor


def row_slopes(
    state: Tensor, objective: Objective, loss: Tensor | None, logprob: Tensor | None = None,
    lse: Tensor | None = None, entropy: Tensor | None = None,
) -> Slopes:  # fmt: skip
    """Slopes of R rows from their state and the upstream gradients of their values ([R] each, None: zero)."""
    read = objective.read
    peak, total = read(state, "peak"), read(state, "total")
    zero = torch.zeros_like(total)
    slope, target, smooth, tilt = zero, zero, zero, zero
    if loss is not None:
        share = 1 - objective.label_smoothing
        weight = read(state, "target_weight") if objective.weighted else torch.ones_like(total)
        slope = target = loss * weight * share
        if objective.label_smoothing:
            smooth = loss * (objective.label_smoothing / objective.vocab)
            slope = slope + smooth * read(state, "mass")
        if objective.z_loss:
            slope = slope + loss * (2 * objective.z_loss) * (peak + total.log())
    if logprob is not None:
        slope, target = slope - logprob, target - logprob
    if lse is not None:
        slope = slope + lse
    if entropy is not None:
        slope = slope + entropy * read(state, "tilt") / total
        tilt = -entropy / total
    return Slopes(peak, slope / total, tilt, target, smooth)


def pack(slopes: Slopes) -> Tensor:
    """[R,5], one message."""
    return torch.stack(slopes, dim=-1)


def unpack(packed: Tensor) -> Slopes:
    return Slopes(*packed.unbind(-1))
