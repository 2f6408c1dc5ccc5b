# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward qa evaluate`: models answer a file's questions, and are scored.

A result is plain JSON, with the scores of every question, so that two models can be compared question by question:

    {"kind": "answers", "commit": "...", ..., "model": {"name": "runs/a", "recurrent": true, "window": 512},
     "data": {"name": "dev.json", "format": "hotpotqa", "questions": 600, "unaligned": 0, "words": 900},
     "rows": [{"use_state": true, "exact": 43.2, "f1": 56.1, "seconds": 10.0, "scores": {"id": [0.0, 0.5], ...}}]}
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..models.loading import Loaded, describe_finder, load_finder
from ..settings import AnswerSettings
from ..utils import console
from ..utils.files import name_of, write_json
from ..utils.markdown import markdown_table
from ..utils.provenance import provenance
from .dataset import Question, read_questions
from .join_passages import join_passages
from .metrics import percent, score_all
from .predict import Found, answer_all, ask


def evaluate_answers(
    names: Sequence[str], settings: AnswerSettings, *, out: Path | None = None, device: str | None = None
) -> list[dict[str, Any]]:
    """Score models on the questions of a file; results and predictions are written to `out`. That there is no answer
    may be the answer if some question of the file has none."""
    data, window = Path(settings.data), settings.window
    questions = read_questions(data)
    if settings.join_words is not None:
        questions = join_passages(questions, settings.join_words, seed=settings.seed)
    allow_none = any(question.kind == "none" for question in questions)  # of all: it is the data set's rule
    questions = questions[: settings.max_questions]
    about = _about(questions, data.name)
    if about["unaligned"]:
        told = f"{about['unaligned']:,} of {len(questions):,} answers are not in their documents"
        console.note(f"{told}; they are scored all the same.")
    how = {name: getattr(settings, name) for name in ("overlap", "max_answer_tokens", "batch_size")}
    how["allow_none"] = allow_none
    for name in names:
        describe_finder(name, window=window)
    results = []
    for name in names:
        loaded = load_finder(name, window=window, device=device)
        noted = {"join_words": settings.join_words, **how, "bf16": settings.bf16}
        stem = name_of((name, data.name.partition(".")[0]), (about, noted, settings.seed, window))
        rows = []
        for use_state, found, seconds in _answers(loaded, questions, how, settings):
            rows.append({"use_state": use_state, **_scored(questions, found), "seconds": seconds})
            if out is not None:
                ending = "" if use_state or loaded.untrained else "-without-state"
                write_json(out / f"{stem}{ending}-predictions.json", _predictions(questions, found))
        model: Any = loaded.model
        results.append(
            {
                "kind": "answers",
                **provenance(str(model.device)),
                "seed": settings.seed,
                "settings": noted,
                "model": {"name": name, "recurrent": not loaded.untrained, "window": model.config.recurrence.window},
                "data": about,
                "rows": rows,
            }
        )
        if out is not None:
            write_json(out / f"{stem}.json", results[-1])
    return results


def _about(questions: Sequence[Question], name: str) -> dict[str, Any]:
    return {
        "name": name,
        "format": questions[0].format,
        "questions": len(questions),
        "unaligned": sum(not question.aligned for question in questions),
        "words": round(np.mean([len(question.document.split()) for question in questions])),
    }


def _answers(
    loaded: Loaded, questions: Sequence[Question], how: dict[str, Any], settings: AnswerSettings
) -> Iterator[tuple[bool, list[Found], float]]:
    """A model's answers with its state and, as a control, without, whichever it can give; and how long it took."""
    model: Any = loaded.model
    asked = ask(model, questions, loaded.tokenizer, overlap=settings.overlap)
    tokens = sum(len(one.ids) for one in asked)
    for use_state in [False] if loaded.untrained else [True, False] if settings.control else [True]:
        begun = time.monotonic()
        with (
            console.Bar(f"{loaded.name}{'' if use_state else ', without state'}", tokens, "tokens") as bar,
            torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bf16),
        ):
            found = answer_all(model, asked, use_state=use_state, progress=bar.advance, **how)
        yield use_state, [answers[0] for answers in found], time.monotonic() - begun


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """A line for each model, the control beside it."""
    lines = []
    for one in results:
        rows = {row["use_state"]: row for row in one["rows"]}
        shown = [rows.get(True), rows.get(False)] if one["model"]["recurrent"] else [rows[False], None]
        cells = [f"{row[name]:.2f}" if row else "–" for row in shown for name in ("exact", "f1")]
        lines.append([one["model"]["name"], f"{one['model']['window']}", *cells])
    table = markdown_table(["model", "window", "exact match", "F1", "state removed: exact match", "F1"], lines)
    about = results[0]["data"]
    return f"{table}\n\n{about['name']}: {about['questions']:,} questions, {about['words']:,} words a document."


def _scored(questions: Sequence[Question], found: Sequence[Found]) -> dict[str, Any]:
    scores = score_all(questions, [answer.text for answer in found])
    exact, f1 = percent(scores)
    by_id = {question.id: list(pair) for question, pair in zip(questions, scores, strict=True)}
    return {"exact": exact, "f1": f1, "scores": by_id}


def _predictions(questions: Sequence[Question], found: Sequence[Found]) -> dict[str, Any]:
    """As the official scripts read them."""
    texts = {question.id: answer.text for question, answer in zip(questions, found, strict=True)}
    if questions[0].format == "hotpotqa":
        return {"answer": texts, "sp": {name: [] for name in texts}}
    return texts
