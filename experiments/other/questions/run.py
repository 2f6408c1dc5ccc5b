# SPDX-License-Identifier: Apache-2.0
"""Question answering over long documents: does a state help (section 5.4 of the paper, claim C7)?

    python run.py path/to/minilm path/to/qa path/to/hotpotqa [--only recurrent-256] [--seeds 0]   # runs what is missing
    python run.py path/to/minilm path/to/qa path/to/hotpotqa --jobs 7   # in parallel; 110 GB of a GPU, 16 cores
    python run.py path/to/minilm path/to/qa path/to/hotpotqa --borders  # where windows cut: borders.json, one minute
    python run.py --tables-only                                         # writes README.md and the figure

Passages of SQuADShifts are joined to documents of about 900 words; some passages are set aside with their questions.
Every cell is trained on the rest and tested on these, and on COVID-QA, which it was not trained on. Then it is trained
on the HotpotQA sample and tested on another one. Finished cells are not run again, and stopped ones resume. Models are
in `runs/questions/`, results in `results/`.
"""

import argparse
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import borders
from cells import CELLS, LONG_ANSWERS, RESULTS, VARIANTS, WORK, missing_texts, seeds_of
from harness import command_line, strip_folders, write_result
from tables import write_pages

from carryforward.qa import evaluate, train
from carryforward.qa.dataset import write_questions
from carryforward.qa.join_passages import join_files
from carryforward.reproduction.parallel import run_parallel
from carryforward.settings.commands import MAX_ANSWER_TOKENS, AnswerSettings, QuestionSettings

HERE = Path(__file__).parent
SHIFTS = "squadshifts_*"
WORDS, TEST, VALIDATION = 900, 5000, 1000  # words per document; questions set aside


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cells = [*CELLS, *VARIANTS]
    parser.add_argument("encoder", type=Path, help="folder of the encoder")
    parser.add_argument("squad", type=Path, help="folder of the files of SQuADShifts and COVID-QA")
    parser.add_argument("hotpotqa", type=Path, help="folder of the files of HotpotQA")
    parser.add_argument("--only", nargs="+", choices=cells, default=cells, metavar="CELL", help="run these cells only")
    parser.add_argument("--seeds", nargs="+", type=int, help="by default three, and one for the variants")
    parser.add_argument("--jobs", type=int, default=1, help="cells run at once, each in its own process")
    parser.add_argument("--borders", action="store_true", help="only find out where windows cut; train nothing")


def measure(arguments: argparse.Namespace) -> None:
    files = prepare(arguments.squad, arguments.hotpotqa)
    if arguments.borders:
        cuts = borders.find(arguments.encoder, files, sorted(arguments.squad.glob(SHIFTS)))
        write_result(HERE / "borders.json", cuts)
        return
    cells = [
        (cell, seed) for cell in arguments.only for seed in arguments.seeds or seeds_of(cell)
        if missing_texts(cell, seed)
    ]  # fmt: skip
    if arguments.jobs > 1:
        paths = map(str, (arguments.encoder, arguments.squad, arguments.hotpotqa))
        command = [__file__, *paths, "--no-pages"]
        run_parallel(
            {f"{cell}-seed{seed}": [*command, "--only", cell, "--seeds", str(seed)] for cell, seed in cells},
            WORK, arguments.jobs,
        )  # fmt: skip
    else:
        for cell, seed in cells:
            run_cell(cell, seed, arguments.encoder, files)


def prepare(squad: Path, hotpotqa: Path) -> dict[str, Path]:
    """Join passages of SQuADShifts, once, and return all files of questions by their purpose."""
    files = {name: WORK / f"{name}.json" for name in ("train", "validation", "squadshifts")}
    if not all(path.exists() for path in files.values()):
        WORK.mkdir(parents=True, exist_ok=True)
        sides = join_files(sorted(squad.glob(SHIFTS)), WORDS, set_aside=(VALIDATION, TEST), seed=0)
        for path, side in zip(files.values(), sides, strict=True):
            write_questions(side, path)
    (covid,) = squad.glob("covid_qa*")
    (dev,), (train,) = hotpotqa.glob("*dev*"), hotpotqa.glob("*train*")
    return {**files, "covid-qa": covid, "hotpotqa-train": train, "hotpotqa": dev}


def run_cell(cell: str, seed: int, encoder: Path, files: dict[str, Path]) -> None:
    """Train a cell on SQuADShifts, then on HotpotQA, and score each model on its texts."""
    shared = yaml.safe_load((HERE / "settings" / "minilm.yaml").read_text())
    own = {**shared, **(CELLS | VARIANTS)[cell], "model": str(encoder), "data": str(files["train"])}
    settings = QuestionSettings(**own, validation_data=str(files["validation"]), seed=seed)
    first, second = WORK / f"{cell}-seed{seed}", WORK / f"{cell}-seed{seed}-hotpotqa"
    if not first.exists():  # all results of a cell must be of one model, and the model of the present ones is gone
        shutil.rmtree(RESULTS / f"{cell}-seed{seed}", ignore_errors=True)
    texts = {text: files[text] for text in missing_texts(cell, seed)}
    score(first, settings, seed, cell, {text: path for text, path in texts.items() if text != "hotpotqa"})
    if "hotpotqa" not in texts:
        return
    names = ("learning_rate", "recurrence_learning_rate", "epochs", "batch_size", "bf16", "seed", "recurrence")
    again = QuestionSettings(model=str(first), data=str(files["hotpotqa-train"]))
    again = replace(again, **{name: getattr(settings, name) for name in names})
    score(second, again, seed, cell, {"hotpotqa": files["hotpotqa"]})


def score(model: Path, settings: QuestionSettings, seed: int, cell: str, texts: dict[str, Path]) -> None:
    """Train, unless that is done, and answer the questions of these texts."""
    record = train.train(settings, model)
    record = {name: record[name] for name in ("settings", "steps", "questions", "best_f1", "seconds", "history")}
    strip_folders(record["settings"], "model", "data", "validation_data")
    for text, path in texts.items():
        longest = LONG_ANSWERS.get(text, MAX_ANSWER_TOKENS)
        answers = AnswerSettings(str(path), batch_size=64, bf16=settings.bf16, max_answer_tokens=longest)
        (result,) = evaluate.evaluate([str(model)], answers)
        for row in result["rows"]:
            pairs = row.pop("scores").values()  # in the order of the file; as few characters as they need
            row["exact_each"] = "".join(str(int(exact)) for exact, _ in pairs)
            row["f1_each"] = [round(1000 * f1) for _, f1 in pairs]
        result["model"]["name"] = cell
        write_result(RESULTS / f"{cell}-seed{seed}" / f"{text}.json", {**result, "run": record}, indent=None)


if __name__ == "__main__":
    main()
