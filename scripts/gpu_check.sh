#!/bin/sh
# Checks and times everything on one GPU: scripts/gpu_check.sh [<file>] [--rehearse]; PYTHON is the interpreter
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m fpexp.bench.device "$@"
