# SPDX-License-Identifier: Apache-2.0
"""How far back a state helps, where in a window, and whether it helps as much deep in a long document.

    python run.py smollm2-kept runs/kept-146 path/to/books   # writes results/smollm2-kept{,-long}.json
    python run.py --tables                                   # writes README.md and the figures

On the first 15,000 tokens of each validation book, and on 100,000 tokens of eight of them. Trained models come from
`carryforward reproduce beyond` and `alternatives`, untrained ones from `carryforward add --window 300`.
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

from carryforward.evaluation import horizon
from carryforward.models.loading import load_config
from carryforward.settings import HorizonSettings
from carryforward.utils.files import write_json, write_text
from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import COLOURS

HERE = Path(__file__).parent
WINDOW, TOKENS, DEPTHS = 300, 15_000, (0, 1, 2, 4, 8, 16)
LONG, BOOKS, BYTES = 100_000, 8, 400_000  # tokens of as many validation books, the first by name of this size
STRETCHES = (0, 10, 50, 100, 200, 300)  # of a window's positions
NAMES = {
    "bundled-kept-untrained": "the bundled model, half a window kept, untrained",
    "bundled-kept": "the bundled model, half a window kept",
    "bundled-paper": "the bundled model, the paper's vector",
    "smollm2-kept-untrained": "SmolLM2-135M, half a window kept, untrained",
    "smollm2-kept": "SmolLM2-135M, half a window kept",
    "smollm2-paper": "SmolLM2-135M, the paper's vector at layer 6",
}
ABOUT = f"""
What the state's removal costs, in nats per token. Windows of {WINDOW} tokens, no overlap, validation books. "From n
back" is a state that the n windows before have made, on windows that have {DEPTHS[-1]} before them: where one is nearly
as good as {DEPTHS[-1]}, nothing older is of use. "In windows" goes by a window's number in its document; the first have
few tokens (2,400 each in the long books), so that their figures are rough.
"""


def main() -> None:
    if sys.argv[1:] == ["--tables"]:
        tables()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=NAMES)
    parser.add_argument("model")
    parser.add_argument("books")
    given = parser.parse_args()
    run(given.setting, given.model, Path(given.books))


def run(setting: str, model: str, books: Path) -> None:
    recurrence = getattr(load_config(model), "recurrence", None)
    if recurrence is None or (recurrence.window, recurrence.overlap) != (WINDOW, 0):
        raise SystemExit(f"{model}: a recurrent model with windows of {WINDOW} and overlap 0 is expected.")
    enough = [book for book in sorted((books / "validation").glob("*.txt")) if book.stat().st_size >= BYTES]
    if len(enough) < BOOKS:
        raise SystemExit(f"{books}: {len(enough)} validation books of {BYTES:,} bytes or more, {BOOKS} are needed.")
    gpu = torch.cuda.is_available()
    settings = HorizonSettings(
        str(books), depth=DEPTHS, max_document_tokens=TOKENS, bf16=gpu, batch_size=50 if gpu else 8
    )
    write(horizon.survey(model, settings), setting)
    with tempfile.TemporaryDirectory() as folder:
        few = Path(folder) / books.name
        (few / "validation").mkdir(parents=True)
        for book in enough[:BOOKS]:
            shutil.copy(book, few / "validation")
        long = replace(settings, data=str(few), depth=(0, 1), max_document_tokens=LONG, batch_size=BOOKS)
        write(horizon.survey(model, long), f"{setting}-long")


def write(survey: dict[str, Any], name: str) -> None:
    survey["model"] = Path(survey["model"]).name
    (HERE / "results").mkdir(exist_ok=True)
    write_json(HERE / "results" / f"{name}.json", survey)


def tables() -> None:
    lines = ["# Horizon", "", " ".join(ABOUT.split())]
    for ending, figure, title in (
        ("", "horizon.png", f"The first {TOKENS:,} tokens of each book"),
        ("-long", "long.png", f"{LONG:,} tokens of {BOOKS} books"),
    ):
        found = {name: read(f"{name}{ending}") for name in NAMES}
        surveys = {name: survey for name, survey in found.items() if survey}
        lines += ["", f"## {title}"]
        if surveys:
            colours = [colour for name, colour in zip(NAMES, COLOURS, strict=True) if name in surveys]
            horizon.draw(list(surveys.values()), HERE / figure, colours)
            parts = ([far(one) for one in surveys.values()], [place(one) for one in surveys.values()],
                     [number(one) for one in surveys.values()])  # fmt: skip
            for first, part in zip(("gain with a state from", "at positions", "in windows"), parts, strict=True):
                lines += ["", table(first, list(surveys.values()), part)]
            lines += ["", f"![gains]({figure})"]
        missing = [NAMES[name] for name in NAMES if name not in surveys]
        lines += ["", f"Not measured yet: {'; '.join(missing)}."] * bool(missing)
    lines += ["", "Written by `python experiments/horizon/run.py --tables`."]
    write_text(HERE / "README.md", "\n".join(lines) + "\n")


def read(name: str) -> dict[str, Any] | None:
    path = HERE / "results" / f"{name}.json"
    return {**json.loads(path.read_text()), "model": NAMES[name.removesuffix("-long")]} if path.exists() else None


def far(survey: dict[str, Any]) -> dict[str, float]:
    return {f"{one['windows']} back": one["gain"] for one in survey["depths"] if one["windows"]}


def number(survey: dict[str, Any]) -> dict[str, float]:
    return {_stretch(one["from"], one["to"]): one["gain"] for one in survey["windows"]}


def place(survey: dict[str, Any]) -> dict[str, float]:
    """Gains at stretches of a window's positions."""
    found = {}
    for begin, end in pairwise(STRETCHES):
        inside = [one for one in survey["positions"] if begin <= one["from"] and one["to"] <= end]
        tokens = sum(one["tokens"] for one in inside)
        found[_stretch(begin, end)] = sum(one["gain"] * one["tokens"] for one in inside) / tokens
    return found


def _stretch(begin: int, end: int) -> str:
    return f"{begin}" if end == begin + 1 else f"{begin} to {end - 1}"


def table(first: str, surveys: list[dict[str, Any]], gains: list[dict[str, float]]) -> str:
    """A line for each model."""
    heads = list(dict.fromkeys(head for one in gains for head in one))
    lines = [[survey["model"], *(f"{one[head]:.3f}" if head in one else "–" for head in heads)]
             for survey, one in zip(surveys, gains, strict=True)]  # fmt: skip
    return markdown_table([first, *heads], lines)


if __name__ == "__main__":
    main()
