"""OffloadStreamAdamW alone: masters and moments live on the host, parameters stay bfloat16."""

import torch

import steppe

model = torch.nn.Linear(512, 512).to(torch.bfloat16)
optimizer = steppe.OffloadStreamAdamW(model.parameters(), lr=1e-2, max_norm=1.0, bucket_bytes=2**20)
for step in range(3):
    loss = model(torch.ones(8, 512, dtype=torch.bfloat16)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, gradient norm {float(optimizer.grad_norm):.3f}")
print(optimizer.stats()["kernel"])
