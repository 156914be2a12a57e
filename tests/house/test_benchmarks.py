"""The baselines that benchmarks measure against are what they say they are."""

from __future__ import annotations

import torch

from benchmarks import case_together
from steppe.flatteners import NAMES
from steppe.integrations.transformers import token_losses
from tests.support.exactness import assert_reordered


def _losses_and_gradients(run: object, dtype: torch.dtype) -> list[torch.Tensor]:
    random_numbers = torch.Generator().manual_seed(0)
    tokens, hidden, vocab = 2 * case_together.CHUNK + 7, 16, 61
    inputs = [torch.randn(*shape, generator=random_numbers) for shape in ((1, tokens, hidden), (vocab, hidden))]
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    labels = torch.randint(vocab, (1, tokens), generator=random_numbers)
    labels[0, ::5] = -100
    losses = run(*inputs, None, labels)  # type: ignore[operator]
    losses.sum().backward()
    return [losses.detach(), *(x.grad for x in inputs if x.grad is not None)]


def test_the_chunked_plain_program_is_the_plain_program() -> None:
    truth = _losses_and_gradients(token_losses, torch.float64)
    plain = _losses_and_gradients(token_losses, torch.float32)
    ours = _losses_and_gradients(case_together.chunked_losses, torch.float32)
    for name, mine, theirs, exact in zip(("losses", "hidden", "weight"), ours, plain, truth, strict=True):
        assert_reordered(mine, theirs, exact, length=2 * case_together.CHUNK + 7, what=name)


def test_the_ablation_has_each_alone_all_but_one_and_all() -> None:
    names = case_together.programs()
    assert names[0] == "plain" and names[-1] == "all"
    assert set(NAMES) < set(names)
    assert sum(name.count("+") == len(NAMES) - 2 for name in names) == len(NAMES)
