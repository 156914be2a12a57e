"""The training step is the plain program's: same gradients as float64 truth, on any ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.core.errors import ConfigError, WorkingSetError
from steppe.training import checkpoint
from steppe.training.config import RunConfig, policy_class
from steppe.training.data import Batch
from steppe.training.loop import Trainer
from steppe.training.model import build_model
from steppe.training.optimizer import gradient_norm, local
from tests.support.exactness import assert_bitwise, assert_reordered
from tests.support.float64 import float64_model
from tests.support.ranks import run_ranks
from tests.training.toys import toy_run

ONE_ROW = {"packing": "stream"}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gradients of the trainer's next step before clipping, without taking it."""
    batches, num_tokens, num_valid = trainer._fetch(None)
    trainer._accumulate(batches, num_tokens, num_valid, False)
    return {name: _full(p.grad).clone() for name, p in trainer.model.named_parameters()}


def plain_and_truth(rank: int, world: int, configs: list[RunConfig]) -> list[Any]:
    results = []
    for config in configs:
        trainer = Trainer(config)
        weights = {name: _full(value).clone() for name, value in trainer.model.state_dict().items()}
        ours = _gradients(trainer)
        results.append((weights, trainer.model_config, ours, tuple(trainer.data.batches(0))))
    return results


def _dense_gradients(model: Any, batches: list[Batch], num_valid: int, coefficient: float) -> dict[str, torch.Tensor]:
    """One process, all rows at once: sum of token losses over the global number of labels."""
    tokens = sum(b.num_tokens for b in batches)
    for batch in batches:
        out = model(input_ids=batch.input_ids, position_ids=batch.position_ids, output_router_logits=bool(coefficient))
        flat = out.logits.flatten(0, 1)
        wide = flat if flat.dtype == torch.float64 else flat.float()
        loss = torch.nn.functional.cross_entropy(wide, batch.labels.flatten(), reduction="sum") / num_valid
        if coefficient:
            loss = loss + coefficient * batch.num_tokens / tokens * out.aux_loss
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _together(parts: Iterable[Batch]) -> Batch:
    rows = [(part.input_ids, part.position_ids, part.labels) for part in parts]
    return Batch(*(torch.cat(tensors) for tensors in zip(*rows, strict=True)))


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_those_of_one_dense_process(world: int, tmp_path: Path) -> None:
    aux = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    runs = [
        toy_run(tmp_path / "plain", train={"micro_batches": 2, "batch": 2}),
        toy_run(tmp_path / "aux", "mixtral", train={"micro_batches": 3}),
        toy_run(tmp_path / "mla", "deepseek_v3", train={"checkpointing": False}),
        toy_run(tmp_path / "tied"),
        toy_run(tmp_path / "narrow", model={"dtype": "bfloat16"}, train={"dtype": "bfloat16"}),
    ]
    runs[1] = runs[1].replace("model", shape={**runs[1].model.shape, **aux})
    runs[3] = runs[3].replace("model", shape={**runs[3].model.shape, "tie_word_embeddings": True})
    if world == 1:
        runs = runs[:2]  # what differs on one rank is the sharding alone
    per_rank = run_ranks(plain_and_truth, world, runs)
    for i, run in enumerate(runs):
        weights, model_config, ours, _ = per_rank[0][i]
        # A micro-batch is that of all ranks together: the router's auxiliary loss is not a mean of the ranks' own.
        batches = [_together(parts) for parts in zip(*(rank[i][3] for rank in per_rank), strict=True)]
        num_valid = sum(b.num_valid for b in batches)
        coefficient = 0.02 if i == 1 else 0.0
        plain_model = build_model(run, model_config)
        for name, value in plain_model.state_dict().items():
            assert_bitwise(weights[name], value, f"{name} of run {i} and of one process")
        plain = _dense_gradients(plain_model, batches, num_valid, coefficient)
        truth = _dense_gradients(float64_model(model_config, weights), batches, num_valid, coefficient)
        for name, exact in truth.items():
            length = sum(b.num_tokens for b in batches)
            assert_reordered(ours[name], plain[name], exact, length=length, what=f"{name} of run {i}")


def two_alike(rank: int, world: int, config: RunConfig) -> bool:
    first, second = Trainer(config), Trainer(config)
    for _ in range(3):
        results = first.step(keep_token_losses=True), second.step(keep_token_losses=True)
        assert results[0].loss.hex() == results[1].loss.hex()
        assert results[0].grad_norm.hex() == results[1].grad_norm.hex()
        for mine, theirs in zip(results[0].token_losses, results[1].token_losses, strict=True):
            assert_bitwise(mine, theirs, "token losses")
    for (name, mine), (_, theirs) in zip(first.model.named_parameters(), second.model.named_parameters()):
        assert_bitwise(local(mine), local(theirs), name)
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_two_trainers_of_one_config_alternate_bit_for_bit_with_dropout(world: int, tmp_path: Path) -> None:
    config = toy_run(tmp_path, train={"micro_batches": 2})
    config = config.replace("model", shape={**config.model.shape, "attention_dropout": 0.2})
    assert all(run_ranks(two_alike, world, config))


def refused_then_right(rank: int, world: int, config: RunConfig) -> tuple[str, list[str], list[str]]:
    def losses(trainer: Trainer, spoil: bool) -> tuple[str, list[str]]:
        said, values = "", []
        for step in range(4):
            if spoil and step == 2:
                long = torch.zeros((1, 33), dtype=torch.int64)
                batches = [Batch(long, long, long)] if rank == world - 1 else trainer.data.batches(2)
                with pytest.raises(WorkingSetError) as refusal:
                    trainer.step(batches)
                said = str(refusal.value)
            values.append(trainer.step().loss.hex())
        return said, values

    _, quiet = losses(Trainer(config), spoil=False)
    said, spoilt = losses(Trainer(config), spoil=True)
    return said, quiet, spoilt


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_beyond_the_declared_n_in_mid_run_is_refused_on_all_ranks_and_loses_nothing(
    world: int, tmp_path: Path
) -> None:
    for said, quiet, spoilt in run_ranks(refused_then_right, world, toy_run(tmp_path)):
        assert "33 tokens" in said
        assert "N = 32" in said
        assert "Remedy" in said
        assert quiet == spoilt


def whole_documents(rank: int, world: int, config: RunConfig) -> tuple[list[int], str]:
    trainer, seen = Trainer(config), []
    try:
        for _ in range(40):
            seen.append(trainer.step().num_tokens)
    except WorkingSetError as refusal:
        return seen, str(refusal)
    return seen, ""


def test_whole_documents_fill_rows_up_to_n_and_a_longer_one_is_refused_when_its_step_comes(tmp_path: Path) -> None:
    lines = tmp_path / "docs.jsonl"
    short = ['{"text": "%s"}' % ("flat " * n) for n in (3, 5, 8, 4, 9, 2)]
    data = {"path": str(lines), "kind": "jsonl", "packing": "whole", "tokenizer_vocab": 300}
    lines.write_text("\n".join(short))
    (seen, said), *_ = run_ranks(whole_documents, 1, toy_run(tmp_path, data=data, output={"dir": str(tmp_path / "a")}))
    assert said == ""
    assert max(seen) <= 32
    assert len(set(seen)) > 1, "rows of whole documents have different lengths"
    lines.write_text("\n".join([*short, '{"text": "%s"}' % ("one two three " * 60)]))
    (seen, said), *_ = run_ranks(whole_documents, 1, toy_run(tmp_path, data=data, output={"dir": str(tmp_path / "b")}))
    assert seen, "steps before the long document train"
    assert "N = 32" in said


def mixed(rank: int, world: int, config: RunConfig) -> tuple[list[float], set[torch.dtype]]:
    trainer = Trainer(config)
    losses = [trainer.step().loss for _ in range(5)]
    kept = {p.dtype for p in trainer.model.parameters()} | {v.dtype for v in checkpoint.state_of(trainer).values()}
    return losses, kept


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(tmp_path: Path) -> None:
    config = toy_run(tmp_path, train={"dtype": "bfloat16", "steps": 5, "warmup": 0})
    narrow, kept = run_ranks(mixed, 2, config)[0]
    wide, _ = run_ranks(mixed, 2, config.replace("train", dtype="float32"))[0]
    assert kept == {torch.float32}
    assert narrow != wide, "products were rounded to bfloat16"
    assert narrow[-1] < narrow[0]


def norms(rank: int, world: int, config: RunConfig) -> tuple[float, float, float]:
    trainer = Trainer(config)
    full = _gradients(trainer)
    dense = torch.stack([g.double().square().sum() for g in full.values()]).sum().sqrt().item()
    parameters = list(trainer.model.parameters())
    found = gradient_norm(parameters, trainer.group)
    from steppe.training.optimizer import clip_gradients

    clip_gradients(parameters, found, found.item() / 4)
    return dense, found.item(), gradient_norm(parameters, trainer.group).item()


@pytest.mark.parametrize("world", [1, 2])
def test_the_norm_counts_each_parameter_once_and_clipping_brings_it_down(world: int, tmp_path: Path) -> None:
    for dense, found, clipped in run_ranks(norms, world, toy_run(tmp_path)):
        assert found == pytest.approx(dense, rel=torch.finfo(torch.float64).eps * 64)
        assert clipped == pytest.approx(dense / 4, rel=torch.finfo(torch.float32).eps * 64)


def sequence_losses(rank: int, world: int, config: RunConfig) -> list[float]:
    trainer = Trainer(config)
    return [trainer.step().loss for _ in range(3)]


def test_d_ranks_of_a_sequence_train_like_one_rank(tmp_path: Path) -> None:
    config = toy_run(tmp_path, model={"attention": "packed"})
    one = run_ranks(sequence_losses, 1, config)[0]
    two = run_ranks(sequence_losses, 2, config.replace("launch", sequence=2, ranks=2))
    assert two[0] == two[1]
    length = 32 * 2
    for mine, theirs in zip(two[0], one, strict=True):
        assert mine == pytest.approx(theirs, rel=torch.finfo(torch.float32).eps * length)


def _balanced(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    config = toy_run(Path(folder), "glm4_moe", train={"router_bias_rate": 0.01}, launch={"ranks": world_size})
    with pytest.raises(ConfigError, match="router_bias_rate"):
        Trainer(config)
    trainer = Trainer(config.with_flatten(dispatch=policy_class("dispatch")(chunk_tokens=8)))
    trainer.step()
    biases = [b for name, b in trainer.model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert biases
    return [bias.clone() for bias in biases]


def test_router_biases_move_once_a_step_by_the_counts_of_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_balanced, 2, str(tmp_path))
    for mine, theirs in zip(first, second, strict=True):
        assert_bitwise(mine, theirs, "bias")
        assert torch.isin(mine.abs().round(decimals=6), torch.tensor([0.0, 0.01])).all(), "one step moves by one rate"
        assert mine.any()
