# SPDX-License-Identifier: Apache-2.0
"""What models read when keys and values are carried over window borders, before any training.

    python run.py smollm2 path/to/smollm2-135m path/to/books   # writes results/smollm2/*.json
    python run.py --tables                                     # writes README.md

Plain at several overlaps beside models that keep so many positions and carry no overlap, windows of 300 tokens, on the
first 15,000 tokens of each validation document.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch

from carryforward.backbones.architectures import architecture_of
from carryforward.cli.add import extend
from carryforward.evaluation import report
from carryforward.evaluation.evaluate import evaluate
from carryforward.models.loading import load_config
from carryforward.settings import EvaluateSettings
from carryforward.utils.markdown import markdown_table

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- untrained: written by experiments/untrained/run.py -->", "<!-- end of untrained -->"
WINDOW, TOKENS = 300, 15_000
OVERLAPS = (0, 50, 100, 200)
SHOWN = (0, 50, 200)  # in the main README
KEPT = ((28, 4), (60, 4), (146, 4), (208, 4), (296, 4), (150, 0))  # newest positions and the document's first
WORK = Path("untrained-models")
NAMES = {"bundled": "the bundled model, learned positions", "smollm2": "SmolLM2-135M, rotary positions"}


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
    out = HERE / "results" / setting
    gpu = torch.cuda.is_available()
    settings = EvaluateSettings(
        books, "validation", max_document_tokens=TOKENS, bf16=gpu, batch_size=50 if gpu else 8, overlap=(0,)
    )
    found = [evaluate(model, replace(settings, window=WINDOW, overlap=OVERLAPS))]
    found[0]["model"]["name"] = "plain"
    shutil.rmtree(out, ignore_errors=True)  # model and books are what they should be: what was there is superseded
    report.save(found, out)
    config = load_config(model)
    architecture = architecture_of(config)
    for kept, sinks in KEPT:
        name = f"kept {kept} + {sinks}"
        if not architecture.rotary and WINDOW + kept + sinks > architecture.positions(config):
            continue
        folder = WORK / f"{setting}-{kept}-{sinks}"
        shutil.rmtree(folder, ignore_errors=True)
        extend(model, folder, data=books, window=WINDOW, kept=kept, sinks=sinks)
        found.append(evaluate(str(folder), settings))
        found[-1]["model"]["name"] = name
        report.save(found, out)


def tables() -> None:
    lines = [
        "# Untrained",
        "",
        "Keys and values of the newest positions, and of a document's first few, are carried to the next window, and "
        "the model reads on: no training, no overlap. Windows of 300 tokens, the first 15,000 tokens of each "
        "validation book.",
    ]
    for setting, name in NAMES.items():
        folder = HERE / "results" / setting
        if not folder.exists():
            continue
        found = report.load(folder)
        lines += ["", f"## {name[0].upper()}{name[1:]}", "", report.markdown(found).strip()]
    lines += ["", "How far back that reaches, and how it goes in long documents: [horizon](../horizon/README.md)."]
    lines += ["", "Written by `python experiments/untrained/run.py --tables`."]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n\n{excerpt()}\n\n{END}{rest.partition(END)[2]}")


def excerpt() -> str:
    """For the main README: what half a window is worth, beside overlaps."""
    head = ["word perplexity, windows of 300", "plain", "overlap 50", "overlap 200", "150 positions carried on"]
    lines = []
    for setting, name in NAMES.items():
        found = {one["model"]["name"]: one for one in report.load(HERE / "results" / setting)}
        rows = {row["overlap"]: row for row in found["plain"]["rows"]}
        (own,) = [row for row in found["kept 146 + 4"]["rows"] if row["use_state"]]
        numbers = [f"{rows[overlap]['word_perplexity']:.1f}" for overlap in SHOWN]
        lines.append([name, *numbers, f"{own['word_perplexity']:.1f}"])
        cost = [row["flops"]["base"] + row["flops"]["recurrence"] for row in (*(rows[o] for o in SHOWN), own)]
        lines.append(["its FLOPs", *(f"{one / cost[0]:.2f}" for one in cost)])
    books = "On 50 [validation books](experiments/untrained/README.md), nothing trained"
    return f"{markdown_table(head, lines)}\n\n{books}; SmolLM2-135M-Instruct, from 4-bit weights."


if __name__ == "__main__":
    main()
