"""Ring-DTP alone: projection and cross-entropy without N x V logits. With ranks, pass their group and weight shards."""

import torch

import steppe

hidden = torch.randn(2048, 64, requires_grad=True)
weight = torch.randn(32_768, 64, requires_grad=True)  # this rank's rows of the vocabulary
labels = torch.randint(32_768, (2048,))
loss = steppe.ring_dtp_loss(hidden, weight, labels, group=None, z_loss=1e-4, label_smoothing=0.1)
loss.backward()
print(f"loss {loss.item():.4f}; whole float32 logits would be {2048 * 32_768 * 4:,} bytes, three times over")
