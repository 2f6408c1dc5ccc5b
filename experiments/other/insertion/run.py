# SPDX-License-Identifier: Apache-2.0
"""What does a state do to a model that has not been trained to use it, depending on the layer it enters?

    python run.py bundled bundled path/to/books                # writes results/bundled.json, then the page
    python run.py smollm2 path/to/smollm2-135m path/to/books   # writes results/smollm2.json, then the page
    python run.py --tables-only                                # writes README.md and the figure

The paper's module before any training. Where its state disturbs the model, or the loss is very sensitive to it,
training teaches the model to ignore the state. So it is worth choosing the layer before training.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import command_line, new_result, paragraph, write_page, write_result

import carryforward as cf
from carryforward.backbones.architectures import architecture_of
from carryforward.data.documents import load_documents
from carryforward.models.loading import load_causal
from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import COLOURS, new_figure, save_figure, style_axes
from carryforward.utils.progress import ProgressBar

HERE = Path(__file__).parent
NAMES = {"bundled": "the bundled model", "smollm2": "SmolLM2-135M"}
WINDOW, WINDOWS, BOOKS, SKIPPED = 300, 5, 4, 3000  # tokens per window, windows per book, books, first tokens left out
CHANGE = 0.01  # relative change of the state
ABOUT = f"""
The paper's module before any training, inserted at one layer at a time: {BOOKS} validation books, {WINDOWS} windows of
{WINDOW} tokens each. "Worse": how much the state raises the loss of the windows that receive one. The other columns are
the sensitivity: how much the summed loss of such a window changes when the state changes by one per cent in the worst
direction, to first order. Where a few windows are far more sensitive than the others, their gradients dominate a
training step.
"""


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=NAMES, help="name of the result")
    parser.add_argument("model", help="the plain model: bundled, a folder or a Hub name")
    parser.add_argument("books", help="folder with validation/*.txt")


def measure(arguments: argparse.Namespace) -> None:
    loaded = load_causal(arguments.model)
    length = SKIPPED + WINDOWS * WINDOW + 1
    documents = load_documents(arguments.books, "validation", loaded.tokenizer, max_tokens=length)
    long = [i for i, document in enumerate(documents) if len(document) == length]
    if len(long) < BOOKS:
        raise SystemExit(f"{arguments.books}: {len(long)} validation texts have {length:,} tokens; {BOOKS} are needed.")
    documents = documents.select(long[:BOOKS])
    texts = torch.tensor([document[SKIPPED:].tolist() for document in documents])
    count = len(architecture_of(loaded.model.config).layer_list(loaded.model.base_model))
    layers = [
        layer for layer in range(1, count + 1) if count <= 12 or layer <= 8 or layer % 4 == 0 or layer > count - 2
    ]
    rows, baseline = [], losses_without_state(with_module(loaded.model, 2), texts)
    with ProgressBar(f"measuring {arguments.setting}", len(layers), "layers") as bar:
        for layer in layers:
            torch.manual_seed(0)  # the same module at every layer
            model = with_module(loaded.model, layer).requires_grad_(False)
            rows.append({"layer": layer, **sensitivity(model, texts, baseline)})
            bar.advance(1)
    data = {**documents.about(), "skipped": SKIPPED, "windows": WINDOWS, "window": WINDOW}
    result = new_result("insertion") | {"model": NAMES[arguments.setting], "layers": count, "data": data, "rows": rows}
    write_result(HERE / "results" / f"{arguments.setting}.json", result)


def with_module(model: Any, layer: int) -> Any:
    """The model with the paper's module, whose vector enters at a layer."""
    return cf.add_recurrence(model, window=WINDOW, memory=cf.VectorMemoryConfig(insert_at=layer)).eval()


def losses_without_state(model: cf.RecurrentForCausalLM, texts: torch.Tensor) -> list[float]:
    """The summed loss of each window without a state."""
    with torch.no_grad():
        pieces = [texts[:, start : start + WINDOW + 1] for start in range(0, WINDOWS * WINDOW, WINDOW)]
        return [float(model(input_ids=piece, labels=piece, use_state=False).nll_sum) for piece in pieces]


def sensitivity(model: cf.RecurrentForCausalLM, texts: torch.Tensor, baseline: list[float]) -> dict[str, Any]:
    """The cost of the state and the sensitivity of the loss to it, over all windows that receive a state.

    Returns:
        excess: mean loss above that without a state, in nats per token.
        median, most: change of a window's summed loss, in nats, when the state changes by `CHANGE` in the worst
            direction, to first order.
    """
    excess, changes, state = [], [], None
    for start in range(0, WINDOWS * WINDOW, WINDOW):
        piece = texts[:, start + (start > 0) : start + WINDOW + 1]  # the last token is only a target
        carried = None
        if state is not None:
            state = state.detach()
            carried = state.memory["vector"].requires_grad_()
        out = model(input_ids=piece, labels=piece, state=state)
        if carried is not None:
            (gradient,) = torch.autograd.grad(out.nll_sum, carried)
            norms = [x.flatten(1).norm(dim=1) for x in (gradient, carried.detach())]
            changes += (CHANGE * norms[0] * norms[1]).tolist()
            excess.append((float(out.nll_sum.detach()) - baseline[start // WINDOW]) / (len(texts) * WINDOW))
        state = out.state
    return {
        "excess": float(np.mean(excess)),
        "median": float(np.median(changes)),
        "most": float(np.max(changes)),
        "windows": len(changes),
    }


def write_pages() -> None:
    results = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    lines = ["# Where the state enters", "", paragraph(ABOUT)]
    for result in results:
        lines += ["", f"## {result['model'][0].upper()}{result['model'][1:]}, {result['layers']} layers", ""]
        head = ["layer", "worse, nats per token", "one per cent of the state, nats per window: median", "most"]
        rows = [[f"{row['layer']}", f"{row['excess']:+.4f}", f"{row['median']:.2f}", f"{row['most']:.2f}"]
                for row in result["rows"]]  # fmt: skip
        lines += [markdown_table(head, rows, text_columns=0)]
    draw(results)
    trained = "SmolLM2-135M [trained](../../paper/alternatives/README.md) without overlap"
    lines += ["", f"{trained} uses a state that enters at layer 6, but not one that enters at layer 2."]
    write_page(HERE, [*lines, "", "![by layer](figure.png)"])


def draw(results: list[dict[str, Any]]) -> None:
    figure, (left, right) = new_figure(2)
    for result, colour in zip(results, COLOURS, strict=False):
        layers = [row["layer"] for row in result["rows"]]
        left.plot(layers, [row["excess"] for row in result["rows"]], "o-", color=colour, label=result["model"])
        for name, style in (("median", "o-"), ("most", "o:")):
            values = [row[name] for row in result["rows"]]
            right.plot(layers, values, style, color=colour, label=f"{result['model']}, {name}")
    left.set_yscale("symlog", linthresh=0.001)
    right.set_yscale("log")
    style_axes(left, "cost of an untrained state", "layer it enters", "nats per token")
    style_axes(right, "sensitivity to one per cent of the state", "layer it enters", "nats per window")
    for axes in (left, right):
        axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)
    save_figure(figure, HERE / "figure.png")


if __name__ == "__main__":
    main()
