"""What a loss means on several ranks: this rank's share of the mean over the labels of all of them.

A mean of the ranks' own means is another number where they have different counts of labels, and NaN where one has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steppe.runtime import collectives
from steppe.runtime.collectives import Group


class SharedCount:
    """The model's own `loss_function`, which gets the number of all ranks' labels where the caller gave none.

    Shares sum over ranks to the loss of the whole batch, and their gradients to its gradients.
    """

    def __init__(self, model: Any, groups: Iterable[Group]) -> None:
        self._model, self._groups, self._inner = model, tuple(groups), model.loss_function
        self._mine = vars(model).get("_loss_function")
        model.loss_function = self

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor | None, vocab_size: int, *, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: torch.Tensor | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """As transformers calls it; labels are shifted here, unless they come shifted."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        if num_items_in_batch is None:
            num_items_in_batch = count_labels(shift_labels, ignore_index, self._groups)
        loss: torch.Tensor = self._inner(
            logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index,
            shift_labels=shift_labels, **options,
        )  # fmt: skip
        return loss

    def stats(self) -> None:
        """Nothing is counted."""

    def detach(self) -> None:
        """The model's own loss again, unless somebody has put another one there since."""
        if self._model.loss_function is self:
            take_back(self._model, "loss_function", self._mine)


def count_labels(shift_labels: torch.Tensor, ignore_index: int, groups: Iterable[Group]) -> torch.Tensor:
    """Labels of all ranks of these groups; 1 where there are none, for a loss of 0."""
    count = (shift_labels != ignore_index).sum()
    for group in groups:
        count = collectives.all_reduce(count, group)
    return count.clamp(min=1)


def take_back(owner: nn.Module, name: str, mine: Any) -> None:
    """Give an instance its own attribute back, or that of its class where it had none (`mine` is None)."""
    if mine is not None:
        setattr(owner, name, mine)
    else:
        vars(owner).pop(name, vars(owner).pop(f"_{name}", None))
