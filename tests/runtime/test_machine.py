"""Calibration: the file round-trips, priors stay where nothing was measured, rates are those of this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from steppe.core.errors import ConfigError
from steppe.core.shapes import MachineShape
from steppe.runtime import machine

QUICK = 0.02


@pytest.fixture(scope="module")
def measured() -> machine.Measured:
    return machine.calibrate(seconds=QUICK)


def test_what_was_measured_round_trips_through_toml(measured: machine.Measured, tmp_path: Path) -> None:
    machine.save(measured, tmp_path / "machine.toml")
    assert machine.load(tmp_path / "machine.toml") == measured


def test_measured_figures_replace_the_priors_and_nothing_else(measured: machine.Measured) -> None:
    priors = MachineShape()
    shape = measured.shape(priors)
    assert shape.host_memory_rate == measured.host_memory_rate
    assert shape.adamw_rate == max(measured.adamw_rates.values())
    assert shape.network_rate == priors.network_rate
    if measured.to_host_rate is None:
        assert (shape.to_host_rate, shape.device_memory_bytes) == (priors.to_host_rate, priors.device_memory_bytes)


def test_one_rate_for_every_thread_count_that_was_asked(measured: machine.Measured) -> None:
    assert str(machine.usable_threads()) in measured.adamw_rates
    assert "1" in measured.adamw_rates
    assert min(measured.adamw_rates.values()) > 0


def test_the_native_kernel_is_timed_when_it_is_handed_in() -> None:
    calls: list[tuple[int, int]] = []

    def kernel(count: int, threads: int) -> float:
        calls.append((count, threads))
        return count / 1e9

    assert machine.adamw_rate(3, QUICK, kernel) == pytest.approx(1e9)
    assert {threads for _, threads in calls} == {3}


def test_affinity_is_left_as_it_was(measured: machine.Measured) -> None:
    before = os.sched_getaffinity(0)
    machine.far_memory_rate(QUICK, num_bytes=1 << 20)
    machine.memory_rate(2, QUICK, num_bytes=1 << 20)
    assert os.sched_getaffinity(0) == before


def test_numa_nodes_hold_each_usable_cpu_once() -> None:
    nodes = machine.numa_cpus()
    assert sorted(cpu for node in nodes for cpu in node) == sorted(os.sched_getaffinity(0))


def test_cpu_lists_of_the_kernel_are_read() -> None:
    assert machine._cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert machine._cpu_list("\n") == set()


@pytest.mark.parametrize(
    ("text", "named"),
    [("[machine]\nspeed = 3\n", "speed"), ("", r"no \[machine\]"), ("machine = 3", "machine = 3"),
     ('machine = [1, "a"]', "machine = "), ("[[machine]]\na = 1\n[[machine]]\nb = 2\n", "machine = ")],
)  # fmt: skip
def test_a_file_that_is_no_machine_is_refused_with_the_command_to_run(text: str, named: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(text)
    with pytest.raises(ConfigError, match=f"{named}.*steppe calibrate"):
        machine.load(bad)
    with pytest.raises(ConfigError, match="steppe calibrate"):
        machine.load(tmp_path / "absent.toml")


def test_without_tomli_w_writing_says_what_to_install(
    measured: machine.Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    with pytest.raises(ConfigError, match="pip install tomli-w"):
        machine.save(measured, tmp_path / "machine.toml")
    monkeypatch.setattr(machine, "calibrate", lambda **_: pytest.fail("measured before it was refused"))
    with pytest.raises(ConfigError, match="pip install tomli-w"):
        machine.calibrate_command(tmp_path / "machine.toml")


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs an accelerator")
def test_the_link_is_measured_both_ways() -> None:
    rates = machine.link_rates(QUICK)
    assert rates["to_host_rate"] > 1e9
    assert rates["to_device_rate"] > 1e9
    assert rates["device_memory_bytes"] > 2**30
