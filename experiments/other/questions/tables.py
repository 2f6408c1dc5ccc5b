# SPDX-License-Identifier: Apache-2.0
"""The page: README.md and its figure, from the results."""

import json

import numpy as np
from border_tables import border_section
from cells import CELLS, HERE, TEXTS, VARIANTS, missing_texts, seeds_of, window_and_overlap
from comparison import Gains, Interval, Results, baseline, f1, gains_of, interval, interval_text, load
from figure import draw
from harness import paragraph, write_page

from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import skip_without_matplotlib

ABOUT = """
An encoder of 22 million parameters (all-MiniLM-L6-v2, 512 positions) reads a question and a document window by window.
"disjoint": separate windows. "recurrent": the paper's state, a vector that enters at layer 2. "kv": the keys and
values of the last 96 tokens of a window and of the first 4 of the document instead. "overlapping": no state, windows
that share 100 or 50 tokens. Questions, seeds and training are otherwise the same.
SQuADShifts (Amazon, Reddit, new Wikipedia): each passage is joined with passages of the same file that do not contain
the answer, to documents of about 900 words; questions are set aside by passage. Learning rates were not searched for
any cell; of three epochs, the one with the best validation score counts. Each cell's mean over its seeds is compared
with the mean over all seeds of disjoint windows of the same length. Intervals are 95 % bootstrap intervals: questions
are drawn for both sides together, seeds for each side independently. An interval from one seed lacks the variation
between runs, and three seeds estimate it poorly. Scores on the HotpotQA sample are not scores on its development set.
Answers may have 30 tokens, those of COVID-QA 100. "Windows" is the mean number of windows per question.
"""
RULE = """
The claim holds if the interval lies above 0 and includes one point. It does not hold if the interval ends below one
point. Otherwise it is undecided. Ends are rounded to a tenth of a point: a new draw moves them by a few hundredths.
"""
OVERLAP = """
Overlap is the usual alternative to a state. Overlapping windows also see what is left of a border, and what is right of
it, and read it twice. Trained and tested with overlap, one seed each.
"""
OVERLAPPING = [  # pairs of cells to compare
    ("overlapping-256", "kv-256"),
    ("overlapping-50-256", "kv-256"),
    ("kv-overlapping-50-256", "overlapping-50-256"),
]
Windows = dict[str, dict[str, float]]  # mean number of windows per question, by text, and by window and overlap
HEAD = [
    "model and window",
    "seeds",
    "windows",
    "exact match",
    "F1",
    "by seed",
    "F1 against disjoint",
    "state removed: F1",
    "F1 against removed",
]


def write_pages() -> None:
    lines, results = ["# Questions about long documents", "", paragraph(ABOUT)], load()
    gains, cuts = gains_of(results), json.loads((HERE / "borders.json").read_text())
    with skip_without_matplotlib(HERE / "figure.png"):
        draw(results, gains)
        lines += ["", "![F1 against disjoint windows](figure.png)"]
    lines += ["", "## Claim C7: about one point better than disjoint windows", "", paragraph(RULE), ""]
    lines += [
        verdict(gains.get((cell, text)), len(results.get((cell, text), ())), f"{text}, {cell}")
        for text in TEXTS for cell in CELLS if cell != baseline(cell)
    ]  # fmt: skip
    for text, title in TEXTS.items():
        rows = [
            _row(results, gains, cell, text, cuts["windows"]) for cell in (CELLS | VARIANTS) if (cell, text) in results
        ]
        if rows:
            lines += ["", f"## {title}", "", _sizes(results, text), "", markdown_table(HEAD, rows)]
    lines += _overlap_section(results, cuts["windows"])
    lines += border_section(results, cuts)
    write_page(HERE, [*lines, "", *_origin(results)])


def _sizes(results: Results, text: str) -> str:
    data = next(one["data"] for (_, name), seeds in results.items() if name == text for one in seeds.values())
    return f"{data['questions']:,} questions; a question's document has {data['words']:,} words on average."


def _row(results: Results, gains: Gains, cell: str, text: str, windows: Windows) -> list[str]:
    """Means over seeds, the gain over disjoint windows of the same length, and the loss when the state is removed."""
    seeds = results[cell, text]
    ours, exact = f1(seeds), np.mean([one["rows"][0]["exact"] for one in seeds.values()])
    by_seed = ", ".join(f"{mean:.2f}" for mean in ours.mean(axis=1))
    columns = [cell, str(len(seeds)), _window_count(cell, text, windows), f"{exact:.2f}", f"{ours.mean():.2f}", by_seed]
    columns += [interval_text(*gains[cell, text]) if (cell, text) in gains else ""]
    if any(len(one["rows"]) < 2 for one in seeds.values()):  # no state to remove
        return [*columns, "", ""]
    removed = f1(seeds, row=1)
    return [*columns, f"{removed.mean():.2f}", interval_text(*interval(ours, removed, same_runs=True))]


def _window_count(cell: str, text: str, windows: Windows) -> str:
    window, overlap = window_and_overlap(cell)
    return f"{windows[text][f'{window}-{overlap}']:.1f}"


def _overlap_section(results: Results, windows: Windows) -> list[str]:
    rows = [
        [text, cell, against, _window_count(cell, text, windows), _window_count(against, text, windows),
         interval_text(*interval(f1(results[cell, text]), f1(results[against, text])))]
        for text in TEXTS for cell, against in OVERLAPPING if {(cell, text), (against, text)} <= results.keys()
    ]  # fmt: skip
    head = ["text", "model", "against", "its windows", "the other's", "F1 against it"]
    table = markdown_table(head, rows, text_columns=3)
    return ["", "## Overlap, with a state and without", "", paragraph(OVERLAP), "", table] if rows else []


def _origin(results: Results) -> list[str]:
    """Number of models, training time, hardware, commits, and what was not measured."""
    # COVID-QA is scored with the models trained on SQuADShifts.
    runs = [one for (_, text), seeds in results.items() if text != "covid-qa" for one in seeds.values()]
    models = len({(cell, seed) for (cell, _), seeds in results.items() for seed in seeds})
    minutes = sum(one["run"]["seconds"] for one in runs) / 60
    hardware = {one["hardware"].get("gpu") or one["hardware"]["cpu"] for one in runs}
    commits = {one["commit"][:12] for one in runs}
    text = f"{models} models, {minutes:.0f} minutes of training in all on {', '.join(sorted(hardware))}"
    unfinished = [
        f"{cell}, seed {seed}, on {' and '.join(texts)}"
        for cell in (CELLS | VARIANTS) for seed in seeds_of(cell) if (texts := missing_texts(cell, seed))
    ]  # fmt: skip
    missing = ["", f"Not measured: {'; '.join(unfinished)}."] if unfinished else []
    return [f"{text}; commit {', '.join(sorted(commits))}.", *missing] if runs else []


def verdict(gain: Interval | None, seeds: int, what: str) -> str:
    """A line on claim C7 for one cell and text."""
    if gain is None:
        return f"* {what}: not measured yet."
    _, low, high = gain
    if seeds == 1:
        return f"* {what}: **undecided**, {interval_text(*gain)} points, one seed."
    if round(low, 1) > 0:
        outcome = "holds" if round(high, 1) >= 1 else "better, but by less"
    else:
        outcome = "does not hold" if round(high, 1) < 1 else "undecided"
    return f"* {what}: **{outcome}**, {interval_text(*gain)} points, {seeds} seeds."
