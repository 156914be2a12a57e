"""PipelinedLLEP alone: chunked experts on one rank. With an expert group, each rank gives its own experts."""

import torch

import steppe

tokens = torch.randn(4096, 64, requires_grad=True)
gate_up, down = torch.randn(8, 2 * 32, 64) * 0.1, torch.randn(8, 64, 32) * 0.1
experts = steppe.ExpertWeights(torch.nn.Parameter(gate_up), torch.nn.Parameter(down))
weights, expert_ids = torch.randn(4096, 8).softmax(-1).topk(2)
policy = steppe.DispatchPolicy(chunk_tokens=512)
out = steppe.pipelined_llep(tokens, expert_ids, weights, experts, group=None, policy=policy)
out.sum().backward()
print(f"output {tuple(out.shape)}, gradient norm of the experts {experts.gate_up.grad.norm():.2f}")
