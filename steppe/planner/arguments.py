"""The arguments of `steppe plan` and `steppe explain`, and from words to numbers: every refusal names its flag."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from steppe.core.errors import ConfigError
from steppe.core.units import parse_bytes, parse_rate, parse_tokens
from steppe.flatteners import NAMES

RESERVE: Final = "2GiB"  # context, NCCL and fragmentation
MOST_DEVICES: Final = 2**20
MOST_TFLOPS: Final = 1e6
_DTYPES: Final = ("float32", "bfloat16")
# Flags as users write them, by how their text is read; None stays None.
_READ: Final[tuple[tuple[Callable[[str], float], tuple[str, ...]], ...]] = (
    (parse_tokens, ("seq_len",)),
    (parse_bytes, ("device_memory", "host_memory", "reserve")),
    (parse_rate, ("link", "network", "host_memory_rate")),
    (float, ("tflops", "parameters")),
    (
        int,
        ("batch", "micro_batches", "sequence", "expert", "vocab_ranks", "vocab", "ranks_per_node", "tp", "pp", "etp"),
    ),
)
_MAY_BE_ZERO: Final = ("reserve",)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `steppe plan`."""
    _add_run(parser)
    run = parser.add_argument_group("choice")
    run.add_argument(
        "--ranks", default="8", metavar="W", help="devices of the job; 8,16,64 compares several (%(default)s)"
    )
    run.add_argument(
        "--on", action="append", choices=NAMES, default=[], metavar="FLATTENER",
        help=f"switch it on though it may not pay ({', '.join(NAMES)}); may be given several times",
    )  # fmt: skip
    run.add_argument(
        "--off", action="append", choices=NAMES, default=[], metavar="FLATTENER", help="keep it off whatever it saves"
    )
    run.add_argument(
        "--fused-adamw", action="store_true",
        help="plain AdamW is fused or looped: without foreach's transient of 4 bytes a parameter",
    )  # fmt: skip
    for flag in ("--tp", "--pp", "--etp"):  # other stacks': refused with what steppe has instead
        parser.add_argument(flag, help=argparse.SUPPRESS)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")
    out.add_argument(
        "--out", type=Path, metavar="plan.toml",
        help="write the plan of the last W for `steppe train`, which wants data and rates beside it",
    )  # fmt: skip
    out.add_argument("--picture", type=Path, metavar="FILE", help="draw who holds the device, plain beside flattened")
    _add_machine(parser)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group(
        "machine", "Rates that aren't given are priors: they decide which switches pay and the modelled step time."
    )
    machine.add_argument(
        "--machine", type=Path, metavar="machine.toml",
        help="what `steppe calibrate` measured there; what is given beside it wins",
    )  # fmt: skip
    machine.add_argument(
        "--device-memory", metavar="BYTES",
        help="of one device, as 141GB (10^9) or 80GiB (2^30); a datasheet's 80 GB are GB, nvidia-smi's are MiB",
    )  # fmt: skip
    machine.add_argument(
        "--reserve", default=RESERVE, metavar="BYTES",
        help="kept free of it for context, NCCL and fragmentation, which no tensor counts (%(default)s)",
    )  # fmt: skip
    machine.add_argument("--host-memory", metavar="BYTES", help="of one node, all its ranks together (1 TB)")
    machine.add_argument("--link", metavar="RATE", help="device to host, each way, as 55GB/s (16GB/s: PCIe gen4 x8)")
    machine.add_argument("--network", metavar="RATE", help="out of one rank to others, as 50GB/s (25GB/s)")
    machine.add_argument("--host-memory-rate", metavar="RATE", help="of one node's memory, as 300GB/s (the prior)")
    machine.add_argument(
        "--tflops", metavar="TFLOP/S",
        help="what a device reaches in large bf16 GEMMs, not its datasheet's peak: 300 to 700 on an H100 or H200 (400)",
    )  # fmt: skip


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `steppe explain`."""
    parser.add_argument("size", metavar="SIZE", help='what failed to allocate, as "37.09 GiB"; - reads the message')
    _add_run(parser)
    other = parser.add_argument_group("the run's other stacks", "What people's launchers call their groups.")
    other.add_argument("--ranks", default="1", metavar="W", help="devices of the job (%(default)s)")
    other.add_argument("--tp", default="1", metavar="TP", help="tensor parallel ranks (%(default)s)")
    other.add_argument("--pp", default="1", metavar="PP", help="pipeline parallel ranks (%(default)s)")
    other.add_argument("--etp", default="1", metavar="ETP", help="tensor parallel ranks of one expert (%(default)s)")
    other.add_argument(
        "--parameters", metavar="COUNT",
        help="parameters of the whole model, as 30.58e9, where the config doesn't tell (a vision tower, adapters)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of sentences")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a config.json, a folder with one, or a shipped name")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--seq-len", required=True, metavar="S",
        help="tokens of one sequence before it is split over D ranks, as 65536, 128K (131,072) or 1M (1,048,576)",
    )  # fmt: skip
    run.add_argument(
        "--batch", "--mbs", default="1", metavar="B", help="sequences a rank and micro-batch (%(default)s)"
    )
    run.add_argument(
        "--micro-batches", "--gas", default="1", metavar="M", help="gradient accumulation steps (%(default)s)"
    )
    run.add_argument(
        "--sequence", "--cp", metavar="D", help="ranks that share a sequence (Ulysses); must divide W and the heads"
    )
    run.add_argument("--expert", "--ep", metavar="E_p", help="ranks that share the experts; must divide W and E")
    run.add_argument("--vocab-ranks", metavar="P", help="ranks that share the vocabulary; must divide W")
    run.add_argument("--vocab", metavar="V", help="vocabulary, where the tokenizer was resized or padded")
    run.add_argument(
        "--ranks-per-node", default="8", metavar="R", help="devices that share a host's memory (%(default)s)"
    )
    run.add_argument(
        "--zero", type=int, choices=(0, 1, 2, 3), default=3,
        help="what the ranks shard: 3 weights, gradients and state (FSDP2), 2 gradients and state, 1 state, 0 nothing "
        "(%(default)s); steppe itself runs 3",
    )  # fmt: skip
    run.add_argument("--router-loss", action="store_true", help="the auxiliary loss is on (output_router_logits)")
    run.add_argument(
        "--transformers", metavar="VERSION",
        help="whose auxiliary loss it is: before 5.16 it builds a one-hot of all layers (the installed one, else the "
        "newest)",
    )  # fmt: skip
    run.add_argument(
        "--attention", choices=("auto", "fused", "materialised"), default="auto",
        help="fused: a flash-like kernel, O(N) bytes; materialised: eager code that builds its scores, O(heads N S); "
        "auto: fused, but materialised for models with attention sinks (%(default)s)",
    )  # fmt: skip
    for what, about in (
        ("weight", "parameters as they are stored"),
        ("state", "master weights and both moments"),
    ):
        default = "float32" if what == "state" else "bfloat16"
        run.add_argument(f"--{what}-dtype", choices=_DTYPES, default=default, help=f"{about} (%(default)s)")
    run.add_argument("--gradient-dtype", choices=_DTYPES, help="gradients as they are kept (as parameters are stored)")
    run.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="activations (%(default)s)")


def read(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with numbers in place of words.

    Raises: ConfigError that names the flag, for what is no number, negative, zero where nothing can be zero, or beyond
    all reason.
    """
    told = argparse.Namespace(**vars(args))
    for parse, names in _READ:
        for name in names:
            text = getattr(args, name, None)
            if isinstance(text, str):
                setattr(told, name, _number(name, text, parse))
    return told


def _number(name: str, text: str, parse: Callable[[str], float]) -> float:
    flag = "--" + name.replace("_", "-")
    try:
        value = parse(text)
    except ConfigError as refusal:
        raise ConfigError(flag, got=refusal.got, allowed=refusal.allowed, remedy=refusal.remedy) from refusal
    except ValueError:
        kind = "a whole number" if parse is int else "a number"
        raise ConfigError(flag, got=repr(text), allowed=f"{kind}, 1 or more", remedy=f"correct {flag}") from None
    least = 0 if name in _MAY_BE_ZERO else 1
    if parse is float:
        most = MOST_TFLOPS if name == "tflops" else 1e18
        if not (math.isfinite(value) and 0 < value <= most):
            raise ConfigError(flag, got=text, allowed=f"above 0, at most {most:g}", remedy=f"correct {flag}")
    elif value < least:
        raise ConfigError(flag, got=text, allowed=f"{least} or more", remedy=f"raise {flag}, or leave it out")
    return value


def worlds(text: str) -> list[int]:
    """The numbers of devices in `--ranks`. Raises: ConfigError."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    found = list(dict.fromkeys(found))
    if not found or min(found) < 1 or max(found) > MOST_DEVICES:
        raise ConfigError(
            "--ranks", got=repr(text), allowed=f"numbers of devices, 1 to {MOST_DEVICES:,}, as 64 or 8,16,64",
            remedy="write them so",
        )  # fmt: skip
    return found
