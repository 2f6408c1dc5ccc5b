# SPDX-License-Identifier: Apache-2.0
"""Question answering over long documents: does a state help (section 5.4 of the paper, claim C7)?

    python run.py path/to/minilm path/to/qa path/to/hotpotqa [--only recurrent-256] [--seeds 0]   # runs what is missing
    python run.py path/to/minilm path/to/qa path/to/hotpotqa --jobs 7   # side by side; 110 GB of a GPU, 16 cores
    python run.py --tables                                              # writes README.md

Passages of SQuADShifts are joined to documents of about 900 words, and some passages set aside with their questions.
Every cell is trained on the rest and tested on these, and on COVID-QA, which it was never trained on; then it is
trained on the HotpotQA sample and tested on that. What is finished is never run again, and what was stopped goes on.
Models are in `runs/questions/`, results in `results/`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from carryforward.answer_reports import evaluate_answers
from carryforward.data.joining import join_files
from carryforward.data.questions import write_questions
from carryforward.files import write_whole
from carryforward.question_training import train_answers
from carryforward.reproduction.side_by_side import run_side_by_side
from carryforward.settings import MAX_ANSWER_TOKENS, AnswerSettings, QuestionSettings
from carryforward.table import markdown_table

HERE = Path(__file__).parent
RESULTS, WORK = HERE / "results", Path("runs/questions")
WORDS, TEST, VALIDATION = 900, 5000, 1000  # words of a document, questions set aside
CELLS: dict[str, dict[str, Any]] = {
    f"{kind}-{window}": {"window": window, **more}
    for window in (256, 512)
    for kind, more in (("disjoint", {"recurrence": False}), ("recurrent", {}))
}
# what is best for language models; windows of 512 have no positions left, and a long question leaves 126 tokens of 256
CELLS["kept-256"] = {"window": 256, "slots": 0, "kept": 96, "sinks": 4}
TRIED: dict[str, dict[str, Any]] = {  # what else a state can be, and what does without one; seed 0
    "every-layer-256": {"window": 256, "insert_at": ("all",)},
    "layer-5-256": {"window": 256, "insert_at": (5,)},  # where an untrained state changes the last layer most
    "four-slots-256": {"window": 256, "slots": 4},
    "one-window-bptt-256": {"window": 256, "bptt_windows": 1},
    "faster-256": {"window": 256, "recurrence_learning_rate": 0.001},  # as the module of language models learns
    "overlapping-256": {"window": 256, "overlap": 100, "recurrence": False},  # as much of the text before as "kept" has
    # both: what is kept comes from the left, and a token before a border lacks what follows it; and overlap alone
    "kept-overlapping-50-256": {"window": 256, "overlap": 50, "slots": 0, "kept": 72, "sinks": 4},
    "overlapping-50-256": {"window": 256, "overlap": 50, "recurrence": False},
}
LONGEST = {"covid-qa": 100}  # tokens of an answer; one in five has more than the usual 30
RESAMPLES = 10_000
SEEDS = [0, 1, 2]
Seeds = dict[int, dict[str, Any]]  # what a cell came to, by seed
Results = dict[tuple[str, str], Seeds]  # by cell and text
Pair = tuple[dict[str, Any], dict[str, Any]]  # scores to compare, of one seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "paths", nargs="*", type=Path, help="the encoder, the folder of SQuAD files, that of HotpotQA's"
    )
    parser.add_argument("--only", nargs="+", choices=[*CELLS, *TRIED], default=[*CELLS, *TRIED])
    parser.add_argument("--seeds", nargs="+", type=int, help="by default three, and one of what is merely tried")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each in a process of its own")
    parser.add_argument("--tables", action="store_true")
    given = parser.parse_args()
    if not given.tables:
        encoder, squad, hotpot = given.paths
        files = prepare(squad, hotpot)
        cells = [(cell, seed) for cell in given.only for seed in given.seeds or seeds_of(cell) if lacking(cell, seed)]
        if given.jobs > 1:
            command = [__file__, *map(str, given.paths)]
            run_side_by_side(
                {f"{cell}-seed{seed}": [*command, "--only", cell, "--seeds", str(seed)] for cell, seed in cells},
                WORK, given.jobs,
            )  # fmt: skip
        else:
            for cell, seed in cells:
                run(cell, seed, encoder, files)
    tables()


def prepare(squad: Path, hotpot: Path) -> dict[str, Path]:
    """Files of questions, by what they are for."""
    files = {name: WORK / f"{name}.json" for name in ("train", "validation", "squadshifts")}
    if not all(path.exists() for path in files.values()):
        WORK.mkdir(parents=True, exist_ok=True)
        sides = join_files(sorted(squad.glob("squadshifts_*")), WORDS, set_aside=(VALIDATION, TEST), seed=0)
        for path, side in zip(files.values(), sides, strict=True):
            write_questions(side, path)
    (covid,) = squad.glob("covid_qa*")
    (dev,), (train,) = hotpot.glob("*dev*"), hotpot.glob("*train*")
    return {**files, "covid-qa": covid, "hotpotqa-train": train, "hotpotqa": dev}


def seeds_of(cell: str) -> list[int]:
    """Those that a cell is to have."""
    return SEEDS if cell in CELLS else SEEDS[:1]


def lacking(cell: str, seed: int) -> list[str]:
    """Texts that a cell has not been scored on."""
    return [text for text in TEXTS if not (RESULTS / f"{cell}-seed{seed}" / f"{text}.json").exists()]


def run(cell: str, seed: int, encoder: Path, files: dict[str, Path]) -> None:
    shared = yaml.safe_load((HERE / "settings" / "minilm.yaml").read_text())
    own = {**shared, **(CELLS | TRIED)[cell], "model": str(encoder), "data": str(files["train"])}
    settings = QuestionSettings(**own, validation_data=str(files["validation"]), seed=seed)
    first, second = WORK / f"{cell}-seed{seed}", WORK / f"{cell}-seed{seed}-hotpotqa"
    # a cell's figures are of one model: if it is gone, what was scored is scored again
    texts = {text: files[text] for text in (lacking(cell, seed) if first.exists() else TEXTS)}
    score(first, settings, seed, cell, {text: path for text, path in texts.items() if text != "hotpotqa"})
    if "hotpotqa" not in texts:
        return
    plain = QuestionSettings(model=str(first), data=str(files["hotpotqa-train"]))
    kept = ("learning_rate", "recurrence_learning_rate", "epochs", "batch_size", "bf16", "seed", "recurrence")
    later = replace(plain, **{name: getattr(settings, name) for name in kept})
    score(second, later, seed, cell, {"hotpotqa": files["hotpotqa"]})


def score(model: Path, settings: QuestionSettings, seed: int, cell: str, texts: dict[str, Path]) -> None:
    """Train, unless that is done, and answer questions about these texts."""
    folder = RESULTS / f"{cell}-seed{seed}"
    record = train_answers(settings, model)
    record = {name: record[name] for name in ("settings", "steps", "questions", "best_f1", "seconds", "history")}
    for place in ("model", "data", "validation_data"):  # where things lie on this machine
        record["settings"][place] = record["settings"][place] and Path(record["settings"][place]).name
    for name, path in texts.items():
        longest = LONGEST.get(name, MAX_ANSWER_TOKENS)
        asked = AnswerSettings(str(path), batch_size=64, bf16=settings.bf16, max_answer_tokens=longest)
        (found,) = evaluate_answers([str(model)], asked)
        for row in found["rows"]:
            pairs = row.pop("scores").values()  # in the order of the file; as few characters as they need
            row["exact_each"] = "".join(str(int(exact)) for exact, _ in pairs)
            row["f1_each"] = [round(1000 * f1) for _, f1 in pairs]
        found["model"]["name"] = cell
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.json", json.dumps({**found, "run": record}) + "\n")


def tables() -> None:
    lines = ["# Questions about long documents", "", " ".join(ABOUT.split())]
    results = load()
    for text, about in TEXTS.items():
        rows = [_row(results, cell, text) for cell in (CELLS | TRIED) if (cell, text) in results]
        if rows:
            lines += ["", f"## {about}", "", _counts(results, text), "", markdown_table(HEAD, rows)]
    lines += ["", "## Claim C7: about one point better than disjoint windows", ""]
    lines += [verdict(results, text, cell) for text in TEXTS for cell in CELLS if not cell.startswith("disjoint")]
    lines += ["", *_made(results)]
    lines += ["", "Written by `python experiments/questions/run.py --tables`."]
    write_whole(HERE / "README.md", "\n".join(lines) + "\n")


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


def interval(compared: list[Pair]) -> tuple[float, float, float]:
    """How much better the first F1 of a pair is, in points: the mean over seeds, and the 95 % interval of a paired
    bootstrap, which draws seeds and questions again."""
    each = np.array([np.subtract(*(side["f1_each"] for side in pair)) for pair in compared]) / 10
    random, means = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        seeds, questions = (random.integers(count, size=count) for count in each.shape)
        means.append(each[seeds].mean(axis=0)[questions].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(each.mean()), float(low), float(high)


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
TEXTS = {
    "squadshifts": "SQuADShifts, joined: questions set aside",
    "covid-qa": "COVID-QA, trained on SQuADShifts alone",
    "hotpotqa": "HotpotQA, a sample, trained on another sample after SQuADShifts",
}
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


if __name__ == "__main__":
    main()
