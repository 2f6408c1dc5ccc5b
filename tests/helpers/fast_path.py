# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of the fast path: CUDA graphs emulated on the CPU, and training steps with and without them."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from carryforward.engine import cuda_graphs, graph_cache
from helpers import tiny

IDS = tiny.documents(3, 45)
RAGGED = torch.tensor([[1] * 45, [1] * 30 + [0] * 15, [1] * 9 + [0] * 36])
RAGGED_ROWS = (torch.arange(45) < torch.tensor([45, 38, 20])[:, None]).long()  # their last windows need a mask
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run it on a machine that has one")


class OperationLog(TorchDispatchMode):
    """Records every tensor operation."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result


def capture_on_cpu(function, pool):
    """As `cuda_graphs.capture`, without a GPU: the replay repeats the tensor operations on the same tensors and runs no
    other Python code."""
    with OperationLog() as log:
        results = function()
    steps = [
        (operation, [_detached(a) for a in args], kwargs, [_detached(place) for place in tree_leaves(result)])
        for operation, args, kwargs, result in log.operations
        if not any(r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns)
    ]  # without views, which follow their bases

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # the log has autocast's own casts already
    def replay():
        for operation, args, kwargs, places in steps:
            new = operation(*args, **kwargs)
            for place, value in zip(places, [new] if isinstance(new, torch.Tensor) else tree_leaves(new), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)

    return results, replay


@pytest.fixture
def captures(monkeypatch):
    """Capture on the CPU, from the second window of a shape on. The list of captured functions."""
    functions = []
    monkeypatch.setattr(graph_cache, "DEVICES", ("cpu",))
    monkeypatch.setattr(graph_cache, "CAPTURE_AFTER", 1)
    monkeypatch.setattr(cuda_graphs, "warm_up", lambda function, times=1: function())
    monkeypatch.setattr(cuda_graphs.GradientAccumulator, "pool", lambda self, shared=True: None)
    monkeypatch.setattr(
        cuda_graphs, "capture", lambda function, pool: functions.append(function) or capture_on_cpu(function, pool)
    )
    return functions


def _detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def step(model, ids=IDS, seed=3, **kwargs):
    """One training step of a model with a loss: its output and gradients."""
    torch.manual_seed(seed)
    out = model(ids, labels=ids, **kwargs)
    out.loss.backward()
    return out, tiny.gradients(model)


def model_pair(name, training=False, **fields):
    """Two equal models: one that always runs eagerly, and one that captures."""
    plain, fast = (tiny.recurrent(name, **fields).train(training) for _ in range(2))
    plain.fast_path = "off"
    return plain, fast


def qa_pair(name, training=False, **fields):
    """The same for question answering."""
    plain, fast = (tiny.answering(name, **fields).train(training) for _ in range(2))
    plain.fast_path = "off"
    return plain, fast


def qa_forward(model, seed=3, mask=RAGGED_ROWS, questions=tiny.QUESTIONS, device="cpu", **kwargs):
    """The output of a question-answering model, with a loss, for as many documents as there are questions."""
    torch.manual_seed(seed)
    answers = {"start_positions": torch.tensor([40, -100, 3]), "end_positions": torch.tensor([42, -100, 3]),
               "answer_kinds": torch.tensor([0, 2, 0])}  # fmt: skip
    ids, rows = tiny.documents(3, 45, seed).to(device), len(questions)
    answers = {key: value[:rows].to(device) for key, value in answers.items()}
    return model(ids[:rows], attention_mask=mask[:rows].to(device), question_ids=questions, **answers, **kwargs)


def qa_step(model, seed=3, mask=RAGGED_ROWS, questions=tiny.QUESTIONS, device="cpu", **kwargs):
    """One training step of a question-answering model: its output and gradients."""
    out = qa_forward(model, seed, mask, questions, device, **kwargs)
    out.loss.backward()
    return out, tiny.gradients(model)


def assert_same_answers(out, expected, tolerance=1e-5):
    for key in ("loss", "start_logits", "end_logits", "kind_logits"):
        assert_close(out[key], expected[key], rtol=10 * tolerance, atol=tolerance)


def graphs_of(model, kind=cuda_graphs.CapturedForward):
    """A model's captured graphs of a kind."""
    return [graph for graphs in model.graph_cache._graphs.values() for graph in graphs if isinstance(graph, kind)]


class CharacterTokenizer:
    """One token for each character."""

    is_fast = True

    def __call__(self, texts, **kwargs):
        ids = [[5 + ord(letter) % 60 for letter in text] for text in texts]
        offsets = [[(i, i + 1) for i in range(len(text))] for text in texts]
        return {"input_ids": ids, "offset_mapping": offsets}
