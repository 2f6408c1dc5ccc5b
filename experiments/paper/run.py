# SPDX-License-Identifier: Apache-2.0
"""`carryforward reproduce` for machines without typer: the same job, options and results.

python experiments/paper/run.py table2 --setting bundled --data path/to/books --jobs 4
python experiments/paper/run.py table2 --tables-only
"""

import argparse
from pathlib import Path

from carryforward.reproduction.pages import publish
from carryforward.reproduction.reproduce import EXPERIMENTS, WORK, reproduce
from carryforward.utils.console import note, quiet_libraries
from carryforward.utils.signals import raise_interrupts


def main() -> None:
    arguments = parse()
    options = vars(arguments)
    pages, tables_only = options.pop("pages"), options.pop("tables_only")
    with raise_interrupts(), quiet_libraries():
        try:
            if not tables_only:
                reproduce(**options, program=[__file__])
            for page in publish(arguments.experiments) if pages else []:
                print(page)
        except KeyboardInterrupt as interrupt:
            note(str(interrupt) or "interrupted")
            raise SystemExit(130) from None
        except (ValueError, ChildProcessError) as error:
            raise SystemExit(f"error: {error}") from error


def parse() -> argparse.Namespace:
    """The options of `carryforward reproduce`; `carryforward reproduce --help` describes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="folder of an experiment: table2, windows, alternatives, ...")
    parser.add_argument("--setting", default="bundled", help="recipe of the experiment")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS)
    parser.add_argument("--work", type=Path, default=WORK, help="folder for the models")
    parser.add_argument("--model", help="base model, in place of the recipe's")
    parser.add_argument("--data", help="corpus, in place of the recipe's")
    parser.add_argument("--cell", dest="cells", nargs="+", default=[], help="run only these cells")
    parser.add_argument("--jobs", type=int, default=1, help="cells to run in parallel")
    parser.add_argument("--seconds", type=float, help="save and stop after so many; the same command resumes")
    parser.add_argument("--test", action="store_true", help="also score the test split")
    parser.add_argument("--tables-only", action="store_true", help="run nothing; only rewrite the pages")
    parser.add_argument("--pages", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep-models", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", help="cpu, to leave the GPU unused")
    return parser.parse_args()


if __name__ == "__main__":
    main()
