"""One decision tree for measured and predicted steps: what to switch on first, and what would save nothing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from steppe.core.ledger import PEAKS, Entry, Ledger, Moment
from steppe.core.shapes import BatchShape, MeshShape, RunShape
from steppe.core.units import GiB
from steppe.planner.advice import SCHEDULES, advise, order, predicted_without, savings
from steppe.planner.models import load_model
from steppe.planner.predict import PLAIN, predict
from steppe.planner.search import candidate, policies_of

LOSS, UPDATE = frozenset({Moment.LOSS}), frozenset({Moment.UPDATE})


def told(entries: list[Entry], ceiling: int) -> tuple[str, ...]:
    ledger = Ledger.from_entries(entries)
    return advise(ledger, predicted_without(ledger), ceiling)


def test_the_peak_to_flatten_first_is_named_and_what_would_save_nothing() -> None:
    said = told([Entry("vocab", "v", 60 * GiB, LOSS), Entry("weights", "w", 40 * GiB)], 80 * GiB)
    assert said[0] == "The peak is 100.00 GiB, in loss; vocab holds 60% of it."
    assert said[1] == "It is 20.00 GiB over the ceiling of 80.00 GiB."
    assert said[2] == "First vocab (Ring-DTP): the peak can fall to 40.00 GiB."
    assert said[3] == "PipelinedLLEP, SCO, OffloadStreamAdamW would save next to nothing here."


def test_a_peak_that_stands_next_comes_second() -> None:
    entries = [Entry("vocab", "v", 60 * GiB, LOSS), Entry("optimizer", "o", 50 * GiB, UPDATE)]
    said = told([*entries, Entry("weights", "w", 10 * GiB)], 15 * GiB)
    assert said[2:4] == (
        "First vocab (Ring-DTP): the peak can fall to 60.00 GiB.",
        "Then optimizer (OffloadStreamAdamW): the peak can fall to 10.00 GiB.",
    )


def test_what_is_on_already_is_not_switched_on_again() -> None:
    ledger = Ledger.from_entries([Entry("vocab", "v", 60 * GiB, LOSS), Entry("weights", "w", 40 * GiB)])
    said = advise(ledger, predicted_without(ledger), on=["vocab", "boundary"])
    assert said[1].startswith("Ring-DTP is on")
    assert said[2] == "PipelinedLLEP, OffloadStreamAdamW would save next to nothing here."


def test_when_none_of_the_four_stands_out_batch_times_length_is_named() -> None:
    said = told([Entry("weights", "w", 96 * GiB), Entry("vocab", "v", 4 * GiB, LOSS)], 80 * GiB)
    assert "None of the four peaks stands out." in said
    assert "batch x sequence length" in said[-1]


def test_peaks_that_only_together_make_it_fit_are_all_named() -> None:
    """Each is too small to stand out; over a ceiling that they reach, "it will not fit by schedules" was false."""
    entries = [Entry("weights", "w", 80 * GiB), *(Entry(peak, peak, 5 * GiB, LOSS) for peak in PEAKS)]
    said = told(entries, 86 * GiB)
    assert said[2].startswith("First ") and said[3].startswith("Then ")
    assert "can fall to 85.00 GiB" in said[4]
    assert said[5] == "OffloadStreamAdamW would save next to nothing here."
    assert not any("will not fit" in sentence for sentence in said)
    assert "None of the four peaks stands out." in told(entries, 120 * GiB)
    assert "what is left, 80.00 GiB" in told(entries, 60 * GiB)[-1]


def test_what_a_later_switch_reaches_is_told_with_those_before_it() -> None:
    """12 of 130 is no tenth and 12 of 118 is one, but only beside the first."""
    entries = [Entry("weights", "w", 106 * GiB), *(Entry(peak, peak, 12 * GiB, LOSS) for peak in PEAKS[:2])]
    ledger = Ledger.from_entries(entries)
    said = advise(ledger, predicted_without(ledger))
    assert said[1].endswith("the peak can fall to 118.00 GiB.") and said[2].endswith("can fall to 106.00 GiB.")


def test_nothing_is_said_of_peaks_whose_makers_nobody_knew() -> None:
    ledger = Ledger.from_entries([Entry("vocab", "v", 60 * GiB, LOSS), Entry("weights", "w", 40 * GiB)])
    said = advise(ledger, predicted_without(ledger), unseen=["dispatch", "optimizer"])
    assert said[-1] == "SCO would save next to nothing here."


def test_what_is_named_first_is_what_the_forecast_loses_when_it_is_flattened() -> None:
    """The tree only subtracts an owner; the forecast says what the flattener really leaves."""
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(65_536), MeshShape(8))
    ledger = predict(shape)
    first, low = order(predicted_without(ledger))[0]
    assert first == "vocab"
    flat = candidate(shape, {**PLAIN, "vocab": policies_of("vocab")[0]}).forecast.ledger
    assert low <= flat.device_peak_bytes < ledger.device_peak_bytes


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(Entry, st.sampled_from([*PEAKS, "weights"]), st.just("t"), st.integers(0, 100), st.frozensets(
            st.sampled_from([Moment.LOSS, Moment.BACKWARD, Moment.UPDATE]), min_size=1)),
        max_size=8,
    )
)  # fmt: skip
def test_every_step_of_the_order_helps_and_none_goes_below_all_of_them(entries: list[Entry]) -> None:
    without = predicted_without(Ledger.from_entries(entries))
    heights = [without(()), *(low for _, low in order(without))]
    assert heights == sorted(set(heights), reverse=True)
    assert heights[-1] >= without(PEAKS)
    assert set(savings(without)) == set(SCHEDULES) == set(PEAKS)
    assert max(savings(without).values()) >= 0


def test_measured_and_predicted_steps_are_advised_by_the_same_tree() -> None:
    import numpy as np

    from steppe.profiler import reading
    from steppe.runtime.timeline import Timeline

    entries = [Entry("vocab", "v", 6 * GiB, LOSS), Entry("optimizer", "o", 5 * GiB, UPDATE), Entry("weights", "w", GiB)]
    ledger = Ledger.from_entries(entries)
    held = np.array([[6, 0], [0, 5], [1, 1]], dtype=np.int64) * GiB
    timeline = Timeline(("vocab", "optimizer", "weights"), np.arange(2.0), held)
    measured = replace(ledger, entries=())
    assert reading.advice(measured, timeline, 4 * GiB) == advise(ledger, predicted_without(ledger), 4 * GiB)
