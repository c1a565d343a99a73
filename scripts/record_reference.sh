#!/bin/sh
# Copies finished runs, without their checkpoints, to results/reference: scripts/record_reference.sh <run folder>...
set -eu
for run in "$@"; do
    grep -q '"state": "finished"' "$run/status.json" || { echo "$run is not finished" >&2; exit 1; }
    target=results/reference/runs/$(basename "$run")
    mkdir -p "$target"
    for file in config.yaml environment.json status.json metrics.jsonl curve.jsonl; do
        cp "$run/$file" "$target/"
    done
done
