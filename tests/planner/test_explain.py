"""Allocations that failed in the field, named to the digits that their messages print."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steppe.core.errors import ConfigError
from steppe.core.parameters import total_parameters
from steppe.core.shapes import BatchShape, MeshShape, ModelShape, RunShape
from steppe.planner.explain import MiB, Printed, explain, find_size, find_sizes, segment_bytes
from steppe.planner.models import load_model


def _with_parameters(model: ModelShape, total: float) -> ModelShape:
    return replace(model, extra_parameters=round(total) - total_parameters(model))


def _first(text: str, shape: RunShape) -> str:
    readings = explain(find_size(text), shape)
    assert readings, f"nothing reads as {text}"
    return str(readings[0])


FIELD = {
    "PrimeIntellect-ai/prime-rl baselines": (
        "37.09 GiB",
        RunShape(load_model("qwen3-0.6b"), BatchShape(65536)),
        "logits: N 65,536 x V 151,936, 4 bytes",
    ),
    "huggingface/transformers#48131": (
        "48.00 GiB",
        RunShape(load_model("qwen3-30b-a3b"), BatchShape(131072)),
        "one-hot of the chosen experts: L 48 x N 131,072 x k 8 x E 128, 8 bytes",
    ),
    "modelscope/ms-swift#9403": (
        "26.44 GiB",
        RunShape(load_model("qwen3-235b-a22b"), BatchShape(4096), MeshShape(64, expert=8, tensor=4, pipeline=2)),
        "routed experts of all blocks on this rank: 47 blocks x 16 local experts x 3 x H 4,096 x I 1,536, 2 bytes",
    ),
    "QwenLM/Qwen3-VL#2053": (
        "3.56 GiB",
        RunShape(_with_parameters(load_model("qwen3-30b-a3b"), 30.58e9), BatchShape(4096), MeshShape(32, zero=2)),
        "one optimizer moment (exp_avg or exp_avg_sq): 30,580,000,000 parameters / W 32, 4 bytes",
    ),
    "NVIDIA-NeMo/Megatron-Bridge#5508": (
        "3.79 GiB",
        RunShape(replace(load_model("qwen3-30b-a3b"), vocab=248320), BatchShape(4096), MeshShape(8)),
        "logits: N 4,096 x V 248,320, 4 bytes",
    ),
    "Dao-AILab/flash-attention#1895": (
        "512.00 MiB",
        RunShape(load_model("gpt-oss-20b"), BatchShape(1024, batch=4)),
        "attention scores, materialised: batch 4 x heads 64 x S 1,024^2, 2 bytes",
    ),
}


@pytest.mark.parametrize("where", FIELD)
def test_a_field_report_is_explained_to_the_digits(where: str) -> None:
    text, shape, expected = FIELD[where]
    assert _first(text, shape).startswith(expected)


@pytest.mark.parametrize(
    ("text", "name"),
    [("31.16 GB", "both moments of AdamW"), ("15.58 GB", "one optimizer moment"), ("15.58 GB", "foreach transient")],
)
def test_the_first_adam_step_of_verl_5364(text: str, name: str) -> None:
    shape = RunShape(_with_parameters(load_model("qwen3-30b-a3b"), 3.895e9), BatchShape(4096))
    assert any(name in str(reading) for reading in explain(find_size(text), shape))


MESSAGE = """torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 37.09 GiB. GPU 0 has a total capacity of
79.19 GiB of which 30.11 GiB is free. Including non-PyTorch memory, this process has 49.07 GiB memory in use."""


def test_a_whole_error_message_gives_the_size_that_was_tried() -> None:
    assert find_size(MESSAGE) == Printed("37.09", "GiB")


def test_gb_and_gib_are_told_apart() -> None:
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(65536))
    assert explain(Printed("37.09", "GiB"), shape)
    assert not explain(Printed("37.09", "GB"), shape)
    assert explain(Printed("39.83", "GB"), shape)


def test_a_size_that_nothing_has_is_not_explained() -> None:
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(65536))
    assert explain(Printed("36.21", "GiB"), shape) == ()


@pytest.mark.parametrize(
    "text",
    [
        "it crashed",
        "torch.AcceleratorError: CUDA error: out of memory",
        "CUDA error: out of memory. GPU 0 has 80 GiB",  # what the device has is nothing that was allocated
        "GPU 0 has a total capacity of 79.19 GiB of which 30.11 GiB is free.",
        "37.09 GiB and 3.79 GiB",
    ],
)
def test_text_without_an_allocation_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="Tried to allocate"):
        find_sizes(text)


@pytest.mark.parametrize(
    "text",
    [
        MESSAGE,
        "RuntimeError: CUDA out of memory. Tried to allocate 37.09 GiB (GPU 0; 79.35 GiB total capacity; 40.11 GiB "
        "already allocated; 30.11 GiB free; 41.00 GiB reserved in total by PyTorch)",
        "MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB). Tried to allocate 37.09 GiB on",
        "_ArrayMemoryError: Unable to allocate 37.09 GiB for an array with shape (65536, 151936)",
        "MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 4.00 GB, max allowed: 9.07 GB). Tried "
        "to allocate 37.09 GB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit",
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 15.16 GiB\n"
        "Requested               : 37.09 GiB\nDevice limit            : 15.99 GiB\nFree (according to CUDA): 0 bytes",
        "slurmstepd: memory requested: 64 GB\nTried to allocate 37.09 GiB",
        "NCCL WARN Failed to CUDA calloc async 37.09 GiB",
        "\x1b[31mTried to allocate\x1b[0m\n37.09 GiB.",
    ],
)
def test_the_allocation_is_found_in_every_wording_beside_what_the_device_holds(text: str) -> None:
    assert find_sizes(text) == (Printed("37.09", "GiB"),)


def test_a_log_of_several_ranks_gives_each_size_once() -> None:
    log = f"[rank0]: Tried to allocate 1.17 GiB.\n[rank1]: {MESSAGE}\n[rank2]: {MESSAGE}"
    assert find_sizes(log) == (Printed("1.17", "GiB"), Printed("37.09", "GiB"))


def test_a_tensor_is_found_under_the_whole_segments_that_torch_prints_for_it() -> None:
    """Logits of 1,001 tokens hold 290.08 MiB; torch asks the driver for, and prints, 292.00 MiB."""
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(1001))
    for text in ("290.08 MiB", "292.00 MiB"):
        assert explain(find_size(text), shape)[0].tensor.name == "logits"
    assert not explain(find_size("291.00 MiB"), shape)


@pytest.mark.parametrize(
    ("num_bytes", "asked"),
    [(1, 2 * MiB), (MiB, 2 * MiB), (MiB + 1, 20 * MiB), (10 * MiB - 1, 20 * MiB), (10 * MiB, 10 * MiB),
     (10 * MiB + 1, 12 * MiB)],
)  # fmt: skip
def test_segments_are_those_of_torchs_allocator(num_bytes: int, asked: int) -> None:
    assert segment_bytes(num_bytes) == asked


def test_two_copies_are_a_reading_after_one() -> None:
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(65536))
    doubled = explain(Printed("74.19", "GiB"), shape)
    assert [reading.copies for reading in doubled] == sorted(reading.copies for reading in doubled)
    assert any(r.copies == 2 and r.tensor.name == "logits" for r in doubled)


def test_no_reading_is_told_twice() -> None:
    shape = RunShape(load_model("qwen3-0.6b"), BatchShape(65536))
    readings = [str(reading) for reading in explain(Printed("37.09", "GiB"), shape)]
    assert len(readings) == len(set(readings))
