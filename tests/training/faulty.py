"""`steppe` with a fault: rank 1 fails once in the middle of a step, while the others wait for it in a collective.

`python -m tests.training.faulty train run.toml` with FAULT_AT_MICRO (which micro-batch, from 0) and FAULT_MARKER (a
file that is made before the fault, and keeps it from happening again) in the environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from steppe.cli import main
from steppe.integrations import transformers as hf

MESSAGE = "the floor under rank 1 gave way"


def _spoil() -> None:
    marker, left, real = Path(os.environ["FAULT_MARKER"]), int(os.environ["FAULT_AT_MICRO"]), hf.loss_of

    def loss_of(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0 and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            raise RuntimeError(MESSAGE)
        return real(*args, **kwargs)

    hf.loss_of = loss_of


if __name__ == "__main__":
    _spoil()
    sys.exit(main())
