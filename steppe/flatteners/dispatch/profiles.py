"""Forced routing: the profiles r/h that dispatchers of this field are judged by. Integers only.

Profile r/h: the first floor(r*N) tokens of a rank take experts {j mod h}, j < k; the others take
{h + (i+j) mod (E-h)}. Balanced: {(i+j) mod E}. All route weights are 1/k. Where h < k a token names the same expert
several times, which is legal.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

import numpy as np

from steppe.core.errors import ConfigError
from steppe.flatteners.dispatch.plan import Ints

PROFILES: Final = ("balanced", "30/16", "50/16", "80/16", "95/16", "30/4", "50/4", "95/1")


def forced_routes(profile: str, *, num_tokens: int, num_experts: int, num_choices: int) -> Ints:
    """Expert ids [N, k] of one rank under a profile: `"balanced"` or `"percent/hot experts"`.

    Raises: ConfigError for a profile that is not of this form or has as many hot experts as there are experts.
    """
    token = np.arange(num_tokens, dtype=np.int64)[:, None]
    choice = np.arange(num_choices, dtype=np.int64)[None, :]
    if profile == "balanced":
        return (token + choice) % num_experts
    share, num_hot = _parse(profile, num_experts)
    hot = token < int(share * num_tokens)
    return np.where(hot, choice % num_hot, num_hot + (token + choice) % (num_experts - num_hot))


def forced_counts(profile: str, *, num_ranks: int, num_tokens: int, num_experts: int, num_choices: int) -> Ints:
    """Counts [E_p, E] when every rank's `num_tokens` tokens follow the profile."""
    ids = forced_routes(profile, num_tokens=num_tokens, num_experts=num_experts, num_choices=num_choices)
    return np.tile(np.bincount(ids.reshape(-1), minlength=num_experts).astype(np.int64), (num_ranks, 1))


def _parse(profile: str, num_experts: int) -> tuple[Fraction, int]:
    percent, _, hot = profile.partition("/")
    if not (percent.isdigit() and hot.isdigit() and 0 < int(hot) < num_experts and int(percent) <= 100):
        raise ConfigError(
            "routing profile", got=repr(profile), allowed=f"'balanced' or percent/hot with hot < E = {num_experts}",
            remedy=f"use one of {', '.join(PROFILES)}",
        )  # fmt: skip
    return Fraction(int(percent), 100), int(hot)
