"""Checkpoints: bitwise resume, any number of ranks, and every kind of damage refused with the way back."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from steppe.core.errors import CheckpointError
from steppe.runtime import collectives
from steppe.training import checkpoint
from steppe.training.config import RunConfig
from steppe.training.export import export, shard_plan
from steppe.training.launch import resume, run
from steppe.training.loop import Trainer
from steppe.training.manifest import NAME, data_files
from steppe.training.progress import Progress
from steppe.training.tokens import load_tokenizer
from tests.support.exactness import assert_bitwise
from tests.support.ranks import run_ranks
from tests.training.toys import toy_run

QUIET = Progress(shown=False, steps=0)


def train(rank: int, world: int, config: RunConfig) -> dict[str, torch.Tensor]:
    """Train to the end (resuming what is there); returns the full weights and optimizer state."""
    trainer = Trainer(config)
    run(trainer, Path(config.output.dir), QUIET)
    return {key: _full(value).clone() for key, value in checkpoint.state_of(trainer).items()}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _losses(config: RunConfig) -> list[tuple[int, str, str]]:
    lines = (Path(config.output.dir) / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss_hex"], r["grad_norm_hex"]) for r in map(json.loads, lines)]


def _dropout_run(folder: Path, **output: Any) -> RunConfig:
    config = toy_run(folder, train={"micro_batches": 2, "steps": 6}, output={"dir": str(folder / "out"), **output})
    return config.replace("model", shape={**config.model.shape, "attention_dropout": 0.1})


def with_policies(config: RunConfig, flatten: dict[str, object]) -> RunConfig:
    from steppe.training.config import policies

    return config.with_flatten(**policies(flatten))


def stop_early(rank: int, world: int, config: RunConfig, steps: int) -> None:
    """What a killed run leaves: its checkpoints, and a metrics line for a step behind the last of them."""
    trainer = Trainer(config)
    output = Path(config.output.dir)
    for _ in range(steps):
        trainer.step()
    checkpoint.save(trainer, output / "checkpoints", keep=config.output.keep)
    if rank == 0:
        (output / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": s}) + "\n" for s in range(steps + 2)) + '{"st'
        )


FLATTENED = {"optimizer": "on", "boundary": "on"}
OVERLAP = {"optimizer": {"bucket_bytes": 65536, "overlap_backward": True}}


@pytest.mark.parametrize(("world", "flatten"), [(1, {}), (2, {}), (2, FLATTENED), (2, OVERLAP)])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(world: int, flatten: dict[str, object], tmp_path: Path) -> None:
    straight, broken = (with_policies(_dropout_run(tmp_path / name), flatten) for name in "ab")
    expected = run_ranks(train, world, straight)
    run_ranks(stop_early, world, broken, 3)
    found = run_ranks(train, world, broken)
    for key, value in expected[0].items():
        assert_bitwise(found[0][key], value, key)
    lines = (Path(broken.output.dir) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6)), "each step stands there once"
    resumed = [(r["step"], r["loss_hex"]) for r in map(json.loads, lines) if "loss_hex" in r]
    assert resumed == [(step, loss) for step, loss, _ in _losses(straight)][3:]


def digest(rank: int, world: int, config: RunConfig) -> dict[str, torch.Tensor]:
    trainer = Trainer(config)
    checkpoint.load(trainer, checkpoint.committed(Path(config.output.dir) / "checkpoints")[-1])
    assert trainer.rows_read() == 3 * 2 * 2, "the stream goes on behind the rows that two ranks have read"
    state = {key: _full(value).clone() for key, value in checkpoint.state_of(trainer).items()}
    trainer.step()
    return state


@pytest.mark.parametrize("worlds", [(1, 2), pytest.param((1, 2, 3, 4), marks=pytest.mark.slow)])
def test_weights_and_optimizer_state_are_the_same_bits_on_any_number_of_ranks(
    worlds: tuple[int, ...], tmp_path: Path
) -> None:
    config = _dropout_run(tmp_path)
    run_ranks(stop_early, 2, config, 3)
    states = {world: run_ranks(digest, world, config)[0] for world in worlds}
    assert any(key.endswith("exp_avg_sq") for key in states[1])
    assert states[1]["optim.model.norm.weight.step"] == 3
    for world in worlds[1:]:
        for key, value in states[1].items():
            assert_bitwise(states[world][key], value, f"{key} on {world} ranks")


def refusal(rank: int, world: int, config: RunConfig) -> tuple[str, bool]:
    trainer = Trainer(config)
    before = {key: value.clone() for key, value in checkpoint.state_of(trainer).items()}
    with pytest.raises(CheckpointError) as refused:
        run(trainer, Path(config.output.dir), QUIET)
    after = checkpoint.state_of(trainer)
    return str(refused.value), all(torch.equal(_full(before[k]), _full(after[k])) for k in before)


def _saved_twice(rank: int, world: int, config: RunConfig) -> None:
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
        checkpoint.save(trainer, Path(config.output.dir) / "checkpoints", keep=2)


def _damage(kind: str, directory: Path) -> Path:
    victim = data_files(directory)[-1] if kind != "manifest" else directory / NAME
    body = bytearray(victim.read_bytes())
    if kind == "missing":
        victim.unlink()
    elif kind == "truncated":
        victim.write_bytes(body[: len(body) // 2])
    else:
        body[len(body) // 2] ^= 1
        victim.write_bytes(body)
    return victim


KINDS = ("flipped", "missing", "truncated", "manifest")


def damaged(rank: int, world: int, config: RunConfig) -> list[tuple[str, str]]:
    """Each kind of damage in turn, undone again: (file, refusal)."""
    root, told = Path(config.output.dir) / "checkpoints", []
    _saved_twice(rank, world, config)
    trainer = Trainer(config)
    before = {key: _full(value).clone() for key, value in checkpoint.state_of(trainer).items()}
    for kind in KINDS:
        if rank == 0:
            shutil.copytree(root / "step-00000002", root / "whole")
        victim = collectives.all_gather_object(
            str(_damage(kind, root / "step-00000002")) if rank == 0 else "", trainer.group
        )[0]
        with pytest.raises(CheckpointError) as refused:
            run(trainer, Path(config.output.dir), QUIET)
        told.append((victim, str(refused.value)))
        for key, value in checkpoint.state_of(trainer).items():
            assert torch.equal(_full(value), before[key]), "nothing is loaded from a checkpoint that is refused"
        collectives.barrier(trainer.group)
        if rank == 0:
            shutil.rmtree(root / "step-00000002")
            (root / "whole").rename(root / "step-00000002")
        collectives.barrier(trainer.group)
    return told


def test_a_damaged_checkpoint_is_refused_by_file_and_the_previous_one_offered(tmp_path: Path) -> None:
    config = toy_run(tmp_path)
    for told in run_ranks(damaged, 2, config):
        for victim, said in told:
            assert victim in said
            assert 'output.resume = "step-00000001"' in said
    run_ranks(train, 2, config.replace("output", resume="step-00000001"))
    root = Path(config.output.dir) / "checkpoints"
    assert [p.name for p in checkpoint.committed(root)][-1] == "step-00000006"
    assert (root / "abandoned-step-00000002").is_dir(), "what was left behind is set aside, not deleted"


def went_back_twice(rank: int, world: int, config: RunConfig) -> list[str | None]:
    """A job that goes back to step 1, is started again by its launcher, and ends; then the same job anew."""
    root, told = Path(config.output.dir) / "checkpoints", []
    for restarted in (False, True, False):
        trainer = Trainer(config)
        chosen = resume(trainer, root, restarted=restarted and rank == world - 1)  # its node's launcher counts alone
        told.append(chosen.name if chosen else None)
        trainer.step()
        checkpoint.save(trainer, root, keep=9)
        trainer.step()
        checkpoint.save(trainer, root, keep=9)
    return told


def test_a_restarted_job_does_not_go_back_a_second_time_and_what_was_set_aside_stays(tmp_path: Path) -> None:
    config = toy_run(tmp_path)
    run_ranks(_saved_twice, 2, config)
    back = config.replace("output", resume="step-00000001")
    assert run_ranks(went_back_twice, 2, back)[0] == ["step-00000001", "step-00000003", "step-00000001"]
    root = Path(config.output.dir) / "checkpoints"
    aside = [f"abandoned-step-0000000{n}" for n in ("2", "2-2", "3", "4", "5")]
    assert sorted(p.name for p in root.glob("abandoned-*")) == aside
    fresh = config.replace("output", resume="never", dir=str(tmp_path / "fresh"))
    found = run_ranks(restarted_afresh, 1, fresh)[0]
    assert found == [None, "step-00000002"], "what a fresh start has written is its own"


def restarted_afresh(rank: int, world: int, config: RunConfig) -> list[str | None]:
    root, trainer = Path(config.output.dir) / "checkpoints", Trainer(config)
    first = resume(trainer, root)
    _saved_twice(rank, world, config)
    again = resume(trainer, root, restarted=True)
    return [found.name if found else None for found in (first, again)]


def test_what_differs_is_named_by_the_key_that_brings_it_back(tmp_path: Path) -> None:
    plain = toy_run(tmp_path)
    flattened = with_policies(plain, {"optimizer": "on"})
    run_ranks(_saved_twice, 1, plain)
    assert "set flatten.optimizer off again" in run_ranks(refusal, 1, flattened)[0][0]
    narrow = plain.replace("model", dtype="bfloat16")
    assert 'set model.dtype = "float32"' in run_ranks(refusal, 1, narrow)[0][0]
    other = plain.replace("model", shape={**plain.model.shape, "rms_norm_eps": 0.5})
    assert "set rms_norm_eps back in model.shape" in run_ranks(refusal, 1, other)[0][0]
    assert "set data.tokens" not in run_ranks(refusal, 1, plain.replace("data", tokenizer_vocab=280))[0][0]
    on = flattened.replace("output", dir=str(tmp_path / "on"))
    run_ranks(_saved_twice, 1, on)
    assert "set flatten.optimizer on again" in run_ranks(refusal, 1, on.plain())[0][0]


def test_keys_of_another_model_are_refused_both_ways(tmp_path: Path) -> None:
    small, large = toy_run(tmp_path), toy_run(tmp_path)
    large = large.replace("model", shape={**large.model.shape, "num_hidden_layers": 3})
    wide = small.replace("model", shape={**small.model.shape, "vocab_size": 384})
    run_ranks(_saved_twice, 2, large)
    assert "with 'model.model.layers.2" in run_ranks(refusal, 2, small)[0][0]
    run_ranks(_saved_twice, 2, small)
    assert "without 'model.model.layers.2" in run_ranks(refusal, 2, large)[0][0]
    assert "float32[320, 32]; allowed: float32[384, 32]" in run_ranks(refusal, 2, wide)[0][0]


def test_a_run_with_other_data_or_another_seed_is_refused_by_the_field_that_differs(tmp_path: Path) -> None:
    config = toy_run(tmp_path)
    run_ranks(_saved_twice, 1, config)
    said = run_ranks(refusal, 1, config.replace("train", seed=4))[0][0]
    assert "train.seed = 4" in said
    assert "Remedy: set train.seed back" in said, "an older checkpoint of the same run would be refused, too"
    assert "data.seq_len = 16" in run_ranks(refusal, 1, config.replace("data", seq_len=16))[0][0]
    (tmp_path / "texts" / "a.txt").write_text("another text, long enough for a row of tokens " * 20)
    assert "data.tokens" in run_ranks(refusal, 1, config)[0][0]


class FullDisk(dcp.FileSystemWriter):
    """A disk that is full after the first rank has written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            (Path(self.path) / "half").write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write_data(plan, planner)


def full_disk(rank: int, world: int, config: RunConfig) -> tuple[str, list[str], bool]:
    trainer, root = Trainer(config), Path(config.output.dir) / "checkpoints"
    trainer.step()
    checkpoint.save(trainer, root, keep=2)
    trainer.step()

    def write(state: Any, directory: Path, group: Any) -> None:
        dcp.save(state, storage_writer=FullDisk(directory), process_group=group)

    with pytest.raises(CheckpointError) as refused:
        checkpoint.save(trainer, root, keep=2, write=write)
    names = sorted(p.name for p in root.iterdir())
    loss = trainer.step().loss  # the run itself is whole
    again = Trainer(config)
    checkpoint.load(again, root / "step-00000001")
    return str(refused.value), names, loss == loss and again.next_step == 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_full_disk_is_a_clear_error_and_the_previous_checkpoint_stays(world: int, tmp_path: Path) -> None:
    for said, names, alive in run_ranks(full_disk, world, toy_run(tmp_path)):
        assert "space for" in said
        assert "step-00000001 is intact" in said
        assert names == ["latest", "step-00000001"]
        assert alive


def too_small_a_disk(rank: int, world: int, config: RunConfig) -> str:
    from collections import namedtuple

    trainer, usage = Trainer(config), namedtuple("usage", "total used free")
    real, checkpoint.shutil.disk_usage = checkpoint.shutil.disk_usage, lambda _: usage(10, 9, 1)
    try:
        with pytest.raises(CheckpointError) as refused:
            checkpoint.save(trainer, Path(config.output.dir) / "checkpoints", keep=2)
    finally:
        checkpoint.shutil.disk_usage = real
    return str(refused.value)


def test_a_disk_too_small_is_seen_before_a_byte_is_written(tmp_path: Path) -> None:
    config = toy_run(tmp_path)
    for said in run_ranks(too_small_a_disk, 2, config):
        assert "1 B free" in said
        assert "there is no earlier checkpoint" in said
    assert not list((Path(config.output.dir) / "checkpoints").iterdir())


def test_only_the_newest_checkpoints_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    config = toy_run(tmp_path, output={"dir": str(tmp_path / "out"), "checkpoint_every": 1, "keep": 3})
    run_ranks(train, 2, config)
    root = Path(config.output.dir) / "checkpoints"
    assert [p.name for p in checkpoint.committed(root)] == [f"step-0000000{n}" for n in (4, 5, 6)]
    assert (root / "latest").read_text() == "step-00000006\n"
    assert not list(root.glob(".*")), "no left-overs"


def exported(rank: int, world: int, config: RunConfig, target: Path) -> dict[str, torch.Tensor]:
    trainer = Trainer(config)
    trainer.step()
    export(trainer.model, target, trainer.group, tokenizer_file=trainer.store.tokenizer_file, shard_bytes=40_000)
    return {name: _full(p).detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_an_export_loads_with_from_pretrained_and_trains_on(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = toy_run(tmp_path, family)
    weights = run_ranks(exported, 2, config, tmp_path / "hf")[0]
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert_bitwise(parameter.detach(), weights[name], name)
    text = "Steppes 12345 are  as\tflat as cafe\u0301s.\r\n\n  1,024!"  # digits, accents, white space: split by classes
    ids = load_tokenizer(tmp_path / "hf").encode(text, add_special_tokens=False).ids
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer(text, add_special_tokens=False).input_ids == ids, "the ids that the run was trained on"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert loaded.config.eos_token_id is not None
    onward = toy_run(tmp_path, model={"config": str(tmp_path / "hf"), "weights": str(tmp_path / "hf"), "shape": {}})
    again = run_ranks(first_weights, 2, onward)[0]
    for name, value in again.items():
        assert_bitwise(value, weights[name], name)


def first_weights(rank: int, world: int, config: RunConfig) -> dict[str, torch.Tensor]:
    trainer = Trainer(config)
    return {name: _full(p).detach().clone() for name, p in trainer.model.named_parameters()}


def test_shards_hold_their_bytes_or_one_larger_tensor() -> None:
    assert shard_plan({"a": 4, "b": 4, "c": 9, "d": 1}, 8) == [["a", "b"], ["c"], ["d"]]
    assert shard_plan({}, 8) == []
