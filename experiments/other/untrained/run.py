# SPDX-License-Identifier: Apache-2.0
"""How well do models read when keys and values are carried across windows, without any training?

    python run.py smollm2 path/to/smollm2-135m path/to/books   # writes results/smollm2/*.json, then the page
    python run.py --tables-only                                # writes README.md

The plain model at several overlaps, beside recurrent models without overlap that carry the keys and values of some of
the newest positions. Windows of 300 tokens, on the first 15,000 tokens of each validation document.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import command_line, paragraph, write_page

from carryforward.backbones.architectures import architecture_of
from carryforward.cli.add import add_to_folder
from carryforward.evaluation import report
from carryforward.evaluation.evaluate import evaluate
from carryforward.models.model_files import load_config
from carryforward.settings.commands import EvaluateSettings
from carryforward.settings.recurrence import RecurrentSettings

HERE = Path(__file__).parent
WINDOW, TOKENS = 300, 15_000
OVERLAPS = (0, 50, 100, 200)
CARRIED = ((28, 4), (60, 4), (146, 4), (208, 4), (296, 4), (150, 0))  # newest positions, attention sinks
WORK = Path("untrained-models")
NAMES = {"bundled": "the bundled model, learned positions", "smollm2": "SmolLM2-135M, rotary positions"}
ABOUT = f"""
The keys and values of the newest positions, and of the first few of the document (attention sinks), are carried to the
next window. No training, no overlap. "kv 146 + 4": 146 newest positions and 4 sinks. Windows of {WINDOW} tokens, the
first {TOKENS:,} tokens of each validation book.
"""


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=NAMES, help="name of the results")
    parser.add_argument("model", help="the plain model: bundled, a folder or a Hub name")
    parser.add_argument("books", help="folder with validation/*.txt")


def measure(arguments: argparse.Namespace) -> None:
    setting, model, books = arguments.setting, arguments.model, arguments.books
    out = HERE / "results" / setting
    gpu = torch.cuda.is_available()
    settings = EvaluateSettings(
        books, "validation", max_document_tokens=TOKENS, bf16=gpu, batch_size=50 if gpu else 8, overlap=(0,)
    )
    results = [evaluate(model, replace(settings, window=WINDOW, overlap=OVERLAPS))]
    results[0]["model"]["name"] = "plain"
    shutil.rmtree(out, ignore_errors=True)  # only now: model and books can be read, so old results are superseded
    report.save(results, out)
    config = load_config(model)
    architecture = architecture_of(config)
    for recent, sinks in CARRIED:
        if not architecture.rotary and WINDOW + recent + sinks > architecture.max_positions(config):
            continue
        folder = WORK / f"{setting}-{recent}-{sinks}"
        shutil.rmtree(folder, ignore_errors=True)
        add_to_folder(model, folder, RecurrentSettings(window=WINDOW, recent=recent, sinks=sinks), data=books)
        results.append(evaluate(str(folder), settings))
        results[-1]["model"]["name"] = f"kv {recent} + {sinks}"
        report.save(results, out)


def write_pages() -> None:
    lines = ["# Untrained", "", paragraph(ABOUT)]
    for setting, name in NAMES.items():
        folder = HERE / "results" / setting
        if folder.exists():
            lines += ["", f"## {name[0].upper()}{name[1:]}", "", report.markdown(report.load(folder)).strip()]
    lines += ["", "How far back the state helps, and how it does in long documents: [horizon](../horizon/README.md)."]
    write_page(HERE, lines)


if __name__ == "__main__":
    main()
