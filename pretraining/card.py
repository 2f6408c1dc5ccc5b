# SPDX-License-Identifier: Apache-2.0
"""The bundled model's card, from the record of its training. `python pretraining/card.py` writes it."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def card(record: dict[str, Any]) -> str:
    """The model card as Markdown."""
    config, corpus, training = record["config"], record["corpus"], record["training"]
    hardware = record["hardware"].get("gpu", record["hardware"]["cpu"])
    (limit,) = {score["tokens_of_each_book"] for score in record["scores"].values()}
    cut = f"the first {limit:,} tokens of" if limit else "whole"
    rows = [
        f"| {name} | {score['word_perplexity']:.2f} | {score['token_perplexity']:.2f} | {score['bits_per_byte']:.3f} |"
        for name, score in record["scores"].items()
    ]
    return f"""---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# The bundled model

A small English language model of the GPT-2 architecture: {config["n_layer"]} layers of width {config["n_embd"]},
{config["n_head"]} heads, {config["n_positions"]} learned positions, {config["parameters"] / 1e6:.2f} M parameters,
byte-level BPE with {config["vocabulary"]:,} tokens. It comes with carryforward, so that everything can be tried
without a download: `carryforward.load_bundled()`, or the name `bundled` wherever a model is named. It is a plain model,
without recurrence. Stored in float16, loaded as float32.

**Trained on** {corpus["books"]:,} English books of Project Gutenberg that are in the public domain in the United States
({corpus["words"] / 1e6:.1f} M words, {corpus["tokens"] / 1e6:.0f} M tokens; at most 40 of an author), from scratch:
{training["tokens"] / 1e6:,.0f} M tokens, windows of {config["n_positions"]}, {config["batch"]} at a time, AdamW with a
learning rate of {training["learning_rate"]:g} that rises linearly over a fiftieth of the steps and then falls linearly
to zero, bfloat16 autocast, seed {record["seed"]}; {training["seconds"] / 60:.0f} minutes on one {hardware}. The recipe
is the folder `pretraining` of the project.

**Scores** of the stored weights on {cut} books by authors that are not in the training set, windows of
{config["n_positions"]} tokens:

| split | word perplexity | token perplexity | bits per byte |
| --- | ---: | ---: | ---: |
{chr(10).join(rows)}

**Use it** to try things out, and for nothing else. It writes fluent nonsense in the style of books from 1800 to 1930,
with their views of the world.
"""


if __name__ == "__main__":
    record = json.loads((HERE / "results/pretraining.json").read_text())
    (HERE.parent / "src/carryforward/bundled/README.md").write_text(card(record))
