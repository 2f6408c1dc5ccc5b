# SPDX-License-Identifier: Apache-2.0
"""Question answering over long documents: does a state help (section 5.4 of the paper, claim C7)?

    python run.py path/to/minilm path/to/qa path/to/hotpotqa [--only recurrent-256] [--seeds 0]   # runs what is missing
    python run.py path/to/minilm path/to/qa path/to/hotpotqa --jobs 7   # side by side; 110 GB of a GPU, 16 cores
    python run.py path/to/minilm path/to/qa path/to/hotpotqa --borders  # what windows cut: borders.json, in a minute
    python run.py --tables                                              # writes README.md

Passages of SQuADShifts are joined to documents of about 900 words, and some passages set aside with their questions.
Every cell is trained on the rest and tested on these, and on COVID-QA, which it was never trained on; then it is
trained on the HotpotQA sample and tested on that. What is finished is never run again, and what was stopped goes on.
Models are in `runs/questions/`, results in `results/`.
"""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import borders
import yaml
from cells import CELLS, HERE, LONGEST, RESULTS, TRIED, WORK, lacking, seeds_of
from tables import tables

from carryforward.qa.dataset import write_questions
from carryforward.qa.evaluate import evaluate_answers
from carryforward.qa.join_passages import join_files
from carryforward.qa.train import train_answers
from carryforward.reproduction.parallel import run_side_by_side
from carryforward.settings import MAX_ANSWER_TOKENS, AnswerSettings, QuestionSettings
from carryforward.utils.files import write_json, write_text

SHIFTS = "squadshifts_*"
WORDS, TEST, VALIDATION = 900, 5000, 1000  # words of a document, questions set aside


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "paths", nargs="*", type=Path, help="the encoder, the folder of SQuAD files, that of HotpotQA's"
    )
    parser.add_argument("--only", nargs="+", choices=[*CELLS, *TRIED], default=[*CELLS, *TRIED])
    parser.add_argument("--seeds", nargs="+", type=int, help="by default three, and one of what is merely tried")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, each in a process of its own")
    parser.add_argument("--borders", action="store_true", help="see where windows cut, and run nothing")
    parser.add_argument(
        "--tables",
        action=argparse.BooleanOptionalAction,
        help="write the page, and run nothing; or the other way round",
    )
    given = parser.parse_args()
    if not given.tables:
        if len(given.paths) != 3:
            parser.error("give three paths: the encoder, the folder of SQuAD files, that of HotpotQA's; or --tables")
        encoder, squad, hotpot = given.paths
        files = prepare(squad, hotpot)
        cells = [(cell, seed) for cell in given.only for seed in given.seeds or seeds_of(cell) if lacking(cell, seed)]
        if given.borders:
            write_json(HERE / "borders.json", borders.find(encoder, files, sorted(squad.glob(SHIFTS))))
        elif given.jobs > 1:
            command = [__file__, *map(str, given.paths), "--no-tables"]
            run_side_by_side(
                {f"{cell}-seed{seed}": [*command, "--only", cell, "--seeds", str(seed)] for cell, seed in cells},
                WORK, given.jobs,
            )  # fmt: skip
        else:
            for cell, seed in cells:
                run(cell, seed, encoder, files)
    if given.tables is not False:
        tables()


def prepare(squad: Path, hotpot: Path) -> dict[str, Path]:
    """Files of questions, by what they are for."""
    files = {name: WORK / f"{name}.json" for name in ("train", "validation", "squadshifts")}
    if not all(path.exists() for path in files.values()):
        WORK.mkdir(parents=True, exist_ok=True)
        sides = join_files(sorted(squad.glob(SHIFTS)), WORDS, set_aside=(VALIDATION, TEST), seed=0)
        for path, side in zip(files.values(), sides, strict=True):
            write_questions(side, path)
    (covid,) = squad.glob("covid_qa*")
    (dev,), (train,) = hotpot.glob("*dev*"), hotpot.glob("*train*")
    return {**files, "covid-qa": covid, "hotpotqa-train": train, "hotpotqa": dev}


def run(cell: str, seed: int, encoder: Path, files: dict[str, Path]) -> None:
    shared = yaml.safe_load((HERE / "settings" / "minilm.yaml").read_text())
    own = {**shared, **(CELLS | TRIED)[cell], "model": str(encoder), "data": str(files["train"])}
    settings = QuestionSettings(**own, validation_data=str(files["validation"]), seed=seed)
    first, second = WORK / f"{cell}-seed{seed}", WORK / f"{cell}-seed{seed}-hotpotqa"
    if not first.exists():  # a cell's figures are of one model, and that of those there are is gone
        shutil.rmtree(RESULTS / f"{cell}-seed{seed}", ignore_errors=True)
    texts = {text: files[text] for text in lacking(cell, seed)}
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
        write_text(folder / f"{name}.json", json.dumps({**found, "run": record}) + "\n")


if __name__ == "__main__":
    main()
