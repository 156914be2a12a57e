"""Plain and flattened side by side from one seed: the certificate that nothing but memory changed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from steppe.core.errors import ConfigError
from steppe.core.ledger import OWNERS, PEAKS, Ledger
from steppe.core.policy import OFF
from steppe.core.units import format_bytes
from steppe.runtime import collectives
from steppe.runtime.collectives import Group
from steppe.runtime.sharded import local
from steppe.sides import Side, ignore, run_side
from steppe.training.config import RunConfig
from steppe.training.loop import StepResult, Trainer
from steppe.truth import distance, first_step, not_a_number_last


@dataclass(frozen=True)
class Certificate:
    """Differences of two programs over the same steps; losses are per token, gradients those of the first step.

    `max_grad_rel_err` is the largest over parameters of ||flattened - plain|| / ||plain||, named by `worst_parameter`.
    `against_float64` holds each side's own distance from the float64 program, where there is one.
    """

    steps: int
    max_abs_loss_diff: float
    mean_abs_loss_diff: float
    per_token_mse: float
    max_grad_rel_err: float
    worst_parameter: str
    grad_norm_rel_diff: float
    plain: Mapping[str, Any]
    flattened: Mapping[str, Any]
    flatteners: Mapping[str, str]
    signals: tuple[str, ...] = ()
    against_float64: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Pair:
    """Both sides and what was found."""

    sides: Mapping[str, Side]
    certificate: Certificate


def side_by_side(
    config: RunConfig,
    *,
    steps: int,
    device: torch.device | None = None,
    say: Callable[[str], None] = print,
    after: Callable[[Trainer], None] | None = None,
) -> Pair:
    """Run plain, then flattened, for `steps` steps from one seed; `after` gets the flattened trainer at its end.

    Raises: ConfigError for less than one step; what the trainers raise.
    """
    if steps < 1:
        raise ConfigError("steps", got=steps, allowed="1 or more", remedy="3 show the steady step")
    sides: dict[str, Side] = {}
    for name, side_config in (("plain", config.plain()), ("flattened", config)):
        say(f"{name}: building text, model and optimizer")

        def on_step(result: StepResult, name: str = name) -> None:
            say(f"{name}: step {result.step + 1}/{steps}  loss {result.loss:.4f}  {result.ms:.0f} ms")

        last = after if after is not None and name == "flattened" else ignore
        sides[name] = run_side(side_config, steps=steps, device=device, on_step=on_step, after=last)
    group = collectives.world()
    found = certify(sides["plain"], sides["flattened"], config, group)
    say("against float64: computing the first step")
    truth = first_step(config)
    if truth is None:
        say("against float64: left out, since whole scores and logits in float64 would be too large here")
        return Pair(sides, found)
    distances = {name: distance(side, truth) for name, side in sides.items()}
    return Pair(sides, replace(found, against_float64=distances))


def certify(plain: Side, flattened: Side, config: RunConfig, group: Group) -> Certificate:
    """Judge two sides of the same steps; collective, the same certificate on all ranks.

    Raises: ConfigError when the sides don't cover the same steps.
    """
    if len(plain.results) != len(flattened.results) or plain.gradients.keys() != flattened.gradients.keys():
        raise ConfigError("certificate", got="sides of different steps or parameters", allowed="the same run twice",
                          remedy="run both sides with the same configuration and number of steps")  # fmt: skip
    largest, total, squares, count = _token_differences(plain, flattened, group)
    errors = dict(_gradient_errors(plain.gradients, flattened.gradients, group))
    worst = max(errors, key=lambda name: not_a_number_last(errors[name]), default="")
    norms = [(p.grad_norm, f.grad_norm) for p, f in zip(plain.results, flattened.results, strict=True)]
    return Certificate(
        steps=len(plain.results),
        max_abs_loss_diff=largest,
        mean_abs_loss_diff=total / max(1.0, count),
        per_token_mse=squares / max(1.0, count),
        max_grad_rel_err=errors.get(worst, 0.0),
        worst_parameter=worst,
        grad_norm_rel_diff=max((abs(f - p) / p if p else abs(f) for p, f in norms), key=not_a_number_last, default=0.0),
        plain=summary(plain, group),
        flattened=summary(flattened, group),
        flatteners={name: "off" if policy == OFF else str(policy) for name, policy in config.flatten.items()},
        signals=flattened.signals,
    )


def summary(side: Side, group: Group) -> dict[str, Any]:
    """Peaks and time of one side: the largest over ranks, of the steady step."""
    ledgers: list[Ledger] = collectives.all_gather_object(side.ledger, group)
    top = max(ledgers, key=lambda ledger: ledger.device_peak_bytes)
    owners = [owner for owner in OWNERS if owner in PEAKS or any(ledger.peaks.get(owner) for ledger in ledgers)]
    return {
        "device_peak_bytes": top.device_peak_bytes,
        "peaks": {owner: max(ledger.peaks.get(owner, 0) for ledger in ledgers) for owner in owners},
        "holders": dict(top.holders),
        "host_bytes": max(ledger.host_bytes for ledger in ledgers),
        "step_ms": max(collectives.all_gather_object(side.step_ms, group)),
        "losses": [result.loss for result in side.results],
    }


def _token_differences(plain: Side, flattened: Side, group: Group) -> tuple[float, float, float, float]:
    """Largest and summed absolute difference, summed square and number of the tokens' losses, over all ranks."""
    sums, largest = torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for p, f in zip(plain.results, flattened.results, strict=True):
        for before, after in zip(p.token_losses, f.token_losses, strict=True):
            difference = (after.double() - before.double()).abs().flatten().cpu()
            sums += torch.stack([difference.sum(), difference.square().sum(), torch.tensor(float(len(difference)))])
            largest = torch.maximum(largest, _max(difference))
    collectives.all_reduce(sums, group)
    found = max(collectives.all_gather_object(largest.item(), group), key=not_a_number_last)
    return found, *sums.tolist()


def _max(values: torch.Tensor) -> torch.Tensor:
    return values.max()[None] if values.numel() else torch.zeros(1, dtype=torch.float64)


def _gradient_errors(
    plain: Mapping[str, torch.Tensor], flattened: Mapping[str, torch.Tensor], group: Group
) -> Iterator[tuple[str, float]]:
    """||flattened - plain|| / ||plain|| of every parameter, over all its shards."""
    for name, before in plain.items():
        after, before = local(flattened[name]).double(), local(before).double()
        squares = torch.stack([(after - before).square().sum(), before.square().sum()]).cpu()
        difference, scale = collectives.all_reduce(squares, group).sqrt().tolist()
        yield name, difference / scale if scale else difference


def table(certificate: Certificate) -> str:
    """The certificate as text: one row a holder, plain | flattened, then the differences."""
    plain, flattened = certificate.plain, certificate.flattened
    lines = [f"{'':<16}{'plain':>14}{'flattened':>14}{'change':>9}", "-" * 53]
    owners = [*dict.fromkeys([*PEAKS, *plain["peaks"], *flattened["peaks"]])]
    for owner in owners:
        lines.append(_row(owner, plain["peaks"].get(owner, 0), flattened["peaks"].get(owner, 0)))
    lines.append("-" * 53)
    lines.append(_row("device peak", plain["device_peak_bytes"], flattened["device_peak_bytes"]))
    lines.append(_row("host", plain["host_bytes"], flattened["host_bytes"]))
    ratio = flattened["step_ms"] / plain["step_ms"]
    lines.append(f"{'step time':<16}{plain['step_ms']:>11.0f} ms{flattened['step_ms']:>11.0f} ms{ratio:>8.2f}x")
    lines += ["", f"over {certificate.steps} steps from one seed:"]
    lines += [
        f"  largest loss difference of a token   {certificate.max_abs_loss_diff:.3g}",
        f"  mean square of these differences     {certificate.per_token_mse:.3g}",
        f"  largest gradient error               {certificate.max_grad_rel_err:.3g}  {certificate.worst_parameter}",
        f"  gradient norm difference             {certificate.grad_norm_rel_diff:.3g}",
    ]
    for name, error in (certificate.against_float64 or {}).items():
        lines.append(
            f"  {name} against float64: loss {error['loss_abs_err']:.2g}, gradients {error['max_grad_rel_err']:.2g}"
        )
    lines += [f"  note: {signal}" for signal in certificate.signals]
    return "\n".join(lines)


def _row(name: str, before: int, after: int) -> str:
    change = f"{100 * (after - before) / before:+.0f}%" if before else ""
    return f"{name:<16}{format_bytes(before):>14}{format_bytes(after):>14}{change:>9}"


def emit(certificate: Certificate, args: argparse.Namespace) -> None:
    print(json.dumps(strict(certificate.to_json()), indent=1) if args.json else table(certificate))


def strict(value: Any) -> Any:
    """`value` with null for NaN and infinity, for which JSON has no words and most readers no ears."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value
