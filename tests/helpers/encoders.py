# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with a word for every id of tiny encoders, documents, masks, and small trainers of encoders."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import carryforward as cf
from carryforward.data.labelled import LabelledDocuments, LabelledText
from carryforward.data.masking import MaskedDocuments, Masking
from carryforward.training import encoder_trainer

from . import tiny

SPECIAL = (0, 1, 2, 3, 4)  # unknown, padding, first, last and mask token
MASK = 4
CLASSES = ("LABEL_0", "LABEL_1", "LABEL_2")
NO_DROPOUT, DROPOUT = (dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), p) for p in (0.0, 0.1))
KV = {"slots": 0, "recent": 3, "sinks": 1}
TWO_SIDED = {"memory": cf.KVMemoryConfig(recent=3, sinks=1, right=2, group_windows=3), "overlap": 0}
LENGTHS = (5, 1, 40, 77, 100, 12, 63, 2)
RNG = np.random.default_rng(0)
TRAIN = [RNG.integers(5, tiny.VOCABULARY, size=n) for n in LENGTHS]
HELD_OUT = [RNG.integers(5, tiny.VOCABULARY, size=n) for n in (30, 50, 1)]
MASKING = Masking(MASK, SPECIAL, tiny.VOCABULARY, probability=0.3)


def word(number: int) -> str:
    return f"w{number}"


def tokenizer() -> PreTrainedTokenizerFast:
    """The word "w7" is token 7."""
    special = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    vocabulary = {name: number for number, name in enumerate(special.values())}
    vocabulary |= {word(number): number for number in range(len(special), tiny.VOCABULARY)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def masked(documents=HELD_OUT, seed=0) -> MaskedDocuments:
    return MaskedDocuments(documents, MASKING, seed)


def labelled(task, documents=TRAIN, seed=0):
    """Documents with random labels; every third token has none."""
    random = np.random.default_rng(seed)
    labels = [random.integers(0, 3, size=len(ids) if task == "token-classification" else 1) for ids in documents]
    if task == "token-classification":
        for own in labels:
            own[::3] = -100
    texts = [LabelledText(f"line-{i}", "", ()) for i in range(len(documents))]
    first = [np.arange(len(ids)) for ids in documents] if task == "token-classification" else None
    return LabelledDocuments([*documents], labels, CLASSES, task, texts, first)


def model(name="bert", head=None, settings=None, **fields):
    torch.manual_seed(0)
    own = settings if settings is not None else NO_DROPOUT if name != "distilbert" else {}
    return tiny.recurrent(name, head, settings=own, **fields)


def trainer(out, *, name="bert", head=None, train=TRAIN, held_out=HELD_OUT, callbacks=(), settings=None, fields=None,
            **arguments):  # fmt: skip
    """A trainer of a masked language model or, with `head`, of a classifier of "token"s or "sequence"s."""
    trainer_class, arguments_class = {
        None: (encoder_trainer.MaskedTrainer, encoder_trainer.MaskedTrainingArguments),
        "token": (encoder_trainer.TokenClassificationTrainer, encoder_trainer.ClassificationTrainingArguments),
        "sequence": (encoder_trainer.ClassificationTrainer, encoder_trainer.ClassificationTrainingArguments),
    }[head]
    made = model(name, head, settings, **(fields or {}))
    if head is not None:
        made.config.id2label = dict(enumerate(train.classes))
    defaults = {
        "windows_per_sample": 3, "eval_tokens": 150, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 2, "logging_steps": 1, "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    defaults |= {"mask_probability": MASKING.probability} if head is None else {}
    args = arguments_class(str(out), **{**defaults, **arguments})
    extra = {"tokenizer": tokenizer()} if head is None else {}
    return trainer_class(made, args, train, held_out, callbacks=list(callbacks), **extra)
