# SPDX-License-Identifier: Apache-2.0
"""Pretrain the bundled model from scratch: tokenizer, training, storing in 16 bits, scores, model card.

    python pretraining/pretrain.py --books BOOKS --search     # tries learning rates (results/search.json)
    python pretraining/pretrain.py --books BOOKS              # writes the model to src/carryforward/bundled

BOOKS holds train/, validation/ and test/ of .txt files. About ten minutes on one H200.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from card import card
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from carryforward.data.corpora import open_corpus
from carryforward.data.documents import Documents, load_documents
from carryforward.evaluation.perplexity import perplexity
from carryforward.utils.console import note
from carryforward.utils.files import write_json
from carryforward.utils.progress import ProgressBar
from carryforward.utils.provenance import provenance

HERE = Path(__file__).parent
RECORD = HERE / "results/pretraining.json"
BUNDLED = HERE.parent / "src/carryforward/bundled"
POSITIONS = 512
SHAPE = {"n_positions": POSITIONS, "n_embd": 256, "n_layer": 7, "n_head": 8}
VOCABULARY = 4096  # small: its embeddings are 1 M of 6.7 M parameters
CHARACTERS = 50_000  # of each book, to train the tokenizer
BATCH = 64  # windows of 512 tokens
END = "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--books", required=True, help="folder with train/, validation/, test/")
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder to write the model to")
    parser.add_argument("--tokens", type=float, default=440e6, help="tokens to train on, over several epochs")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search", nargs="*", type=float, help="only try these rates briefly (5e-4 1e-3 2e-3)")
    parser.add_argument("--search-tokens", type=float, default=100e6, help="tokens to try each rate on")
    parser.add_argument("--score", action="store_true", help="only score the existing model and write its card")
    parser.add_argument("--score-tokens", type=int, help="score the first so many tokens of each book; all by default")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.score:
        return score(arguments)

    tokenizer = make_tokenizer(arguments.books, arguments.out)
    train = load_documents(arguments.books, "train", tokenizer)
    stream = concatenated(train, tokenizer.eos_token_id).to(device)
    validation = held_out(arguments.books, "validation", tokenizer)
    note(f"{len(train):,} books, {len(stream):,} tokens; {int(train.words.sum()):,} words")

    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(config()).to(device)
    loss = torch.compile(lambda ids: loss_of(model, ids)) if arguments.compile else lambda ids: loss_of(model, ids)
    record = {
        **provenance(device),
        "command": shlex.join(["python", "pretraining/pretrain.py", *sys.argv[1:]]),
        "seed": arguments.seed,
        "config": {**SHAPE, "vocabulary": VOCABULARY, "batch": BATCH, "parameters": model.num_parameters()},
        "corpus": {"books": len(train), "words": int(train.words.sum()), "tokens": len(stream)},
    }
    if arguments.search is not None:
        trials, start = [], {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for rate in arguments.search or [5e-4, 1e-3, 2e-3]:
            model.load_state_dict(start)
            seconds = fit(model, loss, stream, rate, int(arguments.search_tokens), arguments.seed)
            scores = perplexity(model, validation, window=POSITIONS, batch_size=BATCH)
            trials.append({"learning_rate": rate, "word_perplexity": scores.word_perplexity, "seconds": seconds})
            outcome = f"validation word perplexity {scores.word_perplexity:.2f} after {seconds:.0f} s"
            note(f"learning rate {rate:g}: {outcome}")
            write(HERE / "results/search.json", {**record, "tokens": arguments.search_tokens, "trials": trials})
        return

    seconds = fit(model, loss, stream, arguments.learning_rate, int(arguments.tokens), arguments.seed)
    store(model, arguments.out)
    training = {"tokens": int(arguments.tokens), "learning_rate": arguments.learning_rate, "seconds": seconds}
    write(RECORD, {**record, "training": training, "scores": {}})
    score(arguments)


def score(arguments: argparse.Namespace) -> None:
    """Score the stored model, which is what users load, and write its card."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = json.loads(RECORD.read_text())
    model = AutoModelForCausalLM.from_pretrained(arguments.out).to(device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.out)
    for split in ("validation", "test"):
        documents = held_out(arguments.books, split, tokenizer, arguments.score_tokens)
        with ProgressBar(f"scoring {split}", int(documents.lengths.sum()), "tokens") as bar:
            scores = perplexity(model, documents, window=POSITIONS, batch_size=BATCH, progress=bar.advance)
        record["scores"][split] = {
            **dataclasses.asdict(scores), "word_perplexity": scores.word_perplexity,
            "bits_per_byte": scores.bits_per_byte, "token_perplexity": scores.token_perplexity,
            "tokens_of_each_book": arguments.score_tokens,
            "hardware": provenance(device)["hardware"],
        }  # fmt: skip
        write(RECORD, record)
    (arguments.out / "README.md").write_text(card(record))


def config() -> GPT2Config:
    """The model's config, without dropout: there is too much text to overfit."""
    return GPT2Config(
        vocab_size=VOCABULARY, **SHAPE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )


# --- text ----------------------------------------------------------------------------------------------------------


def make_tokenizer(books: str, folder: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the beginning of every training book, or load it if the folder has one."""
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    texts = (text.text[:CHARACTERS] for text in open_corpus(books, "train"))
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    fast.save_pretrained(folder)
    return fast


def concatenated(documents: Documents, end: int) -> Tensor:
    """All documents as one tensor, with an end token after each."""
    end_token = torch.tensor([end], dtype=torch.int16)
    return torch.cat([piece for ids in documents for piece in (torch.from_numpy(ids.astype("int16")), end_token)])


def held_out(books: str, split: str, tokenizer: Any, max_tokens: int | None = 15_000) -> Documents:
    return load_documents(books, split, tokenizer, max_tokens=max_tokens)


def batches(stream: Tensor, seed: int) -> Iterator[Tensor]:
    """Batches of windows and the token after each. An epoch has every token once; epochs differ in cuts and order."""
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(POSITIONS + 1, device=stream.device)
    while True:
        shift = int(torch.randint(POSITIONS, (), generator=generator))
        count = (len(stream) - 1 - shift) // POSITIONS
        starts = (shift + POSITIONS * torch.randperm(count, generator=generator)).to(stream.device)
        for batch in starts.split(BATCH):
            if len(batch) == BATCH:
                yield stream[batch[:, None] + within].long()


# --- training ------------------------------------------------------------------------------------------------------


def loss_of(model: GPT2LMHeadModel, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def fit(
    model: GPT2LMHeadModel, loss: Callable[[Tensor], Tensor], stream: Tensor, rate: float, tokens: int, seed: int
) -> float:
    """Train with AdamW; the rate rises linearly over a fiftieth of the steps, then falls linearly to zero.

    Returns:
        the time it took, in seconds.
    """
    steps = max(1, tokens // (BATCH * POSITIONS))
    warmup = max(1, steps // 50)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    model.train()
    begun, recent = time.perf_counter(), torch.zeros((), device=stream.device)
    with ProgressBar(f"learning rate {rate:g}", steps * BATCH * POSITIONS, "tokens") as bar:
        for step, ids in zip(range(1, steps + 1), batches(stream, seed), strict=False):
            value = loss(ids)
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            recent = recent.lerp(value.detach(), 1 / min(step, 200))
            if step % 50 == 0 or step == steps:  # not more often: reading the loss waits for the device
                if not math.isfinite(recent.item()):
                    raise ArithmeticError(f"The loss became {recent.item()}: use a smaller --learning-rate.")
                bar.update(step * BATCH * POSITIONS, remark=f"loss {recent.item():.3f}")
    return time.perf_counter() - begun


def store(model: GPT2LMHeadModel, folder: Path) -> None:
    """Save the weights in float16 to halve the file; the config says float32, so they are loaded as float32."""
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)


if __name__ == "__main__":
    main()
