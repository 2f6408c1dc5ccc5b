# SPDX-License-Identifier: Apache-2.0
"""Small models whose weights are quantised to 8 or 4 bits when they are loaded, by every method that runs on a CPU."""

import pytest
import torch
import transformers as hf

import carryforward as cf

from . import families, tiny

bitsandbytes = pytest.importorskip("bitsandbytes", reason="make test-all: it installs bitsandbytes")
torchao = pytest.importorskip("torchao.quantization", reason="make test-all: it installs torchao")

METHODS = {
    "bitsandbytes 8": lambda: hf.BitsAndBytesConfig(load_in_8bit=True),
    "bitsandbytes 4": lambda: hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "bitsandbytes nf4": lambda: hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "torchao 8": lambda: hf.TorchAoConfig(torchao.Int8WeightOnlyConfig()),
    "torchao 8, activations too": lambda: hf.TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()),
    "torchao 4": lambda: hf.TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
}


def cases(*cases):
    """Parameters of a test, each a method or a model and a method; most are slow."""
    quick = ("torchao 8", ("llama", "bitsandbytes nf4"), ("llama", "torchao 8"))
    marks = [() if case in quick else pytest.mark.slow for case in cases]
    values = [(case,) if isinstance(case, str) else case for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


# torchao quantises linear layers, and those of GPT-2 are of another class.
MODELS = cases(
    *(("llama", method) for method in METHODS), *(("gpt2", method) for method in METHODS if "bits" in method)
)
TRAINED = cases("bitsandbytes 8", "bitsandbytes nf4", "torchao 8", "torchao 4")
# Groups of 64 weights, and the vocabulary of `prose`.
_SIZES = {"hidden_size": 64, "n_embd": 64, "intermediate_size": 128, "n_inner": 128, "head_dim": 32, "vocab_size": 300}
MEMORIES = [cf.KVMemoryConfig(recent=3, sinks=1), cf.VectorMemoryConfig(hidden_sizes=(12,), insert_at="all")]


def save_plain(name, folder, head=None):
    """A model before it is quantised."""
    model = families.base(name, head, **_SIZES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.7 if parameter.ndim > 1 else 1.0
    model.save_pretrained(folder)


def load(folder, method, auto=hf.AutoModelForCausalLM, **options):
    return auto.from_pretrained(folder, quantization_config=METHODS[method](), **options)


def recurrent(model, memory=MEMORIES, **fields):
    """Recurrence on a quantised model, with a state large enough to matter."""
    model = cf.add_recurrence(model, memory=memory, documents=tiny.TEXT, **{"window": 8, "overlap": 2, **fields})
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.memory.parameters():
            parameter.normal_(std=0.6)
    return model.eval()
