# SPDX-License-Identifier: Apache-2.0
"""`carryforward demo`: train, compare and generate with a pretrained model, in minutes on two CPU cores.

Only the settings are special: the demo trains, evaluates and generates as the other commands do. They were chosen on
the validation split of `python-docs`, never on the documents that the table reports.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings.commands import EvaluateSettings, GenerateSettings, TrainSettings
from ..settings.recurrence import BUNDLED, PYTHON_DOCS
from .errors import user_errors
from .generate import stream
from .options import check_folder

OVERLAPS = (0, 5, 10, 30, 50)
_MIN_WORDS, _ENOUGH_WORDS = 2_000, 30_000  # of the user's text


def demo(
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="<path>...", help="Text files, 30,000 words or more.", show_default="Python's documentation"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for models and results.")] = Path("carryforward-demo"),
    seed: Annotated[int, typer.Option(min=0, metavar="<int>", help="Random seed.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="Only a few steps, to test the installation.")] = False,
) -> None:
    """Fine-tune a small model with and without recurrence, compare the two, and generate text. Takes minutes."""
    with user_errors(out):
        check_folder(out)
        run_demo(out, text or (), seed=seed, short=short, show=stream)


@dataclass(frozen=True)
class Effort:
    """Tokens to train on, tokens to score of each held-out document, tokens to generate."""

    train: int
    score: int
    generate: int


FULL, SHORT = Effort(120_000, 1_500, 600), Effort(5_000, 100, 40)


def run_demo(
    out: Path, files: Sequence[Path] = (), *, seed: int = 0, short: bool = False, show: Callable[[str], Any]
) -> None:
    """Fine-tune the bundled model with and without recurrence, compare the two, and generate with the recurrent one.

    Args:
        out: a new folder, or the folder of an earlier demo, which is replaced.
        files: the user's text; Python's documentation by default.
        show: receives the results, piece by piece.
    """
    from ..evaluation import report
    from ..evaluation.evaluate import evaluate
    from ..training.train import train
    from ..utils.console import note
    from . import text_generation

    _settings(PYTHON_DOCS, SHORT, seed, recurrence=True)  # refuses a wrong seed before anything is deleted
    contents = _read(files)
    _clear(out)
    effort = SHORT if short else FULL
    data = _own_text(contents, out / "text") if files else PYTHON_DOCS
    held_out = "the last fifth, which" if 0 < len(files) < 5 else "documents that"
    note(
        f"A small language model, pretrained on 1250 old books, is fine-tuned on {_named(files)}. Twice, on the same "
        "text:\nplain, in windows of 64 tokens, and with a state carried from each window to the next.\n"
        f"Then both are scored on {held_out} they have not seen, and the recurrent one generates text."
    )
    plain, recurrent = str(out / "plain"), str(out / "recurrent")
    note("\n1. Train the plain model.")
    train(_settings(data, effort, seed, recurrence=False), Path(plain))
    note("\n2. Train the recurrent model.")
    train(_settings(data, effort, seed, recurrence=True), Path(recurrent))
    note(f"\n3. Score both on {held_out} they have not seen, at several overlaps of the windows.")
    settings = EvaluateSettings(data, "test", overlap=OVERLAPS, max_document_tokens=effort.score, batch_size=32)
    results = [evaluate(name, settings, seed=seed) for name in (plain, recurrent)]
    report.save(results, out / "results")
    show(f"\n{report.markdown(results)}\n{_conclusion(results)}\n")

    prompt = _beginning(data)
    note("\n4. The recurrent model continues a document, beyond the 512 positions of the plain one.")
    show(f"\n{prompt}")
    record = text_generation.generate(recurrent, prompt, GenerateSettings(effort.generate, seed=seed), show=show)
    show("\n")
    text_generation.print_summary(record)
    note(_next_steps(out))


def _settings(data: str, effort: Effort, seed: int, recurrence: bool) -> TrainSettings:
    """Settings that learn within a minute, which the paper's single vector does not.

    The last layer can use states of its own kind without training: outputs of the layer below it for the previous
    window, pooled into as many vectors as there are positions to pool at the largest overlap.
    """
    memory: dict[str, Any] = {"slots": 14, "insert_at": ("7",), "pooled_layers": "below", "residual": True}
    return TrainSettings(
        model=BUNDLED, data=data, validation=False, recurrence=recurrence, window=64, preset="paper",
        **(memory if recurrence else {}), windows_per_sample=8, batch_size=8,
        learning_rate=(1e-3,), recurrence_learning_rate=(1e-3,), warmup_steps=5, train_tokens=effort.train, seed=seed,
    )  # fmt: skip


def scores(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Word perplexity at overlap 0 of the plain model, the recurrent one, and that with its state removed."""
    perplexities = {}
    for result in results:
        for row in result["rows"]:
            if row["overlap"] == 0:
                kind = "plain" if not result["model"]["recurrent"] else "recurrent" if row["use_state"] else "removed"
                perplexities[kind] = row["word_perplexity"]
    return perplexities


def _conclusion(results: Sequence[dict[str, Any]]) -> str:
    perplexities = scores(results)
    lowers = "lowers" if perplexities["recurrent"] < perplexities["plain"] else "does not lower"
    change = 100 * (perplexities["recurrent"] / perplexities["plain"] - 1)
    plain, recurrent, removed = (f"{perplexities[kind]:,.1f}" for kind in ("plain", "recurrent", "removed"))
    return (
        f"At overlap 0 the state {lowers} word perplexity: {plain} without recurrence, {recurrent} with it "
        f"({change:+.1f} %), {removed} when the state is removed."
    )


def _named(files: Sequence[Path]) -> str:
    return "Python's documentation" if not files else ", ".join(file.name for file in files)


def _beginning(data: str) -> str:
    """The first sentences of the longest held-out document."""
    from ..data.corpora import open_corpus

    text = max(open_corpus(data, "test"), key=lambda text: len(text.text)).text
    return text[:600].rsplit(None, 1)[0]


def _next_steps(out: Path) -> str:
    return (
        f"\n{out} holds the two models, and results/ with the table, a figure and the JSON behind them.\n"
        "With your own model and text:\n"
        f"  carryforward demo --text FILE...\n"
        "  carryforward train --model gpt2 --data FOLDER --out runs/recurrent\n"
        "  carryforward evaluate runs/recurrent --data FOLDER --overlap 0 10 50 --out results\n"
        f"  carryforward generate {out / 'recurrent'} --prompt TEXT --max-new-tokens 10000"
    )


# --- folders -------------------------------------------------------------------------------------------------------


def _clear(out: Path) -> None:
    """Delete an earlier demo's results; refuse a folder with anything else in it."""
    parts = [out / name for name in ("plain", "recurrent", "results", "text")]
    if out.exists() and (not out.is_dir() or any(path not in parts for path in out.iterdir())):
        raise ValueError(f"--out {out} exists and holds other things. Use a new folder.")
    for part in parts:
        shutil.rmtree(part, ignore_errors=True)


def _read(files: Sequence[Path]) -> dict[Path, str]:
    from ..data import texts
    from ..utils.console import note

    contents = {path: texts.read_text(path) for path in files}
    words = sum(len(text.split()) for text in contents.values())
    if files and words < _MIN_WORDS:
        raise ValueError(f"--text has {words:,} words: give at least {_MIN_WORDS:,}, or there is too little to learn.")
    if files and words < _ENOUGH_WORDS:
        note(
            f"--text has {words:,} words. Training repeats them until the models overfit, and the comparison says "
            f"little. Give {_ENOUGH_WORDS:,} or more."
        )
    return contents


def _own_text(contents: dict[Path, str], folder: Path) -> str:
    """Write texts as a corpus. Every fifth file is held out; of fewer than five files, the last fifth of each."""
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
