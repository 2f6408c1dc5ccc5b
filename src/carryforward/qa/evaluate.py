# SPDX-License-Identifier: Apache-2.0
"""`carryforward qa evaluate`: score models on the questions of a file.

A result is plain JSON with the scores of every question, so that two models can be compared question by question:

    {"kind": "answers", "commit": "...", ..., "model": {"name": "runs/a", "recurrent": true, "window": 512},
     "data": {"name": "dev.json", "format": "hotpotqa", "questions": 600, "unaligned": 0, "words": 900},
     "rows": [{"use_state": true, "exact": 43.2, "f1": 56.1, "seconds": 10.0, "scores": {"id": [0.0, 0.5], ...}}]}
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..distributed.journal import Journal
from ..distributed.processes import ALONE, Processes
from ..distributed.work_map import WorkMap
from ..engine.block_size import block_tokens
from ..models.loading import Loaded, describe_question_answering, load_question_answering
from ..models.model_files import version_of
from ..settings.commands import AnswerSettings
from ..utils import console
from ..utils.files import result_stem, write_json
from ..utils.markdown import escape_markdown, markdown_table
from ..utils.provenance import provenance
from .dataset import Question, read_questions
from .join_passages import join_passages
from .metrics import mean_percent, score_all
from .predict import PredictedAnswer, answer_all, tokenise_questions


def evaluate(
    names: Sequence[str],
    settings: AnswerSettings,
    *,
    out: Path | None = None,
    device: str | None = None,
    processes: Processes = ALONE,
) -> list[dict[str, Any]]:
    """Score models on the questions of a file; write results and predictions to `out`.

    Models can predict "no answer" if at least one question of the file has none.

    Args:
        out: a folder. If the work is stopped, the same call continues it.
        processes: of the command; they divide the questions, and each gets all results.
    """
    data = Path(settings.data)
    questions = read_questions(data)
    if settings.join_words is not None:
        questions = join_passages(questions, settings.join_words, seed=settings.seed)
    allow_none = any(question.kind == "none" for question in questions)  # of the whole file, before `max_questions`
    questions = questions[: settings.max_questions]
    description = _describe(questions, data.name)
    if description["unaligned"]:
        console.note(
            f"{description['unaligned']:,} of {len(questions):,} answers are not in their documents; they are scored "
            "nevertheless."
        )
    for name in names:  # refuse a wrong model before the first one runs
        describe_question_answering(name, window=settings.window)
    return [
        _evaluate_model(name, questions, description, settings, allow_none, out, device, processes) for name in names
    ]


def _evaluate_model(
    name: str,
    questions: Sequence[Question],
    description: dict[str, Any],
    settings: AnswerSettings,
    allow_none: bool,
    out: Path | None,
    device: str | None,
    processes: Processes,
) -> dict[str, Any]:
    loaded = load_question_answering(name, window=settings.window, device=processes.device(device))
    options = {option: getattr(settings, option) for option in ("overlap", "max_answer_tokens", "batch_size")}
    options["allow_none"] = allow_none
    used = {"join_words": settings.join_words, **options, "bf16": settings.bf16}
    data_name = description["name"].partition(".")[0]
    stem = result_stem((name, data_name), (description, used, settings.seed, settings.window))
    model: Any = loaded.model
    identity = [stem, version_of(name), _digest(questions), model.device.type, torch.__version__]
    journal = None if out is None else Journal(out, identity)
    rows = []
    for use_state, answers, seconds in _predict(loaded, questions, options, settings, processes, journal):
        rows.append({"use_state": use_state, **_scores(questions, answers), "seconds": seconds})
        if out is not None and processes.is_first:
            out.mkdir(parents=True, exist_ok=True)
            ending = "" if use_state or loaded.untrained else "-without-state"
            write_json(out / f"{stem}{ending}-predictions.json", _official_format(questions, answers))
    result = {
        "kind": "answers",
        **provenance(str(model.device)),
        "seed": settings.seed,
        "processes": processes.count,
        "settings": {**used, "block_tokens": block_tokens(model)},
        "model": {"name": name, "recurrent": not loaded.untrained, "window": model.config.recurrence.window},
        "data": description,
        "rows": rows,
    }
    if journal is not None:
        processes.first(lambda: write_json(journal.out / f"{stem}.json", result))
        processes.first(journal.delete)
    return result


def _digest(questions: Sequence[Question]) -> str:
    return hashlib.blake2b(repr(questions).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _describe(questions: Sequence[Question], name: str) -> dict[str, Any]:
    return {
        "name": name,
        "format": questions[0].format,
        "questions": len(questions),
        "unaligned": sum(not question.aligned for question in questions),
        "words": round(np.mean([len(question.document.split()) for question in questions])),
    }


def _predict(
    loaded: Loaded,
    questions: Sequence[Question],
    options: dict[str, Any],
    settings: AnswerSettings,
    processes: Processes,
    journal: Journal | None,
) -> Iterator[tuple[bool, list[PredictedAnswer], float]]:
    """Yield `use_state`, the best answers and the seconds taken: with the state, and without it as a control."""
    model: Any = loaded.model
    tokenised = tokenise_questions(model, questions, loaded.tokenizer, overlap=settings.overlap)
    tokens = sum(len(question.document_ids) for question in tokenised)
    for use_state in [False] if loaded.untrained else [True, False] if settings.control else [True]:
        start = time.monotonic()
        with (
            processes.progress_bar(
                f"{loaded.name}{'' if use_state else ', without state'}", tokens, "tokens"
            ) as progress,
            torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bf16),
        ):
            work_map = WorkMap(processes, journal, f"use_state {use_state}")
            answers = answer_all(model, tokenised, use_state=use_state, progress=progress, work_map=work_map, **options)
        yield use_state, [best for best, *_ in answers], time.monotonic() - start


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """A table with a line for each model, and the control without the state beside it."""
    lines = []
    for result in results:
        rows = {row["use_state"]: row for row in result["rows"]}
        shown = [rows.get(True), rows.get(False)] if result["model"]["recurrent"] else [rows[False], None]
        cells = [f"{row[name]:.2f}" if row else "–" for row in shown for name in ("exact", "f1")]
        lines.append([escape_markdown(result["model"]["name"]), f"{result['model']['window']}", *cells])
    table = markdown_table(["model", "window", "exact match", "F1", "state removed: exact match", "F1"], lines)
    data = results[0]["data"]
    name = escape_markdown(data["name"])
    return f"{table}\n\n{name}: {data['questions']:,} questions, {data['words']:,} words per document."


def _scores(questions: Sequence[Question], answers: Sequence[PredictedAnswer]) -> dict[str, Any]:
    scores = score_all(questions, [answer.text for answer in answers])
    exact, f1 = mean_percent(scores)
    by_id = {question.id: list(pair) for question, pair in zip(questions, scores, strict=True)}
    return {"exact": exact, "f1": f1, "scores": by_id}


def _official_format(questions: Sequence[Question], answers: Sequence[PredictedAnswer]) -> dict[str, Any]:
    """Predictions in the format that the data set's official evaluation script reads."""
    texts = {question.id: answer.text for question, answer in zip(questions, answers, strict=True)}
    if questions[0].format == "hotpotqa":
        return {"answer": texts, "sp": {name: [] for name in texts}}
    return texts
