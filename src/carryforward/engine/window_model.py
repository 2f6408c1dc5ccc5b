# SPDX-License-Identifier: Apache-2.0
"""What the engine asks of a model: run one window batch. `WindowInputs` go in, `WindowOutputs` come out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config import RecurrentModelConfig
from ..memories.collection import Memories
from ..memories.links import WindowLinks
from ..windows import Span
from .activation_budget import ShapeKey

# The summed loss, or outputs: for the batch [], for rows [b, k], for positions [b, n, ...]; and the states, [b, m].
WindowOutputs = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True)
class WindowInputs:
    """One window batch as the model runs it: with targets it gives the loss, with `outputs` what the head needs, and
    in any case states for the windows that follow.

    Attributes:
        ids, mask: tokens [b, n] and, where an encoder needs one, the attention mask.
        prefix_lengths, token_types: if rows have their own prefixes, their lengths [b, 1] and the token types [b, n].
        state: the flat state that enters, [b, m]; None in a document's first window. With links, [R, m].
        begins: whether documents begin here, and are read with a state. Some memories then give a first one.
        links: in a block, how its windows follow each other; None: every window receives its own row of the state.
        targets: the labels of positions from `start` on, [b, n - start].
        start: the first position whose output is needed.
        outputs: whether the outputs of positions from `start` on are needed.
        record_attention: whether outputs are followed by the attention paid to the state, for each layer that the state
            enters, [b, heads, n].
        hidden_states: whether outputs are followed by the hidden states of all layers, [b, n, L + 1, k].
        spans: a state is made of each of these position ranges; in a block there is one at most.
        depth: windows of a row that stand side by side, as far as rows have that many.
        shape_key: windows with the same key need the same activation memory.
    """

    ids: Tensor
    mask: Tensor | None = None
    prefix_lengths: Tensor | None = None
    token_types: Tensor | None = None
    state: Tensor | None = None
    begins: bool = False
    links: WindowLinks | None = None
    targets: Tensor | None = None
    start: int = 0
    outputs: bool = False
    record_attention: bool = False
    hidden_states: bool = False
    spans: tuple[Span, ...] = ()
    depth: int = 1
    shape_key: ShapeKey = ()

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether its links name places in a block of exactly these sizes."""
        return self.links is not None and self.links.has_fixed_sizes

    def copy(self) -> "WindowInputs":
        """The same with tensors of its own."""
        tensors: dict[str, Any] = {
            name: value.detach().clone() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return self.replace(links=None if self.links is None else self.links.copy(), **tensors)

    def replace(self, **values: Any) -> "WindowInputs":
        """The same with other values in some fields."""
        return replace(self, **values)


class WindowModel(Protocol):
    """A model whose windows the engine runs."""

    config: RecurrentModelConfig
    memory: Memories

    @property
    def backbone(self) -> nn.Module:
        """The base model without its head."""
        ...

    @property
    def device(self) -> torch.device: ...

    def run_window(self, window: WindowInputs) -> WindowOutputs:
        """Run one window: everything that happens on the device, and no decision that depends on data."""
        ...

    def probe_outputs(self, ids: Tensor) -> dict[str, Any]:
        """The fields of `WindowInputs` with which windows of these tokens compute what training needs of them."""
        ...

    def run_empty(self, with_outputs: bool = True) -> Tensor:
        """A scalar 0 that depends on all weights of the base model, or without `with_outputs` on those below the head:
        for a rank of a sharded run that has no window left."""
        ...

    def get_input_embeddings(self) -> nn.Module: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


# Runs a window in one of several ways: eagerly, or from a captured graph. The second argument is the flat state of all
# rows, to which gradients flow.
RunWindow = Callable[[WindowInputs, Tensor], WindowOutputs]
