# SPDX-License-Identifier: Apache-2.0
"""How a model runs one window batch: the state enters the base model, the window's loss or outputs come out, and the
states it passes on. The engine calls `run_window`; heads say what a window gives out."""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..backbones import attention
from ..backbones.hooks import HookContext
from ..backbones.kv_layout import KVLayout
from ..backbones.memory_positions import MemoryPositions
from ..config import RecurrentModelConfig
from ..engine.window_model import WindowInputs, WindowOutputs
from ..memories.collection import Memories


class WindowRunner(PreTrainedModel):
    """A base model (`base`) with memories (`memory`), one window batch at a time."""

    config: RecurrentModelConfig
    base: PreTrainedModel
    memory: Memories

    @property
    def backbone(self) -> PreTrainedModel:
        """The base model without its head."""
        return self.config.architecture.backbone_of(self.base)

    @functools.cached_property
    def kv_layouts(self) -> list[KVLayout]:
        """See `Architecture.kv_layouts`."""
        return self.config.architecture.kv_layouts(self.backbone)

    def run_window(self, window: WindowInputs) -> WindowOutputs:
        """Run one window: its loss or outputs, and the states it passes on. See `engine.window_model.WindowModel`."""
        context, previous, inputs = self._base_inputs(window)
        outputs: tuple[Tensor, ...] = ()
        if window.targets is not None:
            outputs = (self._window_loss(inputs, window),)
        elif window.outputs:
            outputs = *self._window_outputs(inputs, window.start), *context.attention_to_state.values()
        else:
            self.backbone(**inputs)
        layer_outputs, window_kv, layer_after = (
            context.take_layer_outputs(), context.take_window_kv(), context.take_layer_after()
        )  # fmt: skip
        if window.links is not None:
            return outputs, (self.memory.write_block(context),) if window.spans else ()
        states = (
            self.memory(
                layer_outputs,
                window_kv,
                span,
                previous,
                self.rerotate,
                window.prefix_lengths,
                layer_after,
                context.last_after,
            )
            for span in window.spans
        )
        return outputs, tuple(states)

    def _base_inputs(self, window: WindowInputs) -> tuple[HookContext, dict[str, Tensor] | None, dict[str, Any]]:
        """The hooks' context of a window, the state it received, and the arguments of the base model's call."""
        context, ids = HookContext(), window.ids
        context.record_attention, context.kv_layouts = window.record_attention, self.kv_layouts
        passes_on = bool(window.spans) and window.links is None
        context.record_kv = passes_on and self.memory.records_kv
        if self.memory.wraps_attention:
            attention.use_wrapped_attention(self.backbone.config)
        inputs: dict[str, Any] = {
            "input_ids": ids, "attention_mask": window.mask, "hook_context": context, "return_dict": True,
        }  # fmt: skip
        if window.hidden_states:
            inputs["output_hidden_states"] = True
        if window.token_types is not None:
            inputs["token_type_ids"] = window.token_types
        state = None if window.state is None else self.memory.unflatten(window.state)
        if window.links is not None:
            self.memory.read_block(state, context, window.links, self.rotation)
        elif state is not None:
            self.memory.read(state, context)
        elif window.begins:
            self.memory.read_first(len(ids), context)
        if passes_on:
            self.memory.prepare_write(len(ids), context)
        has_past = context.links or state is not None or context.before is not None
        positions = self._shifted_positions(window) if has_past else None
        if context.memory_positions is not None:
            positions = self._with_memory_positions(context.memory_positions, positions, ids)
        if positions is not None:
            inputs["position_ids"] = self.config.architecture.position_ids(self.backbone.config, positions)
        if self.config.architecture.causal:
            inputs["use_cache"] = False
        return context, state, inputs

    def _shifted_positions(self, window: WindowInputs) -> Tensor | None:
        """The positions of a window batch [1 or b, n], behind what is carried; None where the base model counts by
        itself. The prefix keeps its own, and so do the first windows of a block, which receive nothing. A suffix stands
        behind what its window sees on its right."""
        links, device = window.links, window.ids.device
        rows, width = window.ids.shape
        slots = None if links is None else links.slots
        shift: Tensor | int | None = self.memory.position_shift if slots is None else slots.shift
        if shift is None:
            return None
        prefix = len(self.config.recurrence.prefix) if window.prefix_lengths is None else window.prefix_lengths
        positions = torch.arange(width, device=device)[None]
        shifted = positions + (shift if isinstance(shift, int) else shift[:, None])
        shifted = torch.where(positions < prefix, positions, shifted)
        if links is None or slots is not None:
            return shifted
        if links.num_first:
            shifted = torch.cat([positions.expand(links.num_first, -1), shifted.expand(rows, -1)[links.num_first :]])
        if links.num_right is None:
            return shifted
        return shifted + torch.where(positions >= links.next_start, links.num_right[:, None], 0)

    def _with_memory_positions(self, count: MemoryPositions, positions: Tensor | None, ids: Tensor) -> Tensor:
        """The positions of a window [1 or b, n] with those of the memory around it. Behind an encoder's window they
        follow a full one, so that they are the same whatever its length."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        end = positions[:, -1:] + 1
        if not self.config.architecture.causal:
            end = torch.full_like(end, self.config.recurrence.window + (self.memory.position_shift or 0))
        before, after = (torch.arange(n, device=ids.device)[None] for n in (count.before, count.after))
        return torch.cat([before.expand(len(positions), -1), positions, end + after], dim=1)

    def _window_outputs(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        """What the head's output is made of, as in `WindowOutputs`; positions count from `start` on."""
        raise NotImplementedError

    @staticmethod
    def _hidden_states(inputs: dict[str, Any], outputs: Any, start: int = 0) -> tuple[Tensor, ...]:
        """The base model's hidden states of all layers at positions from `start` on, [b, n, L + 1, k], if its inputs
        ask for them."""
        if "output_hidden_states" not in inputs:
            return ()
        return (torch.stack(outputs.hidden_states, dim=2)[:, start:],)

    def _window_loss(self, inputs: dict[str, Any], window: WindowInputs) -> Tensor:
        """The summed loss of a window's positions from `window.start` on."""
        raise NotImplementedError

    def probe_outputs(self, ids: Tensor) -> dict[str, Any]:
        return {"outputs": True}

    def run_empty(self, with_outputs: bool = True) -> Tensor:
        """A scalar 0 that depends on the weights: a sharded rank without windows must take part in gathering them."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.memory.like.device)
        module = self.base if with_outputs else self.backbone
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.config.architecture.causal:
            inputs["use_cache"] = False
        return module(**inputs)[0].sum() * 0

    def rerotate(self, kv: Tensor, distance: int | Tensor) -> Tensor:
        """Re-rotate keys as if they stood `distance` positions further back; see `Architecture.rerotate`."""
        return self.config.architecture.rerotate(self.backbone, kv, distance, self.config.recurrence.window)

    def rotation(self, distance: int | Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine that move the keys of each layer `distance` positions back; see `Architecture.rotation`."""
        window, layers = self.config.recurrence.window, self.config.base_config.num_hidden_layers
        return self.config.architecture.rotation(self.backbone, distance, window, self.memory.like, layers)
