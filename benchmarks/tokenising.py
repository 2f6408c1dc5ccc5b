# SPDX-License-Identifier: Apache-2.0
"""How fast text becomes tokens: the processor's time for a corpus of many documents.

    python benchmarks/tokenising.py

Writes benchmarks/results/tokenising-cpu.json, which benchmarks/corpus_cost.py reads. The text is Python's own
documentation, repeated; the tokenizer is byte-level BPE as GPT-2's, trained on it. The cache is written to disk.
"""

import argparse
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from measurements import RESULTS, collect_cases

from carryforward.utils.provenance import provenance

OUT = RESULTS / "tokenising-cpu.json"
TEXT_MB = 20
ROUNDS = 3


def gpt2_like(texts: list[str]) -> Any:
    """A byte-level BPE tokenizer as GPT-2's, with as many merges of its vocabulary as the text gives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=50257, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def measure() -> dict[str, Any]:
    """Text that a core tokenises in a second, by the processor's time in all threads, which other work on the machine
    hardly changes; the best of several rounds."""
    from carryforward.data.corpora import open_corpus
    from carryforward.data.documents import tokenise

    texts = [topics[name] for name in sorted(topics)]
    tokenizer, seconds = gpt2_like(texts), []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "texts"
        corpus.mkdir()
        size = number = 0
        while size < TEXT_MB * 1_000_000:
            text = texts[number % len(texts)]
            (corpus / f"{number:06}.txt").write_text(text, encoding="utf-8")
            size, number = size + len(text.encode()), number + 1
        for i in range(ROUNDS):
            begun = time.process_time()
            documents = tokenise(open_corpus(str(corpus), "train"), tokenizer, cache=Path(folder) / str(i))
            seconds.append(time.process_time() - begun)
        size, tokens = int(documents.bytes.sum()), int(documents.lengths.sum())
    rates = {"bytes_per_core_second": size / min(seconds), "slowest": size / max(seconds)}
    return {"name": "tokenise", "bytes": size, "tokens": tokens, **rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with collect_cases(args.out, {**provenance("cpu"), "seed": 0, "rounds": ROUNDS}) as add:
        add(measure())


if __name__ == "__main__":
    main()
