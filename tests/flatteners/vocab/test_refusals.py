"""Bad input and live models that can't be helped: clear errors, with the remedy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steppe.core.errors import ConfigError, ConflictError, DataError, ShapeError
from steppe.flatteners.vocab.attach import RingDTPLoss, conflicts, diagnose
from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.embedding import vocab_parallel_embedding
from steppe.flatteners.vocab.reductions import ring_softmax_matmul, ring_topk
from steppe.flatteners.vocab.ring import ring_dtp, ring_dtp_loss
from steppe.flatteners.vocab.stats import RingStats

HIDDEN, WEIGHT, LABELS = torch.randn(4, 3), torch.randn(5, 3), torch.tensor([0, 4, -100, 2])


@pytest.mark.parametrize("label", [5, -1, 2**40])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    with pytest.raises(DataError, match=rf"{label} on rank 0.*0 to 4"):
        ring_dtp_loss(HIDDEN, WEIGHT, torch.tensor([0, label, 1, 2]))


def test_a_label_on_a_padded_row_is_refused() -> None:
    with pytest.raises(DataError, match="0 to 3"):
        ring_dtp_loss(HIDDEN, WEIGHT, LABELS, vocab_size=4)


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "told"),
    [
        (HIDDEN, WEIGHT.flatten(), LABELS, "FSDP1 and ZeRO-3"),
        (HIDDEN, torch.empty(0), LABELS, "FSDP1 and ZeRO-3"),
        (HIDDEN, nn.Linear(3, 5), LABELS, "LoRA"),
        (HIDDEN, WEIGHT[:, :2], LABELS, r"\[..., 2\]"),
        (HIDDEN[0], WEIGHT, LABELS, "hidden states"),
        (HIDDEN, WEIGHT, LABELS[:3], "labels"),
        (HIDDEN, WEIGHT, LABELS.float(), "int64"),
        (HIDDEN.long(), WEIGHT, LABELS, "hidden"),
        (HIDDEN.double(), WEIGHT, LABELS, "float64"),
        (HIDDEN.to(torch.complex64), WEIGHT, LABELS, "hidden"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, told: str
) -> None:
    with pytest.raises(ShapeError, match=told):
        ring_dtp_loss(hidden, weight, labels)


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "average"},
        {"label_smoothing": 1.5},
        {"z_loss": -1.0},
        {"softcap": 0.0},
        {"vocab_size": 0},
        {"vocab_size": 6},
        {"num_items_in_batch": 0},
        {"num_items_in_batch": 4, "reduction": "sum"},
        {"policy": VocabPolicy("one_pass"), "reduction": "none"},
    ],
)
def test_options_without_a_meaning_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError):
        ring_dtp_loss(HIDDEN.clone().requires_grad_(), WEIGHT, LABELS.clamp(min=0), **options)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="want"):
        ring_dtp(HIDDEN, WEIGHT, LABELS, want=("perplexity",))
    with pytest.raises(ShapeError, match="bias"):
        ring_dtp_loss(HIDDEN, WEIGHT, LABELS, bias=torch.zeros(4))
    with pytest.raises(ShapeError, match="class_weight"):
        ring_dtp_loss(HIDDEN, WEIGHT, LABELS, class_weight=torch.zeros(4))
    with pytest.raises(ShapeError, match="detach"):
        ring_dtp_loss(HIDDEN, WEIGHT, LABELS, class_weight=torch.ones(5, requires_grad=True))
    many = torch.zeros(2**24 + 1, 1)
    with pytest.raises(ConfigError, match="num_correct"):
        ring_dtp(torch.ones(1, 1), many, LABELS[:1], want=("num_correct",))
    with pytest.raises(ConfigError, match="k: got 6"):
        ring_topk(HIDDEN, WEIGHT, 6)
    with pytest.raises(ShapeError, match="values"):
        ring_softmax_matmul(HIDDEN, WEIGHT, torch.zeros(4, 2))
    with pytest.raises(DataError, match="token id out of range: got 5"):
        vocab_parallel_embedding(torch.tensor([5]), WEIGHT)
    with pytest.raises(ShapeError, match="token ids"):
        vocab_parallel_embedding(torch.tensor([0.5]), WEIGHT)
    with pytest.raises(ShapeError, match="two dimensions"):
        vocab_parallel_embedding(torch.tensor([0]), WEIGHT.flatten())


class Toy(nn.Module):
    """What RingDTPLoss asks of a model."""

    def __init__(self, head: nn.Module, **config: object) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(5, 3), head
        self.config = SimpleNamespace(**config)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(3, 5)


def emptied() -> nn.Linear:
    head = nn.Linear(3, 5, bias=False)
    head.weight = nn.Parameter(torch.empty(0))
    return head


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Toy(LoRA()), "LoRA"),
        (Toy(emptied()), "FSDP1 and ZeRO-3"),
        (Toy(nn.Bilinear(3, 3, 5)), "Bilinear"),
        (Toy(nn.Linear(3, 5), final_logit_softcapping=30.0), "final_logit_softcapping"),
        (nn.Linear(3, 5), "no head"),
    ],
)
def test_models_whose_head_can_not_be_taken_are_refused_with_a_remedy(model: nn.Module, told: str) -> None:
    found = conflicts(model, object())
    assert told in found[0].what
    with pytest.raises(ConflictError, match="Remedy"):
        RingDTPLoss(model)


def test_a_plain_head_has_no_conflicts() -> None:
    assert conflicts(Toy(nn.Linear(3, 5))) == ()


def test_counters_are_put_into_words() -> None:
    assert "no loss has gone through" in diagnose(RingStats())[0]
    waiting = RingStats(calls=1, wait_s=6.0, busy_s=10.0, tile_tokens=512, rows=1000)
    assert "60% of 10.00 s" in diagnose(waiting)[0]
    thin = RingStats(calls=1, busy_s=1.0, tile_tokens=8, rows=1000)
    assert "8 tokens are thin" in diagnose(thin)[0]
    assert diagnose(RingStats(calls=1, busy_s=1.0, tile_tokens=512, rows=1000)) == ()
