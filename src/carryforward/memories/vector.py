# SPDX-License-Identifier: Apache-2.0
"""From a window's hidden states to the state the next window sees: equation 1 and the feed-forward network.

Shapes: B rows, T positions, L layers, k hidden size, S slots, G states (1, or one per insertion layer), m what is
pooled at a position (k, or G times k where each insertion layer pools the one below it).
This file knows neither where the hidden states come from nor how the state is inserted (`insertion`).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import init

from ..config import RecurrenceConfig
from ..windows import Span
from .kv import Keeping, Turn


class Recurrence(nn.Module):
    """Pools the outputs of all layers over a window (z) and turns them into the carried vectors (h_prev).

    Without slots it does nothing but own what is kept (`keeping`), if anything is.
    """

    def __init__(
        self,
        config: RecurrenceConfig,
        num_layers: int,
        hidden_size: int,
        kept_shape: Sequence[int] | None,
        learned_positions: bool,
    ):
        super().__init__()
        self.config = config
        self.keeping = Keeping(config, kept_shape, learned_positions) if kept_shape else None
        self.networks = nn.ModuleList()
        if not config.slots:
            return
        layers = config.insertion_layers(num_layers)
        outputs = {"all": range(num_layers), "last": [num_layers - 1], "below": [layer - 2 for layer in layers]}
        self.pooled = list(outputs[config.pooled_layers])  # from 0
        self.width = hidden_size * (len(layers) if config.pooled_layers == "below" else 1)  # m
        if config.pooled_layers == "all":
            self.layer_logits = nn.Parameter(torch.empty(num_layers))  # α of equation 1
        if config.pooling == "attention":
            self.keys = nn.Parameter(torch.empty(config.slots, self.width))
        groups = len(layers) if config.separate else 1
        self.networks.extend(_feed_forward(hidden_size, config.hidden_sizes) for _ in range(groups))
        self._start()

    def forward(
        self,
        hidden: Sequence[Tensor],
        span: Span,
        noted: Sequence[tuple[Tensor, Tensor]] = (),
        before: Tensor | None = None,
        turn: Turn | None = None,
        leads: Tensor | None = None,
    ) -> Tensor:
        """All that a window passes on, [B, m]: what is pooled, then what is kept.

        Args:
            hidden: the outputs of layers 1 to L, each [B, T, k].
            span: the positions that are pooled, and where the next window starts.
            noted, before, turn: as `Keeping` takes them, if something is kept.
            leads: how long each row's own prefix is, [B, 1], where the span does not say.
        """
        parts = []
        start = span.start if leads is None or span.start is not None else leads.to(self.weight.device)
        assert start is not None
        if self.networks:
            begin = start if isinstance(start, int) else 0
            chosen = [_range(h, begin, span.stop).to(self.weight.device) for h in self.chosen(hidden)]
            slots = None if isinstance(start, int) else _slots(start, span.stop, self.config.slots)
            parts.append(self.carried(self.pool(chosen, slots)).flatten(1))
        if self.keeping is not None:
            assert turn is not None
            parts.append(self.keeping(noted, before, start, span.following, turn).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def chosen(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        """Those of the layers' outputs that are pooled."""
        return [hidden[i] for i in self.pooled]

    def carried(self, z: Tensor) -> Tensor:
        """h_prev, [B, G, S, k], from what was pooled, [B, S, m]."""
        parts = z.to(self.weight.dtype).split(self.weight.shape[0], dim=-1)  # one for all networks, or one for each
        inputs = parts if len(parts) > 1 else parts * len(self.networks)
        made = [network(x) for network, x in zip(self.networks, inputs, strict=True)]
        if self.config.residual:
            made = [x + new for x, new in zip(inputs, made, strict=True)]
        # under autocast a network's output is of lower precision; states keep the weights'
        return torch.stack(made, dim=1).to(self.weight.dtype)

    @property
    def weight(self) -> Tensor:
        """The last linear layer's weight, or what stands for it: states live on its device, in its precision."""
        if self.networks:
            return self.networks[0][-1].weight  # type: ignore[index]
        assert self.keeping is not None, "a state is pooled or kept"
        return self.keeping.like

    @property
    def layer_weights(self) -> Tensor:
        """w = softmax(α) of equation 1, [L], where all layers are mixed."""
        return self.layer_logits.softmax(dim=0)

    def pool(self, layers: Sequence[Tensor], slots: Tensor | None = None) -> Tensor:
        """Equation 1 and its alternatives: the chosen layers, each [B, P, k], to [B, S, m].

        Args:
            slots: where rows differ, which slot each position belongs to, -1 for none, [B, P].
        """
        if self.config.pooling == "mean":
            # The mean over positions first: the same number as mixing first, without a mix of P x k.
            return self.mix([self._stretched(h, slots) for h in layers])
        return self.pool_mixed(self.mix(layers), slots)

    def pool_mixed(self, mixed: Tensor, slots: Tensor | None = None) -> Tensor:
        """The same from layers mixed already, [B, P, m]."""
        if self.config.pooling != "attention":
            return self._stretched(mixed, slots)
        scores = mixed @ self.keys.to(mixed.dtype).T / mixed.shape[-1] ** 0.5  # [B, P, S]
        if slots is not None:
            scores = scores.masked_fill(slots[..., None] < 0, -torch.inf)
        return scores.softmax(dim=1).transpose(1, 2) @ mixed

    def _stretched(self, x: Tensor, slots: Tensor | None) -> Tensor:
        mean, count = self.config.pooling == "mean", self.config.slots
        if slots is None:
            return _stretches(x, count, _mean if mean else torch.amax)
        inside = [slots[..., None] == slot for slot in range(count)]
        if not mean:
            return torch.stack([x.masked_fill(~chosen, -torch.inf).amax(dim=1) for chosen in inside], dim=1)
        return torch.stack([_mean(x.masked_fill(~chosen, 0), 1, chosen.sum(dim=1)) for chosen in inside], dim=1)

    def mix(self, layers: Sequence[Tensor]) -> Tensor:
        """Σ w_ℓ h^(ℓ) with w = softmax(α), or the layers side by side where they are not mixed."""
        if self.config.pooled_layers != "all":
            return torch.cat(list(layers), dim=-1)
        weights = self.layer_weights.to(layers[0].dtype)
        total = weights[0] * layers[0]
        for weight, layer in zip(weights[1:], layers[1:], strict=True):
            total = total + weight * layer
        return total

    def _start(self) -> None:
        """α = 0, linear layers as PyTorch starts them, the last one N(0, init_std), or 0 if residual."""
        if self.config.pooled_layers == "all":
            init.zeros_(self.layer_logits)
        if self.config.pooling == "attention":
            init.normal_(self.keys, std=self.config.init_std)
        for network in self.networks:
            *inner, last = [layer for layer in network.children() if isinstance(layer, nn.Linear)]
            for layer in inner:
                bound = layer.in_features**-0.5
                init.uniform_(layer.weight, -bound, bound)
                init.uniform_(layer.bias, -bound, bound)
            init.normal_(last.weight, std=0.0 if self.config.residual else self.config.init_std)
            init.zeros_(last.bias)


def _feed_forward(size: int, hidden_sizes: Sequence[int]) -> nn.Sequential:
    sizes = [size, *hidden_sizes]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], size))


def _stretches(x: Tensor, slots: int, pool: Callable[..., Tensor]) -> Tensor:
    """Pool as many equal stretches of positions as there are slots, [B, P, m] to [B, S, m].

    Where they cannot be equal, the older ones have one position more. Few slices: a slice's gradient is as large as
    the whole.
    """
    length = x.shape[1]
    if length < slots:  # a document may end with fewer; some positions then fill several slots
        return x[:, torch.arange(slots, device=x.device) * length // slots]
    size, longer = divmod(length, slots)
    if not longer:
        return pool(x.unflatten(1, (slots, size)), dim=2)
    older, newer = x.split([longer * (size + 1), (slots - longer) * size], dim=1)
    halves = older.unflatten(1, (longer, size + 1)), newer.unflatten(1, (slots - longer, size))
    return torch.cat([pool(half, dim=2) for half in halves], dim=1)


def _slots(leads: Tensor, stop: int, slots: int) -> Tensor:
    """The same stretches where each row starts at its own position, [B, 1]: the slot of every position up to `stop`,
    -1 in front of the start, [B, stop]."""
    position = torch.arange(stop, device=leads.device) - leads
    size, longer = (stop - leads) // slots, (stop - leads) % slots
    older = longer * (size + 1)
    slot = torch.where(position < older, position // (size + 1), longer + (position - older) // size)
    return torch.where(position < 0, -1, slot)


def _mean(x: Tensor, dim: int, count: Tensor | None = None) -> Tensor:
    """The division comes last, of few numbers, so that the gradient of many is one number that need not be written."""
    exact = torch.promote_types(x.dtype, torch.float32)  # a sum may be more than float16 can hold
    return (x.sum(dim=dim, dtype=exact) / (x.shape[dim] if count is None else count)).to(x.dtype)


def _range(x: Tensor, start: int, stop: int) -> Tensor:
    """Some positions; all of them as they are, since the gradient of a part is as large as the whole."""
    return x if (start, stop) == (0, x.shape[1]) else x[:, start:stop]
