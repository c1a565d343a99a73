"""argv -> command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import importlib
import os
import sys

from fpexp import __version__
from fpexp.errors import EndedElsewhere, FpexpError, Interrupted, UserError

COMMANDS = {
    "train": "train a run, resume one, or sweep with -m",
    "sweep": "which jobs of a sweep are done, and what makes the others",
    "evaluate": "measure a recorded run once more: other lengths, another solver, caps on its iterations",
    "generate": "what a recorded run makes of a prompt, token by token",
    "runs": "list recorded runs",
    "report": "tables, figures and a page of recorded runs, beside what the paper reports",
    "data": "prepare a text corpus as token files",
    "bench": "time this machine against named baselines",
    "list": "list tasks, models, solvers, schedules, gradients, scales, experiments",
    "doctor": "check the installation and this machine",
}

USAGE = """\
usage: fpexp <command> [key=value ...]

Fixed-Point RNNs: train, measure and compare them.

commands:
{commands}

  fpexp <command> --help    what a command takes
  fpexp --version

first steps:
  fpexp train task=a4 model=fp_mamba_k
  fpexp runs

exit codes: 0 done, 1 failure, 2 a mistake in what was asked for, 130 Ctrl-C, 143 SIGTERM, 140 SIGUSR2"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; errors become one line on stderr and an exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read when torch loads OpenMP: idle threads leave kernels the core
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a model or task of one's own beside the run, as with python -m
    try:
        return _dispatch(arguments)
    except EndedElsewhere as error:
        return error.exit_code
    except Interrupted as error:
        print(f"fpexp: {error}", file=sys.stderr)
        return error.exit_code
    except FpexpError as error:
        print(f"fpexp: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fpexp: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"fpexp: error: {error.strerror or error}{where}", file=sys.stderr)
        return 1


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE.format(commands="\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())))
        return 0
    if arguments[0] == "--version":
        print(f"fpexp {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        from fpexp.config.schema import did_you_mean

        raise UserError(f"unknown command '{command}'{did_you_mean(command, COMMANDS)} ({', '.join(COMMANDS)})")
    words = [word for word in rest if word not in ("-h", "--help")]
    if len(words) < len(rest):
        from fpexp.commands import usage

        print(usage.describe(command, words))
        return 0
    module = "list_" if command == "list" else command
    code: int = importlib.import_module(f"fpexp.commands.{module}").run(rest)
    return code
