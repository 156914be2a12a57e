"""All four on a Hugging Face model, in your own loop: torchrun --nproc-per-node 2 examples/full_loop.py"""

import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import steppe

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=4096, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).train()
plan = {
    "dispatch": steppe.DispatchPolicy(chunk_tokens=128),
    "vocab": steppe.VocabPolicy(),
    "boundary": steppe.BoundaryPolicy(),
    "optimizer": steppe.OptimizerPolicy(bucket_bytes=2**20, max_norm=1.0),
}
flattened = steppe.flatten_peaks(model, plan, mesh=steppe.MeshShape(world=ranks, expert=ranks, vocab=ranks))
optimizer = flattened.optimizer(lr=1e-3)
for step in range(3):
    ids = torch.randint(4096, (1, 512))
    loss = model(input_ids=ids, labels=ids, num_items_in_batch=511 * ranks, use_cache=False).loss
    loss.backward()  # gradients are summed over ranks: the loss is divided by all ranks' labels
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: this rank's share of the loss {loss.item():.4f}")
flattened.detach()
if ranks > 1:
    dist.destroy_process_group()
