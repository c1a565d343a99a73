#!/bin/sh
# Copies finished runs, and what was measured of them later, without their checkpoints to results/reference/runs:
# scripts/record_reference.sh <run folder>...
set -eu
reference=$(dirname "$0")/../results/reference/runs
for run in "$@"; do
    target=$reference/$(basename "$run")
    grep -q '"state": "finished"' "$run/status.json" || { echo "$run is not finished" >&2; exit 1; }
    [ ! -e "$target" ] || { echo "$target is there already" >&2; exit 1; }
    mkdir -p "$target"
    for file in config.yaml environment.json status.json metrics.jsonl curve.jsonl; do
        # where things lie on that machine is nobody's business
        sed -e 's/ results_dir=[^ "]*//' -e 's/^results_dir: .*/results_dir: results/' \
            -e 's#^\( *files: \)/.*/#\1<folder>/#' -e 's#\(task.files=\)/[^ "]*/#\1<folder>/#' \
            "$run/$file" > "$target/$file"
    done
    for settings in "$run"/evaluations/*/settings.json; do
        [ -e "$settings" ] || continue
        mkdir -p "$target/evaluations"
        cp -R "$(dirname "$settings")" "$target/evaluations/"
    done
done
