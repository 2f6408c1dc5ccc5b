# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the fast path: CUDA graphs imitated on a CPU, and training steps with and without them."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from carryforward.engine import cuda_graphs
from helpers import tiny

IDS = tiny.documents(3, 45)
RAGGED = torch.tensor([[1] * 45, [1] * 30 + [0] * 15, [1] * 9 + [0] * 36])
RAGGED_ROWS = (torch.arange(45) < torch.tensor([45, 38, 20])[:, None]).long()  # their last windows need a mask
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Tape(TorchDispatchMode):
    """Notes every operation on tensors."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result


def run_again(function, pool):
    """A recording without a GPU: the same operations on the same tensors, and not a line of Python again."""
    with Tape() as tape:
        results = function()

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # or what was cast, and cast back, is cast once more
    def again():
        for operation, args, kwargs, result in tape.operations:
            if any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns):
                continue  # a view: it shows what it is a view of
            new = operation(*[a.detach() if isinstance(a, torch.Tensor) else a for a in args], **kwargs)
            for place, value in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.detach().copy_(value)

    return results, again


def step(model, ids=IDS, seed=3, **kwargs):
    torch.manual_seed(seed)
    out = model(ids, labels=ids, **kwargs)
    out.loss.backward()
    return out, tiny.gradients(model)


def both(name, training=False, **fields):
    plain, fast = (tiny.recurrent(name, **fields).train(training) for _ in range(2))
    plain.fast_path = "off"
    return plain, fast


def answers(name, training=False, **fields):
    plain, fast = (tiny.answering(name, **fields).train(training) for _ in range(2))
    plain.fast_path = "off"
    return plain, fast


def learn(model, seed=3, mask=RAGGED_ROWS, questions=tiny.QUESTIONS, device="cpu", **kwargs):
    """A step of a model that answers questions: its output and gradients."""
    out = asked(model, seed, mask, questions, device, **kwargs)
    out.loss.backward()
    return out, tiny.gradients(model)


def asked(model, seed=3, mask=RAGGED_ROWS, questions=tiny.QUESTIONS, device="cpu", **kwargs):
    torch.manual_seed(seed)
    told = {"start_positions": torch.tensor([40, -100, 3]), "end_positions": torch.tensor([42, -100, 3]),
            "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    ids, rows = tiny.documents(3, 45, seed).to(device), len(questions)
    told = {key: value[:rows].to(device) for key, value in told.items()}
    return model(ids[:rows], attention_mask=mask[:rows].to(device), question_ids=questions, **told, **kwargs)


def assert_same_answers(out, expected, tolerance=1e-5):
    for key in ("loss", "start_logits", "end_logits", "kind_logits"):
        assert_close(out[key], expected[key], rtol=10 * tolerance, atol=tolerance)


def recordings_of(model, kind=cuda_graphs.CapturedForward):
    return [one for some in model.graph_cache._recordings.values() for one in some if isinstance(one, kind)]


class Letters:
    """A tokenizer of characters."""

    is_fast = True

    def __call__(self, texts, **kwargs):
        ids = [[5 + ord(letter) % 60 for letter in text] for text in texts]
        offsets = [[(i, i + 1) for i in range(len(text))] for text in texts]
        return {"input_ids": ids, "offset_mapping": offsets}
