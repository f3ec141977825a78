#!/usr/bin/env bash
# Stands in for the interpreter in scripts/slurm/train.sbatch: see phased.py.
root=$(cd "$(dirname "$0")/.." && pwd)
exec "${PHASED_PYTHON:-python3}" "$root/tests/phased.py" "$@"
