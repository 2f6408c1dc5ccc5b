# SPDX-License-Identifier: Apache-2.0
"""How far back a state helps, where in a window, and whether it helps as much deep in a long document.

    python run.py smollm2-kept runs/kept-146 path/to/books   # writes results/smollm2-kept{,-long}.json
    python run.py --tables                                   # writes README.md and the figures

On the first 15,000 tokens of each validation book, and on 100,000 tokens of eight of them.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from carryforward import horizon

HERE = Path(__file__).parent
TOKENS, DEPTHS = 15_000, (0, 1, 2, 4, 8, 16)
LONG, BOOKS, BYTES = 100_000, 8, 400_000  # tokens of as many validation books, the first by name of this size
NAMES = {
    "bundled-kept-untrained": "the bundled model, half a window kept, untrained",
    "bundled-kept": "the bundled model, half a window kept",
    "bundled-paper": "the bundled model, the paper's vector",
    "smollm2-kept-untrained": "SmolLM2-135M, half a window kept, untrained",
    "smollm2-kept": "SmolLM2-135M, half a window kept",
    "smollm2-paper": "SmolLM2-135M, the paper's vector",
}


def main() -> None:
    if sys.argv[1:] == ["--tables"]:
        tables()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=NAMES)
    parser.add_argument("model")
    parser.add_argument("books")
    run(**vars(parser.parse_args()))


def run(setting: str, model: str, books: str) -> None:
    gpu = torch.cuda.is_available()
    found = horizon.survey(
        model, books, depths=DEPTHS, max_document_tokens=TOKENS, bf16=gpu, batch_size=50 if gpu else 8
    )
    write(found, setting)
    with tempfile.TemporaryDirectory() as folder:
        enough = [book for book in sorted((Path(books) / "validation").glob("*.txt")) if book.stat().st_size >= BYTES]
        few = Path(folder) / "validation"
        few.mkdir()
        for book in enough[:BOOKS]:
            shutil.copy(book, few)
        found = horizon.survey(
            model, folder, depths=(0, 1), max_document_tokens=LONG, bf16=gpu, batch_size=BOOKS
        )  # fmt: skip
    found["data"]["name"] = Path(books).name
    write(found, f"{setting}-long")


def write(survey: dict[str, Any], name: str) -> None:
    survey["model"] = Path(survey["model"]).name
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.json").write_text(json.dumps(survey, indent=1) + "\n")


def tables() -> None:
    lines = [
        "# Horizon",
        "",
        "What the state's removal costs, in nats per token: with a state that comes from so many windows at most, by "
        "position in the window, and by number of the window. Windows of 300 tokens, no overlap, validation books.",
    ]
    near, far = [read(name) for name in NAMES], [read(f"{name}-long") for name in NAMES]
    for surveys, figure, text in (
        (near, "horizon.png", f"## The first {TOKENS:,} tokens of each book"),
        (far, "long.png", f"## {LONG:,} tokens of {BOOKS} books"),
    ):
        found = [one for one in surveys if one]
        horizon.draw(found, HERE / figure)
        lines += ["", text, "", *table(found, "depths"), "", *table(found, "windows"), "", f"![gains]({figure})"]
    lines += ["", "Written by `python experiments/horizon/run.py --tables`."]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


def read(name: str) -> dict[str, Any] | None:
    path = HERE / "results" / f"{name}.json"
    return {**json.loads(path.read_text()), "model": NAMES[name.removesuffix("-long")]} if path.exists() else None


def table(surveys: list[dict[str, Any]], what: str) -> list[str]:
    """A line for each model: gains by windows that the state comes from, or by number of the window."""
    longest = max((one[what] for one in surveys), key=len)
    if what == "depths":
        title, heads = "gain with a state from", [f"{one['windows']} back" for one in longest[1:]]
    else:
        title = "gain in windows"
        heads = [str(one["from"]) + (f" to {one['to'] - 1}" if one["to"] > one["from"] + 1 else "") for one in longest]
    lines = [f"| {title} | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for survey in surveys:
        gains = [f"{one['gain']:.3f}" for one in survey[what][len(longest) - len(heads) :]]
        lines.append(f"| {survey['model']} | {' | '.join(gains + ['–'] * (len(heads) - len(gains)))} |")
    return lines


if __name__ == "__main__":
    main()
