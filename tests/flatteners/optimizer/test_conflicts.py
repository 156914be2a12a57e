"""Live objects that would undo the optimizer's work are named, with a remedy; attach and detach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from steppe.core.errors import ConflictError
from steppe.flatteners.optimizer.adamw import OffloadStreamAdamW
from steppe.flatteners.optimizer.attach import attach, conflicts, diagnose
from steppe.flatteners.optimizer.budget import OptimizerPolicy
from steppe.flatteners.optimizer.schedule import STATE_BYTES


def _optimizer(**settings: Any) -> OffloadStreamAdamW:
    return OffloadStreamAdamW(nn.Linear(3, 3).parameters(), **settings)


def test_a_trainer_that_clips_after_backward_is_named_with_the_remedy() -> None:
    arguments = SimpleNamespace(max_grad_norm=1.0)
    trainer = SimpleNamespace(args=arguments, optimizer=_optimizer(overlap_backward=True))
    for live in ((trainer,), (arguments, trainer.optimizer), (trainer, trainer.optimizer)):
        (found,) = conflicts(*live)
        assert "clips after backward (max_grad_norm=1)" in found.what
        assert found.remedy == "max_grad_norm=0 there, and OffloadStreamAdamW(..., max_norm=1)"
    assert conflicts(arguments, _optimizer()) == ()
    assert conflicts(SimpleNamespace(max_grad_norm=0.0), _optimizer(overlap_backward=True)) == ()


def test_transformers_own_default_is_found() -> None:
    transformers = pytest.importorskip("transformers")
    default = transformers.TrainingArguments.__dataclass_fields__["max_grad_norm"].default
    assert default == 1.0
    assert len(conflicts(SimpleNamespace(max_grad_norm=default), _optimizer(overlap_backward=True))) == 1


def test_a_scaler_and_data_parallel_hooks_conflict_with_overlap() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert "GradScaler" in conflicts(scaler, _optimizer(overlap_backward=True))[0].what
    assert conflicts(scaler, _optimizer()) == ()
    assert conflicts(torch.amp.GradScaler("cpu", enabled=False), _optimizer(overlap_backward=True)) == ()


def test_zero_3_is_refused() -> None:
    engine = SimpleNamespace(zero_optimization_stage=lambda: 3)
    trainer = SimpleNamespace(args=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)))
    for thing in (engine, trainer):
        (found,) = conflicts(thing, _optimizer())
        assert "ZeRO-3" in found.what
        assert "fully_shard" in found.remedy


def test_two_optimizers_over_the_same_parameters_conflict() -> None:
    model = nn.Linear(2, 2)
    ours, other = OffloadStreamAdamW(model.parameters()), torch.optim.SGD(model.parameters())
    assert "two optimizers" in conflicts(ours, other)[0].what
    assert conflicts(ours, _optimizer()) == ()


def test_attach_builds_a_ready_optimizer_and_detach_lets_go() -> None:
    model = nn.Linear(8, 8)
    attached = attach(model, OptimizerPolicy(overlap_backward=True, max_norm=1.0), lr=0.1, weight_decay=0.0)
    assert attached.stats()["host_state_bytes"] >= STATE_BYTES * 72
    assert attached.optimizer.defaults["lr"] == 0.1
    model(torch.ones(1, 8)).sum().backward()
    assert model.weight.grad is None
    attached.optimizer.step()
    attached.detach()
    model(torch.ones(1, 8)).sum().backward()
    assert model.weight.grad is not None


def test_attach_refuses_what_conflicts() -> None:
    class Distributed(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.inner = nn.Linear(2, 2)

    with pytest.raises(ConflictError, match=r"DistributedDataParallel.*fully_shard"):
        attach(Distributed(), OptimizerPolicy(overlap_backward=True))


def test_failure_signals_are_read_off_the_stats() -> None:
    well = {"kernel": "compiled (x86-64-v4)", "device": "cuda:0", "steps": 9, "skipped": 0, "streams": 1, "cpus": (0,),
            "step_seconds": 1.0, "update_seconds": 0.4, "threads": 4, "num_elements": 10**9}  # fmt: skip
    assert diagnose(well) == ()
    told = diagnose({**well, "kernel": "numpy (not built)", "update_seconds": 0.95, "skipped": 1})
    assert len(told) == 3
    assert "reinstall steppe" in told[0]
    assert "0.950 of 1.000 s, 1053 M parameters/s on 4 threads" in told[1]
    assert "1 of 10 steps were skipped" in told[2]
    assert diagnose(_optimizer().stats()) == ()
