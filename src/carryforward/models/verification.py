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
from functools import cached_property
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..backbones.architectures import architecture_of
from ..backbones.discovery import probe_ids
from ..backbones.hooks import HookContext
from ..backbones.modes import as_before, eval_mode
from ..backbones.observation import AttentionCall, Observation, call_backbone, observed_attention, observed_kernels
from ..backbones.quantization import is_quantized
from ..config import RecurrenceConfig, RecurrentModelConfig
from ..memories.base import MemoryConfig
from ..memories.kv import KVMemoryConfig
from ..memories.vector import VectorMemoryConfig
from .causal_lm import RecurrentForCausalLM
from .generation.window_cache import WindowCache
from .headless import RecurrentModel

WINDOW = 4
_VECTORS = VectorMemoryConfig(insert_at="all", hidden_sizes=(8,))
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
    with as_before(base), eval_mode(base), torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(base)):
        torch.manual_seed(0)
        probe = _Probe(base, head)
        for check in _CHECKS:
            problem = _problem(check, probe)
            if problem:
                raise ValueError(
                    f"Recurrence cannot be added to {type(base).__name__}: {problem}. With verify=False it is added "
                    "all the same."
                )


def _problem(check: "Callable[[_Probe], str]", probe: "_Probe") -> str:
    """What a check finds wrong, in words; empty if nothing is."""
    try:
        return check(probe)
    except Exception as error:  # whatever a model does with windows that it does not expect
        name, reason = check.__name__.strip("_").replace("_", " "), str(error).strip().partition("\n")[0].rstrip(".")
        return f"the check {name!r} fails with {type(error).__name__}: {reason}"


class _SecondWindow(NamedTuple):
    """What reaches attention in a window that receives keys and values, and a vector in every layer.

    Attributes:
        carried: keys and values, [1, L, 2, heads, n, d].
        vectors: by layer, [1, 1, k].
        calls: of attention kernels, by layer; None if there was none.
    """

    carried: Tensor
    vectors: dict[int, Tensor]
    calls: list[AttentionCall | None]


class _Probe:
    """A base model, two texts of two windows, and how exactly its own outputs can be repeated.

    What several checks need is computed once.
    """

    def __init__(self, base: PreTrainedModel, head: type):
        self.base, self.head = base, head
        self.ids = probe_ids(base, 2 * WINDOW, rows=2)
        self.architecture = architecture_of(base.config)
        self.backbone = self.architecture.backbone_of(base)
        windows, self.attention_alone = self.ids.unflatten(1, (2, WINDOW)).flatten(0, 1), Observation()
        with self.observed(self.attention_alone):
            together = self.hidden(windows)
        self.windows_alone = together.unflatten(0, (2, 2)).flatten(1, 2)
        noise = _relative_error(self.hidden(windows[:1]), together[:1])
        dtype, least = together.dtype, _ROUNDING[together.dtype]
        if is_quantized(base):  # layers of 8 bits may compute in half precision, and round activations to 8 bits
            dtype = max(dtype, torch.float16, key=_ROUNDING.__getitem__)
            least = _ROUNDING[torch.bfloat16]
        self.rounding = _ROUNDING[dtype]
        self.tolerance = max(_SLACK * noise, least)

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

    @cached_property
    def second_window(self) -> _SecondWindow:
        model, context = self.recurrent(KVMemoryConfig(recent=2, sinks=0), _VECTORS), HookContext()
        state = model.advance_state(self.ids[:1, : WINDOW + 1])  # with the first token after it, a window is complete
        model.memory.read(state.memory, context)
        observation = Observation()
        with observed_kernels(observation):
            model(self.ids[:1, WINDOW + 1 :], state=state)
        return _SecondWindow(state.memory["kv"], context.slots, self.of_layers(observation.attention))

    @cached_property
    def kv_of_vectors(self) -> Tensor:
        """Keys and values as in a state, [1, L, 2, heads, WINDOW, d], of tokens that all have the vector of each layer
        as their hidden state."""
        observation, layers = Observation(), self.architecture.layers_in_order(self.backbone)
        with self.observed(observation), _same_hidden_states(layers, self.second_window.vectors):
            self.hidden(self.ids[:1, :WINDOW])
        kv = [(call.key, call.value) for call in self.of_layers(observation.attention) if call is not None]
        layouts = self.architecture.kv_layouts(self.backbone)
        if layouts:
            kv = [(layout.keys(key), layout.values(value)) for layout, (key, value) in zip(layouts, kv, strict=True)]
        return torch.stack([torch.stack(pair, dim=1) for pair in kv], dim=1)

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

    def is_close(self, x: Tensor, expected: Tensor, tolerance: float | None = None) -> bool:
        tolerance = self.tolerance if tolerance is None else tolerance
        return x.shape == expected.shape and _relative_error(x, expected) <= tolerance


def _relative_error(x: Tensor, expected: Tensor) -> float:
    """The size of the difference as a part of the whole: single numbers may be rounded by more."""
    return float((x.float() - expected.float()).norm().detach() / expected.detach().float().norm())


def _cuda_devices(base: PreTrainedModel) -> list[torch.device]:
    return [base.device] if base.device.type == "cuda" else []


# --- checks: what is wrong, in words; empty if nothing is ------------------------------------------------------------


def _state_removed(probe: "_Probe") -> str:
    """Windows without a state are the base model's."""
    model = probe.recurrent(_VECTORS)
    if not probe.is_close(model(probe.ids, use_state=False).last_hidden_state, probe.windows_alone):
        return "with the state removed it computes something else than before"
    return ""


def _state_arrives(probe: "_Probe") -> str:
    """In every layer, every query sees what is carried: read off the keys and masks that reach the attention kernels,
    since outputs may hide it (a softmax that is saturated)."""
    carried, _, calls = probe.second_window
    count = carried.shape[-2]
    for number, call in enumerate(calls, start=1):
        if call is None:
            return f"no key of layer {number} reaches an attention function that is known"
        if call.key.shape[2] < count + 1 + WINDOW or not probe.is_close(
            call.key[:, :, :count], carried[:, number - 1, 0]
        ):
            return f"layer {number} does not see the keys that are carried"
        if not bool(call.visible()[..., -WINDOW:, : count + 1].all()):
            return f"in layer {number} not every token sees the state"
    return ""


def _vectors_enter(probe: "_Probe") -> str:
    """A vector that is inserted into a layer has the key and the value of a token with this hidden state, at a window's
    first position."""
    carried, _, calls = probe.second_window
    place = carried.shape[-2]  # behind what is carried
    for number, call in enumerate(calls, start=1):
        assert call is not None  # see `_state_arrives`
        pairs = zip((call.key, call.value), probe.kv_of_vectors[:, number - 1].unbind(1), strict=True)
        if not all(probe.is_close(given[:, :, place], expected[:, :, 0]) for given, expected in pairs):
            return f"a vector does not enter layer {number} as a token's hidden state does"
    return ""


def _loss(probe: "_Probe") -> str:
    """The loss of one window is the base model's own, of two texts: two wrong numbers are hardly right by chance."""
    if not probe.causal_head:
        return ""
    model = probe.recurrent_head(KVMemoryConfig(recent=2), window=2 * WINDOW)
    for ids in probe.ids.split(1):
        loss = model(ids, labels=ids).loss  # without logits, as in training
        expected = probe.base(input_ids=ids, labels=ids, use_cache=False).loss
        if not probe.is_close(loss.reshape(1), expected.reshape(1), probe.rounding):  # of the same hidden states
            return f"its loss would be {float(loss):.4f}, where its own is {float(expected):.4f}"
    return ""


def _two_windows(probe: "_Probe") -> str:
    """A window that carries all of the window before is a text in which the second half sees the first."""
    model, together = probe.recurrent(KVMemoryConfig(recent=WINDOW - 1, sinks=1)), Observation()
    for call in probe.attention_alone.attention:
        own = call.visible()[:1, :1]  # of one window, which is that of all
        hidden, seen = torch.zeros_like(own), torch.ones_like(own)
        visible = torch.cat([torch.cat([own, hidden], dim=3), torch.cat([seen, own], dim=3)], dim=2)
        added = torch.zeros_like(visible, dtype=call.query.dtype).masked_fill(
            ~visible, torch.finfo(call.query.dtype).min
        )
        together.masks[call.module] = added if call.is_eager else visible
    with probe.observed(together):
        expected = probe.hidden(probe.ids)
    if not probe.is_close(model(probe.ids).last_hidden_state, expected):
        return "two windows that carry everything are not one text"
    return ""


def _keys_move(probe: "_Probe") -> str:
    """A key that is moved to the position before it is that of the same hidden state there. If positions are not
    rotations, it is the same key."""
    kv, architecture = probe.kv_of_vectors, probe.architecture
    moved = architecture.rerotate(probe.backbone, kv, 1, WINDOW) if architecture.rotary else kv
    for number, (key, expected) in enumerate(zip(moved[0, :, 0], kv[0, :, 0], strict=True), start=1):
        if not probe.is_close(key[:, 1:], expected[:, :-1]):
            return f"keys of layer {number} depend on their positions in another way than is known"
    return ""


def _token_by_token(probe: "_Probe") -> str:
    """Generation reads what a forward pass reads: the first tokens at once, then one by one over a window's end."""
    if not probe.causal_head:
        return ""
    ids, first = probe.ids[:1], WINDOW + 2
    model = probe.recurrent_head(KVMemoryConfig(recent=2, sinks=1), _VECTORS, overlap=1)
    cache = WindowCache(model.fresh_state(1), overlap=1)
    pieces = [ids[:, :first], *ids[:, first:].split(1, dim=1)]
    read = [model(piece, past_key_values=cache).logits for piece in pieces]  # each of the last token
    if not probe.is_close(torch.cat(read, dim=1), model(ids, logits_to_keep=len(pieces)).logits):
        return "read token by token it is another text"
    return ""


_CHECKS = (_state_removed, _state_arrives, _vectors_enter, _loss, _two_windows, _keys_move, _token_by_token)


@contextlib.contextmanager
def _same_hidden_states(layers: Iterable[nn.Module], vectors: dict[int, Tensor]) -> Iterator[None]:
    """Inside, every position of each layer's input is a vector [B, 1, k]."""

    def replace(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        vector = waiting[layer].pop(0)
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = vector.to(hidden).expand_as(hidden)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    waiting: dict[nn.Module, list[Tensor]] = {}
    for number, layer in enumerate(layers, start=1):
        waiting.setdefault(layer, []).append(vectors[number])
    with contextlib.ExitStack() as stack:
        for layer in waiting:
            stack.callback(layer.register_forward_pre_hook(replace, with_kwargs=True).remove)
        yield
