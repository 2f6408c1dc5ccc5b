# SPDX-License-Identifier: Apache-2.0
"""The small encoder's card, from the record of its training. `python pretraining/encoder/card.py` writes it."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def card(result: dict[str, Any]) -> str:
    """The model card as Markdown."""
    settings, train, scores = result["settings"], result["data"]["train"], result["validation"]
    hardware = result["hardware"].get("gpu", result["hardware"]["cpu"])
    window = settings["positions"] - 2
    return f"""---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: fill-mask
---

# A small encoder

A small English encoder of the BERT architecture: {settings["layers"]} layers of width {settings["width"]},
{settings["heads"]} heads, {settings["positions"]} learned positions, {result["parameters"] / 1e6:.2f} M parameters,
{result["vocabulary"]:,} word pieces in lower case. It was made to measure what carryforward does to an encoder where
none can be downloaded: `carryforward add`, `train` and `embed` take its folder. It is a plain model, without
recurrence. Stored in float16 ({result["bytes"] / 1e6:.2f} MB), loaded as float32.

**Trained on** {train["books"]:,} English books of Project Gutenberg that are in the public domain in the United States
({train["words"] / 1e6:.1f} M words, {train["tokens"] / 1e6:.0f} M tokens), from scratch, to predict masked tokens:
{result["tokens"] / 1e6:,.0f} M tokens in {result["steps"]:,} steps of {settings["batch"]} windows of {window} tokens
between [CLS] and [SEP]. {settings["masked"]:.0%} of the tokens of each window are predicted, chosen anew each time:
80 % of them are masked, 10 % replaced, 10 % left. AdamW, learning rate {settings["learning_rate"]:g} with
{settings["warmup"]} steps of warm-up and a cosine to zero, weight decay {settings["weight_decay"]:g}, bfloat16 autocast
on a GPU, seed {settings["seed"]}; {result["seconds"] / 60:.1f} minutes on one {hardware}. The recipe is the folder
`pretraining/encoder` of the project.

**Scores** of the stored weights on books by authors that are not in the training set, in windows of {window} tokens:
masked-token loss {scores["masked_loss"]:.3f} nats, accuracy {scores["masked_accuracy"]:.1%}
({scores["masked_tokens"]:,} tokens).

**Use it** to measure, and for nothing else. Its vectors were never trained to compare texts, and its books are from
1800 to 1930, with their views of the world.
"""


if __name__ == "__main__":
    result = json.loads((HERE / "results/pretraining.json").read_text())
    (HERE / "model/README.md").write_text(card(result))
