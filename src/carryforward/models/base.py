# SPDX-License-Identifier: Apache-2.0
"""`RecurrentPreTrainedModel`: what all recurrent models share: a base model, its memories, and how one window runs.

A call of a model plans its windows (`engine.batch_plan`), runs them (`engine.run_windows`) and puts their outputs
together (`outputs`). How one window batch runs is in `window_runner`; heads say what it gives out (`token_model`,
`encoders`, `question_answering`).
"""

import dataclasses
import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..backbones import hooks, quantization
from ..config import RecurrentModelConfig
from ..data import tokenization
from ..engine import bptt, run_windows
from ..engine.activation_budget import ActivationBudget
from ..engine.batch_plan import BatchPlan
from ..engine.block_size import BlockSize
from ..engine.graph_cache import FastPath, GraphCache
from ..engine.run_policy import NO_MODEL_PARALLEL, is_sharded
from ..engine.window_program import OutputSpec
from ..memories.collection import Memories
from ..state import State
from ..utils import checkpoints
from ..utils.checks import check_count, check_flag
from ..utils.files import atomic_folder
from ..utils.peft import check_memory_saved, has_own_adapters
from . import argument_checks
from .files import model_card
from .window_runner import WindowRunner

logger = logging.get_logger(__name__)


class RecurrentPreTrainedModel(WindowRunner):
    """A base model (`base`) with memories (`memory`) that reads documents of any length."""

    config_class = RecurrentModelConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # `num_items_in_batch` is honoured
    tokenizer: Any = None  # saved with the model, if it is known
    auto_class: ClassVar[str] = "AutoModel"  # by name: importing it triggers the registration in `auto`
    _capturable_outputs: ClassVar[bool] = True  # a window's outputs are small, and then computed from position 0 on
    _passes_gradients = False  # not known yet
    _supports_sdpa = True
    _no_split_modules = ["Memories"]
    _tied_weights_keys = {}  # only the base model has some, where peft then looks

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
            for module in base.modules():  # `post_init` must not initialise the user's weights
                module._is_hf_initialized = True  # type: ignore[assignment]
        recurrence, architecture = config.recurrence, config.architecture
        self.memory = Memories(recurrence.memories, config.base_config, architecture, recurrence.size)
        hooks.install(self.base, architecture)
        self.graph_cache = GraphCache()
        self.activation_budget = ActivationBudget()
        self.block_size = BlockSize()
        self._fingerprint = checkpoints.CachedFingerprint()
        self.post_init()

    # --- a call: plan, run ---------------------------------------------------------------------------------------

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
        labelled: bool = False,
        logits: bool = False,
        allow_other_model: bool = False,
    ) -> BatchPlan:
        """Check a call's arguments and cut its documents into windows.

        Args:
            logits: windows give out logits, even if the call does not return them.
            labelled: the call has labels, even if `labels` (those of tokens) is None.
        """
        for name, flag in (("use_state", use_state), ("final", final), ("allow_other_model", allow_other_model)):
            check_flag(name, flag)
        check_flag("return_logits", outputs)
        recurrence = self.config.recurrence
        longest_prefix = None if prefixes is None else max(map(len, prefixes))
        overlap = argument_checks.check_overlap(self.config, overlap, longest_prefix)
        if input_ids is None and isinstance(state, State):  # no new tokens: the call only says that documents end
            input_ids = state.tokens[:, :0]
        input_ids = argument_checks.check_batch(input_ids)
        training = torch.is_grad_enabled() and (self.training or labelled or labels is not None)
        if training and not self._passes_gradients:
            quantization.check_gradients(self.base)
            self._passes_gradients = True
        fresh = self.fresh_state(len(input_ids), overlap, training=training)
        is_given = state is not None
        state = fresh if state is None else state
        argument_checks.check_state(state, len(input_ids), fresh, allow_other_model)
        state = dataclasses.replace(state, model=fresh.model)  # this model's from here on
        if use_state and not self.memory.ready:
            logger.warning_once(
                "The model cannot read its carried keys and values: its positions are learned and their offsets were "
                "never measured. Call carryforward.measure_position_offsets(model, documents)."
            )
        argument_checks.check_mask(attention_mask, input_ids)
        framing = None
        if not is_given or any(state.read):  # given a fresh state, documents are read as they stand
            framing = argument_checks.find_framing(input_ids, attention_mask, recurrence.prefix, recurrence.suffix)
        if framing is not None:
            attention_mask, framing = self._without_framing(input_ids, attention_mask, framing, state, final)
        argument_checks.check_tokens(input_ids, attention_mask, state, final)
        labels = argument_checks.check_labels(labels, input_ids)
        logits |= not self._capturable_outputs and (outputs or (labels is not None and not self._chunks_loss))
        longest = input_ids.shape[1] + state.tokens.shape[1]
        single = longest < recurrence.window - (longest_prefix or len(recurrence.prefix)) - len(recurrence.suffix)
        alone = single or closing  # no window stands beside another one of its document
        plan = BatchPlan(
            self.config, self._send(input_ids), attention_mask, labels if labels is None else self._send(labels), state,
            overlap=overlap, outputs=outputs, final=final, closing=closing, use_state=use_state,
            block_windows=1
            if alone
            else self.block_size.windows(self, len(input_ids), use_state=use_state, logits=logits),
            prefixes=prefixes, framing=framing,
        )  # fmt: skip
        argument_checks.check_vocabulary(input_ids, attention_mask, self._vocabulary)
        argument_checks.check_classes(labels, attention_mask, self._num_classes)
        return plan

    @staticmethod
    def _without_framing(
        input_ids: Tensor, attention_mask: Tensor | None, framing: Tensor, state: State, final: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The mask of the documents' own tokens, and where a tokenizer has put special tokens around whole documents.
        Around a piece of a document they would be in the middle of its text: a warning."""
        if any(state.read) or not final:
            logger.warning_once(
                "A piece of a document begins and ends with special tokens, which are added to every window anyway. "
                "Tokenise pieces with add_special_tokens=False."
            )
            return attention_mask, None
        mask = torch.ones_like(framing) if attention_mask is None else attention_mask.to(framing)
        return mask & ~framing, framing

    def _asks_for_hidden_states(self, value: bool | None) -> bool:
        """Whether a call asks for the hidden states of all layers: by its argument, or else by the config."""
        check_flag("output_hidden_states", value, optional=True)
        return bool(self.config.output_hidden_states) if value is None else value

    @property
    def _chunks_loss(self) -> bool:
        """Whether the loss is computed without the logits of whole windows."""
        return False

    def _send(self, ids: Tensor) -> Tensor:
        """Token ids on the model's device. If they come from the host, neither checking nor sending them waits for the
        device, which may still be busy with an earlier call."""
        if ids.device.type != "cpu" or self.device.type in ("cpu", "meta"):
            return ids
        return (ids.pin_memory() if self.device.type == "cuda" else ids).to(self.device, non_blocking=True)

    def _run(self, plan: BatchPlan, outputs: OutputSpec | None) -> tuple[list[bptt.Outputs], Tensor]:
        """Run the windows: their outputs (None: the summed loss), and the flat state after them, [B, m].

        With gradients enabled and no outputs, the parameters' gradients are computed here, not in `backward`.
        """
        return run_windows.run_windows(
            self, plan, outputs, budget=self.activation_budget, graphs=self.graph_cache,
            capturable=self._capturable_outputs and (outputs is None or not outputs.hidden_states),
        )  # fmt: skip

    def _state(self, plan: BatchPlan, flat: Tensor, summary: Tensor | None = None) -> State:
        """The `State` after a call, from the flat state after its windows."""
        return plan.final_state(self.memory.unflatten(flat), summary)

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
        allow_other_model: bool = False,
    ) -> State:
        """The state after more tokens. Only complete windows run, and only for their state.

        Args:
            allow_other_model: continue from a state that a model with other weights or settings has made.
            final: the documents end here: a last window that is not full passes on what it has, and the state is that
                of the whole document. It cannot be continued then. (Where windows see their right neighbours, the state
                is that of the last window that has one.)
        """
        plan = self._plan(
            input_ids, attention_mask, None, state,
            overlap=overlap, use_state=use_state, outputs=final, final=final, closing=final,
            allow_other_model=allow_other_model,
        )  # fmt: skip
        return self._state(plan, run_windows.advance_state(self, plan, self.activation_budget, self.graph_cache))

    def _grouped_mm_can_dispatch(self) -> bool:
        return True  # a mixture of experts: the base model was asked when it was made

    # --- state, vocabulary, speed --------------------------------------------------------------------------------

    def fresh_state(self, batch: int, overlap: int | None = None, *, training: bool | None = None) -> State:
        """The state of documents of which nothing has been read yet. A call that is given it reads special tokens
        around a document as a part of it.

        Args:
            training: the weights change between calls, so states cannot name the model. By default they do in training
                mode with gradients enabled.
        """
        overlap = argument_checks.check_overlap(self.config, overlap)
        check_count("batch", batch)
        training = self.training and torch.is_grad_enabled() if training is None else training
        counts = torch.zeros(batch, dtype=torch.long)
        return State(
            memory=self.memory.initial(batch), started=counts.bool(), tokens=counts[:, None][:, :0], pending=counts,
            read=counts, signature=f"{self._signature}, overlap {overlap}", model=self._model_fingerprint(training),
        )  # fmt: skip

    def _model_fingerprint(self, training: bool) -> str:
        """What tells this model's states from those of another: a digest of its weights without the head, and of the
        settings that decide what a state means. Empty in training and for weights that are sharded."""
        if training:
            self._fingerprint.forget()
            return ""
        if is_sharded(self.modules()):
            return ""
        weights = self._fingerprint(self.backbone, self.memory)
        settings = json.dumps(self.config.recurrence.state_settings(), sort_keys=True)
        return weights and blake2b(f"{weights} {settings}".encode(), digest_size=8).hexdigest()

    @property
    def _signature(self) -> str:
        """What a state must have in common with the model it is given to, in words for an error message."""
        base, recurrence = self.config.base_config, self.config.recurrence
        memories = (
            f"{kind} {'x'.join(map(str, memory.shape))}{recurrence.find(kind).signature()}"
            for kind, memory in self.memory.items()
        )
        return (
            f"{base.model_type} of {base.num_hidden_layers} layers, vocabulary {base.vocab_size}, "
            f"{', '.join(memories)}, window {recurrence.window}"
        )

    @property
    def untrained_memories(self) -> list[str]:
        """The kinds of memory whose states mean nothing yet: they must be trained, and have not changed since
        `add_recurrence` made them."""
        initial = self.config.initial_memory or {}
        return [kind for kind, memory in self.memory.items() if initial.get(kind) == checkpoints.fingerprint(memory)]

    @property
    def _vocabulary(self) -> int:
        layer = self.get_input_embeddings()
        size = getattr(layer, "num_embeddings", None)  # FSDP shards the weight; peft's wrappers have nothing else
        return layer.weight.shape[0] if size is None else size

    @property
    def _num_classes(self) -> int:
        """The number of values that a label may have."""
        return self._vocabulary

    @property
    def fast_path(self) -> FastPath:
        """How windows run on a GPU: "auto" captures them once there are many, and compiles them once there are very
        many; "compiled" does both from the first; "off" runs them eagerly."""
        return self.graph_cache.path

    @fast_path.setter
    def fast_path(self, path: FastPath) -> None:
        if path not in get_args(FastPath):
            raise ValueError(f"fast_path={path!r} must be one of {', '.join(map(repr, get_args(FastPath)))}.")
        self.graph_cache = GraphCache(path)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile what a window runs: the base model without its head. The loop over windows stays Python."""
        self.backbone.compile(*args, **kwargs)

    # --- Hugging Face --------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> Any:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.base.set_output_embeddings(value)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what is added to the base model later, such as embeddings. Memories initialise themselves."""
        if not any(module is own for own in self.memory.modules()):
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
        """Save as every Hugging Face model does; nothing half-written ever appears at `save_directory`.

        The tokenizer that `add_recurrence` was given is saved too, and a model card, and a loader with which
        `trust_remote_code=True` finds carryforward.
        """
        check_memory_saved(self)
        quantization.check_savable(self)
        if (Path(save_directory) / checkpoints.RUN_FILE).exists():
            raise ValueError(
                f"save_directory={str(save_directory)!r} is the folder of a training run, whose record is of another "
                "model. Save to another folder."
            )
        if not kwargs.get("is_main_process", True):
            return super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", Path(save_directory).resolve().name)  # not the temporary folder's name
        with atomic_folder(save_directory) as temporary:
            if hasattr(self.tokenizer, "save_pretrained"):
                self.config.tokenizer_fingerprint = tokenization.fingerprint(self.tokenizer)
                hub = {name: kwargs[name] for name in ("push_to_hub", "repo_id", "token") if name in kwargs}
                self.tokenizer.save_pretrained(temporary, **hub)
            if not has_own_adapters(self):  # of which transformers saves nothing else
                self.config.auto_map = model_card.auto_map(self)
                model_card.write_files(self, temporary, Path(save_directory))
            super().save_pretrained(temporary, **kwargs)
            if not model_card.is_ours(Path(save_directory) / model_card.CARD):
                (temporary / model_card.CARD).unlink(missing_ok=True)  # the repository's

    def _get_files_timestamps(self, working_dir: Any) -> dict[str, float]:
        """Files that need not be uploaded unless they change: the loader, which is written first, is not among them."""
        timestamps = super()._get_files_timestamps(working_dir)  # type: ignore[misc]
        return {name: time for name, time in timestamps.items() if name != model_card.LOADER}

    def _upload_modified_files(self, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Upload a folder to the Hub, with our model card in place of the one that transformers generates."""
        if not has_own_adapters(self):
            model_card.write_card_for_hub(self, Path(working_dir) / model_card.CARD, repo_id, kwargs.get("token"))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Called when the model is loaded by its loader, which is then saved again; not the module of this class."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as every Hugging Face model does; weights that are missing or do not fit are an error."""
        if any(kwargs.get(name) is not None for name in ("tp_plan", "distributed_config")):
            raise ValueError(f"{pretrained_model_name_or_path}: {NO_MODEL_PARALLEL}")
        from .verification import verify_again  # it makes models of its own

        loaded = checkpoints.load_strictly(super().from_pretrained, cls, pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        quantization.after_loading(model, model.base)
        verify_again(model)
        return loaded
