#!/usr/bin/env bash
# Train and evaluate the given configs, in the folder to which prepare.py has written the model and the books:
#   run.sh CONFIG...
# A finished run is not repeated, and a stopped one resumes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
for config in "$@"; do
  python -m carryforward train --config "$here/$config.yaml" --out "runs/$config"
  python -m carryforward evaluate "runs/$config" --data books --split validation --max-document-tokens 15000 \
    --overlap 0 10 30 50 --batch-size 50 --bf16 --out "results/$config" > /dev/null
done
