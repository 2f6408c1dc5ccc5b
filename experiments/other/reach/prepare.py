# SPDX-License-Identifier: Apache-2.0
"""Tokenise what `run.py` reads, so that only token ids and counts of words and bytes go to another machine.

    python prepare.py bundled path/to/books travel/bundled.npz
    python prepare.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf path/to/books travel/smollm2.npz --pieces 33

The folder of books has validation/*.txt and train/*.txt. The latter are needed by models with learned positions only,
whose position offsets are measured on them. `--pieces` also writes the model's file beside the tokens in pieces of so
many megabytes; `run.py` joins them. Needs no GPU.
"""

import argparse
from pathlib import Path

import tokens

from carryforward.backbones.architectures import architecture_of
from carryforward.data.documents import Documents, load_documents
from carryforward.models.loading import load_causal

TRAIN_DOCUMENTS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the plain model: bundled, a folder, a Hub name or a .gguf file")
    parser.add_argument("data", help="folder of books, or python-docs")
    parser.add_argument("out", type=Path, help="the .npz to write")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--documents", type=int, default=60, help="at most so many, by name")
    parser.add_argument("--tokens", type=int, default=8000, help="of each document")
    parser.add_argument("--deep-documents", type=int, default=20, help="documents that gains by depth are measured on")
    parser.add_argument("--deep-tokens", type=int, default=12_000, help="of each of them")
    parser.add_argument("--long-tokens", type=int, default=60_000, help="of the longest document")
    parser.add_argument("--pieces", type=int, metavar="MB", help="also write the model's file, in pieces")
    prepare(parser.parse_args())


def prepare(arguments: argparse.Namespace) -> None:
    loaded = load_causal(arguments.model)
    cuts = {"books": arguments.tokens, "deep": arguments.deep_tokens, "long": arguments.long_tokens}
    texts = {name: load_documents(arguments.data, arguments.split, loaded.tokenizer, max_tokens=cut)
             for name, cut in cuts.items()}  # fmt: skip
    texts["books"] = texts["books"][: arguments.documents]
    texts["deep"] = longest(texts["deep"], arguments.deep_documents)
    texts["long"] = longest(texts["long"], 1)
    if not architecture_of(loaded.model.config).rotary:
        train = load_documents(arguments.data, "train", loaded.tokenizer, max_tokens=arguments.tokens)
        texts["train"] = train[:TRAIN_DOCUMENTS]
    tokens.save(arguments.out, texts)
    if arguments.pieces:
        tokens.split_file(Path(arguments.model), arguments.out.parent, arguments.pieces * 10**6)


def longest(documents: Documents, count: int) -> Documents:
    """The documents with most tokens, the first of several as long, in their order."""
    return documents.select(sorted((-documents.lengths).argsort(kind="stable")[:count]))


if __name__ == "__main__":
    main()
