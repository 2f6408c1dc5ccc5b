# SPDX-License-Identifier: Apache-2.0
"""What must not make a difference, asked of one model type and one memory: the equivalences of `tests/properties`,
short enough for all model types. A check raises an AssertionError.
"""

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import carryforward as cf
from carryforward.backbones.architectures import ARCHITECTURES, store_architecture
from carryforward.backbones.discovery import discover
from carryforward.models.verification import verify

from . import families, tiny
from .generation import GREEDY, decode, greedy_continuation, logits_of_one_call, pad_left

MEMORIES = {
    "vector": cf.VectorMemoryConfig(slots=2, insert_at="all", hidden_sizes=(12,)),
    "kv": cf.KVMemoryConfig(recent=3, sinks=1),
    "tokens": cf.TokenMemoryConfig(memory_tokens=3),
    "associative": cf.AssociativeMemoryConfig(memory_tokens=2, key_size=5),
}
KV = ("kv",)
AROUND = ("tokens", "associative")  # memories that put positions around a window


@dataclass(frozen=True)
class Check:
    """An equivalence.

    Attributes:
        memories: those that it is about.
        causal_only: it is not about encoders.
    """

    holds: Callable[[str, str], None]
    memories: tuple[str, ...] = tuple(MEMORIES)
    causal_only: bool = False

    def cases(self, name: str) -> list[str]:
        """The memories that it is asked of for a model type."""
        if self.causal_only and not families.is_causal(name):
            return []
        return [one for one in self.memories if one not in AROUND or name not in families.NO_MEMORY_POSITIONS]


def build(name: str, memory: str, **fields: Any) -> Any:
    return families.recurrent(name, memory=MEMORIES[memory], **fields)


def assert_close(x: Tensor, expected: Tensor, scale: float = 0.0, what: str = "outputs") -> None:
    """Close as measured by the largest number, or by a larger `scale`: single precision, or norms and rotations that
    models compute in it."""
    tolerance = 1e-5 if x.dtype == torch.float64 else 2e-4
    assert x.shape == expected.shape, f"{what}: {tuple(x.shape)} is not {tuple(expected.shape)}"
    assert x.isfinite().all(), f"{what} are not finite"
    error, largest = float((x - expected).abs().max()), max(float(expected.abs().max()), scale)
    assert error <= tolerance * largest, f"{what} differ by {error:.2g}, of {largest:.2g}"


def trained(model: Any, ids: Tensor, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output and the gradients of a training step."""
    torch.manual_seed(5)
    out = model(ids, labels=ids, **arguments)
    out.loss.backward()
    return out, tiny.gradients(model)


def assert_same_step(step: tuple[Any, dict], expected: tuple[Any, dict]) -> None:
    assert_close(step[0].loss.detach(), expected[0].loss.detach(), what="losses")
    assert_same_gradients(step[1], expected[1])


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal gradients of all parameters; what a loss does not depend on may have none."""
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for key in ours.keys() | theirs.keys():
        one, other = ours.get(key), theirs.get(key)
        if one is None or other is None:
            assert not (other if one is None else one).any(), f"{key} has a gradient in one case only"
        else:
            assert_close(one, other, scale=0.01 * largest, what=f"gradients of {key}")


# --- the checks ------------------------------------------------------------------------------------------------------


def is_verified(name: str, _: str = "") -> None:
    """What discovery finds is verified, or what the table says."""
    model = families.base(name)
    found = discover(model)
    if name not in ARCHITECTURES:
        store_architecture(model.config, found)
    verify(model, cf.RecurrentForCausalLM if families.is_causal(name) else cf.RecurrentForMaskedLM)


@torch.no_grad()
def state_removed(name: str, memory: str) -> None:
    """Every window is the base model's, one window has its loss, and the state has an effect."""
    model, ids = build(name, memory, overlap=0), tiny.documents(2, 24)
    recurrence = model.config.recurrence
    logits = model(ids, use_state=False).logits
    sides = [torch.tensor(side, dtype=torch.long).expand(2, -1) for side in (recurrence.prefix, recurrence.suffix)]
    for start in (0, 8, 16):
        window = model.base(input_ids=torch.cat([sides[0], ids[:, start : start + 8], sides[1]], dim=1)).logits
        assert_close(logits[:, start : start + 8], window[:, len(recurrence.prefix) :][:, :8])
    assert (model(ids).logits - logits)[:, 8:].abs().max() > 1e-3, "the state has no effect"
    if families.is_causal(name):
        expected = model.base(input_ids=ids[:, :8], labels=ids[:, :8]).loss
        for use_state in (True, False) if memory != "tokens" else (False,):
            assert_close(model(ids[:, :8], labels=ids[:, :8], use_state=use_state).loss, expected, what="losses")


@torch.no_grad()
def two_windows(name: str, _: str) -> None:
    """Two windows, of which the second carries all of the first, are one text in which the first does not see the
    second."""
    everything = cf.KVMemoryConfig(recent=7, sinks=1)
    wide = {"sliding_window": 64, "local_attention": 128}  # of carried positions every query sees all
    model = families.recurrent(name, memory=everything, window=8, overlap=0, prefix=(), suffix=(), settings=wide)
    if model.memory.kv.position_offsets is not None:
        torch.nn.init.zeros_(model.memory.kv.position_offsets)
    ids = tiny.documents(1, 16)
    logits = model(ids).logits
    if not families.is_causal(name):
        model.base.set_attn_implementation(_IN_TWO_WINDOWS)
    assert_close(logits, model.base(input_ids=ids).logits)


def _attend_in_two_windows(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any) -> Any:
    """The attention of an encoder in which the first half of a text does not see the second."""
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    visible[: len(visible) // 2, len(visible) // 2 :] = False
    return sdpa_attention_forward(module, query, key, value, visible[None, None], **kwargs)


_IN_TWO_WINDOWS = "attention_in_two_windows"
AttentionInterface.register(_IN_TWO_WINDOWS, _attend_in_two_windows)


def streamed(name: str, memory: str) -> None:
    """Read in pieces, a text has the loss and the gradients of one call."""
    model, ids = build(name, memory), tiny.documents(2, 26)
    whole = model(ids, labels=ids)
    whole.nll_sum.backward()
    expected, state, total = tiny.gradients(model), None, torch.zeros((), dtype=model.dtype)
    for begin, end in itertools.pairwise([0, 1, 10, 11, 26]):
        final = {} if families.is_causal(name) else {"final": end == 26}
        out = model(ids[:, begin:end], labels=ids[:, begin:end], state=state, **final)
        state, total = out.state, total + out.nll_sum
    assert_close(total.detach(), whole.nll_sum.detach(), what="losses")
    total.backward()
    assert_same_gradients(tiny.gradients(model), expected)


def recomputed(name: str, memory: str) -> None:
    """Windows that are computed again in the backward pass have the gradients of a graph that is kept."""
    ids = tiny.documents(2, 26)
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    steps = [trained(build(name, memory, keep_graph=keep).train(), ids, attention_mask=mask) for keep in (False, True)]
    assert_same_step(*steps)
    assert any(gradient.any() for key, gradient in steps[0][1].items() if "memory" in key) or memory == "kv"


def batched(name: str, memory: str) -> None:
    """Rows of different lengths, padded on the left, have the logits and the gradients of each alone."""
    model, lengths = build(name, memory), [3, 23, 9]
    ids, mask = pad_left(tiny.documents(3, max(lengths)), lengths)
    together = model(ids, attention_mask=mask, labels=ids)
    together.nll_sum.backward()
    expected, total = tiny.gradients(model), torch.zeros((), dtype=model.dtype)
    logits = model(ids, attention_mask=mask).logits
    for row, length in enumerate(lengths):
        alone = ids[row : row + 1, -length:]
        assert_close(logits[row : row + 1, -length:].detach(), model(alone).logits.detach())
        total = total + model(alone, labels=alone).nll_sum
    assert_close(together.nll_sum.detach(), total.detach(), what="losses")
    total.backward()
    assert_same_gradients(tiny.gradients(model), expected)


@torch.no_grad()
def generated(name: str, memory: str) -> None:
    """Read token by token, rows of different lengths have the logits of one call, and greedy search its tokens."""
    model, ids, lengths = build(name, memory), tiny.documents(2, 24), [1, 9]
    logits, _ = decode(model, ids, lengths)
    assert_close(logits, logits_of_one_call(model, ids, lengths), what="logits")
    expected = greedy_continuation(model, ids[:, :11], 6)
    assert model.generate(ids[:, :11], max_new_tokens=6, **GREEDY).equal(expected), "greedy search finds other tokens"


def blocks(name: str, memory: str) -> None:
    """Three windows side by side are what one after the other is."""
    ids = tiny.documents(2, 33)
    steps = [trained(build(name, memory, block_windows=size), ids) for size in (3, 1)]
    assert_same_step(*steps)


def saved(name: str, memory: str) -> None:
    """A model that was saved and loaded by its Auto class computes the same."""
    model, ids = build(name, memory), tiny.documents(2, 20)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        auto = getattr(transformers, type(model).auto_class)
        loaded = auto.from_pretrained(folder, dtype=model.dtype).eval()
    if loaded.dtype == torch.float64:
        families.compute_in_double(loaded.base)
    assert loaded.config.recurrence == model.config.recurrence
    assert_same_step(trained(loaded, ids), trained(model, ids))


CHECKS = {
    "verified": Check(is_verified, memories=("",)),
    "state removed": Check(state_removed),
    "two windows": Check(two_windows, memories=KV),
    "streamed": Check(streamed),
    "recomputed": Check(recomputed),
    "batched": Check(batched),
    "generated": Check(generated, causal_only=True),
    "blocks": Check(blocks, memories=KV),
    "saved": Check(saved),
}
