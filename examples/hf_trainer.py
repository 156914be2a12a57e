"""SCO and OffloadStreamAdamW under transformers' Trainer (needs accelerate)."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments

import steppe

config = Qwen3MoeConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
sco = steppe.SCO().apply(model)
data = [{"input_ids": (ids := torch.randint(512, (64,))), "labels": ids} for _ in range(8)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=3, per_device_train_batch_size=2, gradient_checkpointing=True, report_to=[], use_cpu=True
    )
    settings = (steppe.OffloadStreamAdamW, {"lr": 1e-3, "bucket_bytes": 2**20})
    Trainer(model, arguments, train_dataset=data, optimizer_cls_and_kwargs=settings).train()
print(f"{sco.stats().bytes_offloaded:,} bytes left the device")
