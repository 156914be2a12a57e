"""SCO alone, on bare blocks: their inputs wait on the host between forward and backward."""

import torch

import steppe

blocks = [torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)) for _ in range(8)]
sco = steppe.SCO()
hidden = torch.randn(1024, 64, requires_grad=True)
for block in blocks:
    hidden = sco.checkpoint(block, hidden)
hidden.sum().backward()
print(f"{sco.stats().bytes_offloaded:,} bytes left the device, {sco.stats().bytes_reloaded:,} came back")
