"""The peak of a step: the same after a resume, and the same for 4 and 16 micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from steppe.core.errors import WorkingSetError
from steppe.runtime.meter import Meter
from steppe.runtime.sharded import local
from steppe.training import checkpoint
from steppe.training.config import RunConfig
from steppe.training.loop import Trainer
from tests.support.peaks import assert_peak
from tests.support.ranks import run_ranks
from tests.training.toys import toy_run


def _metered(trainer: Trainer) -> int:
    with Meter(trainer.model, trainer.optimizer) as meter:
        trainer.step()
    return meter.ledger().device_peak_bytes


def resumed_peaks(rank: int, world: int, config: RunConfig) -> tuple[list[int], list[int], int]:
    root = Path(config.output.dir) / "checkpoints"
    straight = Trainer(config)
    straight.step()
    straight.step()
    checkpoint.save(straight, root, keep=1)
    steady = [_metered(straight) for _ in range(3)]
    del straight
    again = Trainer(config)
    checkpoint.load(again, root / "step-00000002")
    block = max(sum(p.numel() * 4 for p in layer.parameters()) for layer in again.model.model.layers)
    return steady, [_metered(again) for _ in range(3)], block


@pytest.mark.parametrize("flatten", [False, True])
def test_the_peak_of_a_resumed_run_is_the_steady_peak(flatten: bool, tmp_path: Path) -> None:
    config = toy_run(tmp_path, flatten={"boundary": "on", "optimizer": "on"} if flatten else {})
    for steady, resumed, block in run_ranks(resumed_peaks, 2, config):
        assert min(resumed) == min(steady)
        why = "gloo's threads may let go of a gathered block's buffer a moment late"
        assert_peak(max(resumed), min(steady), block, why)


def peaks_by_micro_batches(rank: int, world: int, runs: list[RunConfig]) -> list[tuple[int, int]]:
    found = []
    for run in runs:
        trainer = Trainer(run)
        trainer.step()
        found.append((_metered(trainer), sum(local(p).numel() * 4 for p in trainer.model.parameters())))
    return found


def test_the_peak_does_not_depend_on_the_number_of_micro_batches(tmp_path: Path) -> None:
    # One text a row: with packed documents, a batch in which one ends needs a mask, and another may not.
    base = toy_run(tmp_path, train={"batch": 4}, data={"packing": "stream"})
    runs = [base.replace("train", micro_batches=count) for count in (1, 4, 16)]
    for peaks in run_ranks(peaks_by_micro_batches, 2, runs):
        (one, shards), (four, _), (sixteen, _) = peaks
        assert sixteen == four
        assert_peak(four, one, shards, "the gradient shards of the first micro-batch are alive in the second")


def _too_large(rank: int, world_size: int, folder: str) -> None:
    config = toy_run(Path(folder), launch={"ranks": world_size, "device_memory": "100KB"})
    with pytest.raises(WorkingSetError, match=r"device memory, .* peak at .* too many.*allowed: 97\.7 KiB"):
        Trainer(config)
    assert not (Path(folder) / "out").exists(), "nothing is built or written before the refusal"
    Trainer(config.replace("launch", device_memory="80GB"))


def test_what_cannot_fit_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    run_ranks(_too_large, 1, str(tmp_path))
