"""Documents packed into a row don't see each other, in any family: a token's loss is that of its document alone."""

from __future__ import annotations

import pytest
import torch

from steppe.integrations import transformers as hf
from tests.support.exactness import assert_reordered
from tests.support.float64 import FAMILIES, float64_model, toy_config, toy_model

LENGTHS = (9, 1, 20, 18)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_documents_losses_are_those_of_the_document_alone(family: str) -> None:
    config = toy_config(family)
    model = toy_model(family, seed=1)
    truth = float64_model(config, dict(model.state_dict()))
    hf.PlainLoss(model)
    ids = torch.randint(0, 256, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    where = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    labels = torch.randint(0, 256, ids.shape, generator=torch.Generator().manual_seed(4))

    def losses(ids: torch.Tensor, where: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = hf.loss_of(model, ids, where, labels, num_valid=1, share=1.0, keep_tokens=True).tokens
        assert tokens is not None
        return tokens

    def exact(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = truth(input_ids=ids).logits.flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").detach()

    parts = list(zip(*(tensor.split(LENGTHS, dim=1) for tensor in (ids, where, labels)), strict=True))
    alone = torch.cat([losses(*part) for part in parts])
    right = torch.cat([exact(part[0], part[2]) for part in parts])
    assert_reordered(losses(ids, where, labels), alone, right, length=sum(LENGTHS), what=family)
