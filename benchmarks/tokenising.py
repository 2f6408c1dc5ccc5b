# SPDX-License-Identifier: Apache-2.0
"""How fast text becomes tokens: the processor's time for a corpus of many documents.

    python benchmarks/tokenising.py

Writes benchmarks/results/tokenising-cpu.json, which benchmarks/corpus_cost.py reads. The text is Python's own
documentation, repeated; the tokenizer is byte-level BPE as GPT-2's, trained on it. The cache is written to disk.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
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


def texts_of(size: int) -> Iterator[str]:
    """Texts of about so many bytes in all."""
    names = cycle(sorted(topics))
    while size > 0:
        text = topics[next(names)]
        size -= len(text.encode())
        yield text


def rate(work: Callable[[], object], size: int) -> dict[str, float]:
    """Bytes in a second of the processor's time, of all threads together: other work on the machine hardly changes it.
    The best of several rounds, and the slowest."""
    seconds = []
    for _ in range(ROUNDS):
        begun = time.process_time()
        work()
        seconds.append(time.process_time() - begun)
    return {"bytes": size, "bytes_per_core_second": size / min(seconds), "slowest": size / max(seconds)}


def measure_tokenising(folder: Path) -> dict[str, Any]:
    """`tokenise`, with the cache on disk; and how many tokens a byte gives."""
    from carryforward.data.corpora import open_corpus
    from carryforward.data.documents import tokenise

    corpus, rounds = folder / "texts", count()
    corpus.mkdir()
    for i, text in enumerate(texts_of(TEXT_MB * 1_000_000)):
        (corpus / f"{i:06}.txt").write_text(text, encoding="utf-8")
    tokenizer = gpt2_like([topics[name] for name in sorted(topics)])

    def run() -> Any:
        return tokenise(open_corpus(str(corpus), "train"), tokenizer, cache=folder / str(next(rounds)))

    documents = run()
    return {**rate(run, int(documents.bytes.sum())), "tokens": int(documents.lengths.sum())}


def measure_reading(folder: Path) -> dict[str, Any]:
    """Reading a JSON lines file as `embed` does in every process: lines, digest, documents."""
    from carryforward.embeddings.document_groups import CHARACTERS_PER_GROUP, read_groups
    from carryforward.settings.commands import EmbedSettings

    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(TEXT_MB * 1_000_000)))
    characters = CHARACTERS_PER_GROUP["document"]
    return rate(
        lambda: sum(len(chunk.ids) for chunk in read_groups(file, EmbedSettings(), characters)), TEXT_MB * 10**6
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with collect_cases(args.out, {**provenance("cpu"), "seed": 0, "rounds": ROUNDS}) as add:
        for name, measure in (("tokenise", measure_tokenising), ("read JSON lines", measure_reading)):
            with tempfile.TemporaryDirectory() as folder:
                add({"name": name, **measure(Path(folder))})


if __name__ == "__main__":
    main()
