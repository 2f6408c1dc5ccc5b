# SPDX-License-Identifier: Apache-2.0
"""How far back does a state help, at which positions of a window, and does it help as much deep in a long document?

    python run.py smollm2-kv runs/kv-146 path/to/books   # writes results/smollm2-kv{,-long}.json, then the page
    python run.py --tables-only                          # writes README.md and the figures

Measured on the first 15,000 tokens of each validation book, and on 100,000 tokens of eight of them. Trained models come
from `carryforward reproduce beyond` and `alternatives`, untrained ones from `carryforward add --window 300`.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import command_line, paragraph, strip_folders, write_page, write_result

from carryforward.evaluation import horizon
from carryforward.models.model_files import load_config
from carryforward.settings.commands import HorizonSettings
from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import COLOURS

HERE = Path(__file__).parent
WINDOW, TOKENS, DEPTHS = 300, 15_000, (0, 1, 2, 4, 8, 16)
LONG, BOOKS, BYTES = 100_000, 8, 400_000  # tokens per book; the first so many books, by name, of at least this size
POSITIONS = (0, 10, 50, 100, 200, 300)  # borders of the ranges of positions in a window
NAMES = {
    "bundled-kv-untrained": "the bundled model, keys and values of half a window, untrained",
    "bundled-kv": "the bundled model, keys and values of half a window",
    "bundled-paper": "the bundled model, the paper's vector",
    "smollm2-kv-untrained": "SmolLM2-135M, keys and values of half a window, untrained",
    "smollm2-kv": "SmolLM2-135M, keys and values of half a window",
    "smollm2-paper": "SmolLM2-135M, the paper's vector at layer 6",
}
ABOUT = f"""
The gain of the state: how much higher the loss is with the state removed, in nats per token. Windows of {WINDOW}
tokens, no overlap, validation books. "n back": the state was built from the n preceding windows only, measured on
windows that have at least {DEPTHS[-1]} before them; where 1 back gains nearly as much as {DEPTHS[-1]} back, older
windows contribute nothing. "In windows": by the window's number in its document. The first groups have few tokens
(2,400 each in the long books), so their numbers are rough.
"""


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=NAMES, help="name of the result")
    parser.add_argument("model", help="folder of the recurrent model")
    parser.add_argument("books", type=Path, help="folder with validation/*.txt")


def measure(arguments: argparse.Namespace) -> None:
    setting, model, books = arguments.setting, arguments.model, arguments.books
    recurrence = getattr(load_config(model), "recurrence", None)
    if recurrence is None or (recurrence.window, recurrence.overlap) != (WINDOW, 0):
        raise SystemExit(f"{model}: a recurrent model with windows of {WINDOW} and overlap 0 is expected.")
    long_books = [book for book in sorted((books / "validation").glob("*.txt")) if book.stat().st_size >= BYTES]
    if len(long_books) < BOOKS:
        raise SystemExit(f"{books}: {len(long_books)} validation books of {BYTES:,} bytes or more, {BOOKS} are needed.")
    gpu = torch.cuda.is_available()
    settings = HorizonSettings(
        str(books), depth=DEPTHS, max_document_tokens=TOKENS, bf16=gpu, batch_size=50 if gpu else 8
    )
    write_survey(horizon.horizon(model, settings), setting)
    with tempfile.TemporaryDirectory() as folder:
        subset = Path(folder) / books.name
        (subset / "validation").mkdir(parents=True)
        for book in long_books[:BOOKS]:
            shutil.copy(book, subset / "validation")
        long = replace(settings, data=str(subset), depth=(0, 1), max_document_tokens=LONG, batch_size=BOOKS)
        write_survey(horizon.horizon(model, long), f"{setting}-long")


def write_survey(survey: dict[str, Any], name: str) -> None:
    strip_folders(survey, "model")
    write_result(HERE / "results" / f"{name}.json", survey)


def read_survey(name: str) -> dict[str, Any] | None:
    path = HERE / "results" / f"{name}.json"
    return {**json.loads(path.read_text()), "model": NAMES[name.removesuffix("-long")]} if path.exists() else None


def write_pages() -> None:
    lines = ["# Horizon", "", paragraph(ABOUT)]
    lines += section("", "horizon.png", f"The first {TOKENS:,} tokens of each book")
    lines += section("-long", "long.png", f"{LONG:,} tokens of {BOOKS} books")
    write_page(HERE, lines)


def section(suffix: str, figure: str, title: str) -> list[str]:
    """The tables and the figure of all results whose names have this suffix."""
    surveys = {name: survey for name in NAMES if (survey := read_survey(f"{name}{suffix}"))}
    lines = ["", f"## {title}"]
    if surveys:
        colours = [colour for name, colour in zip(NAMES, COLOURS, strict=True) if name in surveys]
        horizon.draw(list(surveys.values()), HERE / figure, colours)
        for first, gains_of in (
            ("gain with a state from", gains_by_depth),
            ("at positions", gains_by_position),
            ("in windows", gains_by_window),
        ):
            lines += ["", table(first, list(surveys.values()), [gains_of(survey) for survey in surveys.values()])]
        lines += ["", f"![gains]({figure})"]
    missing = [NAMES[name] for name in NAMES if name not in surveys]
    return [*lines, "", f"Not measured yet: {'; '.join(missing)}."] if missing else lines


def gains_by_depth(survey: dict[str, Any]) -> dict[str, float]:
    return {f"{depth['windows']} back": depth["gain"] for depth in survey["depths"] if depth["windows"]}


def gains_by_window(survey: dict[str, Any]) -> dict[str, float]:
    return {_range(group["from"], group["to"]): group["gain"] for group in survey["windows"]}


def gains_by_position(survey: dict[str, Any]) -> dict[str, float]:
    gains = {}
    for begin, end in pairwise(POSITIONS):
        inside = [group for group in survey["positions"] if begin <= group["from"] and group["to"] <= end]
        tokens = sum(group["tokens"] for group in inside)
        gains[_range(begin, end)] = sum(group["gain"] * group["tokens"] for group in inside) / tokens
    return gains


def _range(begin: int, end: int) -> str:
    return f"{begin}" if end == begin + 1 else f"{begin} to {end - 1}"


def table(first: str, surveys: list[dict[str, Any]], gains: list[dict[str, float]]) -> str:
    """One line per model, one column per key of its gains."""
    heads = list(dict.fromkeys(head for model_gains in gains for head in model_gains))
    lines = [[survey["model"], *(f"{model_gains[head]:.3f}" if head in model_gains else "–" for head in heads)]
             for survey, model_gains in zip(surveys, gains, strict=True)]  # fmt: skip
    return markdown_table([first, *heads], lines)


if __name__ == "__main__":
    main()
