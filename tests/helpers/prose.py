# SPDX-License-Identifier: Apache-2.0
"""Real text, a tokenizer trained on it and a tiny GPT-2 on disk, as a user of the command line has them."""

from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

VOCABULARY = 300
TOPICS = [topics[name] for name in sorted(topics)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it encodes every text, and has one special token, which ends a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TOPICS[:8],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|end|>", eos_token="<|end|>")


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """The same with an encoder's special tokens, which it puts around texts and pairs, and a maximum length."""
    bpe = tokenizer().backend_tokenizer
    special = {"cls_token": "<|cls|>", "sep_token": "<|sep|>", "pad_token": "<|pad|>", "mask_token": "<|mask|>"}
    bpe.add_special_tokens([*special.values()])
    ends = [(token, bpe.token_to_id(token)) for token in ("<|cls|>", "<|sep|>")]
    bpe.post_processor = processors.TemplateProcessing(
        single="<|cls|> $A <|sep|>", pair="<|cls|> $A <|sep|> $B:1 <|sep|>:1", special_tokens=ends
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special, model_max_length=32, model_input_names=names)


def save_model(folder: Path) -> Path:
    """Save a tiny plain GPT-2 with its tokenizer."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_topics(folder: Path, count: int = 12) -> Path:
    """Write the beginnings of some topics to text files."""
    folder.mkdir()
    for number, text in enumerate(TOPICS[:count]):
        (folder / f"{number:02}.txt").write_text(text[:1500], encoding="utf-8")
    return folder
