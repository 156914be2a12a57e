"""`steppe plan` and `steppe explain`: arguments in, one answer out. Nothing here loads torch."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from steppe.core.errors import ConfigError
from steppe.core.parameters import total_parameters
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import format_bytes, parse_bytes, parse_rate, parse_tokens
from steppe.flatteners import NAMES
from steppe.planner.answer import Answer, answer
from steppe.planner.layouts import Job

HOST_MEMORY_RATE: Final = (
    300e9  # of a node with two sockets; what the published update of 2.61 B parameters a GPU takes
)
BYTES_A_PARAMETER: Final = 28  # host memory traffic of one AdamW update
RESERVE: Final = "2GiB"  # context, NCCL and fragmentation


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `steppe plan`."""
    _add_shape_arguments(parser)
    parser.add_argument("--ranks", default="8", help="devices W, or several as 8,16,64 (%(default)s)")
    parser.add_argument("--on", action="append", choices=NAMES, default=[], metavar="FLATTENER", help="force it on")
    parser.add_argument("--off", action="append", choices=NAMES, default=[], metavar="FLATTENER", help="force it off")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys instead of a table")
    parser.add_argument("--out", type=Path, metavar="plan.toml", help="write the plan, for `steppe train`")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw who holds the device, plain and flattened")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--machine", type=Path, metavar="machine.toml", help="what `steppe calibrate` wrote")
    machine.add_argument("--device-memory", type=parse_bytes, metavar="BYTES", help="of one device, as 141GB or 80GiB")
    machine.add_argument("--reserve", type=parse_bytes, default=RESERVE, help="kept free on a device (%(default)s)")
    machine.add_argument("--host-memory", type=parse_bytes, metavar="BYTES", help="of one node")
    machine.add_argument("--link", type=parse_rate, metavar="RATE", help="host link each way, as 55GB/s")
    machine.add_argument("--network", type=parse_rate, metavar="RATE", help="of one rank, as 50GB/s")
    machine.add_argument("--host-memory-rate", type=parse_rate, metavar="RATE", help="of one node, as 300GB/s")
    machine.add_argument("--tflops", type=float, help="matmul rate that a device reaches")
    machine.add_argument("--fused-adamw", action="store_true", help="plain AdamW without foreach's transient")


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `steppe explain`."""
    parser.add_argument("size", metavar="SIZE", help='what failed to allocate, as "37.09 GiB"; - reads the message')
    _add_shape_arguments(parser)
    parser.add_argument("--ranks", type=int, default=1, help="devices W (%(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks (%(default)s)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel ranks (%(default)s)")
    parser.add_argument("--etp", type=int, default=1, help="tensor parallel ranks of an expert (%(default)s)")
    parser.add_argument("--parameters", type=float, help="parameters of the model, where the config doesn't tell them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of sentences")


def _add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a config.json, a folder with one, or a shipped name")
    parser.add_argument("--seq-len", type=parse_tokens, required=True, metavar="S", help="tokens, as 65536, 128K or 1M")
    parser.add_argument("--batch", "--mbs", type=int, default=1, help="sequences a rank and micro-batch (%(default)s)")
    parser.add_argument("--micro-batches", "--gas", type=int, default=1, help="gradient accumulation (%(default)s)")
    parser.add_argument("--sequence", "--cp", type=int, metavar="D", help="ranks of a sequence (default: chosen)")
    parser.add_argument("--expert", "--ep", type=int, metavar="E_p", help="ranks of the experts (default: chosen)")
    parser.add_argument("--vocab-ranks", type=int, metavar="P", help="ranks of the vocabulary (default: chosen)")
    parser.add_argument("--vocab", type=int, metavar="V", help="vocabulary, where it differs from the config's")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="devices of a node (%(default)s)")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=3, help="what is sharded; 3 is FSDP2")
    parser.add_argument("--router-loss", action="store_true", help="the auxiliary loss is on (output_router_logits)")
    parser.add_argument("--attention", choices=("auto", "fused", "materialised"), default="auto", help="kernel")
    for what in ("weight", "gradient", "state"):
        default = "float32" if what == "state" else "bfloat16"
        parser.add_argument(f"--{what}-dtype", choices=("float32", "bfloat16"), default=default, help="(%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations")


def plan(args: argparse.Namespace) -> int:
    """Answer `steppe plan`. Raises: ConfigError for what can't be."""
    from steppe.planner.report import report, sweep_report

    worlds = _worlds(args.ranks)
    answers = [answer(args.model, _job(args, world)) for world in worlds]
    if args.json:
        told = [a.to_json() for a in answers]
        print(json.dumps(told[0] if len(told) == 1 else {"sweep": told}, indent=2))
    else:
        print(report(answers[0]) if len(answers) == 1 else sweep_report(answers))
    _write(args, answers[-1])
    return 0


def _write(args: argparse.Namespace, told: Answer) -> None:
    from steppe.planner.models import model_path
    from steppe.planner.picture import draw
    from steppe.planner.plan import write_plan

    if args.out is not None:
        peak = format_bytes(told.flattened.chosen.forecast.device_peak_bytes)
        fits = "" if told.flattened.chosen.fits else " It doesn't fit."
        lines = (
            f"{args.model} on {told.job.world} ranks: predicted device peak {peak}.{fits}",
            "steppe train takes it.",
        )
        write_plan(replace(told.plan, model=str(model_path(args.model))), args.out, comments=lines)
    if args.picture is not None:
        draw(told, args.picture)


def explain(args: argparse.Namespace) -> int:
    """Answer `steppe explain`; exit code 1 when no reading matches. Raises: ConfigError for text without a size."""
    from steppe.planner import explain as readings

    text = sys.stdin.read() if args.size == "-" else args.size
    printed = readings.find_size(text)
    found = readings.explain(printed, _explained_shape(args))
    if args.json:
        print(json.dumps({"size": str(printed), "readings": [reading.to_json() for reading in found]}, indent=2))
    elif found:
        print(f"{printed} is")
        print("\n".join(f"* {reading}" for reading in found))
    else:
        print(
            f"{printed}: no tensor of this run has that size under any reading (float32, bfloat16, int64; 1 to 4 "
            "copies). Check the tokens a rank really holds (batch x S / D, packing), the vocabulary and the ranks."
        )
    return 0 if found else 1


def _explained_shape(args: argparse.Namespace) -> RunShape:
    mesh = MeshShape(
        args.ranks, args.sequence or 1, args.expert or 1, args.vocab_ranks or 1, args.tp, args.pp, args.ranks_per_node,
        args.zero,
    )  # fmt: skip
    model = _model(args)
    if args.parameters is not None:
        more = round(args.parameters) - total_parameters(model)
        model = replace(model, extra_parameters=model.extra_parameters + more)
    if args.etp < 1 or model.expert_width % args.etp:
        raise ConfigError(
            "--etp", got=args.etp, allowed=f"a divisor of the expert width {model.expert_width}", remedy="check it"
        )
    model = replace(model, expert_width=model.expert_width // args.etp)
    return RunShape(model, _batch(args), mesh, MachineShape(), _dtypes(args), args.attention)


def _job(args: argparse.Namespace, world: int) -> Job:
    return Job(
        model=_model(args), batch=_batch(args), world=world, sequence=args.sequence, expert=args.expert,
        vocab=args.vocab_ranks, ranks_per_node=args.ranks_per_node, machine=_machine(args), dtypes=_dtypes(args),
        attention=args.attention, forced=_forced(args), zero=args.zero,
        without=frozenset({"foreach transient"}) if args.fused_adamw else frozenset(),
    )  # fmt: skip


def _model(args: argparse.Namespace) -> ModelShape:
    from steppe.planner.models import load_model

    model = load_model(args.model)
    changes = {"vocab": args.vocab} if args.vocab else {}
    return replace(model, has_router_loss=model.has_router_loss or args.router_loss, **changes)


def _batch(args: argparse.Namespace) -> BatchShape:
    for name in ("seq_len", "batch", "micro_batches"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(flag, got=getattr(args, name), allowed="1 or more", remedy=f"raise {flag}")
    return BatchShape(args.seq_len, args.batch, args.micro_batches)


def _dtypes(args: argparse.Namespace) -> Dtypes:
    return Dtypes(args.weight_dtype, args.gradient_dtype, args.state_dtype, args.dtype)


def _forced(args: argparse.Namespace) -> tuple[tuple[str, bool], ...]:
    if both := set(args.on) & set(args.off):
        raise ConfigError("--on and --off", got=sorted(both), allowed="one of them", remedy="drop one")
    return tuple([(name, True) for name in args.on] + [(name, False) for name in args.off])


def _machine(args: argparse.Namespace) -> MachineShape:
    """Priors, then the calibrated file, then what was given."""
    base = MachineShape(host_memory_rate=HOST_MEMORY_RATE, adamw_rate=HOST_MEMORY_RATE / BYTES_A_PARAMETER)
    if args.machine is not None:
        from steppe.runtime import machine

        base = machine.load(args.machine).shape(base)
    given = {
        "device_memory_bytes": args.device_memory, "host_memory_bytes": args.host_memory, "to_host_rate": args.link,
        "to_device_rate": args.link, "network_rate": args.network, "host_memory_rate": args.host_memory_rate,
        "matmul_rate": args.tflops and args.tflops * 1e12,
        "adamw_rate": args.host_memory_rate and args.host_memory_rate / BYTES_A_PARAMETER,
    }  # fmt: skip
    shape = replace(base, **{name: value for name, value in given.items() if value})
    usable = shape.device_memory_bytes - args.reserve
    if usable <= 0:
        raise ConfigError(
            "--device-memory", got=format_bytes(shape.device_memory_bytes),
            allowed=f"more than the {format_bytes(args.reserve)} kept free", remedy="lower --reserve",
        )  # fmt: skip
    return replace(shape, device_memory_bytes=usable)


def _worlds(text: str) -> list[int]:
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = []
    if not worlds or min(worlds) < 1:
        raise ConfigError(
            "--ranks", got=repr(text), allowed="numbers of devices, as 64 or 8,16,64", remedy="write them so"
        )
    return worlds
