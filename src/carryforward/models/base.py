# SPDX-License-Identifier: Apache-2.0
"""What all recurrent models share: a base model, the recurrence, and the loop that reads documents window by window.

Cutting documents into windows is `reading`'s, inserting the state `insertion`'s, gradients through time are `bptt`'s;
here they meet. What a window gives out depends on the head and is said in `heads`.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..backbones import attention, hooks
from ..config import RecurrentModelConfig
from ..engine import bptt
from ..engine.activation_budget import ActivationBudget
from ..engine.cuda_graphs import Result, Work
from ..engine.graph_cache import FastPath, GraphCache
from ..engine.window_batches import Reading
from ..engine.window_program import Emit, Program
from ..memories.vector import Recurrence
from ..state import State
from ..utils import checkpoints
from ..utils.peft import refuse_to_lose
from . import argument_checks

logger = logging.get_logger(__name__)


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout; afterwards every module is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class RecurrentPreTrainedModel(PreTrainedModel):
    """A base model (`base`) with a recurrence module (`recurrence`), and the reading of documents."""

    config_class = RecurrentModelConfig
    config: RecurrentModelConfig
    base: PreTrainedModel
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # `num_items_in_batch` is honoured
    auto_class: ClassVar[str] = "AutoModel"  # by name: its import is what `registration` waits for
    _small: ClassVar[bool] = True  # what a window gives out: it can be recorded, and is then had from position 0 on
    _supports_sdpa = True
    _no_split_modules = ["Recurrence"]
    _tied_weights_keys = {}  # none but the base model's, where peft then looks

    def __init__(self, config: RecurrentModelConfig, base: PreTrainedModel | None = None):
        """
        Args:
            base: a loaded model to build on; without it one is made from the config, as `from_pretrained` needs.
        """
        if base is None:
            config.check()  # `from_pretrained` may have been given another recurrence
        super().__init__(config)
        self.base = getattr(transformers, self.auto_class).from_config(config.base_config) if base is None else base
        if base is not None:
            for module in base.modules():  # `post_init` must not initialise what the user brings
                module._is_hf_initialized = True  # type: ignore[assignment]
        layers, size = config.base_config.num_hidden_layers, config.base_config.hidden_size
        learned = not config.architecture.rotary
        self.recurrence = Recurrence(config.recurrence, layers, size, config.kept_shape, learned)
        hooks.install(self.backbone, config.architecture)
        self.graph_cache = GraphCache()
        self.activation_budget = ActivationBudget()
        self._sharded = False
        self.post_init()

    @property
    def backbone(self) -> PreTrainedModel:
        """The base model without its head."""
        return self.base.base_model  # type: ignore[return-value]

    def _slots(self, carried: Tensor) -> dict[int, Tensor]:
        """Which vectors enter which layer: one state for all of them, or one each."""
        layers = self.config.insertion_layers
        return {layer: carried[:, i if carried.shape[1] > 1 else 0] for i, layer in enumerate(layers)}

    def _table(self, state: State) -> Tensor:
        """All numbers of a state, [B, m]: one tensor for everything that is the same whatever they are."""
        parts = [state.carried] if state.kept is None else [state.carried, state.kept]
        return torch.cat([part.flatten(1).to(self.recurrence.weight) for part in parts], dim=1)

    def _parts(self, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """The carried vectors, and the keys and values."""
        shape, kept_shape = self.config.state_shape, self.config.kept_shape
        carried, kept = table.tensor_split([math.prod(shape)], dim=1)
        return carried.reshape(len(table), *shape), None if kept_shape is None else kept.unflatten(1, kept_shape)

    def _turn(self, keys: Tensor, back: int | Tensor) -> Tensor:
        return self.config.architecture.turned(self.backbone, keys, back, self.config.recurrence.window)

    # --- reading -----------------------------------------------------------------------------------------------

    def _plan(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        state: State | None,
        *,
        overlap: int | None,
        use_state: bool,
        outputs: bool,
        final: bool,
        closing: bool = False,
        prefixes: Sequence[Sequence[int]] | None = None,
    ) -> Reading:
        """Check a call's arguments and cut its documents into windows."""
        recurrence = self.config.recurrence
        overlap = argument_checks.overlap(self.config, overlap, None if prefixes is None else max(map(len, prefixes)))
        if input_ids is None and state is not None:  # no new tokens: that the documents end is all the news
            input_ids = state.tokens[:, :0]
        input_ids = argument_checks.batch(input_ids)
        fresh = self.fresh_state(len(input_ids), overlap)
        state = fresh if state is None else state
        argument_checks.state(state, len(input_ids), fresh.signature)
        if use_state and self.recurrence.keeping is not None and not self.recurrence.keeping.known:
            logger.warning_once(
                "What is kept cannot be read yet: a model with learned positions must see some text first. Call "
                "carryforward.measure_position_offsets(model, documents)."
            )
        argument_checks.tokens(input_ids, attention_mask, state, final)
        argument_checks.labels(labels, input_ids)
        # without a state, windows whose activations may be in memory together are also run together
        keep = recurrence.keep_windows
        abreast = max(keep, 1) if keep != "auto" and torch.is_grad_enabled() else 1
        reading = Reading(
            self.config, input_ids, attention_mask, labels, state,
            overlap=overlap, outputs=outputs, final=final, closing=closing, use_state=use_state, abreast=abreast,
            prefixes=prefixes,
        )  # fmt: skip
        argument_checks.vocabulary(input_ids, attention_mask, self._vocabulary)
        frame = recurrence.prefix, recurrence.suffix
        if all(frame) and not any(state.read) and argument_checks.framed(input_ids, attention_mask, *frame):
            logger.warning_once(
                "The documents begin and end with special tokens, which every window is given anyway. Tokenise with "
                "add_special_tokens=False."
            )
        argument_checks.classes(labels, attention_mask, self._num_classes)
        return reading

    def _inputs(self, work: Work) -> tuple[hooks.HookContext, dict]:
        """What the base model is called with for one window."""
        carry, keeping, ids = hooks.HookContext(), self.recurrence.keeping, work.ids
        if keeping is not None:
            attention.use_wrapped_attention(self.backbone.config)
            carry.noting = bool(work.pooled)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": work.mask, "carry": carry, "return_dict": True}
        if work.types is not None:
            inputs["token_type_ids"] = work.types
        if work.carried is not None:
            carried, carry.before = self._parts(work.carried)
            carry.slots = self._slots(carried)
            if keeping is not None and carry.before is not None:
                carry.earlier = keeping.entering(carry.before)
                if keeping.places is not None:
                    prefix = len(self.config.recurrence.prefix) if work.leads is None else work.leads
                    positions = keeping.standing(torch.arange(ids.shape[1], device=ids.device)[None], prefix)
                    inputs["position_ids"] = self.config.architecture.position_ids(self.backbone.config, positions)
        if self.config.architecture.causal:
            inputs["use_cache"] = False
        return carry, inputs

    def _states(self, carry: hooks.HookContext, work: Work) -> tuple[Tensor, ...]:
        """The states that a window passes on, one for each range of positions, [b, m]."""
        outputs, noted = carry.take_outputs(), carry.take_noted()
        rest = noted, carry.before, self._turn, work.leads
        return tuple(self.recurrence(outputs, span, *rest) for span in work.pooled)

    def _window(self, work: Work) -> Result:
        """One window's loss or outputs, and states: all that runs on a device, and no decision that depends on data."""
        carry, inputs = self._inputs(work)
        given: tuple[Tensor, ...] = ()
        if work.targets is not None:
            given = (self._nll_sum(inputs, work.targets, work.start),)
        elif work.outputs:
            given = self._given(inputs, work.start)
        else:
            self.backbone(**inputs)
        return given, self._states(carry, work)

    def _measured_window(self, work: Work) -> Result:
        """The same; what its graph takes is noted, if that is not known."""
        if not torch.is_grad_enabled():
            return self._window(work)
        with self.activation_budget.measuring(work.kind, self.parameters()):
            return self._window(work)

    def _given(self, inputs: dict[str, Any], start: int) -> tuple[Tensor, ...]:
        """What the head's output is made of, as `recording.Result` has it; positions count from `start` on."""
        raise NotImplementedError

    def _nll_sum(self, inputs: dict[str, Any], targets: Tensor, start: int) -> Tensor:
        """The summed loss of a window's positions from `start` on."""
        raise NotImplementedError

    def _unroll(self, reading: Reading, emit: Emit | None) -> tuple[list[bptt.Emission], Tensor]:
        """Run the windows: what they emit (without `emit`, the summed loss), and the state after them, [B, m]."""
        recurrence = self.config.recurrence
        modules, weights = self._modules_and_weights()
        parameters = [parameter for parameter in weights if parameter.requires_grad]
        sharded = self._is_sharded(modules)
        keep_graph = torch.is_grad_enabled() and (recurrence.keep_graph or sharded or bptt.hooked(parameters))
        self._sharded = sharded
        # whoever looks at what graphs hold on to, to keep it elsewhere or compute it again, finds none of a recording's
        watched = torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        recordable = (emit is None or self._small) and not sharded and not keep_graph and not watched
        graph_cache = self.graph_cache.begin(self, modules, weights, lasting=emit is not None) if recordable else None
        training = any(module.training for module in modules)
        run = self._window if keep_graph else self._measured_window  # nothing is kept or not where all is
        program = Program(self, reading, emit, graph_cache, (training, len(parameters)), run)
        if sharded and emit is None:
            program.idle()
        # without states to pass on, windows are run once, in the second pass
        self.activation_budget.keep = recurrence.keep_windows if reading.use_state or emit is not None else 0
        plan = bptt.Plan(
            program=program,
            parameters=parameters,
            always={parameter for parameter in self.recurrence.parameters() if parameter.requires_grad},
            loss_only=emit is None,
            keep_graph=keep_graph,
            allowance=self.activation_budget,
            offload=recurrence.offload_states,
            seeds=bptt.draw_seeds(len(program.cells)) if training else None,
            devices={weight.device for weight in weights},
        )
        return bptt.unroll(plan, self._table(reading.before))

    @torch.no_grad()
    def advance_state(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        *,
        overlap: int | None = None,
        use_state: bool = True,
        final: bool = False,
    ) -> State:
        """Where documents stand after more tokens. Only windows that are complete are run, and only for their state.

        Args:
            final: the documents end here: a last window that is not full passes on what it has, and the state is that
                of the whole document. There is nothing to go on with then.
        """
        reading = self._plan(
            input_ids, attention_mask, None, state,
            overlap=overlap, use_state=use_state, outputs=final, final=final, closing=final,
        )  # fmt: skip
        modules, weights = self._modules_and_weights()
        graph_cache = None if self._is_sharded(modules) else self.graph_cache.begin(self, modules, weights)
        program = Program(self, reading, None, graph_cache)
        table = self._table(reading.before)
        for cell in reading.cells:
            _, table = program.advance(cell, table, head=False)
        return reading.state(*self._parts(table))

    def _modules_and_weights(self) -> tuple[list[nn.Module], list[nn.Parameter]]:
        modules = list(self.modules())
        found = {weight: None for module in modules for weight in module._parameters.values() if weight is not None}
        return modules, list(found)

    def _is_sharded(self, modules: Sequence[nn.Module]) -> bool:
        """Whether FSDP gathers weights window by window. Gradients must then reach it through the plain graph, and all
        ranks must run as many windows."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in modules)
        if sharded and torch.is_grad_enabled() and not self.config.recurrence.keep_graph:
            logger.warning_once(
                "The weights are sharded (FSDP): the graph of all windows is kept instead of recomputing them, and "
                "memory grows with their number."
            )
        return sharded

    def fresh_state(self, batch: int, overlap: int | None = None) -> State:
        """The state of documents of which nothing has been read yet."""
        overlap = self.config.recurrence.overlap if overlap is None else overlap
        counts = torch.zeros(batch, dtype=torch.long)
        zeros, kept_shape = self.recurrence.weight.new_zeros, self.config.kept_shape
        return State(
            carried=zeros(batch, *self.config.state_shape),
            kept=None if kept_shape is None else zeros(batch, *kept_shape),
            started=counts.bool(), tokens=counts[:, None][:, :0], pending=counts, read=counts,
            signature=f"{self._signature}, overlap {overlap}",
        )  # fmt: skip

    @property
    def _signature(self) -> str:
        """What a state must have in common with the model it is given to, in words for an error message."""
        base, recurrence = self.config.base_config, self.config.recurrence
        shape = "x".join(map(str, self.config.state_shape))
        kept = ""
        if self.config.kept_shape is not None:
            _, _, heads, _, size = self.config.kept_shape
            kept = f"kept {recurrence.sinks}+{recurrence.kept} of {heads}x{size}, "
        return (
            f"{base.model_type} of {base.num_hidden_layers} layers, vocabulary {base.vocab_size}, state {shape}, "
            f"{kept}window {recurrence.window}"
        )

    @property
    def _vocabulary(self) -> int:
        return self.get_input_embeddings().weight.shape[0]

    @property
    def _num_classes(self) -> int:
        """How many values a label may have."""
        return self._vocabulary

    @property
    def fast_path(self) -> FastPath:
        """How windows are run on a GPU: "auto" records them once there are many, and compiles them once there are very
        many; "compiled" does so from the first; "off" runs them as they are."""
        return self.graph_cache.path

    @fast_path.setter
    def fast_path(self, path: FastPath) -> None:
        if path not in get_args(FastPath):
            raise ValueError(f"fast_path={path!r} must be one of {', '.join(map(repr, get_args(FastPath)))}.")
        self.graph_cache = GraphCache(path)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what a window runs: the base model without its head. The loop over windows stays Python."""
        self.backbone.compile(*args, **kwargs)

    # --- Hugging Face ------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.base.set_output_embeddings(value)

    def _init_weights(self, module: nn.Module) -> None:
        """For what is added to the base model later, such as embeddings; the recurrence starts itself."""
        if not any(module is own for own in self.recurrence.modules()):
            self.base._init_weights(module)

    def gradient_checkpointing_enable(  # type: ignore[override]
        self, gradient_checkpointing_kwargs: dict | None = None, **kwargs: Any
    ) -> None:
        settings = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if settings["use_reentrant"]:
            raise ValueError(
                "gradient_checkpointing_kwargs: use_reentrant=True loses the gradient of the carried state. "
                "Leave it out, or set it to False."
            )
        super().gradient_checkpointing_enable(settings, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Save as every Hugging Face model does; nothing half-written is ever seen at `save_directory`."""
        refuse_to_lose(self)
        if not kwargs.get("is_main_process", True):
            return super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", Path(save_directory).resolve().name)  # not that of the folder beside
        with checkpoints.atomic_folder(save_directory) as beside:
            super().save_pretrained(beside, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as every Hugging Face model does; weights that are missing or do not fit are an error."""
        return checkpoints.load_strictly(super().from_pretrained, cls, pretrained_model_name_or_path, *args, **kwargs)
