"""The command line. The only place that reads the environment; commands load what they need when they run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from steppe import __version__
from steppe.core.errors import ConfigError, SteppeError

PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp")  # what matplotlib writes
_EPILOG = "A first run: `steppe train run.toml --ranks 2`; what a run.toml holds stands in docs/training.md."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; refusals print one line and exit with 2."""
    parser = build_parser()
    name, code = parser.prog, 0
    try:
        try:
            args = parser.parse_args(argv)
            name = f"{parser.prog} {args.command}"
            _check_targets(args)
            code = int(args.run(args) or 0)
        except SteppeError as refusal:
            print(f"{name}: {refusal}", file=sys.stderr)
            code = 2
        finally:
            _flush()
    except BrokenPipeError:
        return code
    except OSError as failure:
        print(f"{name}: {failure}; check the path, its permissions and the disk", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    return code


def _flush() -> None:
    """Write out what was printed, while a reader who has left or a full disk can still be answered: Python itself
    does it after the last line of the program, prints "Exception ignored" and exits with 120."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to fail at the exit
        raise


def _check_targets(args: argparse.Namespace) -> None:
    """Refuse a file that can't be written before the work that fills it. Raises: ConfigError."""
    for name in ("out", "picture", "export", "markdown"):
        if (path := getattr(args, name, None)) is None:
            continue
        folder = Path(path).absolute()
        if name == "export":  # a directory, made with its parents
            while not folder.exists():
                folder = folder.parent
        else:
            folder = folder.parent
        if name == "picture" and Path(path).suffix.lower() not in PICTURES:
            raise ConfigError(
                "--picture", got=path, allowed=f"a name that ends in {', '.join(PICTURES)}", remedy="end it so"
            )
        is_file = name == "export" or not Path(path).is_dir()
        if not (is_file and folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(
                f"--{name}", got=path, allowed="a path that can be written, in a directory that exists",
                remedy="make its directory, or choose another path",
            )  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="steppe", description=__doc__ and _ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"steppe {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_plan, _add_explain, _add_calibrate, _add_train, _add_profile, _add_verify, _add_compare):
        add(commands)
    return parser


_ABOUT = (
    "Flat memory for long-context MoE training: predict the four peaks of a run, switch on the schedules that pay, "
    "train, and check that nothing but memory changed."
)
_Commands = argparse._SubParsersAction


def _command(commands: _Commands, name: str, about: str, detail: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=about, description=f"{about}. {detail}")
    return parser


def _add_plan(commands: _Commands) -> None:
    from steppe.planner import command

    parser = _command(
        commands, "plan", "say before launch which peak stops a run, at which context, and what to switch on",
        "Needs no GPU, no torch and about a second.",
    )  # fmt: skip
    command.add_plan_arguments(parser)
    parser.set_defaults(run=command.plan)


def _add_explain(commands: _Commands) -> None:
    from steppe.planner import command

    parser = _command(
        commands, "explain", "say which tensor a failed allocation was, and what removes it",
        "Give the size, or the whole error message on standard input.",
    )  # fmt: skip
    command.add_explain_arguments(parser)
    parser.set_defaults(run=command.explain)


def _add_calibrate(commands: _Commands) -> None:
    parser = _command(
        commands, "calibrate", "measure this machine's links, memory, AdamW and GEMM rates",
        "Takes less than a minute; the planner reads the file it writes.",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("machine.toml"), help="the TOML file to write (%(default)s)")

    def run(args: argparse.Namespace) -> int:
        from steppe.flatteners.optimizer import rates
        from steppe.flatteners.optimizer.kernel import load_kernel
        from steppe.runtime import machine

        print(f"AdamW kernel: {load_kernel().name}")
        return machine.calibrate_command(args.out, update=rates.kernel_seconds)

    parser.set_defaults(run=run)


def _add_train(commands: _Commands) -> None:
    parser = _command(
        commands, "train", "train a Hugging Face MoE model as a run.toml describes",
        "Under torchrun it is one rank; by itself it starts the ranks. A killed run resumes where it was.",
    )  # fmt: skip
    _add_run_arguments(parser)
    parser.add_argument("--export", type=Path, metavar="DIR", help="write Hugging Face safetensors there at the end")

    def run(args: argparse.Namespace) -> int:
        from steppe.training import config

        config.load(args.config).launch.count(args.ranks)  # refused before torch is loaded
        from steppe.training import launch

        return launch.train(args.config, args.ranks, export=args.export, environment=os.environ)

    parser.set_defaults(run=run)


def _add_profile(commands: _Commands) -> None:
    parser = _command(
        commands, "profile", "measure who holds the memory of a training step, peak by peak",
        "Runs three steps of the run and reports the steady one; says which peak to flatten first.",
    )  # fmt: skip
    _add_run_arguments(parser)
    _add_report_arguments(parser)
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the step's memory as a stacked timeline (PNG)"
    )
    parser.set_defaults(run=lambda args: _run_on_ranks("profile", args))


def _add_verify(commands: _Commands) -> None:
    parser = _command(
        commands, "verify", "run plain and flattened side by side from one seed and print the certificate",
        "Losses, gradients and peaks of both, and each one's distance from float64 where the model has one.",
    )  # fmt: skip
    _add_run_arguments(parser)
    _add_flatten_argument(parser)
    _add_report_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help="steps to compare (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw both memory timelines (PNG)")
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--stack", action="store_true", help="the four one by one, each on top of the last ones")
    several.add_argument("--all-subsets", action="store_true", help="all 16 subsets of the four")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables of differences and peaks there")
    parser.set_defaults(run=lambda args: _run_on_ranks("verify", args))


def _add_compare(commands: _Commands) -> None:
    parser = _command(
        commands, "compare", "alternate one flattener on and off in one run and print the time ratio",
        "The ratio on / off of interleaved steps with its spread: does it pay here?",
    )  # fmt: skip
    _add_run_arguments(parser)
    _add_report_arguments(parser)
    parser.add_argument("--toggle", required=True, metavar="NAME", help="dispatch, vocab, boundary or optimizer")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of steps (%(default)s)")
    parser.set_defaults(run=lambda args: _run_on_ranks("compare", args))


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="run.toml", help="the run: model, data, training, flatteners")
    parser.add_argument("--ranks", type=int, help="start this many ranks here (default: launch.ranks of the run.toml)")


def _add_flatten_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flatten", metavar="NAME,...", help="switch these flatteners on with their defaults")


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run_on_ranks(name: str, args: argparse.Namespace) -> int:
    from steppe import commands

    return commands.run(name, args, os.environ)


if __name__ == "__main__":
    sys.exit(main())
