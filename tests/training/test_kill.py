"""kill -9 at random moments: every restart resumes, and the losses are bitwise those of the uninterrupted run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.training.toys import toy_tables
from tests.training.zygote import Zygote

STEPS_BETWEEN_KILLS = 3


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


ALL_FOUR = {
    "launch": {"ranks": 2, "expert": 2, "vocab": 2},
    "flatten": {
        "dispatch": {"chunk_tokens": 16}, "vocab": "on", "boundary": {"min_bytes": 0},
        "optimizer": {"bucket_bytes": 65536, "overlap_backward": True},
    },
}  # fmt: skip


def _write_run(folder: Path, name: str, steps: int, extra: dict[str, Any] | None = None, **output: object) -> Path:
    tables = toy_tables(folder) | (extra or {})
    tables["model"]["shape"]["attention_dropout"] = 0.1
    tables["train"] |= {"steps": steps, "micro_batches": 2}
    tables["output"] = {"dir": str(folder / name), "checkpoint_every": 1, **output}
    path = folder / f"{name}.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def _losses(folder: Path) -> dict[int, tuple[str, str]]:
    file = folder / "metrics.jsonl"
    records = (
        [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    )
    assert len({r["step"] for r in records}) == len(records), "no step stands there twice"
    return {r["step"]: (r["loss_hex"], r["grad_norm_hex"]) for r in records}


def _wait_for_step(output: Path, step: int) -> None:
    until = time.monotonic() + 60
    while not (output / "checkpoints").is_dir() or max(_committed(output), default=0) < step:
        assert time.monotonic() < until, f"step {step} was not reached"
        time.sleep(0.01)


def _committed(output: Path) -> list[int]:
    return [int(p.name[5:]) for p in (output / "checkpoints").glob("step-*")]


def _kill(job: dict[str, Any], whom: str) -> None:
    victims = {"ranks": job["ranks"], "one rank": job["ranks"][-1:], "launcher": [job["launcher"]]}[whom]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _killed_run(zygote: Zygote, folder: Path, kills: int, seed: int, extra: dict[str, Any] | None = None) -> None:
    chance = random.Random(seed)
    steps = (kills + 1) * STEPS_BETWEEN_KILLS
    job = zygote.ask(start=str(_write_run(folder, "straight", steps, extra)), ranks=2)
    assert zygote.ask(wait=job["launcher"])["status"] == 0
    path, output, reached = _write_run(folder, "killed", steps, extra), folder / "killed", 0
    for kill in range(kills):
        job = zygote.ask(start=str(path), ranks=2)
        _wait_for_step(output, reached + chance.randint(1, STEPS_BETWEEN_KILLS))
        time.sleep(chance.random() * (0.1 if extra is None else 0.4))  # a step and its checkpoint are as long
        _kill(job, ("ranks", "launcher", "one rank")[kill % 3])
        assert zygote.ask(wait=job["launcher"])["status"] != 0, "the kill came before the end"
        reached = max(_committed(output))
    job = zygote.ask(start=str(path), ranks=2)
    assert zygote.ask(wait=job["launcher"])["status"] == 0
    assert _losses(output) == _losses(folder / "straight")
    assert len(_losses(output)) == steps


def test_five_kills_leave_no_trace_in_the_losses(zygote: Zygote, tmp_path: Path) -> None:
    _killed_run(zygote, tmp_path, kills=5, seed=11)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kill_in_any_phase_leaves_no_trace_with_all_four_on(zygote: Zygote, tmp_path: Path, kills: int) -> None:
    _killed_run(zygote, tmp_path, kills, seed=13, extra=ALL_FOUR)


@pytest.mark.slow
def test_fifty_kills_leave_no_trace_in_the_losses(zygote: Zygote, tmp_path: Path) -> None:
    _killed_run(zygote, tmp_path, kills=50, seed=12)


def test_ranks_end_within_seconds_of_their_launcher(zygote: Zygote, tmp_path: Path) -> None:
    job = zygote.ask(start=str(_write_run(tmp_path, "out", 10_000)), ranks=2)
    _wait_for_step(tmp_path / "out", 1)
    _kill(job, "launcher")
    zygote.ask(wait=job["launcher"])
    until = time.monotonic() + 10
    while any(_alive(pid) for pid in job["ranks"]):
        assert time.monotonic() < until, "a rank outlived its launcher"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """A process that runs; a zombie that nobody has waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_second_job_in_the_same_directory_is_refused_while_the_first_lives(zygote: Zygote, tmp_path: Path) -> None:
    path = _write_run(tmp_path, "out", 10_000, lock_timeout_s=0.2)
    first = zygote.ask(start=str(path), ranks=2)
    _wait_for_step(tmp_path / "out", 1)
    second = zygote.ask(start=str(path), ranks=1)
    assert zygote.ask(wait=second["launcher"])["status"] == 1
    assert all(_alive(pid) for pid in first["ranks"]), "the first job goes on"
    _kill(first, "ranks")
    zygote.ask(wait=first["launcher"])
