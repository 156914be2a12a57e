"""`steppe train` with all four flatteners on: the plain program's run, saved, resumed, resharded and evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steppe.core.errors import CheckpointError, ConfigError
from steppe.runtime import collectives
from steppe.training import checkpoint
from steppe.training.config import RunConfig, policies
from steppe.training.data import Batch
from steppe.training.evaluation import Evaluation
from steppe.training.launch import run
from steppe.training.loop import Trainer
from steppe.training.progress import Progress
from tests.support.exactness import assert_bitwise, rounding_band
from tests.support.ranks import run_ranks
from tests.training.toys import toy_run

QUIET = Progress(shown=False, steps=0)
ALL_FOUR = {
    "dispatch": {"chunk_tokens": 8}, "vocab": {"budget_bytes": 8192}, "boundary": {"min_bytes": 0},
    "optimizer": {"bucket_bytes": 4096},
}  # fmt: skip
STEPS, SAVED = 6, 3
BOTH = {"expert": 2, "vocab": 2}


def _config(folder: Path, *, family: str = "glm4_moe", flatten: bool = True, **launch: int) -> RunConfig:
    """Accumulation, warm-up and cosine, clipping in every step, dropout-free, router biases where nobody is plain."""
    train = {"steps": STEPS, "micro_batches": 2, "clip": 0.05, "schedule": "cosine", "warmup": 2}
    config = toy_run(folder, family, train=train, model={"attention": "packed"}, launch=launch)
    return config.with_flatten(**policies(ALL_FOUR)) if flatten else config


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {key: _full(value) for key, value in checkpoint.state_of(trainer).items()}


def trained(rank: int, world: int, config: RunConfig, stop: int = STEPS) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Resume what is there, train to `stop`, save; every step's loss and norm, and the whole state at the end."""
    trainer, root, told = Trainer(config), Path(config.output.dir) / "checkpoints", []
    if found := checkpoint.committed(root):
        checkpoint.load(trainer, found[-1])
    while trainer.next_step < stop:
        result = trainer.step()
        told.append((result.loss, result.grad_norm, result.lr))
    if stop < STEPS:
        checkpoint.save(trainer, root, keep=2)
    state = _state(trainer)
    trainer.flattened.detach()
    return told, state


def loaded(rank: int, world: int, config: RunConfig) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The state that a checkpoint gives to another layout, and the losses of the steps behind it."""
    trainer = Trainer(config)
    checkpoint.load(trainer, checkpoint.committed(Path(config.output.dir) / "checkpoints")[-1])
    state = _state(trainer)
    told = [(result.loss, result.grad_norm, result.lr) for result in (trainer.step() for _ in range(STEPS - SAVED))]
    trainer.flattened.detach()
    return state, told


def _assert_near(ours: list[Any], plain: list[Any], what: str) -> None:
    """Losses and norms of the same steps in another order of sums: a step's sums are as long as all its gradients."""
    band = rounding_band(torch.float32, 2**17)
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert mine[2] == theirs[2], "the learning rate follows the schedule"
        for name, a, b in zip(("loss", "norm"), mine, theirs):
            assert abs(a - b) <= band * abs(b), f"{what}: {name} {step} is {a!r}, plain {b!r}"


def test_a_run_resumes_bit_for_bit_in_its_layout_and_in_the_reordered_grade_in_others(tmp_path: Path) -> None:
    straight, broken = (_config(tmp_path / name, ranks=2, **BOTH) for name in "ab")
    expected, last = run_ranks(trained, 2, straight)[0]
    run_ranks(trained, 2, broken, SAVED)
    saved = None
    for sizes in ({"ranks": 2}, {"ranks": 4, "sequence": 2, "expert": 2, "vocab": 4}):
        config = broken.replace("launch", **{"expert": 1, "vocab": 1, **sizes})
        state, told = run_ranks(loaded, sizes["ranks"], config)[0]
        saved = saved or state
        for key, value in saved.items():
            assert_bitwise(state[key], value, f"{key} on {sizes}")
        _assert_near(told, expected[SAVED:], f"resumed on {sizes}")
    assert saved is not None
    assert any(key.endswith("master") for key in saved)
    found, again = run_ranks(trained, 2, broken)[0]
    assert found == expected[SAVED:]
    for key, value in last.items():
        assert_bitwise(again[key], value, key)


@pytest.mark.parametrize(
    ("world", "family", "launch"),
    [
        (2, "qwen3_moe", {"sequence": 2, "expert": 2, "vocab": 2}),
        (1, "gpt_oss", {}),
        pytest.param(4, "deepseek_v3", {"sequence": 2, "expert": 2, "vocab": 4}, marks=pytest.mark.slow),
        pytest.param(4, "mixtral", {"sequence": 4, "expert": 4, "vocab": 2}, marks=pytest.mark.slow),
    ],
)
def test_schedules_clipping_and_accumulation_are_those_of_the_plain_run_on_one_rank(
    world: int, family: str, launch: dict[str, int], tmp_path: Path
) -> None:
    rows = world // launch.get("sequence", 1)
    plain = _config(tmp_path / "plain", family=family, flatten=False).replace("train", batch=rows)
    expected, _ = run_ranks(trained, 1, plain)[0]
    assert all(norm > plain.train.clip for _, norm, _ in expected), "every step is clipped"
    ours, _ = run_ranks(trained, world, _config(tmp_path / "ours", family=family, ranks=world, **launch))[0]
    _assert_near(ours, expected, family)


def biased(rank: int, world: int, config: RunConfig) -> list[torch.Tensor]:
    trainer = Trainer(config.replace("train", router_bias_rate=0.01))
    for _ in range(2):
        trainer.step()
    return [b.clone() for name, b in trainer.model.named_buffers() if name.endswith("e_score_correction_bias")]


def test_router_biases_are_the_same_on_any_layout(tmp_path: Path) -> None:
    one = run_ranks(biased, 1, _config(tmp_path / "one").replace("train", batch=1))[0]
    two = run_ranks(biased, 2, _config(tmp_path / "two", ranks=2, sequence=2, **BOTH))
    for rank in two:
        for mine, theirs in zip(rank, one, strict=True):
            assert mine.any()
            assert_bitwise(mine, theirs, "router bias")


def evaluated(rank: int, world: int, config: RunConfig, every: int) -> tuple[list[Any], float]:
    trainer = Trainer(config.replace("train", evaluate_every=every))
    run(trainer, Path(config.output.dir), QUIET)
    lines = [json.loads(line) for line in (Path(config.output.dir) / "metrics.jsonl").read_text().splitlines()]
    rows = Evaluation(trainer)._rows
    batches = collectives.all_gather_object(list(rows.batches(0)), trainer.group)
    weights = {name: _full(value) for name, value in trainer.model.state_dict().items()}
    trainer.flattened.detach()
    return lines, _dense_loss(trainer, weights, [b for own in batches for b in own])


def _dense_loss(trainer: Trainer, weights: dict[str, torch.Tensor], batches: list[Batch]) -> float:
    """The evaluation's rows through a whole model of one process."""
    from steppe.training.model import build_model

    plain = build_model(trainer.config.plain().replace("model", attention="eager"), trainer.model_config).eval()
    plain.load_state_dict(weights)
    total, valid = 0.0, sum(b.num_valid for b in batches)
    for batch in batches:
        with torch.no_grad():
            logits = plain(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
        total += torch.nn.functional.cross_entropy(
            logits.double().flatten(0, 1), batch.labels.flatten(), reduction="sum"
        ).item()
    return total / valid


def test_an_evaluation_is_the_loss_of_a_whole_model_and_leaves_no_trace_in_the_run(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("The steppe that nobody trained on is flat, and so is its loss. " * 40)
    data = {"validation": str(held_out)}
    configs = [_config(tmp_path / name, ranks=2, **BOTH) for name in ("quiet", "told")]
    told, dense = run_ranks(evaluated, 2, configs[1].replace("data", **data), 2)[0]
    quiet, _ = run_ranks(evaluated, 2, configs[0].replace("data", **data), 0)[0]
    assert [r["step"] for r in told if "eval_loss" in r] == [1, 3, 5]
    assert [r["step"] for r in quiet if "eval_loss" in r] == [5], "after the last step in any case"
    assert [r["loss_hex"] for r in told] == [r["loss_hex"] for r in quiet]
    assert told[-1]["eval_loss"] == quiet[-1]["eval_loss"]
    assert abs(told[-1]["eval_loss"] - dense) <= rounding_band(torch.float32, 2**10) * dense


def test_evaluating_without_a_text_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.validation"):
        toy_run(tmp_path, train={"evaluate_every": 2})


def refused(rank: int, world: int, config: RunConfig) -> list[str]:
    root, said = Path(config.output.dir) / "checkpoints", []
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
        checkpoint.save(trainer, root, keep=3)
    before = _state(trainer)
    for damage in ("flipped", "missing"):
        collectives.barrier(trainer.group)
        victim = root / "step-00000002" / f"__{world - 1}_0.distcp"
        if rank == 0 and damage == "flipped":
            body = bytearray(victim.read_bytes())
            body[len(body) // 3] ^= 1
            victim.write_bytes(body)
        if rank == 0 and damage == "missing":
            victim.unlink()
        collectives.barrier(trainer.group)
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.load(trainer, root / "step-00000002")
        said.append(str(refusal.value))
        for key, value in _state(trainer).items():
            assert_bitwise(value, before[key], f"{key} after a refusal")
    checkpoint.load(trainer, root / "step-00000001")
    assert trainer.next_step == 1
    trainer.flattened.detach()
    return said


def test_a_damaged_checkpoint_of_sharded_experts_and_host_state_is_refused_and_the_previous_one_loads(
    tmp_path: Path,
) -> None:
    for said in run_ranks(refused, 2, _config(tmp_path, ranks=2, **BOTH)):
        assert all('output.resume = "step-00000001"' in line for line in said)
        assert "sha256" in said[0] and "missing" in said[1]
