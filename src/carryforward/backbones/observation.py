# SPDX-License-Identifier: Apache-2.0
"""Observation of a model: what its modules and its attention function receive and give out in one call on a few tokens.

The model is as before afterwards: evaluation mode for the call only, no gradients, its own attention function again.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import attention, own_attention
from .attention import eager_attention_of, unwrapped_name
from .modes import eval_mode

_PREFIX = "carryforward_observed_"
_HIDDEN = -5e3  # masks add less to the scores of keys that are not seen: -1e4, a precision's least number, or -inf


@dataclass
class ModuleCall:
    """One call of a module: its arguments, and its output once it has returned."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def hidden(self) -> Tensor | None:
        """The hidden states that it was given, its first argument."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, Tensor) else None

    @property
    def hidden_output(self) -> Tensor | None:
        """The hidden states that it gave out: its output, or the first part of it."""
        first = self.output[0] if isinstance(self.output, tuple | list) and self.output else self.output
        return first if isinstance(first, Tensor) else None


@dataclass
class AttentionCall:
    """One call of transformers' attention interface, or of what a module calls instead.

    Attributes:
        is_eager: of a function that computes attention from its formula, and knows no causal attention but by a mask.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    kwargs: dict[str, Any]
    is_eager: bool

    def visible(self) -> Tensor:
        """Which keys each query sees, [1 or B, 1, queries, keys]."""
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.mask is None:
            ones = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=self.key.device)
            return ones.tril() if self._causal_without_mask and queries > 1 else ones
        visible = self.mask if self.mask.dtype == torch.bool else self.mask > _HIDDEN
        return visible.expand(*visible.shape[:2], queries, keys)

    @property
    def _causal_without_mask(self) -> bool:
        asked = self.kwargs.get("is_causal")
        return not self.is_eager and (getattr(self.module, "is_causal", True) if asked is None else asked)


@dataclass
class Observation:
    """What happened in one call, in order.

    Attributes:
        ids: the token ids that the model was called on.
        masks: input: for attention modules, masks to use instead of the model's own.
    """

    ids: Tensor | None = None
    masks: dict[nn.Module, Tensor] = field(default_factory=dict)
    modules: list[ModuleCall] = field(default_factory=list)  # by the time at which they began
    attention: list[AttentionCall] = field(default_factory=list)
    output: Any = None

    def of(self, module: nn.Module) -> list[ModuleCall]:
        return [call for call in self.modules if call.module is module]

    def attend(
        self, function: Callable[..., Any], is_eager: bool, module: nn.Module, query: Tensor, key: Tensor,
        value: Tensor, mask: Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Record a call of an attention function, and make it."""
        mask = self.masks.get(module, kwargs.pop("attention_mask", mask))
        self.attention.append(AttentionCall(module, query, key, value, mask, kwargs, is_eager))
        return function(module, query, key, value, mask, **kwargs)


_current: list[Observation] = []  # the attention functions below are found by name and get no further argument


def _sdpa(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _current[-1].attend(sdpa_attention_forward, False, module, *args, **kwargs)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _current[-1].attend(eager_attention_of(module), True, module, *args, **kwargs)


for _name, _function, _mask in (
    ("sdpa", _sdpa, masking_utils.sdpa_mask),
    ("eager", _eager, masking_utils.eager_mask),
):
    AttentionInterface.register(f"{_PREFIX}{_name}", _function)
    AttentionMaskInterface.register(f"{_PREFIX}{_name}", _mask)


@torch.no_grad()
def observe(backbone: PreTrainedModel, ids: Tensor, own: str = "", **kwargs: Any) -> Observation:
    """Call a model without its head on token ids [B, n], and record the calls of all its modules.

    Args:
        own: what its attention modules call instead of the attention interface; see `own_attention`.
    """
    observation = Observation(ids)
    open_calls: list[ModuleCall] = []

    def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call = ModuleCall(module, args, dict(kwargs))
        open_calls.append(call)
        observation.modules.append(call)

    def end(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        open_calls.pop().output = output

    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(backbone))
        stack.enter_context(observed_attention(backbone, observation, own))
        for module in backbone.modules():
            for handle in (
                module.register_forward_pre_hook(begin, with_kwargs=True),
                module.register_forward_hook(end, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        observation.output = call_backbone(backbone, ids, **kwargs)
    return observation


@contextlib.contextmanager
def observed_attention(model: nn.Module, observation: Observation, own: str = "") -> Iterator[None]:
    """Record the calls of the attention interface inside, or of what attention modules call instead (`own`)."""
    with contextlib.ExitStack() as stack:
        for config in _configs(model):
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            name = unwrapped_name(config._attn_implementation)
            if own == own_attention.FUNCTION:
                config._attn_implementation = "sdpa"
            elif not own and name in ("sdpa", "eager"):
                config._attn_implementation = f"{_PREFIX}{name}"
        if own == own_attention.METHOD:
            attend = partial(observation.attend, own_attention.method_attention, True)
            for module in own_attention.modules_with_method(model):
                stack.callback(own_attention.take_over(module, own, attend))
        if own == own_attention.FUNCTION:
            attend, running = partial(observation.attend, sdpa_attention_forward, False), _running_modules(model, stack)
            of_running = lambda _, *args, **kwargs: attend(running[-1], *args, **kwargs)  # noqa: E731
            stack.callback(own_attention.take_over(model, own, of_running))
        _current.append(observation)
        stack.callback(_current.pop)
        yield


@contextlib.contextmanager
def observed_kernels(observation: Observation) -> Iterator[None]:
    """Record the calls of attention kernels inside, below everything that this package does."""
    sdpa, method = sdpa_attention_forward, own_attention.method_attention

    def eager_attention(module: nn.Module) -> Callable[..., Any]:
        return partial(observation.attend, eager_attention_of(module), True)

    with (
        mock.patch.object(attention, "sdpa_attention_forward", partial(observation.attend, sdpa, False)),
        mock.patch.object(attention, "eager_attention_of", eager_attention),
        mock.patch.object(own_attention, "method_attention", partial(observation.attend, method, True)),
    ):
        yield


def _configs(model: nn.Module) -> list[Any]:
    configs = {
        id(config): config
        for module in model.modules()
        if hasattr(config := getattr(module, "config", None), "_attn_implementation")
    }
    return [*configs.values()]


def _running_modules(model: nn.Module, stack: contextlib.ExitStack) -> list[nn.Module]:
    """The modules that are running, the innermost last, until a stack is closed."""
    running: list[nn.Module] = []
    for module in model.modules():
        stack.callback(module.register_forward_pre_hook(lambda module, _: running.append(module)).remove)
        stack.callback(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True).remove)
    return running


def call_backbone(backbone: PreTrainedModel, ids: Tensor | None, **kwargs: Any) -> Any:
    """A model's output for token ids (None: for `inputs_embeds`), without a cache."""
    if "use_cache" in inspect.signature(type(backbone).forward).parameters:
        kwargs["use_cache"] = False
    return backbone(input_ids=ids, return_dict=True, **kwargs)
