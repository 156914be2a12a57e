"""`steppe profile`, `verify` and `compare`: one rank of them under torchrun, otherwise the launcher of the ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from steppe.core.errors import ConfigError
from steppe.core.policy import OFF
from steppe.core.units import format_bytes
from steppe.flatteners import NAMES
from steppe.training import config as configs
from steppe.training.config import RunConfig
from steppe.training.tables import check_keys

PROFILED_STEPS = 3


def on_ranks(
    args: argparse.Namespace, work: Callable[[RunConfig, argparse.Namespace, Any], None],
    environment: Mapping[str, str],
) -> int:  # fmt: skip
    """Run `work(config, args, device)` on every rank of the run, starting them when no launcher has."""
    config = _flattened(configs.load(args.config), args)
    _check(config, args)
    count = config.launch.count(args.ranks)
    from steppe.training.ranks import Place, on_this_rank, start_ranks  # torch, which no refusal above waits for

    place = Place.of(environment)
    if place is None:
        start_ranks(sys.argv[1:], count)
        return 0

    def inside(device: Any) -> int:
        work(config, args, device)
        return 0

    return on_this_rank(inside, place, config.launch.timeout_s)


def _flattened(config: RunConfig, args: argparse.Namespace) -> RunConfig:
    """The run with `--flatten NAME,...` switched on with their default policies."""
    names = [name for word in (getattr(args, "flatten", None) or "").split(",") if (name := word.strip())]
    check_keys(dict.fromkeys(names), NAMES, "--flatten")
    return config.with_flatten(**{name: configs.policy_class(name)() for name in names})


def _check(config: RunConfig, args: argparse.Namespace) -> None:
    """Refuse before any rank starts."""
    several = args.command == "verify" and (args.stack or args.all_subsets)
    if args.command == "verify" and not several and all(policy == OFF for policy in config.flatten.values()):
        raise ConfigError("verify", got="a run with every flattener off", allowed="at least one on",
                          remedy='write boundary = "on" under [flatten], or pass --flatten boundary')  # fmt: skip
    if several and args.picture:
        raise ConfigError("--picture", got="several runs", allowed="one", remedy="leave --stack and --all-subsets out")
    if args.command == "verify" and args.steps < 1:
        raise ConfigError("--steps", got=args.steps, allowed="1 or more", remedy="3 show the steady step")
    if args.command == "compare" and args.toggle not in NAMES:
        raise ConfigError("--toggle", got=args.toggle, allowed=", ".join(NAMES), remedy="name one of the flatteners")
    if args.command == "compare" and args.rounds < 1:
        raise ConfigError("--rounds", got=args.rounds, allowed="1 or more", remedy="7 give a steady median")


def profile(config: RunConfig, args: argparse.Namespace, device: Any) -> None:
    """Three steps, the first and the third under the meter; the steady one is reported."""
    from steppe.profiler import picture
    from steppe.runtime import collectives
    from steppe.sides import run_side

    say = _voice()
    say(f"profiling {PROFILED_STEPS} steps on {collectives.size(collectives.world())} ranks")
    side = run_side(config, steps=PROFILED_STEPS, device=device, on_step=_told(say, PROFILED_STEPS))
    reports = collectives.all_gather_object(_portable(side, config), collectives.world())
    if collectives.rank(collectives.world()):
        return
    worst = max(reports, key=lambda report: report["ledger"].device_peak_bytes)
    if args.picture:
        picture(args.picture, {f"rank {worst['rank']}": worst["timeline"]})
    if args.json:
        print(json.dumps({"worst_rank": worst["rank"], "steady": worst["ledger"].to_json(),
                          "first": worst["first"].to_json(), "advice": worst["advice"]}, indent=1))  # fmt: skip
    else:
        print(worst["table"])
        first, steady = worst["first"].device_peak_bytes, worst["ledger"].device_peak_bytes
        print(f"\nrank {worst['rank']} holds most, and is shown: {format_bytes(steady)} in the steady step, ", end="")
        print(f"{format_bytes(first)} in step 1")
        print("\n".join(worst["advice"]))


def verify(config: RunConfig, args: argparse.Namespace, device: Any) -> None:
    """Plain, then flattened, from one seed; rank 0 prints the certificate, or the tables of several."""
    from steppe.profiler import picture
    from steppe.runtime import collectives
    from steppe.verify import emit, side_by_side

    if args.stack or args.all_subsets or args.markdown:
        _verify_several(config, args, device)
        return
    say = _voice()
    pair = side_by_side(config, steps=args.steps, device=device, say=say)
    if collectives.rank(collectives.world()) == 0:
        if args.picture:
            picture(args.picture, {name: side.timeline for name, side in pair.sides.items()})
        emit(pair.certificate, args)


def _verify_several(config: RunConfig, args: argparse.Namespace, device: Any) -> None:
    """Several selections of flatteners against one plain run: tables on standard output, or into a file."""
    from steppe import subsets
    from steppe.runtime import collectives

    on = tuple(name for name in NAMES if config.flatten[name] != OFF)
    chosen = subsets.all_subsets() if args.all_subsets else subsets.stacked() if args.stack else [on]
    found = subsets.certificates(config, chosen, steps=args.steps, device=device, say=_voice())
    if collectives.rank(collectives.world()):
        return
    text = subsets.markdown({name: certificate.to_json() for name, certificate in found.items()})
    if args.markdown:
        args.markdown.write_text(text + "\n")
    print(subsets.to_json(found) if args.json else text)


def compare(config: RunConfig, args: argparse.Namespace, device: Any) -> None:
    from steppe.compare import compare as alternate
    from steppe.runtime import collectives

    _voice()(f"alternating {args.toggle} on and off, {args.rounds} rounds")
    found = alternate(config, args.toggle, rounds=args.rounds, device=device)
    if collectives.rank(collectives.world()) == 0:
        print(json.dumps(found.to_json()) if args.json else found.text())


def run(name: str, args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """What the command line calls."""
    return on_ranks(args, {"profile": profile, "verify": verify, "compare": compare}[name], environment)


def _portable(side: Any, config: RunConfig) -> dict[str, Any]:
    """What rank 0 needs to show any rank's steady step."""
    from steppe.runtime import collectives

    report = side.reports[max(side.reports)]
    return {
        "rank": collectives.rank(collectives.world()),
        "ledger": side.ledger,
        "timeline": report.timeline,
        "first": side.reports[min(side.reports)].ledger,
        "table": report.table(),
        "advice": report.advice(on=[name for name, policy in config.flatten.items() if policy != OFF]),
    }


def _voice() -> Callable[[str], None]:
    """Rank 0 speaks, on standard error."""
    from steppe.runtime import collectives

    silent = collectives.rank(collectives.world()) != 0

    def say(line: str) -> None:
        if not silent:
            print(f"steppe: {line}", file=sys.stderr, flush=True)

    return say


def _told(say: Callable[[str], None], steps: int) -> Callable[[Any], None]:
    return lambda result: say(f"step {result.step + 1}/{steps}  loss {result.loss:.4f}  {result.ms:.0f} ms")
