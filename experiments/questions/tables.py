# SPDX-License-Identifier: Apache-2.0
"""The page: README.md and its figure, from the results."""

import json

import numpy as np
from borders import windows_of
from cells import CELLS, HERE, TEXTS, TRIED, lacking, seeds_of
from comparing import Results, baseline, interval, load, pairs, told
from cut_tables import CUTS, where_windows_cut
from drawing import draw

from carryforward.figure import left_out
from carryforward.files import write_whole
from carryforward.table import markdown_table

ABOUT = """
An encoder of 22 million parameters (all-MiniLM-L6-v2, 512 positions) reads a question and a document window by window.
Disjoint windows stand alone; recurrent ones have the paper's state, a vector that enters at layer 2; "kept" has instead
the keys and values of a window's last 96 tokens and of the document's first 4. The same windows, questions, seeds and
training otherwise.
SQuADShifts (Amazon, Reddit, new Wikipedia) is joined to documents of about 900 words with passages of the same file
that do not have the answer; questions are set aside by passage. Learning rates were not searched, for either side; of
three epochs the one that is best on validation questions is kept. Means are over the seeds that a row has, differences
over those that both sides have. Intervals are of 95 %, by a paired bootstrap over seeds and questions; where there is
one seed, over questions, which leaves out what differs from run to run. Figures on the sample of HotpotQA are not
figures of its development set. Answers may have 30 tokens, those of COVID-QA 100. Beside each model is how many windows
a question takes on average: that is its cost, but for looking at what is kept.
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
HEAD = [
    "model and window",
    "seeds",
    "windows",
    "exact match",
    "F1",
    "F1 against disjoint",
    "by seed",
    "state removed: F1",
    "F1 against removed",
]


def tables() -> None:
    lines, results = ["# Questions about long documents", "", " ".join(ABOUT.split())], load()
    with left_out(HERE / "figure.png"):
        draw(results)
    lines += ["", "![Gains on disjoint windows](figure.png)"]
    for text, about in TEXTS.items():
        rows = [_row(results, cell, text) for cell in (CELLS | TRIED) if (cell, text) in results]
        if rows:
            lines += ["", f"## {about}", "", _counts(results, text), "", markdown_table(HEAD, rows)]
    lines += ["", "## Claim C7: about one point better than disjoint windows", ""]
    lines += [verdict(results, text, cell) for text in TEXTS for cell in CELLS if not cell.startswith("disjoint")]
    lines += _overlapping(results)
    lines += where_windows_cut(results)
    lines += ["", *_made(results)]
    lines += ["", "Written by `python experiments/questions/run.py --tables`."]
    write_whole(HERE / "README.md", "\n".join(lines) + "\n")


def _counts(results: Results, text: str) -> str:
    data = next(one["data"] for (_, name), found in results.items() if name == text for one in found.values())
    return f"{data['questions']:,} questions; a question's document has {data['words']:,} words on average."


def _row(results: Results, cell: str, text: str) -> list[str]:
    """Means over seeds; the gain over disjoint windows of the same length, and what the state's removal costs."""
    found = results[cell, text]
    first = [one["rows"][0] for one in found.values()]
    exact, f1 = (np.mean([row[name] for row in first]) for name in ("exact", "f1"))
    plain = results.get((baseline(cell), text))
    cells = [cell, str(len(found)), f"{_windows(cell, text):.1f}", f"{exact:.2f}", f"{f1:.2f}"]
    if cell.startswith("disjoint") or plain is None or not found.keys() & plain.keys():
        return [*cells, "", "", "", ""]
    gains = pairs(found, plain)
    by_seed = ", ".join(f"{ours['f1'] - theirs['f1']:+.2f}" for ours, theirs in gains)
    against = [told(*interval(gains)), by_seed]
    both = [tuple(one["rows"]) for one in found.values() if len(one["rows"]) == 2]
    if not both:  # no state to remove
        return [*cells, *against, "", ""]
    removed, used = np.mean([without["f1"] for _, without in both]), interval(both)
    return [*cells, *against, f"{removed:.2f}", told(*used)]


def _windows(cell: str, text: str) -> float:
    """How many a question takes."""
    window, overlap = windows_of(cell)
    return float(json.loads(CUTS.read_text())["windows"][text][f"{window}-{overlap}"])


def _overlapping(results: Results) -> list[str]:
    rows = [
        [text, one, other, f"{_windows(one, text):.1f}", f"{_windows(other, text):.1f}",
         told(*interval(pairs(results[one, text], results[other, text])))]
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


def verdict(results: Results, text: str, cell: str) -> str:
    ours, theirs = (results.get((name, text)) for name in (cell, baseline(cell)))
    what = f"* {text}, {cell}: "
    if not ours or not theirs or not pairs(ours, theirs):
        return what + "not measured yet."
    mean, low, high = interval(pairs(ours, theirs))
    found = f", {told(mean, low, high)} points, "
    if len(pairs(ours, theirs)) == 1:
        return what + f"**undecided**{found}one seed."
    if low > 0:
        outcome = "**holds**" if high >= 1 else "**better, but by less**"
    else:
        outcome = "**does not hold**" if high < 1 else "**undecided**"
    return what + f"{outcome}{found}{len(pairs(ours, theirs))} seeds."
