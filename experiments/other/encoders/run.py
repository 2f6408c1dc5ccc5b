# SPDX-License-Identifier: Apache-2.0
"""Do vectors of long documents gain from a state, without training?

    python run.py retrieval --model MINILM --covid-qa FILE --hotpotqa FILE   # chunks of documents, nDCG@10
    python run.py needles --model MINILM --books BOOKS                       # a sentence in 256 to 4,096 tokens
    python run.py classifier --model MINILM --books BOOKS --table train.csv  # when an author was born
    python run.py --tables-only                                              # writes README.md and the figure

MINILM is the folder of all-MiniLM-L6-v2, or of another encoder of sentence-transformers. BOOKS has train/ and
validation/ of .txt files. The arms are data: `settings.yaml`, or --settings another file. Each arm writes a JSON file
to `results/`; an arm that was measured with the same settings is skipped.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import classifier
import needles
import retrieval
from arms import Arm, Reader, arms_of
from harness import command_line, new_result, write_result
from pages import RESULTS, write_pages

from carryforward.utils.console import note

HERE = Path(__file__).parent
Measure = Callable[[Reader], dict[str, Any]]


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", choices=("retrieval", "needles", "classifier"))
    parser.add_argument("--model", required=True, help="folder of an encoder")
    parser.add_argument("--covid-qa", type=Path, help="file of COVID-QA, for retrieval")
    parser.add_argument("--hotpotqa", type=Path, help="file of HotpotQA, for retrieval")
    parser.add_argument("--books", help="folder of books; for needles python-docs is the default")
    parser.add_argument("--table", type=Path, help="CSV of the training books, with id and author, for the classifier")
    parser.add_argument("--settings", type=Path, default=HERE / "settings.yaml", help="YAML file")
    parser.add_argument("--only", nargs="+", metavar="ARM", help="measure these arms only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def measure(arguments: argparse.Namespace) -> None:
    settings = yaml.safe_load(arguments.settings.read_text())
    for name, run in measurements(arguments, settings).items():
        for arm in arms_of(settings, arguments.only):
            if arm.alone and arguments.experiment == "classifier":
                continue  # it has no chunks
            measure_arm(arm, name, run, arguments, settings)


def measurements(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Measure]:
    """What is measured, by the name of its data."""
    about, seed = settings[arguments.experiment], settings["seed"]
    if arguments.experiment == "needles":
        corpus = arguments.books or "python-docs"
        filler = needles.filler_of(corpus, about["documents"] * max(about["lengths"]))
        return {Path(corpus).name: lambda reader: needles.measure(reader, filler, about, seed)}
    if arguments.experiment == "classifier":
        if not arguments.books or not arguments.table:
            raise SystemExit("classifier: give --books and --table.")
        books = classifier.read_books(
            Path(arguments.books) / "train", arguments.table, HERE / "authors.yaml", about, seed
        )
        return {"books": lambda reader: classifier.measure(reader, books, about)}
    files = {"covid-qa": arguments.covid_qa, "hotpotqa": arguments.hotpotqa}
    collections = {name: retrieval.DATA[name](file, about) for name, file in files.items() if file is not None}
    if not collections:
        raise SystemExit("retrieval: give --covid-qa, --hotpotqa or both.")
    return {name: lambda reader, c=c: retrieval.measure(reader, c) for name, c in collections.items()}


def measure_arm(arm: Arm, data: str, run: Measure, arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Measure an arm and write its result, unless it is there."""
    path = arguments.out / arguments.experiment / data / f"{arm.name}.json"
    model = "/".join(Path(arguments.model).absolute().parts[-2:])
    about = {"arm": arm.fields(), "settings": settings[arguments.experiment], "data": data, "model": model}
    if path.exists() and all(json.loads(path.read_text()).get(key) == value for key, value in about.items()):
        note(f"{path} is there already")
        return
    note(f"{arguments.experiment}, {data}: {arm.name}")
    begun = time.perf_counter()
    reader = Reader(arguments.model, arm, device=arguments.device, batch_size=settings["batch_size"])
    scores = run(reader)
    result = new_result(f"encoders {arguments.experiment}", seed=settings["seed"], device=arguments.device) | about
    write_result(path, result | {"seconds": time.perf_counter() - begun} | scores, indent=None)


if __name__ == "__main__":
    main()
