# SPDX-License-Identifier: Apache-2.0
"""Memory positions: embeddings that a memory puts in front of a window's tokens, or behind them.

They enter the base model together with the tokens' embeddings and pass all its layers, so that the model itself gives
them positions, rotations and masks. Behind the model they are cut off again: heads see the window's tokens only. Memory
positions see, and are seen from, everywhere in the window, whatever a layer's sliding window; a causal model's see
nothing that comes after them, and of an encoder's, the last ones may be hidden from all others.

Shapes: B rows, T tokens of a window, e size of an embedding, Q queries, K keys.
"""

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

if TYPE_CHECKING:
    from .hooks import HookContext


class MemoryPositions(NamedTuple):
    """How many memory positions a window has.

    Attributes:
        before, after: in front of its tokens, and behind them.
        unseen: the last so many are not seen from other positions; the others carry the state.
    """

    before: int
    after: int
    unseen: int

    @property
    def num_read(self) -> int:
        """Memory positions that carry the state."""
        return self.before + self.after - self.unseen

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The window's positions of x [B, before + T + after, ...], and those behind it."""
        stop = x.shape[1] - self.after
        return x[:, self.before : stop], x[:, stop:]

    def open_mask(self, mask: Tensor, causal: bool) -> Tensor:
        """A mask [b, heads, Q, Q] in which memory positions see and are seen from everywhere: in causal models from
        later positions only, and never padding."""
        size, is_bool = mask.shape[-1], mask.dtype == torch.bool
        position = torch.arange(size, device=mask.device)
        is_memory = (position < self.before) | (position >= size - self.after)
        if causal:
            allowed = position[:, None] >= position
        else:  # a position that does not see itself is padding
            sees_itself = mask.diagonal(dim1=-2, dim2=-1)
            allowed = (sees_itself if is_bool else sees_itself == 0)[..., None, :]
        opened = (is_memory[:, None] | is_memory) & allowed
        return mask | opened if is_bool else mask.masked_fill(opened, 0.0)


def embed(core: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A forward pre-hook of the module that takes token ids: it gets embeddings instead, with the memory's around."""
    context: HookContext | None = kwargs.get("hook_context")
    positions = None if context is None else context.memory_positions
    if context is None or positions is None:
        return None
    if args:  # some heads give the ids by position, and more
        names = tuple(inspect.signature(type(core).forward).parameters)[1:]
        kwargs, args = {**dict(zip(names, args, strict=False)), **kwargs}, ()
    tokens = core.get_input_embeddings()(kwargs["input_ids"])  # type: ignore[operator]
    parts = [tokens if part is tokens else part.to(tokens) for part in (context.before, tokens, context.after)
             if part is not None]  # fmt: skip
    grown: dict[str, Any] = {"input_ids": None, "inputs_embeds": torch.cat(parts, dim=1)}
    mask, types, around = kwargs.get("attention_mask"), kwargs.get("token_type_ids"), positions[:2]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        grown["attention_mask"] = pad(mask, around, value=1)
    if types is not None:
        grown["token_type_ids"] = pad(types, around)
    return args, {**kwargs, **grown}


def strip(core: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook of the same module: cut memory positions off its output, and record those behind the window."""
    context: HookContext | None = kwargs.get("hook_context")
    positions = None if context is None else context.memory_positions
    if context is None or positions is None:
        return None
    output["last_hidden_state"], context.last_after = positions.split(output.last_hidden_state)
    if output.get("hidden_states") is not None:
        output["hidden_states"] = tuple(positions.split(hidden)[0] for hidden in output.hidden_states)
    return output


def grow_cache_mask(mask: Tensor, before: int) -> Tensor:
    """A mask of a window's tokens over a cache [B, 1, T, K], with as many positions in front, which see each other
    causally, and which every token sees."""
    is_bool = mask.dtype == torch.bool
    visible, hidden = (True, False) if is_bool else (0.0, torch.finfo(mask.dtype).min)
    tokens = pad(mask, (before, 0), value=visible)
    own = torch.full((before, tokens.shape[-1]), hidden, dtype=mask.dtype, device=mask.device)
    seen = torch.ones(before, before, dtype=torch.bool, device=mask.device).tril()
    own[:, :before].masked_fill_(seen, visible)
    return torch.cat([own.expand(*tokens.shape[:2], -1, -1), tokens], dim=2)
