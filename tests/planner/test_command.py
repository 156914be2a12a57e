"""`steppe plan` and `steppe explain`: fast, without torch, with stable keys and one-line refusals."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steppe import cli
from steppe.core.ledger import PEAKS
from steppe.planner.plan import read_plan

ROOT = Path(__file__).parents[2]
ASKED = ["--seq-len", "1M", "--ranks", "16", "--device-memory", "141GB", "--host-memory", "2TB"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(list(args))
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "paper-667b", "--seq-len", "1M", "--ranks", "64", "--device-memory", "141GB", "--host-memory", "2TB"],
        ["explain", "37.09 GiB", "qwen3-0.6b", "--seq-len", "65536"],
    ],
    ids=lambda c: c[0],
)
def test_the_answer_comes_within_a_second_of_cpu_and_without_torch(command: list[str]) -> None:
    probe = (
        "import sys, time, json\n"
        f"from steppe import cli\ncode = cli.main({command!r})\n"
        "heavy = [m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules]\n"
        "print(json.dumps([code, heavy, time.process_time()]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT)
    code, heavy, seconds = json.loads(done.stderr.splitlines()[-1])
    assert (code, heavy) == (0, [])
    assert seconds < 1.0


def test_json_has_the_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "paper-120b", *ASKED, "--json")
    told = json.loads(out)
    for side in ("plain", "flattened"):
        assert {
            "device_peak_bytes", "peaks", "host_bytes", "max_context_tokens", "tokens_per_second_modelled",
        } <= set(told[side])  # fmt: skip
        assert tuple(told[side]["peaks"]) == PEAKS
    assert all(set(switch) == {"flattener", "on", "why"} for switch in told["switches"])
    assert {"model", "data", "train", "launch", "flatten"} <= set(told["plan"])
    assert told["flattened"]["fits"]
    assert not told["plain"]["fits"]


def test_the_written_plan_is_the_one_that_was_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_file = tmp_path / "plan.toml"
    _, out, _ = run(capsys, "plan", "paper-120b", *ASKED, "--json", "--out", str(out_file))
    told = json.loads(out)["plan"]
    written = read_plan(out_file).to_tables()
    assert written == told


def test_the_table_names_the_peaks_the_switches_and_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "paper-667b", "--seq-len", "1M", "--ranks", "64", "--device-memory", "141GB",
                       "--host-memory", "2TB")  # fmt: skip
    assert code == 0
    for words in ("vocab peak", "device peak", "longest context", "host memory of a node", "GB/s of host memory"):
        assert words in out
    assert "without it the device misses" in out
    assert max(map(len, out.splitlines())) <= 400


def test_a_sweep_says_which_peaks_fall_when_devices_double(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "plan", "qwen3-30b-a3b", "--seq-len", "128K", "--ranks", "8,16,64", "--device-memory", "80GB"
    )
    assert "optimizer: " in out
    assert "falls" in out
    assert "hits the ceiling next" in out
    _, out, _ = run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "128K", "--ranks", "8,16", "--json")
    assert [told["ranks"] for told in json.loads(out)["sweep"]] == [8, 16]


def test_the_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, "plan", "paper-120b", *ASKED, "--picture", str(tmp_path / "peaks.png"))
    assert (tmp_path / "peaks.png").read_bytes().startswith(b"\x89PNG")


def test_explain_reads_a_whole_message_on_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("OutOfMemoryError: Tried to allocate 48.00 GiB. GPU 0 has 80 GiB"))
    code, out, _ = run(capsys, "explain", "-", "qwen3-30b-a3b", "--seq-len", "131072", "--json")
    assert code == 0
    assert json.loads(out)["readings"][0]["tensor"] == "one-hot of the chosen experts"


def test_explain_with_a_closed_standard_input_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, "explain", "-", "qwen3-0.6b", "--seq-len", "65536")
    assert code == 2
    assert "Tried to allocate" in err


def test_explain_answers_for_every_rank_of_a_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = b"caf\xe9\n[rank0]: Tried to allocate 1.17 GiB.\n[rank1]: Tried to allocate 37.09 GiB. GPU 1 has 80 GiB"
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log), encoding="utf-8"))
        code, out, _ = run(capsys, "explain", "-", "qwen3-0.6b", "--seq-len", "65536", *flags)
        assert code == 0
    told = json.loads(out)
    assert (told["size"], told["readings"]) == ("1.17 GiB", [])
    assert told["others"][0]["readings"][0]["tensor"] == "logits"


def test_a_size_that_any_small_tensor_prints_is_said_to_name_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "Tried to allocate 20.00 MiB.", "qwen3-0.6b", "--seq-len", "65536")
    assert code == 1
    assert "any of 1 to 10 MiB as 20.00 MiB" in out


def test_explain_says_when_no_reading_matches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "36.21 GiB", "qwen3-0.6b", "--seq-len", "65536")
    assert code == 1
    assert "no tensor of this run has that size" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "no-such-model", "--seq-len", "8K"], "paper-120b, paper-241b"),
        (
            ["plan", "qwen3-30b-a3b", "--seq-len", "8K", "--ranks", "8", "--expert", "3"],
            "E_p: got 3; allowed: a divisor",
        ),
        (["plan", "qwen3-30b-a3b", "--seq-len", "8K", "--ranks", "12", "--sequence", "3"], "D: got 3"),
        (
            ["plan", "deepseek-v3", "--seq-len", "8K", "--ranks", "8", "--device-memory", "80GB"],
            "smallest W that holds",
        ),
        (["plan", "qwen3-4b", "--seq-len", "8K", "--ranks", "eight"], "--ranks"),
        (["plan", "qwen3-4b", "--seq-len", "8K", "--on", "vocab", "--off", "vocab"], "--on and --off"),
        (["plan", "qwen3-4b", "--seq-len", "8K", "--batch", "0"], "--batch"),
        (["plan", "qwen3-4b", "--seq-len", "8K", "--on", "dispatch"], "which has no dispatch peak; allowed: vocab"),
        (["plan", "qwen3-4b", "--seq-len", "8K", "--device-memory", "1GB"], "kept free"),
        (["explain", "it crashed", "qwen3-4b", "--seq-len", "8K"], "Tried to allocate"),
    ],
)
def test_bad_input_is_one_line_with_what_is_allowed(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    code, _, err = run(capsys, *args)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_an_unknown_model_type_lists_the_known_ones_and_how_to_add_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 8}')
    code, _, err = run(capsys, "plan", str(tmp_path), "--seq-len", "8K")
    assert code == 2
    assert "qwen3_moe" in err
    assert "steppe/planner/models.py" in err


def test_sizes_in_gb_and_gib_are_both_understood(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = []
    for memory in ("80GB", "80GiB"):
        _, out, _ = run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "128K", "--device-memory", memory, "--json")
        peaks.append(json.loads(out)["plain"]["max_context_tokens"])
    assert peaks[0] < peaks[1]


def test_planning_a_large_sweep_stays_quick(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.process_time()
    run(capsys, "plan", "deepseek-v3", "--seq-len", "128K", "--ranks", "64,512", "--device-memory", "141GB")
    assert time.process_time() - start < 5


def test_a_calibrated_machine_replaces_the_priors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("[machine]\ndevice_memory_bytes = 64000000000\nto_host_rate = 4e9\nto_device_rate = 4e9\n")
    args = ["plan", "qwen3-30b-a3b", "--seq-len", "1M", "--ranks", "16", "--machine", str(machine)]
    _, out, _ = run(capsys, *args)
    assert "57.60 GiB each" in out  # 64 GB less the 2 GiB that stay free
    assert "the link moves 4.0 GB/s, below the 16 GB/s it takes" in out
    _, out, _ = run(capsys, *args, "--link", "50GB/s")  # what is given wins over what was measured
    assert "the link moves" not in out


@pytest.mark.parametrize(
    "line",
    [
        "to_host_rate = -4e9", 'to_host_rate = "fast"', "to_host_rate = nan", "matmul_rate = 0.0", "adamw_rates = 3",
        'adamw_rates = {"1" = 0}', "numa_nodes = true", "host_memory_rate = inf", "matmul_rate = 5e-324",
    ],
)  # fmt: skip
def test_a_machine_file_with_figures_that_no_machine_has_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str
) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text(f"[machine]\n{line}\n")
    code, _, err = run(capsys, "plan", "qwen3-4b", "--seq-len", "8K", "--machine", str(machine))
    assert code == 2
    assert "finite numbers above 0" in err
    assert len(err.strip().splitlines()) == 1


def test_other_stacks_words_describe_their_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """modelscope/ms-swift#9403, in its own words; with experts cut in two, half of it."""
    asked = ["qwen3-235b-a22b", "--seq-len", "4096", "--ranks", "64", "--tp", "4", "--pp", "2", "--ep", "8"]
    _, out, _ = run(capsys, "explain", "26.44 GiB", *asked)
    assert "47 blocks x 16 local experts x 3 x H 4,096 x I 1,536, 2 bytes" in out
    _, out, _ = run(capsys, "explain", "13.22 GiB", *asked, "--etp", "2")
    assert "x I 768, 2 bytes" in out
    code, _, err = run(capsys, "explain", "13.22 GiB", *asked, "--etp", "5")
    assert code == 2
    assert "a divisor of the expert width 1536" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seq-len", "-5"], "--seq-len: got '-5'"),
        (["--seq-len", "0"], "--seq-len: got 0; allowed: 1 or more"),
        (["--seq-len", "1,5K"], "--seq-len: got '1,5K'"),  # a decimal comma is no thousands separator
        (["--seq-len", "1e400"], "up to 10^18"),
        (["--batch", "-5"], "--batch: got -5; allowed: 1 or more"),
        (["--batch", "1.5"], "a whole number"),
        (["--micro-batches", "0"], "--micro-batches: got 0"),
        (["--sequence", "0"], "--sequence: got 0"),
        (["--expert", "-8"], "--expert: got -8"),
        (["--vocab-ranks", "0"], "--vocab-ranks: got 0"),
        (["--vocab", "-1"], "--vocab: got -1"),
        (["--ranks-per-node", "0"], "--ranks-per-node: got 0"),
        (["--ranks", "-8"], "--ranks: got '-8'"),
        (["--ranks", "99999999999"], "1 to 1,048,576"),
        (["--tflops", "0"], "--tflops: got 0"),
        (["--tflops", "nan"], "--tflops: got nan"),
        (["--link", "0GB/s"], "--link: got 0GB/s"),
        (["--network", "400Gb/s"], "8 Gb are 1 GB"),  # links are sold in bits
        (["--device-memory=-80GB"], "--device-memory: got '-80GB'"),
        (["--device-memory", "80"], "write its unit, as 141GB"),
        (["--tp", "8"], "steppe shards over FSDP2"),
        (["--pp", "two"], "--pp: got 'two'"),
        (["--host-memory", "0"], "--host-memory: got 0"),
        (["--router-loss", "--transformers", "main"], "5.15 or 4.57.1"),
        (["--machine", "no-such.toml"], "no-such.toml"),
    ],
)
def test_numbers_that_no_run_has_are_refused_with_their_flag(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    asked = ["plan", "qwen3-30b-a3b", *flags] + ([] if "--seq-len" in flags else ["--seq-len", "8K"])
    code, _, err = run(capsys, *asked)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "0"], "--tp: got 0"),
        (["--tp", "7"], "a divisor of the attention heads 32"),
        (["--pp", "99"], "at most the 48 layers"),
        (["--parameters", "nan"], "--parameters: got nan"),
        (["--ranks", "0"], "--ranks: got '0'"),
        (["--ranks", "8", "--sequence", "3"], "group size D: got 3"),
        (["--ranks", "8,16"], "one number of devices"),
        (["--ranks", "16", "--tp", "4", "--pp", "8"], "a multiple of TP x PP x CP, 32"),
        (["--ranks", "48", "--ep", "48"], "a divisor of the 128 experts"),
    ],
)
def test_explain_refuses_groups_that_no_run_has(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    code, _, err = run(capsys, "explain", "1.00 GiB", "qwen3-30b-a3b", "--seq-len", "8K", *flags)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("size", ["-5 GiB", "37,09 GiB", "1.2.3 GiB"])
def test_sizes_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], size: str) -> None:
    code, _, err = run(capsys, "explain", size, "qwen3-0.6b", "--seq-len", "64K")
    assert code == 2
    assert "Tried to allocate" in err


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "explain", "calibrate"):
        with pytest.raises(SystemExit) as left:
            cli.main([command, "--help"])
        assert left.value.code == 0
        out = capsys.readouterr().out
        for flag in re.findall(r"^  (--[a-z-]+)", out, flags=re.MULTILINE):
            about = out.split(f"  {flag}", 1)[1].split("\n  -", 1)[0]
            assert len(about.split()) >= 4, (command, flag)


def test_the_router_losss_version_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "qwen3-30b-a3b", "--seq-len", "128K", "--ranks", "16", "--router-loss"]
    _, out, _ = run(capsys, *asked, "--transformers", "5.15.1")
    assert "builds a one-hot of all layers" in out
    _, out, _ = run(capsys, *asked, "--transformers", "5.24.0")
    assert "counts experts layer by layer" in out
