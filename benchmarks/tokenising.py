# SPDX-License-Identifier: Apache-2.0
"""How fast text becomes tokens: a corpus of many documents, on one core and on all.

    python benchmarks/tokenising.py

Writes benchmarks/results/tokenising-cpu.json, which benchmarks/corpus_cost.py reads. The text is Python's own
documentation, repeated; the tokenizer is byte-level BPE as GPT-2's, trained on it. The cache is written to disk.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from measurements import RESULTS, collect_cases, run_case

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
    """Bytes per second of `tokenise`, the best of several rounds."""
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
            begun = time.perf_counter()
            documents = tokenise(open_corpus(str(corpus), "train"), tokenizer, cache=Path(folder) / str(i))
            seconds.append(time.perf_counter() - begun)
        size, tokens = int(documents.bytes.sum()), int(documents.lengths.sum())
    best = min(seconds)
    return {"bytes": size, "tokens": tokens, "bytes_per_second": size / best, "slowest": size / max(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--cores", type=int, help="measure in this process, on so many cores, and print JSON")
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
        print(json.dumps(measure()))
        return
    with collect_cases(args.out, {**provenance("cpu"), "seed": 0, "rounds": ROUNDS}) as add:
        for cores in sorted({1, len(os.sched_getaffinity(0))}):
            env = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(cores)}
            add({"cores": cores, **run_case(__file__, "--cores", str(cores), env=env)})


if __name__ == "__main__":
    main()
