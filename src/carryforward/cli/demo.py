# SPDX-License-Identifier: Apache-2.0
"""`carryforward demo`: what carried keys and values do to a small model, untrained and trained, in minutes on two CPU
cores.

Only the settings are special: the demo adds, generates, trains and evaluates as the other commands do. What is carried
is the recommended memory with its defaults. Learning rate and steps were chosen on the validation split of
`python-docs`, never on the documents that the table reports.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..settings.commands import EvaluateSettings, GenerateSettings, TrainSettings
from ..settings.recurrence import BUNDLED, PYTHON_DOCS, RecurrentSettings
from .demo_results import conclusion, corrected_lines, gain_lines, table
from .errors import user_errors
from .generate import stream
from .options import check_folder

WINDOW = 64
OVERLAPS = (0, 10, 30, 50)
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
    """Read a text with and without what is carried, generate past the limit, train and compare. Takes minutes."""
    with user_errors(out):
        check_folder(out)
        run_demo(out, text or (), seed=seed, short=short, show=stream)


@dataclass(frozen=True)
class Effort:
    """Tokens to read first, to generate, to train on, and to score of each held-out document."""

    read: int
    generate: int
    train: int
    score: int


FULL, SHORT = Effort(1_500, 600, 120_000, 1_500), Effort(800, 40, 5_000, 100)


def run_demo(
    out: Path, files: Sequence[Path] = (), *, seed: int = 0, short: bool = False, show: Callable[[str], Any]
) -> None:
    """Read and generate with the bundled model and what is carried, untrained; then train it plain and recurrent.

    Args:
        out: a new folder, or the folder of an earlier demo, which is replaced.
        files: the user's text; Python's documentation by default.
        show: receives the results, piece by piece.
    """
    from ..utils.console import note

    _settings(PYTHON_DOCS, SHORT, seed, recurrence=True)  # refuses a wrong seed before anything is deleted
    contents = _read(files)
    _clear(out)
    effort = SHORT if short else FULL
    data = _own_text(contents, out / "text") if files else PYTHON_DOCS
    held_out = "the last fifth" if 0 < len(files) < 5 else "documents"
    note(
        f"A small language model, pretrained on 1250 old books, reads {_named(files)} in windows of {WINDOW} tokens.\n"
        f"Each window also sees keys and values that were carried from the windows before it.\n\n"
        "1. The model as it is, without training, with what is carried and without it."
    )
    text = max(_held_out(data), key=len)
    _read_untrained(out / "untrained", data, text, effort, show)
    note("\n2. It generates a text beyond the 512 positions at which the plain model ends.")
    _generate(out / "untrained", text[:600].rsplit(None, 1)[0], effort, seed, show)
    note(f"\n3. Both are trained on {_named(files)}, and scored on {held_out} they have not seen.")
    _train_and_compare(out, data, effort, seed, show)
    note(_next_steps(out))


def _read_untrained(folder: Path, data: str, text: str, effort: Effort, show: Callable[[str], Any]) -> None:
    """Add recurrence without training, and show what it changes on a text."""
    from ..analysis.token_gains import measure_token_gains
    from ..data.tokenization import Encoder
    from ..models.loading import load_causal
    from .add import add_to_folder

    add_to_folder(BUNDLED, folder, RecurrentSettings(window=WINDOW), data=data)
    loaded: Any = load_causal(str(folder))
    encoder = Encoder(loaded.tokenizer, effort.read)
    ids, pieces = encoder.encode_pieces(text)
    tokens = measure_token_gains(loaded.model, ids, top=1)
    alternatives = encoder.token_strings(tokens.without.top_ids[:, 0].tolist())
    show(f"\n{gain_lines(tokens, pieces)}\n{corrected_lines(tokens, pieces, alternatives)}")


def _generate(model: Path, prompt: str, effort: Effort, seed: int, show: Callable[[str], Any]) -> None:
    from . import text_generation

    show(f"\n{prompt}")
    record = text_generation.generate(str(model), prompt, GenerateSettings(effort.generate, seed=seed), show=show)
    show("\n")
    text_generation.print_summary(record)


def _train_and_compare(out: Path, data: str, effort: Effort, seed: int, show: Callable[[str], Any]) -> None:
    from ..evaluation import report
    from ..evaluation.evaluate import evaluate
    from ..training.train import train
    from ..utils.console import note

    results = []
    for name, overlaps in (("plain", OVERLAPS), ("recurrent", (0,))):
        note(f"\nTraining the {name} model, then scoring it.")
        train(_settings(data, effort, seed, recurrence=name == "recurrent"), out / name)
        scoring = EvaluateSettings(data, "test", overlap=overlaps, max_document_tokens=effort.score, batch_size=32)
        results.append(evaluate(str(out / name), scoring, seed=seed))
    report.save(results, out / "results", measure="bits_per_byte")
    show(f"\n{table(results)}\n\n{conclusion(results)}\n")


def _settings(data: str, effort: Effort, seed: int, recurrence: bool) -> TrainSettings:
    """Settings that learn within a minute."""
    return TrainSettings(
        model=BUNDLED, data=data, validation=False, recurrence=recurrence, window=WINDOW, windows_per_sample=8,
        batch_size=8, learning_rate=(1e-3,), recurrence_learning_rate=(1e-3,), warmup_steps=5,
        train_tokens=effort.train, seed=seed,
    )  # fmt: skip


def _named(files: Sequence[Path]) -> str:
    return "Python's documentation" if not files else ", ".join(file.name for file in files)


def _held_out(data: str) -> list[str]:
    """The texts of the held-out documents."""
    from ..data.corpora import open_corpus

    return [document.text for document in open_corpus(data, "test")]


def _next_steps(out: Path) -> str:
    return (
        f"\n{out} holds the three models, and results/ with a figure and the JSON behind the table.\n"
        "See what the carried keys and values do to a text, or let the untrained model go on:\n"
        f"  carryforward inspect {out / 'untrained'} --text FILE --out report.html\n"
        f"  carryforward generate {out / 'untrained'} --prompt TEXT --max-new-tokens 10000\n"
        "With your own model and text, untrained and trained (keys and values of half a window are carried):\n"
        "  carryforward add gpt2 --data FOLDER --out gpt2-recurrent\n"
        "  carryforward evaluate gpt2-recurrent --data FOLDER --split validation\n"
        "  carryforward train --model gpt2 --data FOLDER --out runs/recurrent\n"
        "  carryforward evaluate runs/recurrent --data FOLDER --split validation"
    )


# --- folders -------------------------------------------------------------------------------------------------------


def _clear(out: Path) -> None:
    """Delete an earlier demo's results; refuse a folder with anything else in it."""
    parts = [out / name for name in ("untrained", "plain", "recurrent", "results", "text")]
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
