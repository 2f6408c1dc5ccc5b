# SPDX-License-Identifier: Apache-2.0
"""Run `carryforward demo` with several seeds: does its result depend on the seed?

python experiments/other/demo/run.py [SEED ...]      # seeds 0 1 2 by default, five minutes each
python experiments/other/demo/run.py --tables-only   # writes README.md here and a section of the main README
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import command_line, write_page, write_readme_section

from carryforward.cli.demo_results import conclusion, scores, table
from carryforward.evaluation import report
from carryforward.utils.markdown import markdown_table

HERE = Path(__file__).parent
Results = dict[str, list[report.Result]]  # by seed


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("seeds", nargs="*", type=int, default=[0, 1, 2], metavar="SEED")


def measure(arguments: argparse.Namespace) -> None:
    for seed in arguments.seeds:
        run_demo(seed)


def run_demo(seed: int) -> None:
    """Run the demo in a temporary folder and copy its result files here."""
    folder = HERE / "results" / f"seed-{seed}"
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "carryforward", "demo", "--seed", str(seed)]
        subprocess.run(command, cwd=work, check=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in Path(work, "carryforward-demo/results").glob("*.json"):
            shutil.copy(file, folder)


def write_pages() -> None:
    results = {path.name.removeprefix("seed-"): load(path) for path in sorted(HERE.glob("results/seed-*"))}
    first = next(iter(results.values()))
    report.figure(first, HERE / "figure.png", "bits_per_byte")
    write_page(HERE, page(results))
    write_readme_section(HERE, readme_section(first))


def load(folder: Path) -> list[report.Result]:
    """The results of a run, the plain model first."""
    return sorted(report.load(folder), key=lambda result: result["model"]["recurrent"])


def seed_table(results: Results) -> str:
    lines = []
    for seed, seed_results in results.items():
        bits = scores(seed_results)
        change = f"{100 * (bits['recurrent'] / bits['plain'] - 1):+.1f} %"
        lines.append(
            [seed, *(f"{bits[name]:.3f}" for name in ("plain", "recurrent")), change, f"{bits['removed']:.3f}"]
        )
    head = ["seed", "plain", "keys and values carried", "", "state removed"]
    return markdown_table(head, lines, text_columns=0)


def readme_section(results: list[report.Result]) -> str:
    """For the main README: the table as the demo prints it, and the figure."""
    figure = "![bits per byte against FLOPs](experiments/other/demo/figure.png)"
    text = f"{conclusion(results)} [Seeds and settings](experiments/other/demo/README.md)."
    return f"{table(results)}\n\n{text}\n\n{figure}\n"


def page(results: Results) -> list[str]:
    seed, first = next(iter(results.items()))
    about: dict[str, Any] = first[0]
    hardware, versions, data = about["hardware"], about["versions"], about["data"]
    window = about["model"]["window"]
    return [
        f"""# The demo, with several seeds

What `carryforward demo` shows after training: the test split of `python-docs` ({data["documents"]} documents, the first
{data["max_tokens"]:,} tokens of each), windows of {window}, bits per byte at overlap 0. The learning rate was chosen
for the plain model and for another memory, on the validation split; that of keys and values was not searched, and the
memory is the recommended one with its defaults. The test split was scored with the final settings only.

{seed_table(results)}

Seed {seed}, at several overlaps of the plain model:

{table(first)}

{conclusion(first)}

![bits per byte against FLOPs](figure.png)

Formerly the demo trained another memory (14 pooled vectors); those results are in the history of this folder.

Python {versions["python"]} and its documentation; commit {about["commit"][:12]}; {hardware["cpu"]}, \
{hardware["cores"]} cores. The JSON is in `results/`."""
    ]


if __name__ == "__main__":
    main()
