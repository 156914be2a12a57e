"""Wrong usage of the command line: one line with what is allowed, exit code 2, and nothing started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from steppe import cli
from tests.training.toys import toy_tables


def _said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(toy_tables(tmp_path)))
    return path


@pytest.mark.parametrize("names", ["foo", "boundary, foo", "__init__"])
def test_an_unknown_flattener_is_refused_by_name(
    names: str, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _said(capsys, "verify", run_file, "--flatten", names)
    assert "boundary, dispatch, optimizer, vocab" in said


@pytest.mark.parametrize("command", ["train", "profile"])
@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(command: str, ranks: int, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--ranks: got {ranks}; allowed: 1 or more" in _said(capsys, command, run_file, f"--ranks={ranks}")


def test_what_is_refused_is_refused_before_torch_is_loaded(run_file: Path, tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.toml")
    wrong = [[command, absent] for command in ("train", "profile", "verify")]
    wrong += [
        ["compare", str(run_file), "--toggle", "vocab", "--rounds", "0"],
        ["train", str(run_file), "--ranks", "0"],
    ]
    wrong += [["calibrate", "--out", str(tmp_path / "none" / "machine.toml")], ["profile", str(run_file), "--ranks=-1"]]
    lines = [f"for wrong in {wrong!r}: assert cli.main(wrong) == 2", "assert 'torch' not in sys.modules"]
    probe = "\n".join(["import sys", "from steppe import cli", *lines])
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", len(wrong)), done.stderr


@pytest.mark.parametrize("path", ["none/picture.png", "run.toml/picture.png", "."])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    path: str, run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--picture: got" in _said(capsys, "profile", run_file, "--picture", tmp_path / path)
    assert "--out: got" in _said(capsys, "plan", "qwen3-0.6b", "--seq-len", "4K", "--out", tmp_path / path)


@pytest.mark.parametrize("arguments", [["--version"], ["explain", "37.09 GiB", "qwen3-0.6b", "--seq-len", "65536"]])
def test_a_reader_who_left_is_no_failure_and_a_full_disk_is_one(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "steppe.cli", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ours, theirs = os.pipe()
    os.close(ours)
    left = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=buffered)
    os.close(theirs)
    assert (left.returncode, left.stderr) == (0, b"")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=buffered, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("steppe") and done.stderr.count("\n") == 1 and "No space" in done.stderr


def test_an_export_below_a_file_is_refused(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--export: got" in _said(capsys, "train", run_file, "--export", run_file / "hf")
