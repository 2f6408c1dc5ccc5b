# SPDX-License-Identifier: Apache-2.0
"""`carryforward qa`: the commands of question answering."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..distributed.processes import launched
from ..settings.base import ADVANCED
from ..settings.commands import AS_TRAINED, MAX_ANSWER_TOKENS, NO_STATE, AnswerSettings, QuestionSettings
from ..settings.recurrence import OVERLAP
from ..utils.console import is_first_process
from .errors import user_errors
from .options import (
    Command,
    Config,
    Device,
    Group,
    Json,
    ReportTo,
    RunOut,
    TrainingDevice,
    TrainingJson,
    check_file,
    check_folder,
    options,
)

qa = typer.Typer(
    name="qa",
    cls=Group,
    help="Question answering on documents longer than the model can read at once.",
    no_args_is_help=True,
    add_completion=False,
)
HELD_OUT = {"test": 5000, "validation": 1000}  # default numbers of questions
_CONTEXT = 80  # characters shown on each side of an answer


@qa.command(cls=Command)
@options(QuestionSettings)
def train(
    settings: QuestionSettings,
    out: RunOut,
    config: Config = None,
    report_to: ReportTo = "none",
    device: TrainingDevice = None,
    as_json: TrainingJson = False,
) -> None:
    """Fine-tune an encoder to answer questions, with recurrence, or without it as a baseline."""
    with user_errors(out), launched():
        from ..qa import train as job
        from ..training.lifecycle import uses_cpu

        record = job.train(settings, out, report_to=report_to, use_cpu=uses_cpu(device))
        if is_first_process():
            best = record.get("best_f1")
            validation = "" if best is None else f", validation F1 {best:.2f}"
            typer.echo(json.dumps(record) if as_json else f"{out}: {record['questions']:,} questions{validation}")


@qa.command(cls=Command)
def answer(
    model: Annotated[str, typer.Argument(help="Encoder that answers questions: run folder, model folder or Hub name.")],
    question: Annotated[str, typer.Option(help="The question.")],
    document: Annotated[str, typer.Option(help="Text file to find the answer in, or - for standard input.")],
    top_k: Annotated[int, typer.Option(min=1, metavar="<int>", help="Number of answers.")] = 1,
    allow_none: Annotated[bool, typer.Option("--allow-none", help="The document may hold no answer.")] = False,
    max_answer_tokens: Annotated[
        int,
        typer.Option(min=1, metavar="<int>", rich_help_panel=ADVANCED, help="Length limit of an answer, in tokens."),
    ] = MAX_ANSWER_TOKENS,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="<int>",
            rich_help_panel=ADVANCED,
            help="Tokens per window, of plain models.",
            show_default="at most 512",
        ),
    ] = None,
    overlap: Annotated[
        int | None, typer.Option(rich_help_panel=ADVANCED, help=OVERLAP, show_default=AS_TRAINED)
    ] = None,
    state: Annotated[bool, typer.Option(rich_help_panel=ADVANCED, show_default=False, help=NO_STATE)] = True,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer a question from a document of any length. Prints each answer, its probability and its place."""
    with user_errors():
        from ..data.texts import read_file_or_stdin
        from ..models.loading import load_question_answering
        from ..qa.predict import answer as find_answers

        name, text = read_file_or_stdin(document)
        if not text.strip():
            raise ValueError(f"{name} has no words: there is nothing to find an answer in.")
        loaded = load_question_answering(model, window=window, device=device)
        finder: Any = loaded.model
        answers = find_answers(
            finder, question, text, loaded.tokenizer, top_k=top_k, max_answer_tokens=max_answer_tokens,
            allow_none=allow_none, overlap=overlap, use_state=None if state else False,
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(answer) for answer in answers]))
            return
        for answer in answers:
            typer.echo(_describe(answer, text))


def _describe(answer: Any, document: str) -> str:
    """An answer with its probability and place, and the text around it."""
    words = " ".join(answer.text.split()) if answer.kind != "none" else "(no answer)"
    probability = f"{answer.probability:.1%}" if answer.probability >= 0.001 else "less than 0.1%"
    if answer.start is None or answer.end is None:
        return f"{words}  ({probability})"
    context = " ".join(document[max(answer.start - _CONTEXT, 0) : answer.end + _CONTEXT].split())
    return f"{words}  ({probability}, characters {answer.start:,} to {answer.end:,})\n    … {context} …"


@qa.command(cls=Command)
@options(AnswerSettings)
def evaluate(
    settings: AnswerSettings,
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Run folders, model folders or Hub names.")],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for results and predictions.")] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure exact match and F1 on a file of questions, with and without the state."""
    with user_errors(out), launched() as processes:
        from ..qa import evaluate as job

        check_folder(out)
        results = job.evaluate(models, settings, out=out, device=device, processes=processes)
        if processes.is_first:
            typer.echo(json.dumps(results) if as_json else job.markdown(results))


@qa.command(cls=Command)
def join(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="SQuAD JSON, or rows of it (also .gz, .xz).")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write, in SQuAD's format.")],
    words: Annotated[int, typer.Option(min=1, metavar="<int>", help="Words per document.")] = 900,
    test: Annotated[Path | None, typer.Option(dir_okay=False, help="File for held-out test questions.")] = None,
    test_questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="<int>",
            help="Number of test questions. No other file has their passages.",
            show_default="5000",
        ),
    ] = None,
    validation: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for held-out validation questions.")
    ] = None,
    validation_questions: Annotated[
        int | None, typer.Option(min=1, metavar="<int>", help="Number of validation questions.", show_default="1000")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="<int>", help="Random seed.")] = 0,
) -> None:
    """Make long documents out of SQuAD's passages: a question's passage is joined with others without its answer."""
    with user_errors(out):
        from ..qa.dataset import write_questions
        from ..qa.join_passages import join_files

        held_out = []
        for name, path, count in (("test", test, test_questions), ("validation", validation, validation_questions)):
            if path is None and count is not None:
                raise ValueError(f"--{name}-questions {count}: give the file to write them to, with --{name}.")
            held_out += [(path, count or HELD_OUT[name])] if path is not None else []
        paths = [path.resolve() for path in (*files, out, *(path for path, _ in held_out))]
        if len(set(paths)) < len(paths):
            raise ValueError("files, --out, --test and --validation must be different files.")
        for name, path in (("--out", out), ("--test", test), ("--validation", validation)):
            check_file(path, name)
        parts = join_files(files, words, set_aside=[count for _, count in held_out], seed=seed)
        for path, questions in zip((out, *(path for path, _ in held_out)), parts, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_questions(questions, path)
            lengths = [len(question.document.split()) for question in questions]
            typer.echo(f"{path}: {len(questions):,} questions, {sum(lengths) / len(lengths):,.0f} words a document")
