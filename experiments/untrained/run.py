# SPDX-License-Identifier: Apache-2.0
"""What models read when keys and values are carried over window borders, before any training.

    python run.py smollm2 path/to/smollm2-135m path/to/books   # writes results/smollm2/*.json
    python run.py long smollm2 path/to/books                   # afterwards: how it goes in 100,000 tokens
    python run.py --tables                                     # writes README.md and the figures

Plain at several overlaps beside models that keep so many positions and carry no overlap, windows of 300 tokens, on the
first 15,000 tokens of each validation document.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from carryforward import horizon, report
from carryforward.evaluating import evaluate
from carryforward.extending import extend
from carryforward.insertion import architecture_of
from carryforward.loading import load_config

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- untrained: written by experiments/untrained/run.py -->", "<!-- end of untrained -->"
WINDOW, TOKENS = 300, 15_000
LONG, BOOKS, BYTES = 100_000, 8, 400_000  # tokens of as many validation books, the first by name of this size
OVERLAPS = (0, 50, 100, 200)
SHOWN = (0, 50, 200)  # in the main README
KEPT = ((28, 4), (60, 4), (146, 4), (208, 4), (296, 4), (150, 0))  # newest positions and the document's first
WORK = Path("untrained-models")
NAMES = {"bundled": "the bundled model, learned positions", "smollm2": "SmolLM2-135M, rotary positions"}


def main() -> None:
    if sys.argv[1:] == ["--tables"]:
        tables()
        return
    is_long = sys.argv[1:2] == ["long"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=NAMES)
    if not is_long:
        parser.add_argument("model")
    parser.add_argument("books")
    given = parser.parse_args(sys.argv[1 + is_long :])
    if is_long:
        long(given.setting, given.books)
    else:
        run(given.setting, given.model, given.books)


def run(setting: str, model: str, data: str) -> None:
    out = HERE / "results" / setting
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    gpu = torch.cuda.is_available()
    common = {"split": "validation", "max_document_tokens": TOKENS, "bf16": gpu, "batch_size": 50 if gpu else 8}
    found = [evaluate(model, data, window=WINDOW, overlaps=OVERLAPS, **common)]
    found[0]["model"]["name"] = "plain"
    report.save(found, out)
    config = load_config(model)
    for kept, sinks in KEPT:
        name = f"kept {kept} + {sinks}"
        architecture = architecture_of(config)
        if not architecture.rotary and WINDOW + kept + sinks > architecture.positions(config):
            continue
        folder = WORK / f"{setting}-{kept}-{sinks}"
        shutil.rmtree(folder, ignore_errors=True)
        extend(model, folder, data=data, window=WINDOW, kept=kept, sinks=sinks)
        found.append(evaluate(str(folder), data, overlaps=(0,), **common))
        found[-1]["model"]["name"] = name
        report.save(found, out)
    far = horizon.survey(
        str(WORK / f"{setting}-146-4"), data, depths=(0, 1, 2, 4, 8, 16), max_document_tokens=TOKENS, bf16=gpu,
        batch_size=32 if gpu else 8,
    )  # fmt: skip
    write(far, setting, "horizon.json")


def long(setting: str, data: str) -> None:
    """Does the state help as much at the end of a long document as at its beginning?"""
    books = WORK / "long-books" / "validation"
    shutil.rmtree(books, ignore_errors=True)
    books.mkdir(parents=True)
    enough = [book for book in sorted((Path(data) / "validation").glob("*.txt")) if book.stat().st_size >= BYTES]
    for book in enough[:BOOKS]:
        shutil.copy(book, books)
    far = horizon.survey(
        str(WORK / f"{setting}-146-4"), str(books.parent), depths=(0, 1), max_document_tokens=LONG,
        bf16=torch.cuda.is_available(), batch_size=BOOKS,
    )  # fmt: skip
    write(far, setting, "long.json")


def write(survey: dict[str, Any], setting: str, name: str) -> None:
    survey["model"] = NAMES[setting]
    (HERE / "results" / setting / name).write_text(json.dumps(survey, indent=1) + "\n")


def tables() -> None:
    lines = [
        "# Untrained",
        "",
        "Keys and values of the newest positions, and of a document's first few, are carried to the next window, and "
        "the model reads on: no training, no overlap. Windows of 300 tokens, the first 15,000 tokens of each "
        "validation book.",
    ]
    surveys, longs = [], []
    for setting, name in NAMES.items():
        folder = HERE / "results" / setting
        if not folder.exists():
            continue
        found = report.load(folder)
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", report.markdown(found).strip()]
        surveys.append(json.loads((folder / "horizon.json").read_text()))
        far = ", ".join(f"{one['windows']}: {one['gain']:.3f}" for one in surveys[-1]["depths"][1:])
        lines += ["", f"Gain in nats per token by how many windows back the state begins, 146 + 4 kept: {far}."]
        if (folder / "long.json").exists():
            longs.append(json.loads((folder / "long.json").read_text()))
            lines += ["", in_long(longs[-1])]
    horizon.draw(surveys, HERE / "horizon.png")
    lines += ["", "![gain against distance](horizon.png)"]
    if longs:
        horizon.draw(longs, HERE / "long.png")
        lines += ["", f"The same on documents of {LONG:,} tokens:", "", "![gain in long documents](long.png)"]
    lines += ["", "Written by `python experiments/untrained/run.py --tables`."]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n{excerpt()}\n\n{END}{rest.partition(END)[2]}")


def in_long(survey: dict[str, Any]) -> str:
    parts = ", ".join(f"{one['from']} to {one['to'] - 1}: {one['gain']:.3f}" for one in survey["windows"])
    books = survey["data"]["documents"]
    return f"In {books} books of {LONG:,} tokens each, gain by windows from the beginning: {parts}."


def excerpt() -> str:
    """For the main README: what half a window is worth, beside overlaps."""
    lines = ["| word perplexity, windows of 300 | plain | overlap 50 | overlap 200 | 150 positions carried on |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for setting, name in NAMES.items():
        found = {one["model"]["name"]: one for one in report.load(HERE / "results" / setting)}
        rows = {row["overlap"]: row for row in found["plain"]["rows"]}
        (own,) = [row for row in found["kept 146 + 4"]["rows"] if row["use_state"]]
        numbers = [f"{rows[overlap]['word_perplexity']:.1f}" for overlap in SHOWN]
        lines.append(f"| {name} | {' | '.join(numbers)} | {own['word_perplexity']:.1f} |")
        cost = [row["flops"]["base"] + row["flops"]["recurrence"] for row in (*(rows[o] for o in SHOWN), own)]
        lines.append(f"| its FLOPs | {' | '.join(f'{one / cost[0]:.2f}' for one in cost)} |")
    return "\n".join(lines) + "\n\nOn 50 [validation books](experiments/untrained/README.md), nothing trained."


if __name__ == "__main__":
    main()
