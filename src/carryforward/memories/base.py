# SPDX-License-Identifier: Apache-2.0
"""The interface of a memory: what passes from each window to the next.

A kind of memory is one file of this package with two classes, and one row of `kinds.MEMORY_KINDS`:

- a `MemoryConfig`: its own settings, how much room it needs, its cost, and how windows depend on each other through it;
- a `Memory`: the module that says what a window receives (`read`) and what it passes on (`write`).

`Memory` covers what is inserted into the layers of the base model: vectors, or keys and values (`HookContext`), and
what can be computed from the layers' outputs, keys and values (`WindowRecord`). A model can have several memories side
by side; `collection.Memories` holds them and joins their states.

Shapes: B rows, T positions of a window, L layers, k hidden size.
"""

import difflib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..backbones.architectures import Architecture, architecture_of
from ..backbones.attention import KV
from ..backbones.hooks import HookContext
from ..presets import MAX_DEFAULT_WINDOW
from ..windows import Span, WindowGroup
from .links import BlockLayout, WindowLinks

if TYPE_CHECKING:
    from .slot_links import Send, SlotLinks

# Cosine and sine that move the keys of each layer a distance back, each [1 or B, L, d]: one distance for all rows, or
# one a row, [B, 1].
Rotation = Callable[[int | Tensor], tuple[Tensor, Tensor]]
# Re-rotates keys [B, L, heads, n, d] as if they stood a distance further back: one for all rows, or one a row, [B, 1].
Rerotate = Callable[[Tensor, int | Tensor], Tensor]


class Dependency(enum.IntEnum):
    """What a window needs of the window before it, from the least to the most."""

    NONE = 0  # nothing: windows can run in any order, side by side
    SAME_LAYER_KV = 1  # layer l needs layer l's keys and values: all windows can pass a layer together
    SAME_LAYER_OUTPUT = 2  # layer l needs layer l's output: windows can run along diagonals of layer and window
    LAST_LAYER = 3  # some layer needs a later one: windows run one after the other


@dataclass(frozen=True)
class WindowSize:
    """The sizes that a memory's settings must fit.

    Attributes:
        window: tokens of a window, special tokens included.
        capacity: document tokens of a window.
        overlap: document tokens that consecutive windows share.
    """

    window: int
    capacity: int
    overlap: int


@dataclass(frozen=True)
class WindowCost:
    """What the FLOPs of a memory in one window depend on.

    Attributes:
        base: the base model's config.
        window: tokens of a window.
        pooled: document tokens that are pooled.
        queries: for each layer, how many queries attend: the window's, and those of inserted vectors.
        matrices: the weights of all layers' matrices.
        projections: for each layer, the weights of its attention module.
        stride: document tokens from the start of a window to the start of the next.
    """

    base: PreTrainedConfig
    window: int
    pooled: int
    queries: Sequence[int]
    matrices: int
    projections: Sequence[int]
    stride: int

    @property
    def kv_width(self) -> int:
        """Heads of keys times their size."""
        heads, size = architecture_of(self.base).kv_heads(self.base)
        return heads * size

    @property
    def attention_width(self) -> int:
        """Attention heads times their size, which need not be the hidden size."""
        _, size = architecture_of(self.base).kv_heads(self.base)
        return self.base.num_attention_heads * size


def is_int(value: Any) -> bool:
    """Whether a value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_fields(config: type, values: dict[str, Any], hint: Callable[[str], str] | None = None) -> None:
    """Refuse field names that a config dataclass does not have, with the nearest one that it has.

    Args:
        hint: gives better advice for an unknown name, or an empty string.
    """
    known = [field.name for field in fields(config)]
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            advice = (hint(name) if hint else "") or (f" Did you mean {close[0]!r}?" if close else "")
            raise ValueError(f"{config.__name__} has no field {name!r}.{advice} Its fields are: {', '.join(known)}.")


@dataclass(frozen=True)
class MemoryConfig:
    """The settings of one kind of memory. Subclasses are frozen dataclasses with their own fields."""

    kind: ClassVar[str]
    dependency: ClassVar[Dependency]
    combines_with: ClassVar[tuple[str, ...] | None] = (
        None  # the kinds it can stand beside; None: any that can beside it
    )

    def __new__(cls, *args: Any, **values: Any) -> Self:
        check_fields(cls, values)  # a dataclass would raise a TypeError that does not name the known fields
        return super().__new__(cls)

    def resolve(self, size: WindowSize) -> Self:
        """The same settings with defaults that depend on the window filled in."""
        return self

    def needs_history(self, size: WindowSize) -> bool:
        """Whether what a window receives depends on how much of its document was read. Windows then always run as
        blocks, which have `slot_links`."""
        return False

    @property
    def window_group(self) -> WindowGroup | None:
        """The groups in which windows see their right neighbours, too; None if they see only what is before them. Such
        windows always run as blocks, and a group is never cut."""
        return None

    @property
    def writes_behind(self) -> bool:
        """Whether memory positions stand behind windows that pass their state on."""
        return False

    @property
    def selects(self) -> bool:
        """Whether what windows receive is selected by its contents: such windows cannot be captured."""
        return False

    @property
    def scans(self) -> bool:
        """Whether that goes window by window, although all else in a block runs side by side."""
        return False

    def slot_links(self, block: BlockLayout, rotary: bool, send: "Send") -> "SlotLinks":
        """If it `needs_history`: where the windows of a block find what they receive.

        Args:
            rotary: the model's positions are rotary, not learned.
            send: sends numbers to the device.
        """
        raise NotImplementedError

    def min_capacity(self, overlap: int, size: WindowSize) -> int:
        """Document tokens that a window needs at least when read at an overlap, so that there is enough to carry.

        Args:
            size: the sizes that the model was made for.
        """
        return overlap + 1

    def default_window(self, usable: int) -> int:
        """The default window of a model that has `usable` positions beside memory positions."""
        return min(MAX_DEFAULT_WINDOW, usable)

    @property
    def memory_positions(self) -> int:
        """Positions of the base model in front of a full window's tokens and behind them."""
        return 0

    @property
    def extra_positions(self) -> int:
        """Positions of the base model that it takes beside those of the window."""
        return self.memory_positions

    @property
    def carried_positions(self) -> int:
        """Positions that are carried, which every token of a window attends to."""
        return self.extra_positions

    @property
    def needs_training(self) -> bool:
        """Whether its state means nothing before it is trained."""
        return False

    def check_base(self, base: PreTrainedConfig) -> None:
        """Raise a ValueError if the base model cannot have this memory."""

    def state_shape(self, base: PreTrainedConfig, architecture: Architecture) -> tuple[int, ...]:
        """The shape of one row's state."""
        raise NotImplementedError

    def extra_queries(self, num_layers: int) -> list[int]:
        """For each layer, the queries that it adds to the window's."""
        return [0] * num_layers

    def flops(self, cost: WindowCost) -> float:
        """Operations that it adds to a window that receives a state and passes one on."""
        raise NotImplementedError

    def signature(self) -> str:
        """What a state must have in common with the memory it is given to, beside its shape."""
        return ""

    def describe(self) -> str:
        """A few words for people: what is carried."""
        raise NotImplementedError

    def usage_note(self) -> str:
        """One sentence for people: what to expect of it."""
        raise NotImplementedError

    def build(self, base: PreTrainedConfig, architecture: Architecture, size: WindowSize) -> "Memory":
        """The module."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the kind."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"kind": self.kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}

    def _require(self, name: str, valid: bool, accepted: str) -> None:
        if not valid:
            raise ValueError(f"{type(self).__name__}: {name}={getattr(self, name)!r} must be {accepted}.")


@dataclass(frozen=True)
class WindowRecord:
    """What a window's forward pass leaves for memories to write from.

    Attributes:
        layer_outputs: the outputs of layers 1 to L, each [B, T, k].
        window_kv: the keys and values of layers 1 to L, if a memory records them.
        layer_after, last_after: at memory positions behind the window, the outputs of layers 1 to L and of the model.
        rerotate: re-rotates the keys of rotary keys and values, [B, L, 2, heads, n, d].
        prefix_lengths: [B, 1] where rows have prefixes of their own.
    """

    layer_outputs: Sequence[Tensor]
    window_kv: Sequence[KV]
    rerotate: Rerotate
    prefix_lengths: Tensor | None = None
    layer_after: Sequence[Tensor] = ()
    last_after: Tensor | None = None

    def start(self, span: Span, device: torch.device) -> int | Tensor:
        """The first document position of the window, or each row's, [B, 1]."""
        if span.start is not None:
            return span.start
        assert self.prefix_lengths is not None, "the span leaves its start to each row's prefix"
        return self.prefix_lengths.to(device)


class Memory(nn.Module):
    """One kind of memory of a model. Its state has the shape [B, *shape].

    Attributes:
        shape: of one row's state.
        records_kv: whether `write` needs the window's keys and values.
        uses_previous: whether `write` needs the state that the window received.
        needs_history: see `MemoryConfig.needs_history`.
        reads_first: whether a document's first window receives something, too.
        uses_positions: whether it inserts memory positions.
        writes_behind: whether `write` needs memory positions behind the window. Generation, which reads token by token,
            then reads a full window again.
        reads_every_token: whether every single token passes through the state, not only attention to it. Generation
            then reads the state with each token.
        holds_vectors: whether its state consists of vectors, [..., k], which can stand for a document.
        token_width: numbers to remember of each token in generation, where a window is read token by token.
    """

    records_kv: ClassVar[bool] = False
    uses_previous: ClassVar[bool] = False
    needs_history: ClassVar[bool] = False
    reads_first: ClassVar[bool] = False
    uses_positions: ClassVar[bool] = False
    writes_behind: ClassVar[bool] = False
    reads_every_token: ClassVar[bool] = False
    holds_vectors: ClassVar[bool] = False

    def __init__(self, shape: tuple[int, ...], token_width: int = 0):
        super().__init__()
        self.shape = shape
        self.token_width = token_width
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor

    @property
    def like(self) -> Tensor:
        """A tensor with the device and precision of the state: an empty buffer, or a weight of the memory's own."""
        return self._like

    @property
    def ready(self) -> bool:
        """Whether a model can read the state at all."""
        return True

    def layers(self) -> tuple[int, ...]:
        """The layers in which a window attends to what is carried, counted from 1."""
        raise NotImplementedError

    def layer_modules(self) -> Sequence[nn.Module]:
        """Its modules that run inside the base model, between layers: the fast path compiles them like layers."""
        return ()

    def read(self, state: Tensor, context: HookContext) -> None:
        """Add what a window receives to the hooks' context."""
        raise NotImplementedError

    def read_first(self, rows: int, context: HookContext) -> None:
        """As `read`, for the first windows of so many documents: nothing, unless it `reads_first`."""

    def entering(self, state: Tensor, started: Tensor) -> Tensor:
        """The state that windows read: `state` [B, *shape] in rows that have `started` [B], and in the others what a
        first window receives, if it `reads_first`."""
        return state

    def prepare_write(self, rows: int, context: HookContext) -> None:
        """Add to the hooks' context, after `read`, what windows need that pass their state on."""

    def read_after(self, state: Tensor, context: HookContext, tokens: Sequence[int], rotation: Rotation) -> None:
        """As `read`, for a memory that `needs_history`.

        Args:
            tokens: for each row, how many tokens of its document come before the window.
        """
        raise NotImplementedError

    def read_block(self, state: Tensor | None, context: HookContext, links: WindowLinks, rotation: Rotation) -> None:
        """As `read`, for a block: connect its windows, if they depend on each other through keys and values of the same
        layer (`Dependency.SAME_LAYER_KV`).

        Args:
            state: the rows that enter the block, [R, *shape]; None if there are none.
        """
        raise NotImplementedError

    def write_block(self, context: HookContext) -> Tensor:
        """The states that leave a block, [W, *shape], after it ran with this context."""
        raise NotImplementedError

    @property
    def position_shift(self) -> int | None:
        """How many positions later than usual the tokens of windows stand that receive a state, because of what is
        carried in front of them. None where the base model counts by itself."""
        return None

    def position_shifts(self, tokens: Sequence[int]) -> list[int] | None:
        """As `position_shift`, if it `needs_history`: of windows with so many tokens of their document before them."""
        return None

    def write(self, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        """The state that a window passes on.

        Args:
            span: the positions it is made of, and where the next window starts.
            previous: the state that the window received, if any.
        """
        raise NotImplementedError

    def token_features(self, layer_outputs: Sequence[Tensor]) -> Tensor:
        """What `write_tokens` needs of each token, [B, n, token_width], from the outputs of all layers."""
        raise NotImplementedError

    def write_tokens(self, features: Tensor, record: WindowRecord, span: Span, previous: Tensor | None) -> Tensor:
        """As `write`, for a window that was read token by token: from the features of its tokens, [B, T, token_width].

        The record has no layer outputs.
        """
        raise NotImplementedError
