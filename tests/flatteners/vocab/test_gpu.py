"""On a CUDA device: parity of every schedule in bf16, and a transient that is the budget's."""

from __future__ import annotations

import pytest
import torch

from steppe.flatteners.vocab.budget import VocabPolicy
from steppe.flatteners.vocab.reference import plain_loss
from steppe.flatteners.vocab.ring import ring_dtp_loss
from tests.flatteners.vocab.programs import Spec, make
from tests.support.exactness import assert_reordered

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("schedule", ["local", "weights", "activations"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_and_gradients_on_a_gpu_are_no_worse_than_the_plain_programs(schedule: str, dtype: str) -> None:
    made = make(Spec(rows=(500,), shards=(3001,), width=64, dtype=dtype))
    results = []
    for wide in (False, True):
        hidden, weight = (
            t.cuda().to(torch.float64 if wide else t.dtype).requires_grad_() for t in (made.hidden, made.weight)
        )
        loss = plain_loss(hidden, weight, made.labels.cuda())["loss"]
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    hidden, weight = (t.cuda().requires_grad_() for t in (made.hidden, made.weight))
    policy = VocabPolicy(schedule, tile_tokens=100, tile_vocab=1000)
    loss = ring_dtp_loss(hidden, weight, made.labels.cuda(), policy=policy)
    ours = loss, *torch.autograd.grad(loss, (hidden, weight))
    for mine, plain, truth in zip(ours, *results, strict=True):
        assert_reordered(mine, plain, truth, length=3001)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_whole_logits_never_exist_on_a_gpu() -> None:
    rows, width, vocab = 8192, 1024, 128_256
    hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    ring_dtp_loss(hidden, weight, labels).backward()
    held = torch.cuda.max_memory_allocated() - base
    gradients = vocab * width * (4 + 2) + rows * width * 2
    assert held - gradients < rows * vocab * 2 / 2
