# SPDX-License-Identifier: Apache-2.0
"""The page: README.md, from the results."""

import json
from typing import Any

import numpy as np
from borders import PASSAGE, SUPPORT, WINDOWS
from cells import CELLS, HERE, RESULTS, TEXTS, TRIED, lacking, seeds_of

from carryforward.files import write_whole
from carryforward.table import markdown_table

RESAMPLES = 10_000
CUTS = HERE / "borders.json"
Seeds = dict[int, dict[str, Any]]  # what a cell came to, by seed
Results = dict[tuple[str, str], Seeds]  # by cell and text
Pair = tuple[dict[str, Any], dict[str, Any]]  # scores to compare, of one seed
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
figures of its development set. Answers may have 30 tokens, those of COVID-QA 100.
"""
ABOUT_CUTS = """
A state can only bring what a window does not have. For SQuADShifts that is the rest of the question's own passage: the
others know nothing of it. For HotpotQA it is the other sentences that an answer rests on. The state comes from the
left, so that it can help where a border is before the answer, and less where it is behind.
"""
HEAD = [
    "model and window",
    "seeds",
    "exact match",
    "F1",
    "F1 against disjoint",
    "by seed",
    "state removed: F1",
    "F1 against removed",
]


def tables() -> None:
    lines = ["# Questions about long documents", "", " ".join(ABOUT.split())]
    results = load()
    for text, about in TEXTS.items():
        rows = [_row(results, cell, text) for cell in (CELLS | TRIED) if (cell, text) in results]
        if rows:
            lines += ["", f"## {about}", "", _counts(results, text), "", markdown_table(HEAD, rows)]
    lines += ["", "## Claim C7: about one point better than disjoint windows", ""]
    lines += [verdict(results, text, cell) for text in TEXTS for cell in CELLS if not cell.startswith("disjoint")]
    lines += where_windows_cut(results) if CUTS.exists() else []
    lines += ["", *_made(results)]
    lines += ["", "Written by `python experiments/questions/run.py --tables`."]
    write_whole(HERE / "README.md", "\n".join(lines) + "\n")


def where_windows_cut(results: Results) -> list[str]:
    """What the state makes of questions whose passage or support is cut, and what seeing it whole would bring."""
    cuts = {text: {int(window): np.array([*letters]) for window, letters in found.items()}
            for text, found in json.loads(CUTS.read_text()).items() if text in TEXTS}  # fmt: skip
    lines = ["", "## What windows cut", "", " ".join(ABOUT_CUTS.split())]
    for text, names in (("squadshifts", PASSAGE), ("hotpotqa", SUPPORT)):
        rows = []
        for window in WINDOWS:
            plain = results[f"disjoint-{window}", text]
            for letter, name in names.items():
                some = cuts[text][window] == letter
                f1 = np.mean([np.array(one["rows"][0]["f1_each"])[some].mean() for one in plain.values()]) / 10
                row = [f"{window}", name, f"{some.sum():,}", f"{f1:.2f}"]
                for kind in ("recurrent", "kept"):
                    ours = results.get((f"{kind}-{window}", text))
                    row.append("" if ours is None else told(*interval(pairs(ours, plain), some)))
                rows.append(row)
        about = "the question's passage is" if text == "squadshifts" else "what supports the answer is"
        head = ["window", f"{text}: {about}", "questions", "disjoint: F1", "recurrent against it", "kept against it"]
        lines += ["", markdown_table(head, rows, words=2)]
    return [*lines, "", _if_whole(results, cuts["squadshifts"])]


def _if_whole(results: Results, cuts: dict[int, np.ndarray]) -> str:
    """Windows of 512 against those of 256, where the former have the passage whole: what changes beyond what changes
    where both have it whole is worth seeing it whole."""
    compared = pairs(results["disjoint-512", "squadshifts"], results["disjoint-256", "squadshifts"])
    whole = cuts[512] == "w"
    both, cut = whole & (cuts[256] == "w"), whole & (cuts[256] != "w")
    random, share = np.random.default_rng(0), np.mean(cuts[256] != "w")
    each, gains = _each(compared), []
    for _ in range(RESAMPLES):
        seeds = each[random.integers(len(each), size=len(each))].mean(axis=0)
        drawn = [random.choice(seeds[some], some.sum()).mean() for some in (cut, both)]
        gains.append(share * (drawn[0] - drawn[1]))
    gained, otherwise = each[:, cut].mean(), each[:, both].mean()
    worth = told(share * (gained - otherwise), *np.percentile(gains, [2.5, 97.5]))
    return " ".join(
        f"""
{cut.sum():,} passages are whole in windows of 512 and cut in windows of 256. Without a state the former find
{gained:+.2f} points more there than the latter, and {otherwise:+.2f} where both have the passage whole. So, if passages
that even 512 cut are like the others, to see all of them whole would be worth about {worth} points of F1 on all
questions with windows of 256, and a state can hardly bring more than that.
""".split()
    )


def load() -> Results:
    found: Results = {}
    for path in sorted(RESULTS.glob("*/*.json")):
        cell, _, seed = path.parent.name.rpartition("-seed")
        found.setdefault((cell, path.stem), {})[int(seed)] = json.loads(path.read_text())
    return found


def _counts(results: Results, text: str) -> str:
    data = next(one["data"] for (_, name), found in results.items() if name == text for one in found.values())
    return f"{data['questions']:,} questions; a question's document has {data['words']:,} words on average."


def _row(results: Results, cell: str, text: str) -> list[str]:
    """Means over seeds; the gain over disjoint windows of the same length, and what the state's removal costs."""
    found = results[cell, text]
    first = [one["rows"][0] for one in found.values()]
    exact, f1 = (np.mean([row[name] for row in first]) for name in ("exact", "f1"))
    plain = results.get((baseline(cell), text))
    cells = [cell, str(len(found)), f"{exact:.2f}", f"{f1:.2f}"]
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


def baseline(cell: str) -> str:
    return f"disjoint-{cell.rpartition('-')[2]}"


def _made(results: Results) -> list[str]:
    """What all this took; COVID-QA is answered by models of SQuADShifts."""
    runs = [one for (_, text), found in results.items() if text != "covid-qa" for one in found.values()]
    models = len({(cell, seed) for (cell, _), found in results.items() for seed in found})
    minutes = sum(one["run"]["seconds"] for one in runs) / 60
    where = {one["hardware"].get("gpu") or one["hardware"]["cpu"] for one in runs}
    commits = {one["commit"][:12] for one in runs}
    made = f"{models} models, {minutes:.0f} minutes of training in all on {', '.join(sorted(where))}"
    unfinished = [f"{cell}, seed {seed}" for cell in (CELLS | TRIED) for seed in seeds_of(cell) if lacking(cell, seed)]
    missing = ["", f"Not finished: {'; '.join(unfinished)}."] if unfinished else []
    return [f"{made}; commit {', '.join(sorted(commits))}.", *missing] if runs else []


def pairs(ours: Seeds, theirs: Seeds) -> list[Pair]:
    """Scores of both sides, with every seed that both have."""
    return [(ours[seed]["rows"][0], theirs[seed]["rows"][0]) for seed in sorted(ours.keys() & theirs.keys())]


def interval(compared: list[Pair], some: np.ndarray | None = None) -> tuple[float, float, float]:
    """How much better the first F1 of a pair is, in points: the mean over seeds, and the 95 % interval of a paired
    bootstrap, which draws seeds and questions again; of some questions, or of all."""
    each = _each(compared) if some is None else _each(compared)[:, some]
    random, means = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        seeds, questions = (random.integers(count, size=count) for count in each.shape)
        means.append(each[seeds].mean(axis=0)[questions].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(each.mean()), float(low), float(high)


def _each(compared: list[Pair]) -> np.ndarray:
    """By seed and question, in points."""
    return np.array([np.subtract(*(side["f1_each"] for side in pair)) for pair in compared]) / 10


def told(mean: float, low: float, high: float) -> str:
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


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
