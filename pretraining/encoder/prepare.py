# SPDX-License-Identifier: Apache-2.0
"""Train the small encoder's tokenizer and tokenise the books: arrays that can be sent to another machine.

    python pretraining/encoder/prepare.py --books BOOKS --out DATA

BOOKS holds train/ and validation/ of .txt files. DATA gets `tokenizer/`, `train-00.npy` and so on and `validation.npy`
(uint16, one book after the other, [SEP] after each), and `data.json`, which says what they are.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from carryforward.data.corpora import open_corpus
from carryforward.data.texts import Text
from carryforward.data.tokenization import Encoder, fingerprint
from carryforward.utils.console import note
from carryforward.utils.digests import digest_file
from carryforward.utils.files import atomic_write, write_json
from carryforward.utils.progress import ProgressBar
from carryforward.utils.provenance import provenance

POSITIONS = 512
VOCABULARY = 8192
ALPHABET = 256  # characters; rarer ones are unknown
CHARACTERS = 50_000  # of each book, to train the tokenizer
PIECE = 28_000_000  # tokens of a file: 56 MB
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
           "mask_token": "[MASK]"}  # fmt: skip
BOOKS_AT_ONCE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--books", required=True, help="folder with train/ and validation/")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to, outside the repository")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens of the tokenizer")
    arguments = parser.parse_args()
    prepare(arguments.books, arguments.out, arguments.vocabulary)


def prepare(books: str, out: Path, vocabulary: int = VOCABULARY, piece: int = PIECE) -> dict[str, Any]:
    """Write everything, and return the record of it."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(open_corpus(books, "train"), out / "tokenizer", vocabulary)
    splits = {split: write_split(open_corpus(books, split), tokenizer, out, piece) for split in ("train", "validation")}
    record = {**provenance("cpu"), "vocabulary": len(tokenizer), "tokenizer": fingerprint(tokenizer), **splits}
    write_json(out / "data.json", record)
    return record


def make_tokenizer(corpus: Iterable[Text], folder: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a word-piece tokenizer, lower case, on the beginning of every training book; load it if it is there."""
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL.values()), limit_alphabet=ALPHABET, show_progress=False
    )
    note("training the tokenizer")
    tokenizer.train_from_iterator((text.text[:CHARACTERS] for text in corpus), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=POSITIONS, **SPECIAL)
    fast.save_pretrained(folder)
    return fast


def write_split(corpus: Any, tokenizer: PreTrainedTokenizerFast, out: Path, piece: int) -> dict[str, Any]:
    """Tokenise a split into files of at most `piece` tokens. Returns its counts, and the digests of its files."""
    encoder, end = Encoder(tokenizer), np.array([tokenizer.sep_token_id], np.uint16)
    counts, files, waiting = {"books": 0, "words": 0, "tokens": 0, "unknown": 0}, {}, [np.zeros(0, np.uint16)]

    def write(ids: np.ndarray) -> None:
        name = corpus.split if corpus.split == "validation" else f"{corpus.split}-{len(files):02d}"
        with atomic_write(out / f"{name}.npy") as temporary, temporary.open("wb") as file:
            np.save(file, ids)
        files[f"{name}.npy"] = digest_file(out / f"{name}.npy")

    with ProgressBar(f"tokenising {corpus.split}", corpus.size, "bytes") as bar:
        for books in _grouped(corpus, BOOKS_AT_ONCE):
            for encoded in encoder.encode([book.text for book in books]):
                ids = encoded.ids.astype(np.uint16)
                counts["books"] += 1
                counts["words"] += encoded.words
                counts["unknown"] += int((ids == tokenizer.unk_token_id).sum())
                waiting += [ids, end]
                bar.advance(encoded.bytes)
            stream = np.concatenate(waiting)
            while len(stream) > piece:
                write(stream[:piece])
                counts["tokens"] += piece
                stream = stream[piece:]
            waiting = [stream]
    write(waiting[0])
    counts["tokens"] += len(waiting[0])
    return {**counts, "files": files}


def _grouped(corpus: Iterable[Text], size: int) -> Iterator[list[Text]]:
    group: list[Text] = []
    for text in corpus:
        group.append(text)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


if __name__ == "__main__":
    main()
