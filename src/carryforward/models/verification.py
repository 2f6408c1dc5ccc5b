# SPDX-License-Identifier: Apache-2.0
"""Verification: whether a base model does with a state what recurrence needs, asked of the model itself.

An architecture may be wrong in ways that raise no error: a norm that is left out, a rotation that is another one, a
state that some layer never sees, logits that are scaled. Each check compares a few tokens read in windows with the base
model's own forward pass. The base model is as before afterwards.
"""

import contextlib
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..backbones import attention, own_attention
from ..backbones.architectures import architecture_of
from ..backbones.attention import unwrapped_name
from ..backbones.discovery import probe_ids
from ..backbones.hooks import HookContext
from ..backbones.modes import eval_mode
from ..backbones.observation import AttentionCall, Observation, call_backbone, observed_attention
from ..config import RecurrenceConfig, RecurrentModelConfig
from ..memories.base import MemoryConfig
from ..memories.kv import KVMemoryConfig
from ..memories.vector import VectorMemoryConfig
from .causal_lm import RecurrentForCausalLM
from .generation.window_cache import WindowCache
from .headless import RecurrentModel

WINDOW = 4
_SLACK = 10  # so many times what the base model differs from itself, in two batches, is rounding
_ROUNDING = {  # and always this much
    torch.float64: 1e-5,  # many models compute norms and rotations in single precision
    torch.float32: 1e-4,
    torch.float16: 0.005,
    torch.bfloat16: 0.025,
}


def record_of(base: PreTrainedModel) -> dict[str, str]:
    """What a verification holds for: the version of transformers and a digest of the file that defines the model."""
    file = sys.modules[type(base).__module__]
    digest = hashlib.sha256(inspect.getsource(file).encode()).hexdigest()
    return {"transformers": transformers.__version__, "source": digest}


def verify_again(model: Any) -> None:
    """Verify a recurrent model that was loaded, if it was verified with another version of its source."""
    current = record_of(model.base)
    if model.config.verified is not None and model.config.verified != current:
        verify(model.base, type(model))
        model.config.verified = current


def verify(base: PreTrainedModel, head: type) -> None:
    """Raise a ValueError that names the first check a base model does not pass.

    Args:
        head: the class of the recurrent model that is to be built on it.
    """
    backbone = architecture_of(base.config).backbone_of(base)
    with (
        eval_mode(base), torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(base)),
        _same_attention(backbone.config),
    ):  # fmt: skip
        torch.manual_seed(0)
        probe = _Probe(base, head)
        for check in (_state_removed, _state_arrives, _vectors_enter, _loss, _two_windows, _token_by_token):
            problem = _problem(check, probe)
            if problem:
                raise ValueError(
                    f"Recurrence cannot be added to {type(base).__name__}: {problem}. With verify=False it is added "
                    "all the same."
                )


@contextlib.contextmanager
def _same_attention(config: Any) -> Iterator[None]:
    """The attention function of a config is the same afterwards."""
    implementation = config._attn_implementation
    try:
        yield
    finally:
        config._attn_implementation = implementation


def _problem(check: "Callable[[_Probe], str]", probe: "_Probe") -> str:
    """What a check finds wrong, in words; empty if nothing is."""
    try:
        return check(probe)
    except Exception as error:  # whatever a model does with windows that it does not expect
        name, reason = check.__name__.strip("_").replace("_", " "), str(error).strip().partition("\n")[0].rstrip(".")
        return f"the check {name!r} fails with {type(error).__name__}: {reason}"


class _Probe:
    """A base model, two texts of two windows, and how exactly its own outputs can be repeated."""

    def __init__(self, base: PreTrainedModel, head: type):
        self.base, self.head = base, head
        self.ids = probe_ids(base, 2 * WINDOW, rows=2)
        self.architecture = architecture_of(base.config)
        self.backbone = self.architecture.backbone_of(base)
        together, alone = self.hidden(self.ids), torch.cat([self.hidden(row[None]) for row in self.ids])
        self.tolerance = max(_SLACK * _relative_error(alone, together), _ROUNDING[together.dtype])

    def hidden(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """The base model's last hidden states."""
        return call_backbone(self.backbone, ids, **kwargs).last_hidden_state

    def observed(self, observation: Observation) -> contextlib.AbstractContextManager[None]:
        """Record the calls of attention inside."""
        return observed_attention(self.backbone, observation, self.architecture.own_attention)

    def of_layers(self, calls: Sequence[AttentionCall]) -> list[AttentionCall | None]:
        """For each layer its first call of attention, or None. A module that computes several layers is called for
        them in order."""
        by_module: dict[Any, list[AttentionCall]] = {}
        for call in calls:
            by_module.setdefault(call.module, []).append(call)
        modules = [layer.get_submodule(self.architecture.attention)
                   for layer in self.architecture.layers_in_order(self.backbone)]  # fmt: skip
        shared = [modules[:number].count(module) for number, module in enumerate(modules)]
        of_layer = [by_module.get(module, [])[count:] for module, count in zip(modules, shared, strict=True)]
        return [calls[0] if calls else None for calls in of_layer]

    @property
    def causal_head(self) -> bool:
        """Whether the model predicts tokens from left to right."""
        return self.head is RecurrentForCausalLM

    def recurrent(self, *memories: MemoryConfig, **fields: Any) -> Any:
        """The base model without its head, with memories whose weights are large enough to matter."""
        return self._with_memories(RecurrentModel, self.backbone, memories, fields)

    def recurrent_head(self, *memories: MemoryConfig, **fields: Any) -> Any:
        """The same with its head."""
        return self._with_memories(self.head, self.base, memories, fields)

    def _with_memories(self, cls: Any, base: PreTrainedModel, memories: Sequence[MemoryConfig], fields: Any) -> Any:
        recurrence = RecurrenceConfig(**{"window": WINDOW, "overlap": 0, **fields}, memory=list(memories))
        model = cls(RecurrentModelConfig(base_config=base.config, recurrence=recurrence), base=base)
        for parameter in model.memory.parameters():
            parameter.normal_(std=0.5)
        kv = model.memory.get(KVMemoryConfig.kind)
        if kv is not None and kv.position_offsets is not None:
            kv.position_offsets.zero_()
            kv._measured = True
        model.memory.to(self.base.device, self.base.dtype)
        return model.eval()

    def is_close(self, x: Tensor, expected: Tensor) -> bool:
        return x.shape == expected.shape and _relative_error(x, expected) <= self.tolerance


def _relative_error(x: Tensor, expected: Tensor) -> float:
    """The size of the difference as a part of the whole: single numbers may be rounded by more."""
    return float((x.detach().float() - expected.float()).norm() / expected.float().norm())


def _cuda_devices(base: PreTrainedModel) -> list[torch.device]:
    return [base.device] if base.device.type == "cuda" else []


# --- checks: what is wrong, in words; empty if nothing is ------------------------------------------------------------


def _state_removed(probe: "_Probe") -> str:
    """Windows without a state are the base model's."""
    model = probe.recurrent(VectorMemoryConfig(insert_at="all", hidden_sizes=(8,)))
    windows = probe.ids.unflatten(1, (2, WINDOW)).flatten(0, 1)
    expected = probe.hidden(windows).unflatten(0, (2, 2)).flatten(1, 2)
    if not probe.is_close(model(probe.ids, use_state=False).last_hidden_state, expected):
        return "with the state removed it computes something else than before"
    return ""


def _state_arrives(probe: "_Probe") -> str:
    """In every layer, every query sees what is carried: read off the keys and masks that reach the attention kernels,
    since outputs may hide it (a softmax that is saturated)."""
    kv = KVMemoryConfig(recent=2, sinks=0)
    model = probe.recurrent(kv, VectorMemoryConfig(insert_at="all", hidden_sizes=(8,)))
    state = model.advance_state(probe.ids[:, : WINDOW + 1])  # with the first token after it, a window is complete
    with _kernel_calls() as calls:
        model(probe.ids[:, WINDOW + 1 :], state=state)
    carried = state.memory["kv"]
    for number, call in enumerate(probe.of_layers(calls), start=1):
        if call is None:
            return f"no key of layer {number} reaches an attention function that is known"
        keys = call.key[:, :, : carried.shape[-2]]
        if call.key.shape[2] < carried.shape[-2] + 1 + WINDOW or not probe.is_close(keys, carried[:, number - 1, 0]):
            return f"layer {number} does not see the keys that are carried"
        if not bool(call.visible()[..., -WINDOW:, : carried.shape[-2] + 1].all()):
            return f"in layer {number} not every token sees the state"
    return ""


def _vectors_enter(probe: "_Probe") -> str:
    """A vector that is inserted into a layer has the key and the value of a token with this hidden state, at a window's
    first position."""
    model, context = probe.recurrent(VectorMemoryConfig(insert_at="all", hidden_sizes=(8,))), HookContext()
    state = model.advance_state(probe.ids[:, : WINDOW + 1])
    model.memory.read(state.memory, context)
    inserted, own = Observation(), Observation()
    with probe.observed(inserted):
        model(probe.ids[:, WINDOW + 1 :], state=state)
    layers = probe.architecture.layers_in_order(probe.backbone)
    with probe.observed(own), _first_hidden_states(layers, context.slots):
        probe.hidden(probe.ids[:, :WINDOW])
    pairs = zip(probe.of_layers(inserted.attention), probe.of_layers(own.attention), strict=True)
    for number, (given, expected) in enumerate(pairs, start=1):
        assert given is not None
        assert expected is not None
        if not all(probe.is_close(x[:, :, 0], y[:, :, 0])
                   for x, y in ((given.key, expected.key), (given.value, expected.value))):  # fmt: skip
            return f"a vector does not enter layer {number} as a token's hidden state does"
    return ""


def _loss(probe: "_Probe") -> str:
    """The loss of one window is the base model's own."""
    if not probe.causal_head:
        return ""
    model, ids = probe.recurrent_head(KVMemoryConfig(recent=2), window=2 * WINDOW), probe.ids
    loss = model(ids, labels=ids).loss  # without logits, as in training
    expected = probe.base(input_ids=ids, labels=ids, use_cache=False).loss
    if not probe.is_close(loss.reshape(1), expected.reshape(1)):
        return f"its loss would be {float(loss):.4f}, where its own is {float(expected):.4f}"
    return ""


def _two_windows(probe: "_Probe") -> str:
    """A window that carries all of the window before is a text in which the second half sees the first."""
    model = probe.recurrent(KVMemoryConfig(recent=WINDOW - 1, sinks=1))
    alone, together = Observation(), Observation()
    with probe.observed(alone):
        probe.hidden(probe.ids[:1, :WINDOW])
    for call in alone.attention:
        own = call.visible()[:1, :1]
        hidden, seen = torch.zeros_like(own), torch.ones_like(own)
        visible = torch.cat([torch.cat([own, hidden], dim=3), torch.cat([seen, own], dim=3)], dim=2)
        is_eager = unwrapped_name(probe.backbone.config._attn_implementation) == "eager"
        added = torch.zeros_like(visible, dtype=call.query.dtype).masked_fill(
            ~visible, torch.finfo(call.query.dtype).min
        )
        together.masks[call.module] = added if is_eager else visible
    with probe.observed(together):
        expected = probe.hidden(probe.ids)
    if not probe.is_close(model(probe.ids).last_hidden_state, expected):
        return "two windows that carry everything are not one text"
    return ""


def _token_by_token(probe: "_Probe") -> str:
    """Generation reads what a forward pass reads."""
    if not probe.causal_head:
        return ""
    ids = torch.cat([probe.ids, probe.ids[:, :3]], dim=1)
    vector = VectorMemoryConfig(insert_at="all", hidden_sizes=(8,))
    model = probe.recurrent_head(KVMemoryConfig(recent=2, sinks=1), vector, overlap=1)
    cache = WindowCache(model.fresh_state(len(ids)), overlap=1)
    steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])]
    if not probe.is_close(torch.cat(steps, dim=1), model(ids).logits):
        return "read token by token it is another text"
    return ""


@contextlib.contextmanager
def _first_hidden_states(layers: Iterable[nn.Module], vectors: dict[int, Tensor]) -> Iterator[None]:
    """Inside, the first position of each layer's input is a vector [B, 1, k]."""

    def replace(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        vector = waiting[layer].pop(0)
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = torch.cat([vector.to(hidden), hidden[:, 1:]], dim=1)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    waiting: dict[nn.Module, list[Tensor]] = {}
    for number, layer in enumerate(layers, start=1):
        waiting.setdefault(layer, []).append(vectors[number])
    with contextlib.ExitStack() as stack:
        for layer in waiting:
            stack.callback(layer.register_forward_pre_hook(replace, with_kwargs=True).remove)
        yield


# --- what attention kernels get --------------------------------------------------------------------------------------


@contextlib.contextmanager
def _kernel_calls() -> Iterator[list[AttentionCall]]:
    """The calls of attention kernels inside, below everything that this package does."""
    calls: list[AttentionCall] = []

    def recorded(attend: Callable[..., Any]) -> Callable[..., Any]:
        def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kwargs: Any) -> Any:
            calls.append(AttentionCall(module, query, key, value, mask, kwargs))
            return attend(module, query, key, value, mask, **kwargs)

        return record

    eager, method = attention.eager_attention_of, own_attention.method_attention
    with (
        mock.patch.object(attention, "sdpa_attention_forward", recorded(attention.sdpa_attention_forward)),
        mock.patch.object(own_attention, "method_attention", recorded(method)),
        mock.patch.object(attention, "eager_attention_of", lambda module: recorded(eager(module))),
    ):
        yield calls
