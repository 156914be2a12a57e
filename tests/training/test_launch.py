"""`steppe train` with its real launcher: ranks start, one rank's failure ends all with that rank's message."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from steppe.core.errors import CheckpointError, ConfigError
from steppe.training.agreement import writing
from steppe.training.launch import train
from steppe.training.metrics import MetricsLog
from steppe.training.ranks import JobFailed, Place, start_ranks
from steppe.training.schedule import row_at
from tests.training.faulty import MESSAGE
from tests.training.toys import toy_tables

ROOT = Path(__file__).parents[2]


def _write(folder: Path, **sections: dict[str, object]) -> Path:
    tables = toy_tables(folder)
    for name, fields in sections.items():
        tables[name] = {**tables.get(name, {}), **fields}
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def _steppe(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "steppe.cli", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_train_starts_two_ranks_writes_metrics_and_exports(tmp_path: Path) -> None:
    job = _steppe("train", _write(tmp_path), "--ranks", 2, "--export", tmp_path / "hf")
    _, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(6))
    wanted = {"step", "loss", "loss_hex", "grad_norm", "lr", "tokens", "step_ms", "peak_bytes"}
    assert wanted <= records[0].keys()
    assert records[0]["tokens"] == 2 * 32
    assert records[-1]["loss"] < records[0]["loss"]
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert "step 6/6" in said, "a run without a terminal shows lines"


@pytest.mark.parametrize(("number", "code", "told"), [
    (signal.SIGINT, 130, "steppe train: interrupted"),
    pytest.param(signal.SIGTERM, 2, "stopped by SIGTERM", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_signal_ends_all_ranks_in_one_line(number: signal.Signals, code: int, told: str, tmp_path: Path) -> None:
    job = _steppe("train", _write(tmp_path, train={"steps": 100_000}))
    log = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == code, said
    assert told in said
    assert "Traceback" not in said


def test_a_failing_rank_ends_all_within_a_minute_with_its_own_message(tmp_path: Path) -> None:
    text = tmp_path / "docs.jsonl"
    text.write_text("\n".join(json.dumps({"text": "x" * length}) for length in (*[20] * 7, 90)))
    data = {"path": str(text), "kind": "jsonl", "packing": "whole", "tokenizer_vocab": 257}  # a token a byte
    seed = next(s for s in range(99) if 7 not in (row_at(0, 8, s), row_at(1, 8, s)))  # not in the first step
    started = time.monotonic()
    job = _steppe("train", _write(tmp_path, data=data, train={"seed": seed}), "--ranks", 2)
    _, said = job.communicate(timeout=120)
    assert time.monotonic() - started < 60
    assert job.returncode == 2
    last = said.strip().splitlines()[-1]
    assert last.startswith("steppe train: rank ")
    assert "N = 32, declared at launch" in last
    assert "Remedy" in last
    assert "step 1/6" in said, "a run without a terminal shows lines"
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    wanted = {"step", "loss", "loss_hex", "grad_norm", "lr", "tokens", "step_ms", "peak_bytes"}
    assert wanted <= records[0].keys()


def _all_four(folder: Path) -> Path:
    launch = {"ranks": 2, "expert": 2, "vocab": 2}
    flatten = {"dispatch": {"chunk_tokens": 8}, "boundary": {"min_bytes": 0}, "vocab": "on", "optimizer": "on"}
    return _write(folder, launch=launch, flatten=flatten, output={"checkpoint_every": 1})


def test_what_one_rank_raises_in_a_step_ends_those_that_wait_for_it_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAULT_MARKER", str(tmp_path / "marker"))
    monkeypatch.setenv("FAULT_AT_MICRO", "1")
    started = time.monotonic()
    with pytest.raises(JobFailed, match=f"rank 1 .*{MESSAGE}"):
        start_ranks(["train", str(_all_four(tmp_path))], 2, module="tests.training.faulty")
    assert time.monotonic() - started < 60
    assert capfd.readouterr().err.count(" failed: ") == 1, "only the rank whose doing it was speaks"
    assert not list((tmp_path / "out" / "checkpoints").glob("*00000002*")), "nothing is saved of a broken step"


def test_torchruns_elastic_restart_goes_on_behind_the_last_checkpoint(tmp_path: Path) -> None:
    path = _all_four(tmp_path)
    fault = {"FAULT_MARKER": str(tmp_path / "marker"), "FAULT_AT_MICRO": "3"}
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "tests.training.faulty", "train"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *flags, str(path)], cwd=ROOT, capture_output=True, text=True,
        timeout=200, env={**os.environ, **fault, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert MESSAGE in done.stderr
    assert "resumed from step-00000003" in done.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(6)), "each step stands there once"


@pytest.mark.slow
def test_a_rank_killed_from_outside_ends_all_and_the_next_start_resumes(tmp_path: Path) -> None:
    path = _write(tmp_path, train={"steps": 60}, output={"checkpoint_every": 1})
    job = _steppe("train", path, "--ranks", 2)
    until = time.monotonic() + 90
    while not list((tmp_path / "out" / "checkpoints").glob("step-*")):
        assert time.monotonic() < until
        time.sleep(0.05)
    children = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(job.pid)], text=True).split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "rank " in said.strip().splitlines()[-1]
    job = _steppe("train", path, "--ranks", 2)
    _, said = job.communicate(timeout=180)
    assert job.returncode == 0, said
    assert "resumed from step-" in said


def test_ranks_that_groups_do_not_divide_are_refused_before_anything_starts(tmp_path: Path) -> None:
    path = _write(tmp_path, launch={"ranks": 2, "sequence": 2})
    with pytest.raises(ConfigError, match="a divisor of the 3 ranks"):
        train(path, 3)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ranks: got"):
        train(_write(tmp_path), ranks)


def test_whole_lines_of_metrics_outlive_what_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\n{"step": 0}\n\xff\xfe\n{"step": 1}\n[]\n{"step": 2}\n{"st')
    log = MetricsLog(path)
    log.resume(2)
    log.write({"step": 2})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_only_what_the_disk_under_the_output_refuses_is_blamed_on_it(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(CheckpointError, match=r"check output\.dir"), writing(tmp_path / "out"):
        (tmp_path / "out" / "metrics.jsonl").open("a")
    with pytest.raises(CheckpointError, match="No space left"), writing(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), writing(tmp_path / "out"):
        (tmp_path / "elsewhere" / "text").open()


def test_half_a_launchers_environment_is_refused() -> None:
    assert Place.of({"PATH": "/bin"}) is None
    with pytest.raises(ConfigError, match="torchrun"):
        Place.of({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        Place.of({"RANK": "0"})
