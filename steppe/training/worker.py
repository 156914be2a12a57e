"""One rank, as `steppe train` starts it: `python -m steppe.training.worker run.toml [export directory]`."""

from __future__ import annotations

import os
import sys

from steppe.training.launch import train


def main() -> int:
    export = sys.argv[2] if len(sys.argv) > 2 else None
    return train(sys.argv[1], export=export, environment=os.environ)


if __name__ == "__main__":
    sys.exit(main())
