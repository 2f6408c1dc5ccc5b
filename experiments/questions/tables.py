# SPDX-License-Identifier: Apache-2.0
"""The page: README.md and its figure, from the results."""

import json

import numpy as np
from cells import CELLS, HERE, TEXTS, TRIED, lacking, seeds_of, windows_of
from comparing import Gains, Interval, Results, baseline, f1, gains_of, interval, load, told
from cut_tables import where_windows_cut
from drawing import draw

from carryforward.utils.files import write_text
from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import left_out

ABOUT = """
An encoder of 22 million parameters (all-MiniLM-L6-v2, 512 positions) reads a question and a document window by window.
Disjoint windows stand alone; recurrent ones have the paper's state, a vector that enters at layer 2; "kept" has instead
the keys and values of a window's last 96 tokens and of the document's first 4; "overlapping" ones have no state, and
share 100 or 50 tokens. Questions, seeds and training are the same otherwise.
SQuADShifts (Amazon, Reddit, new Wikipedia) is joined to documents of about 900 words with passages of the same file
that do not have the answer; questions are set aside by passage. Learning rates were not searched, for either side; of
three epochs the one that is best on validation questions is kept. What is compared is the mean over a cell's seeds with
that over all seeds of disjoint windows of the same length. Intervals are of 95 %, by a bootstrap that draws questions
for both sides together and seeds for each on its own; one seed leaves out what differs from run to run, and three say
little of it. Figures on the sample of HotpotQA are not figures of its development set. Answers may have 30 tokens,
those of COVID-QA 100. Beside each model is how many windows a question takes on average.
"""
RULE = """
It holds where the interval is above 0 and has one point in it, and does not where it ends below one point; else it is
undecided. Ends are taken to a tenth of a point: drawing anew moves them by a few hundredths.
"""
OVERLAP = """
Windows that overlap are what one does without a state: they too see what is before a border, and what is behind it,
and read it twice. Trained and tested so, one seed each.
"""
OVERLAPPING = [  # what is compared, and with what
    ("overlapping-256", "kept-256"),
    ("overlapping-50-256", "kept-256"),
    ("kept-overlapping-50-256", "overlapping-50-256"),
]
Windows = dict[str, dict[str, float]]  # a question takes on average, by text, and by window and overlap
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


def tables() -> None:
    lines, results = ["# Questions about long documents", "", " ".join(ABOUT.split())], load()
    gains, cuts = gains_of(results), json.loads((HERE / "borders.json").read_text())
    with left_out(HERE / "figure.png"):
        draw(results, gains)
        lines += ["", "![Gains on disjoint windows](figure.png)"]
    lines += ["", "## Claim C7: about one point better than disjoint windows", "", " ".join(RULE.split()), ""]
    lines += [
        verdict(gains.get((cell, text)), len(results.get((cell, text), ())), f"{text}, {cell}")
        for text in TEXTS for cell in CELLS if cell != baseline(cell)
    ]  # fmt: skip
    for text, about in TEXTS.items():
        rows = [
            _row(results, gains, cell, text, cuts["windows"]) for cell in (CELLS | TRIED) if (cell, text) in results
        ]
        if rows:
            lines += ["", f"## {about}", "", _counts(results, text), "", markdown_table(HEAD, rows)]
    lines += _overlapping(results, cuts["windows"])
    lines += where_windows_cut(results, cuts)
    lines += ["", *_made(results)]
    lines += ["", "Written by `python experiments/questions/run.py --tables`."]
    write_text(HERE / "README.md", "\n".join(lines) + "\n")


def _counts(results: Results, text: str) -> str:
    data = next(one["data"] for (_, name), found in results.items() if name == text for one in found.values())
    return f"{data['questions']:,} questions; a question's document has {data['words']:,} words on average."


def _row(results: Results, gains: Gains, cell: str, text: str, windows: Windows) -> list[str]:
    """Means over seeds; the gain over disjoint windows of the same length, and what the state's removal costs."""
    found = results[cell, text]
    ours, exact = f1(found), np.mean([one["rows"][0]["exact"] for one in found.values()])
    by_seed = ", ".join(f"{one:.2f}" for one in ours.mean(axis=1))
    cells = [cell, str(len(found)), _taken(cell, text, windows), f"{exact:.2f}", f"{ours.mean():.2f}", by_seed]
    cells += [told(*gains[cell, text]) if (cell, text) in gains else ""]
    if any(len(one["rows"]) < 2 for one in found.values()):  # no state to remove
        return [*cells, "", ""]
    removed = f1(found, row=1)
    return [*cells, f"{removed.mean():.2f}", told(*interval(ours, removed, same_runs=True))]


def _taken(cell: str, text: str, windows: Windows) -> str:
    """How many windows a question takes."""
    window, overlap = windows_of(cell)
    return f"{windows[text][f'{window}-{overlap}']:.1f}"


def _overlapping(results: Results, windows: Windows) -> list[str]:
    rows = [
        [text, one, other, _taken(one, text, windows), _taken(other, text, windows),
         told(*interval(f1(results[one, text]), f1(results[other, text])))]
        for text in TEXTS for one, other in OVERLAPPING if {(one, text), (other, text)} <= results.keys()
    ]  # fmt: skip
    head = ["text", "model", "against", "its windows", "the other's", "F1 against it"]
    table = markdown_table(head, rows, words=3)
    return ["", "## Overlap, with a state and without", "", " ".join(OVERLAP.split()), "", table] if rows else []


def _made(results: Results) -> list[str]:
    """What all this took; COVID-QA is answered by models of SQuADShifts."""
    runs = [one for (_, text), found in results.items() if text != "covid-qa" for one in found.values()]
    models = len({(cell, seed) for (cell, _), found in results.items() for seed in found})
    minutes = sum(one["run"]["seconds"] for one in runs) / 60
    where = {one["hardware"].get("gpu") or one["hardware"]["cpu"] for one in runs}
    commits = {one["commit"][:12] for one in runs}
    made = f"{models} models, {minutes:.0f} minutes of training in all on {', '.join(sorted(where))}"
    unfinished = [
        f"{cell}, seed {seed}, on {' and '.join(texts)}"
        for cell in (CELLS | TRIED) for seed in seeds_of(cell) if (texts := lacking(cell, seed))
    ]  # fmt: skip
    missing = ["", f"Not measured: {'; '.join(unfinished)}."] if unfinished else []
    return [f"{made}; commit {', '.join(sorted(commits))}.", *missing] if runs else []


def verdict(gain: Interval | None, seeds: int, what: str) -> str:
    if gain is None:
        return f"* {what}: not measured yet."
    _, low, high = gain
    if seeds == 1:
        return f"* {what}: **undecided**, {told(*gain)} points, one seed."
    if round(low, 1) > 0:
        outcome = "holds" if round(high, 1) >= 1 else "better, but by less"
    else:
        outcome = "does not hold" if round(high, 1) < 1 else "undecided"
    return f"* {what}: **{outcome}**, {told(*gain)} points, {seeds} seeds."
