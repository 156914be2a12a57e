"""What `steppe plan` says beside its figures: sweeps, sentences, and a plan.toml that the training program takes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import case_planner
from steppe import cli
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, MachineShape
from steppe.planner.context import max_context, max_context_plain
from steppe.planner.layouts import Job
from steppe.planner.models import load_model
from steppe.planner.plan import read_plan
from steppe.planner.search import search, search_plain

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(list(args))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_job_that_no_number_of_ranks_runs_is_answered_as_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """gpt-oss's scores at 1M tokens fit nowhere: looking for the fastest plan at every W took 12 s."""
    start = time.process_time()
    _, out, _ = run(capsys, "plan", "gpt-oss-20b", "--seq-len", "1M", "--ranks", "96", "--weight-dtype", "float32",
                    "--host-memory", "2TB", "--device-memory", "288GB")  # fmt: skip
    assert "no W up to 8192 works" in out
    assert time.process_time() - start < 4


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_a_sweep_tells_of_numbers_that_cant_be_beside_those_that_can(
    capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    code, out, _ = run(capsys, "plan", "deepseek-v3", "--seq-len", "8K", "--ranks", "512,8,512,64", *flags)
    assert code == 0
    if flags:
        told = json.loads(out)["sweep"]
        assert [one["ranks"] for one in told] == [512, 8, 64]
        assert "weights: got" in told[1]["refused"]
    else:
        assert "* 8 ranks: weights: got" in out
        assert "falls (8.0x over 8x the devices)" in out  # from 64 to 512, in whatever order they were asked for


def test_a_sweep_in_which_nothing_can_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "deepseek-v3", "--seq-len", "8K", "--ranks", "4,8")
    assert code == 2
    assert "smallest W that works, doubling from 8: 128" in err


def test_a_length_that_divides_badly_is_said_to_want_padding(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "131071", "--ranks", "8")
    assert "S 131,071 divides over 1 ranks at most; padded to 131,072 it divides over 8" in out
    _, out, _ = run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "128K", "--ranks", "8")
    assert "padded" not in out


def test_the_longest_context_is_that_of_programs_that_pay_at_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    """At 1,024 tokens the dispatch's workspace is larger than the rows it replaces: it was left out at every length."""
    asked = ["--ranks", "8", "--device-memory", "141GB", "--host-memory", "2TB", "--json"]
    longest = [
        json.loads(run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "128K", *asked, *off)[1])["flattened"]
        for off in ([], ["--off", "dispatch"])
    ]
    assert longest[0]["max_context_tokens"] > 2 * longest[1]["max_context_tokens"]
    assert longest[1]["stopped_by"] == "dispatch"


@pytest.mark.parametrize("plain", [True, False])
def test_a_plan_fits_at_the_longest_context_that_is_told(plain: bool) -> None:
    machine = MachineShape(device_memory_bytes=80 * 10**9, host_memory_bytes=2 * 10**12)
    for name, world in (("qwen3-30b-a3b", 8), ("mixtral-8x7b", 16), ("qwen2.5-32b", 40)):
        asked = Job(load_model(name), BatchShape(1024), world, machine=machine)
        longest = (max_context_plain if plain else max_context)(asked).num_tokens
        assert longest
        assert (search_plain if plain else search)(asked.with_seq_len(longest)).fits


@pytest.mark.parametrize(("name", "world"), [("qwen3-30b-a3b", 8), ("mixtral-8x7b", 16), ("qwen3-4b", 64)])
def test_the_page_of_contexts_is_what_the_planner_says(name: str, world: int) -> None:
    """`python -m benchmarks.case_planner` writes the page: figures that have moved since are old ones."""
    page = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} | {world} |")]
    told = case_planner.contexts(name, world)
    cells = [cell.strip() for cell in row.split("|")[3:7]]
    assert cells == [
        case_planner._tokens(told[side], told[f"{side}_stopped_by"])
        for side in ("naive", "fused", "tuned", "flattened")
    ]


def test_heads_that_split_over_five_ranks_have_a_longest_context_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", "qwen2.5-32b", "--seq-len", "128000", "--ranks", "40", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["flattened"]["max_context_tokens"] % 40 == 0


def test_the_ceiling_is_told_over_the_ranks_that_the_longest_context_uses(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "gpt-oss-120b", "--seq-len", "131071", "--ranks", "24", "--device-memory", "288GB", "--json"]
    _, out, _ = run(capsys, *asked)
    told = json.loads(out)
    longest = told["flattened"]["max_context_tokens"]
    assert longest
    assert f"about N {longest // 8:,} (S {longest // 1024}K over D 8" in "\n".join(told["sentences"])


def test_a_switch_that_wouldnt_make_the_run_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", "deepseek-v3", "--seq-len", "128K", "--ranks", "24")
    assert "boundary   off  no help: with it the device still misses" in out
    assert "no length fits on W 24: optimizer is too large at any" in out


def test_scores_that_were_asked_for_are_not_laid_to_the_models_sinks(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--seq-len", "8K", "--attention", "materialised"]
    assert "scores are materialised, as was asked for" in run(capsys, "plan", "qwen3-4b", *asked)[1]
    assert "attention sinks have no fused backward" in run(capsys, "plan", "gpt-oss-20b", "--seq-len", "8K")[1]


def test_a_router_loss_without_a_router_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "qwen3-4b", "--seq-len", "8K", "--router-loss")
    assert code == 2
    assert "has no router" in err


def test_a_plan_carries_what_the_run_changes_in_its_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out_file = tmp_path / "plan.toml"
    run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "1M", "--ranks", "64", "--vocab", "152064", "--router-loss",
        "--attention", "materialised", "--out", str(out_file))  # fmt: skip
    plan = read_plan(out_file)
    assert plan.shape == {
        "max_position_embeddings": 2**20, "vocab_size": 152064, "output_router_logits": True,
    }  # fmt: skip
    assert plan.attention == "eager"


def test_a_plan_with_torchs_adamw_says_that_it_has_no_masters(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for flags, said in (([], True), (["--weight-dtype", "float32"], False)):
        run(capsys, "plan", "qwen3-4b", "--seq-len", "8K", *flags, "--out", str(tmp_path / "plan.toml"))
        assert ("keeps both moments in bfloat16" in (tmp_path / "plan.toml").read_text()) is said


def test_the_training_program_takes_a_plan_longer_than_the_models_positions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from steppe.training.config import load
    from steppe.training.model import load_model_config

    run(capsys, "plan", "qwen3-30b-a3b", "--seq-len", "1M", "--ranks", "64", "--out", str(tmp_path / "plan.toml"))
    assert load_model_config(load(tmp_path / "plan.toml")).max_position_embeddings == 2**20


@pytest.mark.parametrize(
    "flags", [["--zero", "2"], ["--gradient-dtype", "float32"], ["--state-dtype", "bfloat16"]], ids=lambda f: f[0]
)
def test_a_plan_that_the_training_program_would_run_otherwise_is_not_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str]
) -> None:
    code, _, err = run(capsys, "plan", "qwen3-4b", "--seq-len", "8K", *flags, "--out", str(tmp_path / "plan.toml"))
    assert code == 2
    assert f"{flags[0]} with --out" in err


def test_gradients_are_kept_as_weights_are_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "qwen3-4b", "--seq-len", "8K", "--weight-dtype", "float32", "--json"]
    assert run(capsys, *asked)[1] == run(capsys, *asked, "--gradient-dtype", "float32")[1]


def test_a_forced_flattener_is_not_fitted_away(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With room for every boundary the fastest choice keeps them all: that is no SCO."""
    run(capsys, "plan", "qwen3-4b", "--seq-len", "8K", "--on", "boundary", "--out", str(tmp_path / "plan.toml"))
    policy = read_plan(tmp_path / "plan.toml").policies["boundary"]
    assert policy is not OFF
    assert policy.default == "offload"


@pytest.mark.parametrize("name", ["peaks", "peaks.xyz"])
def test_a_picture_that_cant_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    code, out, err = run(capsys, "plan", "qwen3-4b", "--seq-len", "8K", "--picture", str(tmp_path / name))
    assert (code, out) == (2, "")
    assert ".png" in err
