"""`with profile(model, optimizer) as report:` around a step of one's own: ledger, table, advice, picture."""

from __future__ import annotations

import ast
import inspect
import json
import struct
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steppe.profiler.report
from steppe.core.errors import ConfigError, SteppeError
from steppe.core.ledger import PEAKS, Ledger
from steppe.core.units import GiB, MiB, format_bytes
from steppe.profiler import Report, drawing, picture, profile, reading, table
from steppe.runtime.timeline import Timeline
from tests.support.float64 import toy_model
from tests.support.peaks import assert_peak

VOCAB, TOKENS, HIDDEN, LAYERS = 1024, 128, 32, 2


class Run:
    """A toy Qwen3-MoE with checkpointing and AdamW."""

    def __init__(self) -> None:
        self.model = toy_model("qwen3_moe", vocab_size=VOCAB)
        self.model.train()
        self.model.activation_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.ids = torch.randint(0, VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.fixture(scope="module")
def report() -> Report:
    run = Run()
    run.step()
    with profile(run.model, run.optimizer, ceiling_bytes=MiB) as report:
        run.step()
    return report


def made_up(**held: list[int]) -> Timeline:
    rows = np.array(list(held.values()), dtype=np.int64)
    return Timeline(tuple(held), np.arange(rows.shape[1], dtype=np.float64), rows)


def ledger_of(timeline: Timeline) -> Ledger:
    top = int(timeline.total.argmax())
    holders = {owner: int(row[top]) for owner, row in zip(timeline.owners, timeline.held, strict=True)}
    peaks = {owner: int(row.max()) for owner, row in zip(timeline.owners, timeline.held, strict=True)}
    return Ledger(int(timeline.total[top]), holders, peaks, moment="loss")


def test_a_step_of_ones_own_is_measured_owner_by_owner(report):
    num_bytes = 4 * sum(p.numel() for p in Run().model.parameters())
    peaks = report.ledger.peaks
    assert_peak(peaks["vocab"], 3 * TOKENS * VOCAB * 4, 4096, "scalars of the mean")
    assert_peak(peaks["boundary"], LAYERS * TOKENS * HIDDEN * 4, 0, "boundaries are nothing else")
    assert_peak(peaks["weights"], num_bytes, 4096, "rotary frequencies")
    assert_peak(peaks["gradients"], num_bytes, 0, "gradients are nothing else")
    assert peaks["optimizer"] >= 2 * num_bytes
    assert report.ledger.moment == "loss"
    assert set(report.recognised) == {"boundary", "attention", "dispatch", "router", "vocab"}


def test_profiling_changes_no_bit_and_leaves_the_model_as_it_was():
    plain, profiled = Run(), Run()
    before = [dict(vars(module)) for module in profiled.model.modules()]
    expected = [plain.step() for _ in range(3)]
    actual = [profiled.step()]
    with profile(profiled.model, profiled.optimizer):
        actual.append(profiled.step())
    actual.append(profiled.step())
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert [dict(vars(module)) for module in profiled.model.modules()] == before


def test_a_step_that_fails_leaves_the_model_as_it_was_and_still_reports():
    run = Run()
    before = [dict(vars(module)) for module in run.model.modules()]
    seen = []

    def fails() -> None:
        with profile(run.model, run.optimizer) as report:
            seen.append(report)
            run.model(input_ids=run.ids, labels=run.ids)
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fails()
    assert [dict(vars(module)) for module in run.model.modules()] == before
    assert seen[0].ledger.peaks["vocab"] > 0


class Wrapped(torch.optim.Optimizer):
    """An optimizer as accelerate hands it out: a torch.optim.Optimizer by name, whose hooks are the inner one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    state = property(lambda self: self.optimizer.state)

    def step(self) -> None:
        self.optimizer.step()


def test_a_wrapped_optimizer_and_several_are_named_as_one():
    run = Run()
    run.step()
    halves = [*run.model.parameters()]
    one, two = (torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in (halves[:4], halves[4:]))
    num_bytes = sum(p.nbytes for p in halves)
    for optimizers in ([Wrapped(one), two], (one, two)):
        run.optimizer = one
        with profile(run.model, optimizers) as found:
            two_steps = run.step(), two.step()
        assert two_steps
        assert found.ledger.peaks["optimizer"] > num_bytes / 4
    with profile(run.model, Wrapped(run.optimizer)) as wrapped:
        run.step()
    with profile(run.model, run.optimizer) as direct:
        run.step()
    assert wrapped.ledger.peaks["optimizer"] == direct.ledger.peaks["optimizer"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": None}, "torch.nn.Module"), ({"optimizer": 5}, "a torch.optim.Optimizer"),
        ({"optimizer": [torch.nn.Linear(1, 1)]}, "a torch.optim.Optimizer"),
        ({"ceiling_bytes": "80GB"}, "bytes above 0"), ({"ceiling_bytes": 0}, "bytes above 0"),
        ({"ceiling_bytes": float("nan")}, "bytes above 0"), ({"device_type": "nosuch"}, "a device's type"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_and_leaves_the_model_as_it_was(arguments, words):
    model = toy_model("qwen3_moe")
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ConfigError, match=words), profile(**{"model": model, **arguments}):
        pytest.fail("was measured")
    assert [dict(vars(module)) for module in model.modules()] == before


def test_profiles_on_two_threads_know_nothing_of_each_other():
    """One is held up in the middle of its step while the other takes a whole one."""
    first, second = Run(), Run()
    first.step(), second.step()
    with profile(second.model, second.optimizer) as alone:
        second.step()
    found = {}

    def other() -> None:
        with profile(second.model, second.optimizer) as report:
            second.step()
        found["other"] = report

    with profile(first.model, first.optimizer) as outer:
        kept = first.model(input_ids=first.ids, labels=first.ids, use_cache=False)
        held = outer.meter.live_bytes("boundary")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert outer.meter.live_bytes("boundary") == held
        kept.loss.backward()
    assert outer.ledger.peaks["boundary"] == alone.ledger.peaks["boundary"] == found["other"].ledger.peaks["boundary"]


def test_the_advice_says_what_was_not_seen(report):
    assert not any("recognised" in sentence or "compiled" in sentence for sentence in report.advice())
    headless = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    with profile(headless) as found:
        headless(torch.ones(2, 8)).sum().backward()
    assert found.advice()[-1].startswith("No output head was recognised")
    headless.compile(backend="eager")
    with profile(headless) as found:
        pass
    assert found.advice()[-1].startswith("1 compiled module(s) were left whole (the model itself)")


def test_a_report_is_read_after_its_block():
    run = Run()
    with profile(run.model) as report:
        report.mark("my phase")
        with pytest.raises(SteppeError, match="after the profiled block"):
            _ = report.ledger
    with pytest.raises(SteppeError, match="inside the profiled block"):
        report.mark("late")


def test_the_json_round_trips(report):
    data = json.loads(json.dumps(report.to_json()))
    assert Ledger.from_json(data["ledger"]) == report.ledger
    assert Timeline.from_json(data["timeline"]).peak[1] == report.timeline.peak[1]
    assert data["advice"] == list(report.advice())
    assert set(data["savings"]) == set(PEAKS)


def test_the_phases_of_a_step_are_told(report):
    names = [name for _, name in report.timeline.marks]
    assert names[:3] == ["forward", "loss", "backward"]


def test_the_table_names_every_peak_its_size_and_who_holds_the_top(report):
    lines = report.table().splitlines()
    cells = {line.split("  ")[0].strip(): line for line in lines}
    for owner in PEAKS:
        assert format_bytes(report.ledger.peaks[owner]) in cells[owner]
    assert format_bytes(report.ledger.device_peak_bytes) in cells["device peak"]
    assert "loss" in cells["stands in"]
    assert "#" in cells["vocab"]


def test_the_table_of_two_runs_has_a_column_for_each():
    one = Ledger(3 * MiB, {"vocab": 3 * MiB}, {"vocab": 3 * MiB}, moment="loss")
    two = Ledger(MiB, {"weights": MiB}, {"weights": MiB}, host_bytes=MiB, moment="update")
    text = table({"plain": one, "flattened": two})
    assert text.splitlines()[0].split() == ["plain", "flattened"]
    vocab = next(line for line in text.splitlines() if line.startswith("vocab"))
    assert vocab.split() == ["vocab", "3.0", "MiB", "0", "B"]


def test_a_reading_counts_what_a_peak_is_worth_at_the_height_of_all():
    timeline = made_up(weights=[2, 2, 2], vocab=[0, 10, 0], boundary=[1, 3, 0], optimizer=[0, 0, 8])
    assert reading.savings(timeline) == {"dispatch": 0, "vocab": 5, "boundary": 3, "optimizer": 0}
    assert reading.order(timeline) == [("vocab", 10), ("optimizer", 5), ("boundary", 2)]


@given(
    st.lists(st.lists(st.integers(0, 100), min_size=5, max_size=5), min_size=4, max_size=4),
    st.lists(st.integers(0, 100), min_size=5, max_size=5),
)
def test_no_order_of_schedules_goes_below_all_of_them_and_every_step_of_it_helps(rows, rest):
    timeline = made_up(other=rest, **dict(zip(PEAKS, rows, strict=True)))
    heights = [timeline.peak[1], *(low for _, low in reading.order(timeline))]
    assert heights == sorted(set(heights), reverse=True)
    assert heights[-1] >= reading.without(timeline, PEAKS) == max(rest)


def test_the_advice_names_what_to_switch_on_and_what_would_save_nothing():
    timeline = made_up(weights=[2 * MiB], vocab=[10 * MiB], boundary=[0], optimizer=[4 * MiB])
    said = reading.advice(ledger_of(timeline), timeline, ceiling_bytes=8 * MiB)
    assert said[1] == "It is 8.0 MiB over the ceiling of 8.0 MiB."
    assert said[2] == "First vocab (Ring-DTP): the peak can fall to 6.0 MiB."
    assert said[3] == "Then optimizer (OffloadStreamAdamW): the peak can fall to 2.0 MiB."
    assert said[4] == "PipelinedLLEP, SCO would save next to nothing here."
    assert len(said) == 5


def test_where_nothing_stands_out_and_it_does_not_fit_batch_and_length_are_named():
    timeline = made_up(weights=[2 * MiB], attention=[10 * MiB], boundary=[MiB])
    said = reading.advice(ledger_of(timeline), timeline, ceiling_bytes=8 * MiB)
    assert "None of the four peaks stands out." in said
    assert "batch x sequence length" in said[-1]
    fits = reading.advice(ledger_of(timeline), timeline, ceiling_bytes=20 * MiB)
    assert "to spare" in fits[1]
    assert not any("batch" in sentence for sentence in fits)


def png_size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_the_picture_of_two_runs_is_wide_enough_to_read(report, tmp_path):
    picture(tmp_path / "two.png", {"plain": report.timeline, "flattened": report.timeline})
    width, height = png_size(tmp_path / "two.png")
    assert width >= 2000
    assert height >= 700
    report.picture(tmp_path / "one.png")
    assert png_size(tmp_path / "one.png")[0] < width


def drawn_texts(tmp_path, timelines) -> str:
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        picture(tmp_path / "picture.svg", timelines)
    return (tmp_path / "picture.svg").read_text()


def test_the_picture_names_the_axis_the_peaks_and_the_runs(tmp_path):
    small = made_up(weights=[MiB, MiB], vocab=[0, 5 * MiB], strangers=[MiB, MiB])
    text = drawn_texts(tmp_path, {"plain": small, "flattened": made_up(weights=[MiB, 2 * MiB])})
    for words in (
        "memory on the device, MiB",
        "peak 7.0 MiB",
        "peak 2.0 MiB",
        "plain",
        "flattened",
        "vocab",
        "strangers",
    ):
        assert words in text
    assert "memory on the device, GiB" in drawn_texts(tmp_path, {"run": made_up(vocab=[5 * GiB])})


def test_an_empty_timeline_is_drawn_as_well(tmp_path):
    empty = Timeline((), np.zeros(0), np.zeros((0, 0), dtype=np.int64))
    picture(tmp_path / "empty.png", {"nothing": empty})
    assert png_size(tmp_path / "empty.png")


def test_the_profiler_loads_no_matplotlib_until_it_draws():
    for module in (drawing, reading, steppe.profiler.report):
        top = ast.parse(inspect.getsource(module)).body
        assert not any(
            "matplotlib" in ast.unparse(node) for node in top if isinstance(node, ast.Import | ast.ImportFrom)
        )
