"""The certificate of many runs at once: the flatteners stacked one by one, or all 16 subsets, against one plain run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from steppe.core.errors import ConfigError
from steppe.core.ledger import PEAKS
from steppe.core.policy import OFF
from steppe.core.units import format_bytes
from steppe.flatteners import NAMES
from steppe.runtime import collectives
from steppe.sides import run_side
from steppe.training.config import RunConfig, policy_class
from steppe.truth import distance, first_step
from steppe.verify import Certificate, certify, strict

Names = tuple[str, ...]
NONE = "none"  # the plain program beside itself: what is not zero there is no flattener's doing


def stacked() -> list[Names]:
    """None, the first flattener, the first two ... all four."""
    return [NAMES[:count] for count in range(len(NAMES) + 1)]


def all_subsets() -> list[Names]:
    """The 16, smaller ones first."""
    return [names for count in range(len(NAMES) + 1) for names in itertools.combinations(NAMES, count)]


def with_only(config: RunConfig, names: Names) -> RunConfig:
    """The run with just these flatteners on: by its own policies, or the default ones where it has them off."""
    chosen = {name: config.flatten[name] if config.flatten[name] != OFF else policy_class(name)() for name in names}
    return config.plain().with_flatten(**chosen)


def certificates(
    config: RunConfig, selections: Iterable[Names], *, steps: int, device: torch.device | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Certificate]:  # fmt: skip
    """One certificate a selection ("dispatch+vocab"), all against one plain run and one float64 step.

    All ranks call it and get the same. Raises: ConfigError for less than one step; what the trainers raise.
    """
    if steps < 1:
        raise ConfigError("steps", got=steps, allowed="1 or more", remedy="3 show the steady step")
    say(f"plain: {steps} steps")
    plain, group = run_side(config.plain(), steps=steps, device=device), collectives.world()
    say("against float64: computing the first step")
    truth = first_step(config)
    found: dict[str, Certificate] = {}
    for names in selections:
        say(f"{'+'.join(names) or NONE}: {steps} steps")
        own = with_only(config, names)
        side = run_side(own, steps=steps, device=device)
        certificate = certify(plain, side, own, group)
        if truth is not None:
            against = {"plain": distance(plain, truth), "flattened": distance(side, truth)}
            certificate = replace(certificate, against_float64=against)
        found["+".join(names) or NONE] = certificate
    return found


_DIFFERENCES = (
    ("loss max", lambda c: c["max_abs_loss_diff"]), ("loss mean", lambda c: c["mean_abs_loss_diff"]),
    ("per-token MSE", lambda c: c["per_token_mse"]), ("gradients", lambda c: c["max_grad_rel_err"]),
    ("norm", lambda c: c["grad_norm_rel_diff"]),
)  # fmt: skip
_EXACT = (("loss to float64", "loss_abs_err"), ("gradients to float64", "max_grad_rel_err"))


def markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Two tables from certificates as JSON: differences from the plain run and from float64; peaks by owner."""
    first = next(iter(found.values()))
    exact = [] if first["against_float64"] is None else list(_EXACT)
    head = ["on", *(name for name, _ in _DIFFERENCES), *(name for name, _ in exact)]
    truth = [f"{first['against_float64']['plain'][key]:.2g}" for _, key in exact]
    rows = [["plain", *("" for _ in _DIFFERENCES), *truth]]
    for name, found_here in found.items():
        own = [f"{found_here['against_float64']['flattened'][key]:.2g}" for _, key in exact]
        rows.append([name, *(f"{read(found_here):.2g}" for _, read in _DIFFERENCES), *own])
    peaks = [["plain", *_peaks(first["plain"])]]
    peaks += [[name, *_peaks(found_here["flattened"])] for name, found_here in found.items()]
    return "\n".join([*_table(head, rows), "", *_table(["on", "device peak", *PEAKS, "host"], peaks)])


def _peaks(side: Mapping[str, Any]) -> list[str]:
    values = [side["device_peak_bytes"], *(side["peaks"].get(owner, 0) for owner in PEAKS), side["host_bytes"]]
    return [format_bytes(value) for value in values]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def to_json(found: Mapping[str, Certificate]) -> str:
    return json.dumps(strict({name: certificate.to_json() for name, certificate in found.items()}), indent=1)
