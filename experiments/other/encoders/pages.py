# SPDX-License-Identifier: Apache-2.0
"""The page of the experiment, from its JSON: tables with intervals, and a figure of the needles."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from harness import write_page
from ranking import interval

from carryforward.utils.markdown import markdown_table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PUBLISHED = {256: 0.70, 1024: 0.24, 4096: 0.04}
ABOUT = """# Vectors of long documents, with and without a state

Without any training, an encoder reads long documents in windows: independent ones, with overlap, or with keys and
values carried from the window before. `alone` encodes every chunk as a text of its own. `-removed` is the control: the
same windows with the state removed. Arms and sizes are in [settings.yaml](settings.yaml), and were fixed before
anything was measured. Intervals are 95 %; differences are from `windows-512`, or from the first arm of the table.
"""
SECTIONS = {
    "retrieval": """## Retrieval

nDCG@10 of chunks for questions, over the chunks of all documents. COVID-QA: articles in chunks of 100 words; the chunks
that hold the answer are relevant. HotpotQA: the passages of five questions are a document; the supporting passages are
relevant. Intervals draw whole documents.
""",
    "needles": """## Needles

Accuracy at rank 1: for each length, every document holds one sentence about a person's pass key, and is asked for.
After LongEmbed, with other texts, so that its figures are no reference for these; published there for all-MiniLM-L6-v2:
0.70 at 256 tokens, 0.24 at 1,024 and 0.04 at 4,096.
""",
    "classifier": """## Classifier

When was a book's author born: before 1800, before 1850, or later? Ridge regression on frozen max-pooled vectors, tested
on authors that it has not seen; accuracy with all classes weighted alike, of which chance is a third. Intervals draw
whole authors.
""",
}
BASE = "windows-512"


def write_pages() -> None:
    lines = [ABOUT]
    for experiment, about in SECTIONS.items():
        lines.append(about)
        folders = sorted(path for path in (RESULTS / experiment).glob("*") if path.is_dir())
        if not folders:
            lines.append("Not measured yet.\n")
        for folder in folders:
            results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
            lines += [describe(results), "", (needle_table if experiment == "needles" else score_table)(results), ""]
            if experiment == "needles":
                draw(results, HERE / f"needles-{folder.name}.png")
                lines += [f"![accuracy by length](needles-{folder.name}.png)", ""]
    write_page(HERE, "\n".join(lines).rstrip().split("\n"))


def describe(results: list[dict[str, Any]]) -> str:
    """What was measured, in a sentence."""
    first = results[0]
    hardware = sorted({result["hardware"].get("gpu", result["hardware"]["cpu"]) for result in results})
    counts = ", ".join(
        f"{first[name]:,} {name}" for name in ("documents", "chunks", "queries", "books") if name in first
    )
    counts = counts or f"{first['settings']['documents']} documents of each length"
    return f"**{first['data']}**, {first['model']}: {counts}; measured on {', '.join(hardware)}."


def score_table(results: list[dict[str, Any]]) -> str:
    """Scores, and their differences from the base arm."""
    base = next((result for result in results if result["arm"]["name"] == BASE), results[0])
    rows = []
    for result in results:
        row = [result["arm"]["name"], f"{result['score']:.3f}", bounds(interval(result["scores"], result["groups"]))]
        if result is not base and result["groups"] == base["groups"]:
            apart = np.subtract(result["scores"], base["scores"])
            row += [f"{apart.mean():+.3f}", bounds(interval(apart.tolist(), result["groups"]), "+")]
        rows.append(row + ["–"] * (5 - len(row)))
    return markdown_table(["arm", "score", "interval", "difference", "interval"], rows, text_columns=1)


def bounds(values: list[float], sign: str = "") -> str:
    return " to ".join(f"{value:{sign}.3f}" for value in values)


def needle_table(results: list[dict[str, Any]]) -> str:
    """Accuracy of documents and of best chunks, by length."""
    lengths = list(results[0]["lengths"])
    rows = [
        [f"{result['arm']['name']}, {what}", *(f"{np.mean(result['lengths'][n][what]):.2f}" for n in lengths)]
        for what in ("document", "best chunk")
        for result in results
        if all(what in result["lengths"].get(n, {}) for n in lengths)
    ]
    return markdown_table(["arm", *lengths], rows, text_columns=1)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    from carryforward.utils.plotting import save_figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    for i, result in enumerate(results):
        lengths = [int(n) for n in result["lengths"]]
        for what, style in (("document", "-"), ("best chunk", "--")):
            if all(what in scores for scores in result["lengths"].values()):
                values = [np.mean(scores[what]) for scores in result["lengths"].values()]
                axes.plot(lengths, values, style, color=f"C{i}", label=f"{result['arm']['name']}, {what}")
    axes.plot(*zip(*PUBLISHED.items(), strict=True), "ko", label="published, another data set")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("accuracy at rank 1")
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=6, ncols=2)
    save_figure(figure, path)


if __name__ == "__main__":
    write_pages()
