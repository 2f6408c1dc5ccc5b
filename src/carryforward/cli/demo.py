# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward demo`: the whole idea on a real pretrained model, live, in minutes on two CPU cores.

Nothing here is special to the demo but its settings: it trains, evaluates and writes as the other commands do. The
settings were chosen on the validation split of `python-docs`, never on the documents the table is about.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import texts
from ..data.corpora import open_corpus
from ..evaluation import report
from ..evaluation.evaluate import evaluate
from ..settings import BUNDLED, PYTHON_DOCS, EvaluateSettings, TrainSettings, WriteSettings
from ..training.train import train
from ..utils.console import note
from . import generate

OVERLAPS = (0, 5, 10, 30, 50)
_LEAST_WORDS, _FEW_WORDS = 2_000, 30_000  # of one's own text


@dataclass(frozen=True)
class Effort:
    """How much is done: tokens trained on, tokens read of each held-out document, tokens written."""

    train: int
    read: int
    write: int


FULL, SHORT = Effort(120_000, 1_500, 600), Effort(5_000, 100, 40)


def demo(
    out: Path, files: Sequence[Path] = (), *, seed: int = 0, short: bool = False, show: Callable[[str], Any]
) -> None:
    """Fine-tune the bundled model with and without recurrence, compare the two, and let the recurrent one write.

    Args:
        out: a new folder, or that of an earlier demo, which is replaced.
        files: one's own text; Python's documentation by default.
        show: gets the results, piece by piece.
    """
    contents = _read(files)  # what is wrong with it, before anything is taken away
    _clear(out)
    effort = SHORT if short else FULL
    data = _own_text(contents, out / "text") if files else PYTHON_DOCS
    held_out = "the last fifth, which" if 0 < len(files) < 5 else "documents that"
    note(
        f"A small language model that has read 1250 old books learns {_named(files)}, twice on the same words:\n"
        "plain, window by window of 64 tokens, and with a state carried from each window to the next.\n"
        f"Then both are scored on {held_out} they have not seen, and the second one writes."
    )
    plain, recurrent = str(out / "plain"), str(out / "recurrent")
    note("\n1. The plain model.")
    train(_settings(data, effort, seed, recurrence=False), Path(plain))
    note("\n2. The recurrent one.")
    train(_settings(data, effort, seed, recurrence=True), Path(recurrent))
    note(f"\n3. Both on {held_out} they have not seen, windows overlapping more and more.")
    asked = EvaluateSettings(data, "test", overlap=OVERLAPS, max_document_tokens=effort.read, batch_size=32)
    results = [evaluate(name, asked, seed=seed) for name in (plain, recurrent)]
    report.save(results, out / "results")
    show(f"\n{report.markdown(results)}\n{_conclusion(results)}\n")

    prompt = _beginning(data)
    note("\n4. The recurrent model goes on with a document, past the 512 positions that the plain one has.")
    show(f"\n{prompt}")
    record = generate.write(recurrent, prompt, WriteSettings(effort.write, seed=seed), show=show)
    show("\n")
    generate.told(record)
    note(_farewell(out))


def _settings(data: str, effort: Effort, seed: int, recurrence: bool) -> TrainSettings:
    """The paper's single vector learns nothing in a minute. What the last layer can read without learning are states
    of its own kind: those the layer below it made of the window before, pooled into as many vectors as there are
    positions to pool at the largest overlap."""
    state: dict[str, Any] = {"slots": 14, "insert_at": ("7",), "pooled_layers": "below", "residual": True}
    return TrainSettings(
        model=BUNDLED, data=data, validation=False, recurrence=recurrence, window=64, **(state if recurrence else {}),
        windows_per_sample=8, batch_size=8,
        learning_rate=(1e-3,), recurrence_learning_rate=(1e-3,), warmup_steps=5, train_tokens=effort.train, seed=seed,
    )  # fmt: skip


def scores(results: Sequence[report.Result]) -> dict[str, float]:
    """Word perplexity at overlap 0: plain, recurrent, and that with its state removed."""
    found = {}
    for result in results:
        for row in result["rows"]:
            if row["overlap"] == 0:
                kind = "plain" if not result["model"]["recurrent"] else "recurrent" if row["use_state"] else "removed"
                found[kind] = row["word_perplexity"]
    return found


def _conclusion(results: Sequence[report.Result]) -> str:
    found = scores(results)
    does = "lowers" if found["recurrent"] < found["plain"] else "does not lower"
    plain, recurrent, removed = (f"{found[kind]:,.1f}" for kind in ("plain", "recurrent", "removed"))
    return (
        f"At overlap 0 the state {does} word perplexity: {plain} without recurrence, {recurrent} with it "
        f"({100 * (found['recurrent'] / found['plain'] - 1):+.1f} %), {removed} when the state is taken away again."
    )


def _named(files: Sequence[Path]) -> str:
    return "Python's documentation" if not files else ", ".join(file.name for file in files)


def _beginning(data: str) -> str:
    """The first sentences of the longest held-out document."""
    text = max(open_corpus(data, "test"), key=lambda text: len(text.text)).text
    return text[:600].rsplit(None, 1)[0]


def _farewell(out: Path) -> str:
    return (
        f"\nEverything is in {out}: the two models, and results/ with the table, a figure and the JSON behind them.\n"
        "With a model and text of your own:\n"
        f"  carryforward demo --text FILE...\n"
        "  carryforward train --model gpt2 --data FOLDER --out runs/recurrent\n"
        "  carryforward evaluate runs/recurrent --data FOLDER --overlap 0 10 50 --out results\n"
        f"  carryforward generate {out / 'recurrent'} --prompt TEXT --max-new-tokens 10000"
    )


# --- folders -------------------------------------------------------------------------------------------------------


def _clear(out: Path) -> None:
    """Take away an earlier demo's results; refuse a folder that is anything else."""
    parts = [out / name for name in ("plain", "recurrent", "results", "text")]
    if out.exists() and (not out.is_dir() or any(path not in parts for path in out.iterdir())):
        raise ValueError(f"--out {out} exists and holds other things. Use a new folder.")
    for part in parts:
        shutil.rmtree(part, ignore_errors=True)


def _read(files: Sequence[Path]) -> dict[Path, str]:
    contents = {path: texts.read(path) for path in files}
    words = sum(len(text.split()) for text in contents.values())
    if files and words < _LEAST_WORDS:
        raise ValueError(f"--text has {words:,} words: give at least {_LEAST_WORDS:,}, or there is little to learn.")
    if files and words < _FEW_WORDS:
        note(
            f"--text has {words:,} words, which are read over and over and learned by heart: what is compared says "
            f"little. Give {_FEW_WORDS:,} or more."
        )
    return contents


def _own_text(contents: dict[Path, str], folder: Path) -> str:
    """Every fifth file is held out; of a few files, the last fifth of each."""
    for number, (path, text) in enumerate(contents.items()):
        if len(contents) >= 5:
            parts = {"test" if number % 5 == 4 else "train": text}
        else:
            cut = text.rfind("\n", 0, len(text) * 4 // 5) + 1 or len(text) * 4 // 5
            parts = {"train": text[:cut], "test": text[cut:]}
        for split, part in parts.items():
            (folder / split).mkdir(parents=True, exist_ok=True)
            (folder / split / f"{number}-{path.stem}.txt").write_bytes(part.encode())
    return str(folder)
