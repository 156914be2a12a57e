"""`steppe plan` and `steppe explain`: arguments in, one answer out. Nothing here loads torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from steppe.core.errors import ConfigError
from steppe.core.parameters import total_parameters
from steppe.core.policy import OFF
from steppe.core.shapes import BatchShape, Dtypes, MachineShape, MeshShape, ModelShape, RunShape
from steppe.core.units import format_bytes
from steppe.planner.answer import Answer, answer
from steppe.planner.arguments import add_explain_arguments, add_plan_arguments, read, worlds
from steppe.planner.explain import FILLING, Printed, Reading
from steppe.planner.layouts import Job

__all__ = ["add_explain_arguments", "add_plan_arguments", "explain", "plan"]

HOST_MEMORY_RATE: Final = 300e9  # of a node with two sockets: the published update of 2.61 B parameters a GPU
NEWEST_TRANSFORMERS: Final = "5.24"  # assumed where none is installed and none is given
BYTES_A_PARAMETER: Final = 28  # host memory traffic of one AdamW update


def plan(args: argparse.Namespace) -> int:
    """Answer `steppe plan`. Raises: ConfigError for what can't be."""
    from steppe.planner.report import report, sweep_report

    numbers, args = worlds(args.ranks), read(args)
    _check_out(args)
    _check_own_groups(args)
    answers, refused = _answers(args, numbers)
    if len(numbers) == 1:
        print(json.dumps(answers[0].to_json(), indent=2) if args.json else report(answers[0]))
    elif args.json:
        told = {a.job.world: a.to_json() for a in answers}
        told |= {world: {"ranks": world, "refused": why} for world, why in refused.items()}
        print(json.dumps({"sweep": [told[world] for world in numbers]}, indent=2))
    else:
        print(sweep_report(answers, refused))
    _write(args, answers[-1])
    return 0


def _answers(args: argparse.Namespace, numbers: list[int]) -> tuple[list[Answer], dict[int, str]]:
    """An answer for each number of ranks, or why that one can't be. Raises: ConfigError when none can."""
    answers, refused = [], {}
    changes = _changes(args) if args.out or args.json else {}
    for world in numbers:
        try:
            answers.append(replace(answer(args.model, _job(args, world)), changes=changes))
        except ConfigError as refusal:
            if world == numbers[-1] and not answers:
                raise
            refused[world] = str(refusal)
    return answers, refused


def _check_out(args: argparse.Namespace) -> None:
    """Refuse to write as a plan what `steppe train` doesn't run: it would be another run's. Raises: ConfigError."""
    if args.out is None:
        return
    for flag, got, runs in (
        ("--zero", args.zero, 3),
        ("--gradient-dtype", _dtypes(args).gradient, args.weight_dtype),
        ("--state-dtype", args.state_dtype, "float32"),
    ):
        if got != runs:
            raise ConfigError(
                f"{flag} with --out", got=got, allowed=f"{runs}, which is what steppe train runs",
                remedy=f"leave {flag} or --out out",
            )  # fmt: skip


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """Keys that the run replaces in its config.json, its longest position among them."""
    from steppe.planner.models import longest_position

    changes: dict[str, Any] = {}
    if args.seq_len > longest_position(args.model):
        changes["max_position_embeddings"] = args.seq_len
    if args.vocab:
        changes["vocab_size"] = args.vocab
    if args.router_loss:
        changes["output_router_logits"] = True
    return changes


def _write(args: argparse.Namespace, told: Answer) -> None:
    from steppe.planner.models import portable_path
    from steppe.planner.picture import draw
    from steppe.planner.plan import write_plan

    if args.out is not None:
        peak = format_bytes(told.flattened.chosen.forecast.device_peak_bytes)
        fits = "" if told.flattened.chosen.fits else " It doesn't fit."
        lines: tuple[str, ...] = (
            f"{args.model} on {told.job.world} ranks: predicted device peak {peak}.{fits}",
            "steppe train takes it.",
        )
        if told.plan.policies["optimizer"] == OFF and args.weight_dtype != args.state_dtype:
            lines += (
                f"Its own AdamW keeps both moments in {args.weight_dtype}, without masters: less than predicted.",
            )
        write_plan(replace(told.plan, model=portable_path(args.model, args.out.parent)), args.out, comments=lines)
    if args.picture is not None:
        draw(told, args.picture)


def explain(args: argparse.Namespace) -> int:
    """Answer `steppe explain`; exit code 1 when no reading matches. Raises: ConfigError for text without a size."""
    from steppe.planner import explain as readings

    args = read(args)
    text = _standard_input() if args.size == "-" else args.size
    sizes = readings.find_sizes(text)
    shape = _explained_shape(args)
    found = {printed: readings.explain(printed, shape) for printed in sizes}
    if args.json:
        told = [{"size": str(size), "readings": [r.to_json() for r in of]} for size, of in found.items()]
        print(json.dumps({**told[0], "others": told[1:]}, indent=2))
    else:
        print("\n".join(line for printed, of in found.items() for line in _explained(printed, of)))
    return 0 if any(found.values()) else 1


def _standard_input() -> str:
    """All of it; bytes that are no UTF-8, as logs have them, stand for themselves. Nothing where it is closed."""
    if sys.stdin is None:
        return ""
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else binary.read().decode("utf-8", "replace")


def _explained(printed: Printed, found: Sequence[Reading]) -> Iterator[str]:
    if found:
        yield f"{printed} is"
        yield from (f"* {reading}" for reading in found)
    elif not printed.is_any_small_tensor:
        yield (
            f"{printed}: no tensor of this run has that size under any reading (float32, bfloat16, int64; 1 to 4 "
            "copies). Check the tokens a rank really holds (batch x S / D, packing), the vocabulary and the ranks."
        )
    if printed.is_any_small_tensor:
        yield (
            f"{printed} in torch's message names no tensor: {FILLING}. The device was full before; `steppe plan` says "
            "who fills it."
        )


def _explained_shape(args: argparse.Namespace) -> RunShape:
    ranks, *more = worlds(args.ranks)
    if more:
        raise ConfigError("--ranks", got=args.ranks, allowed="one number of devices", remedy="give the run's own")
    mesh = MeshShape(
        ranks, args.sequence or 1, args.expert or 1, args.vocab_ranks or 1, args.tp, args.pp, args.ranks_per_node,
        args.zero,
    )  # fmt: skip
    model = _model(args)
    if args.parameters is not None:
        more = round(args.parameters) - total_parameters(model)
        model = replace(model, extra_parameters=model.extra_parameters + more)
    for flag, got, of, what in (
        ("--etp", args.etp, model.expert_width, "the expert width"),
        ("--tp", args.tp, model.num_heads, "the attention heads"),
    ):
        if of % got:
            raise ConfigError(flag, got=got, allowed=f"a divisor of {what} {of}", remedy="check it")
    if args.pp > model.num_layers:
        raise ConfigError("--pp", got=args.pp, allowed=f"at most the {model.num_layers} layers", remedy="check it")
    _check_groups(args, ranks, model)
    model = replace(model, expert_width=model.expert_width // args.etp)
    return RunShape(model, _batch(args), mesh, MachineShape(), _dtypes(args), args.attention)


def _check_groups(args: argparse.Namespace, ranks: int, model: ModelShape) -> None:
    """Groups that a launcher would refuse: its ranks are TP x PP x CP x data parallel. Raises: ConfigError."""
    shared = args.tp * args.pp * (args.sequence or 1)
    if ranks % shared:
        raise ConfigError("--ranks", got=ranks, allowed=f"a multiple of TP x PP x CP, {shared}",
                          remedy="give the devices of the whole job")  # fmt: skip
    if args.expert and (model.num_experts or 1) % args.expert:
        raise ConfigError("--expert", got=args.expert, allowed=f"a divisor of the {model.num_experts or 1} experts",
                          remedy="check it")  # fmt: skip


def _check_own_groups(args: argparse.Namespace) -> None:
    """Groups of other stacks that steppe has none of. Raises: ConfigError."""
    for flag, got in (("--tp", args.tp), ("--pp", args.pp), ("--etp", args.etp)):
        if got not in (None, 1):
            raise ConfigError(
                flag, got=got, allowed="1: steppe shards over FSDP2, --sequence (CP), --expert (EP) and --vocab-ranks",
                remedy=f"leave {flag} out; `steppe explain` reads other stacks' runs",
            )  # fmt: skip


def _job(args: argparse.Namespace, world: int) -> Job:
    return Job(
        model=_model(args), batch=_batch(args), world=world, sequence=args.sequence, expert=args.expert,
        vocab=args.vocab_ranks, ranks_per_node=args.ranks_per_node, machine=_machine(args), dtypes=_dtypes(args),
        attention=args.attention, forced=_forced(args), zero=args.zero,
        without=frozenset({"foreach transient"}) if args.fused_adamw else frozenset(),
    )  # fmt: skip


def _model(args: argparse.Namespace) -> ModelShape:
    from steppe.planner.models import installed_transformers, load_model, with_router_loss

    model = load_model(args.model)
    if args.router_loss and not model.num_experts:
        raise ConfigError("--router-loss", got=f"a {model.model_type} model, which has no router",
                          allowed="a model with experts", remedy="leave it out")  # fmt: skip
    if model.has_router_loss or args.router_loss:
        model = with_router_loss(model, args.transformers or installed_transformers() or NEWEST_TRANSFORMERS)
    return replace(model, vocab=args.vocab) if args.vocab else model


def _batch(args: argparse.Namespace) -> BatchShape:
    return BatchShape(args.seq_len, args.batch, args.micro_batches)


def _dtypes(args: argparse.Namespace) -> Dtypes:
    return Dtypes(args.weight_dtype, args.gradient_dtype or args.weight_dtype, args.state_dtype, args.dtype)


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
            allowed=f"more than the {format_bytes(args.reserve)} kept free",
            remedy="write its unit, as 141GB, or lower --reserve",
        )  # fmt: skip
    return replace(shape, device_memory_bytes=usable)
