# SPDX-License-Identifier: Apache-2.0
"""What a state does to a model that has not learned to read it, by the layer it enters.

    python run.py bundled bundled path/to/books                # writes results/bundled.json
    python run.py smollm2 path/to/smollm2-135m path/to/books   # writes results/smollm2.json
    python run.py --tables                                     # writes README.md and the figure

The paper's module before any training. Where its state disturbs the model, and where the loss hangs on every hundredth
of it, a model learns to look away; so the layer is worth choosing before the training.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import carryforward as cf
from carryforward.backbones.architectures import architecture_of
from carryforward.data.corpora import open_corpus
from carryforward.data.documents import tokenise
from carryforward.models.loading import load_causal
from carryforward.utils.files import write_json, write_text
from carryforward.utils.markdown import markdown_table
from carryforward.utils.plotting import COLOURS, dress, empty
from carryforward.utils.progress import bar
from carryforward.utils.provenance import provenance

HERE = Path(__file__).parent
NAMES = {"bundled": "the bundled model", "smollm2": "SmolLM2-135M"}
WINDOW, WINDOWS, BOOKS, SKIPPED = 300, 5, 4, 3000  # tokens and windows, of so many books, after their first tokens
CHANGE = 0.01  # of the state


def main() -> None:
    if sys.argv[1:] == ["--tables"]:
        tables()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=NAMES)
    parser.add_argument("model")
    parser.add_argument("books")
    given = parser.parse_args()
    run(given.setting, given.model, given.books)


def run(setting: str, name: str, data: str) -> None:
    loaded = load_causal(name)
    length = WINDOWS * WINDOW + 1
    documents = tokenise(open_corpus(data, "validation"), loaded.tokenizer, max_tokens=SKIPPED + length)
    long = [i for i, one in enumerate(documents) if len(one) == SKIPPED + length]
    if len(long) < BOOKS:
        raise SystemExit(f"{data}: {len(long)} validation texts have {SKIPPED + length:,} tokens; {BOOKS} are needed.")
    documents = documents.select(long[:BOOKS])
    texts = torch.tensor([one[SKIPPED:].tolist() for one in documents])
    count = len(architecture_of(loaded.model.config).layer_list(loaded.model.base_model))
    layers = [
        layer for layer in range(1, count + 1) if count <= 12 or layer <= 8 or layer % 4 == 0 or layer > count - 2
    ]
    rows, alone = [], plainly(cf.add_recurrence(loaded.model, window=WINDOW).eval(), texts)
    with bar(None, f"layers of {setting}", after=1) as report:
        for layer in layers:
            torch.manual_seed(0)  # the same module at every layer
            model = cf.add_recurrence(loaded.model, window=WINDOW, insert_at=layer).eval().requires_grad_(False)
            rows.append({"layer": layer, **probed(model, texts, alone)})
            report(len(rows), len(layers))
    result = {
        "kind": "insertion", **provenance("cpu"), "seed": 0, "model": NAMES[setting], "layers": count,
        "data": {**documents.about(), "skipped": SKIPPED, "windows": WINDOWS, "window": WINDOW}, "rows": rows,
    }  # fmt: skip
    write_json(HERE / "results" / f"{setting}.json", result)


def plainly(model: cf.RecurrentForCausalLM, texts: torch.Tensor) -> list[float]:
    """The summed loss of each window without a state."""
    with torch.no_grad():
        pieces = [texts[:, start : start + WINDOW + 1] for start in range(0, WINDOWS * WINDOW, WINDOW)]
        return [float(model(input_ids=piece, labels=piece, use_state=False).nll_sum) for piece in pieces]


def probed(model: cf.RecurrentForCausalLM, texts: torch.Tensor, alone: list[float]) -> dict[str, Any]:
    """How much worse the windows that have a state are for it, in nats per token; and by how much, in nats, a window's
    summed loss changes with a hundredth of its state, at most and to first order."""
    excess, hangs, state = [], [], None
    for start in range(0, WINDOWS * WINDOW, WINDOW):
        piece = texts[:, start + (start > 0) : start + WINDOW + 1]  # the last is only a target
        carried = None
        if state is not None:
            state = state.detach()
            carried = state.carried.requires_grad_()
        out = model(input_ids=piece, labels=piece, state=state)
        if carried is not None:
            (gradient,) = torch.autograd.grad(out.nll_sum, carried)
            sizes = [x.flatten(1).norm(dim=1) for x in (gradient, carried.detach())]
            hangs += (CHANGE * sizes[0] * sizes[1]).tolist()
            excess.append((float(out.nll_sum.detach()) - alone[start // WINDOW]) / (len(texts) * WINDOW))
        state = out.state
    return {
        "excess": float(np.mean(excess)),
        "median": float(np.median(hangs)),
        "most": float(np.max(hangs)),
        "windows": len(hangs),
    }


def tables() -> None:
    found = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    lines = ["# Where the state enters", "", " ".join(ABOUT.split())]
    for one in found:
        lines += ["", f"## {one['model'][0].upper()}{one['model'][1:]}, {one['layers']} layers", ""]
        head = ["layer", "worse, nats per token", "a hundredth of the state, nats per window: median", "most"]
        rows = [[f"{row['layer']}", f"{row['excess']:+.4f}", f"{row['median']:.2f}", f"{row['most']:.2f}"]
                for row in one["rows"]]  # fmt: skip
        lines += [markdown_table(head, rows, words=0)]
    drawn, (left, right) = empty(2)
    for one, colour in zip(found, COLOURS, strict=False):
        across = [row["layer"] for row in one["rows"]]
        left.plot(across, [row["excess"] for row in one["rows"]], "o-", color=colour, label=one["model"])
        for name, style in (("median", "o-"), ("most", "o:")):
            right.plot(across, [row[name] for row in one["rows"]], style, color=colour, label=f"{one['model']}, {name}")
    left.set_yscale("symlog", linthresh=0.001)
    right.set_yscale("log")
    dress(left, "what an untrained state costs", "layer it enters", "nats per token")
    dress(right, "how much hangs on a hundredth of it", "layer it enters", "nats per window")
    for axes in (left, right):
        axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.9)
    drawn.savefig(HERE / "figure.png")
    trained = "SmolLM2-135M [trained](../alternatives/README.md) without overlap"
    lines += ["", f"{trained} uses a state that enters at layer 6, not one at layer 2."]
    lines += ["", "![by layer](figure.png)", "", "Written by `python experiments/insertion/run.py --tables`."]
    write_text(HERE / "README.md", "\n".join(lines) + "\n")


ABOUT = f"""
The paper's module before any training, put in at one layer after the other: {BOOKS} validation books, {WINDOWS} windows
of {WINDOW} tokens each. "Worse" is what the state costs the windows that have one, against none. The rest is how much
the summed loss of such a window changes with a hundredth of the state, to first order, in the worst direction: where a
few windows hang on it by far more than others, their gradients are all that a training step sees.
"""


if __name__ == "__main__":
    main()
