#!/usr/bin/env bash
# Every run of this experiment, in the folder where prepare.py has put model and books: run.sh CONFIG...
# A finished run is not run again, and one that was stopped goes on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
for config in "$@"; do
  python -m carryforward train --config "$here/$config.yaml" --out "runs/$config"
  python -m carryforward evaluate "runs/$config" --data books --split validation --max-document-tokens 15000 \
    --overlap 0 10 30 50 --batch-size 50 --bf16 --out "results/$config" > /dev/null
done
