# SPDX-License-Identifier: Apache-2.0
"""The command line of question answering: `carryforward qa ...`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings import MAX_ANSWER_TOKENS, NO_STATE, OVERLAP, AnswerSettings, QuestionSettings
from .errors import Config, Device, Json, ReportTo, RunFolder, only_cpu, user_errors
from .options import options

qa = typer.Typer(
    name="qa", help="Find answers in documents longer than the model.", no_args_is_help=True, add_completion=False
)
ASIDE = {"test": 5000, "validation": 1000}  # questions, where nothing is said
_AROUND = 80  # characters shown beside an answer
Aside = Annotated[Path | None, typer.Option(dir_okay=False, help="File for questions that are set aside.")]


@qa.command()
@options(QuestionSettings)
def train(
    settings: QuestionSettings,
    out: RunFolder,
    config: Config = None,
    report_to: ReportTo = "none",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Train an encoder to find answers, with a state or (--no-recurrence) every window alone."""
    with user_errors():
        from ..qa.train import train_answers

        record = train_answers(settings, out, report_to=report_to, use_cpu=only_cpu(device))
        if int(os.environ.get("RANK", "0")) == 0:
            best = record.get("best_f1")
            told = f"{out}: {record['questions']:,} questions" + ("" if best is None else f", validation F1 {best:.2f}")
            typer.echo(json.dumps(record) if as_json else told)


@qa.command()
def answer(
    model: Annotated[str, typer.Argument(help="A run, a folder or a Hub name: an encoder that answers questions.")],
    question: Annotated[str, typer.Option(help="What is asked.")],
    document: Annotated[str, typer.Option(help="A text file, or - for standard input.")],
    top_k: Annotated[int, typer.Option(min=1, help="How many answers.")] = 1,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = MAX_ANSWER_TOKENS,
    allow_none: Annotated[bool, typer.Option("--allow-none", help="There may be no answer.")] = False,
    window: Annotated[int | None, typer.Option(min=1, help="For plain models; up to 512 tokens by default.")] = None,
    overlap: Annotated[int | None, typer.Option(help=OVERLAP)] = None,
    state: Annotated[bool, typer.Option(help=NO_STATE)] = True,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer a question from a document of any length: where it stands there, and how sure the model is."""
    with user_errors():
        from ..data.texts import read_source
        from ..models.loading import load_finder
        from ..qa.predict import answer as find

        name, text = read_source(document)
        if not text.strip():
            raise ValueError(f"{name} has no words: there is nothing to look for an answer in.")
        loaded = load_finder(model, window=window, device=device)
        finder: Any = loaded.model
        found = find(
            finder, question, text, loaded.tokenizer, top_k=top_k, max_answer_tokens=max_answer_tokens,
            allow_none=allow_none, overlap=overlap, use_state=None if state else False,
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(one) for one in found]))
            return
        for one in found:
            told = " ".join(one.text.split()) if one.kind != "none" else "(no answer)"
            place = "" if one.start is None else f", characters {one.start:,} to {one.end:,}"
            sure = f"{one.probability:.1%}" if one.probability >= 0.001 else "less than 0.1%"
            typer.echo(f"{told}  ({sure}{place})")
            if one.start is not None and one.end is not None:
                around = text[max(one.start - _AROUND, 0) : one.end + _AROUND]
                typer.echo(f"    … {' '.join(around.split())} …")


@qa.command()
@options(AnswerSettings)
def evaluate(
    settings: AnswerSettings,
    models: Annotated[list[str], typer.Argument(help="Runs, folders or Hub names.")],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for results and predictions.")] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Score models on a file of questions: exact match and F1 as the data set counts them."""
    with user_errors():
        from ..qa import evaluate

        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        results = evaluate.evaluate_answers(models, settings, out=out, device=device)
        typer.echo(json.dumps(results) if as_json else evaluate.markdown(results))


@qa.command()
def join(
    files: Annotated[list[Path], typer.Argument(help="SQuAD's JSON, or rows of it; .gz and .xz are read too.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write, in SQuAD's format.")],
    words: Annotated[int, typer.Option(min=1, help="Words of a document.")] = 900,
    test: Aside = None,
    test_questions: Annotated[
        int | None, typer.Option(min=1, help="How many (5,000); their passages are in no other file.")
    ] = None,
    validation: Aside = None,
    validation_questions: Annotated[int | None, typer.Option(min=1, help="Likewise (1,000).")] = None,
    seed: Annotated[int, typer.Option(help="Of the joining, and of what is set aside.")] = 0,
) -> None:
    """Make long documents of short ones: a question's passage among passages of its file, those with the answer left
    out."""
    with user_errors():
        from ..qa.dataset import write_questions
        from ..qa.join_passages import join_files

        aside = []
        for name, path, count in (("test", test, test_questions), ("validation", validation, validation_questions)):
            if path is None and count is not None:
                raise ValueError(f"--{name}-questions {count}: say with --{name} where they are to be written.")
            aside += [(path, count or ASIDE[name])] if path is not None else []
        given = [path.resolve() for path in (*files, out, *(path for path, _ in aside))]
        if len(set(given)) < len(given):
            raise ValueError("files, --out, --test and --validation must be different files.")
        sides = join_files(files, words, set_aside=[count for _, count in aside], seed=seed)
        for path, questions in zip((out, *(path for path, _ in aside)), sides, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_questions(questions, path)
            lengths = [len(question.document.split()) for question in questions]
            typer.echo(f"{path}: {len(questions):,} questions, {sum(lengths) / len(lengths):,.0f} words a document")
