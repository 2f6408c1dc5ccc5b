# SPDX-License-Identifier: Apache-2.0
"""A training step of a model whose weights FSDP shards."""

import torch
from torch import Tensor, nn

from ..engine import bptt
from ..engine.run_policy import is_sharded
from ..engine.run_windows import run_eagerly
from ..engine.window_program import WindowProgram
from ..models.causal_lm import RecurrentForCausalLM
from ..models.encoders import RecurrentForMaskedLM, RecurrentForTokenClassification
from ..models.outputs import RecurrentOutput
from ..models.token_model import TokenOutputModel
from ..state import State
from .sharded_bptt import ShardedUnroll, policy_of

_WITH_LOSS = RecurrentForCausalLM, RecurrentForMaskedLM, RecurrentForTokenClassification


def sharded_backward(
    module: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    state: State | None = None,
    *,
    use_state: bool = True,
    num_items_in_batch: Tensor | int | None = None,
    factor: Tensor | float = 1.0,
) -> RecurrentOutput:
    """Forward and backward of a training step where FSDP shards the weights: in place of `module(...).loss.backward()`.

    The blocks of windows run newest first, each as a forward and backward pass of its own, so memory grows by one state
    a block. The gradients are those of the whole graph, in `.grad`, averaged over ranks as FSDP does. All ranks must
    call it together, with batches of any size. Hooks on gradients run once for every block.

    Args:
        module: the model as FSDP wraps it.
        input_ids, attention_mask, labels, state, use_state: as in the model's call. Encoders' documents end here. No
            gradient flows into `state`.
        num_items_in_batch: divide the loss by this instead of the number of scored targets.
        factor: the gradient of the loss, such as the factor of loss scaling.

    Returns:
        the loss, detached, and the state after the documents.
    """
    if labels is None:
        raise ValueError("labels=None: sharded_backward needs labels, as the loss is computed block by block.")
    model = _recurrent_model(module)
    with torch.enable_grad():
        plan = model._plan(
            input_ids, attention_mask, labels, state, overlap=None, use_state=use_state, outputs=False,
            final=not model.config.architecture.causal,
        )  # fmt: skip
    policy, scored = policy_of(model), plan.count_scored()
    unroll = ShardedUnroll(
        program=WindowProgram(model, plan, None, policy, run_eagerly(model)),
        call=lambda work: module(input_ids=None, work=work),
        seeds=bptt.draw_seeds(len(plan.batches)) if policy.training else None,
        devices={weight.device for weight in policy.weights},
        offload=model.config.recurrence.offload_states,
    )
    items = scored.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    per_target = torch.as_tensor(factor / items, dtype=torch.float32, device=plan.tokens.device)
    nll_sum, flat = unroll.backward(model.memory.flatten(plan.initial_state.memory), per_target)
    return RecurrentOutput(loss=nll_sum / items, nll_sum=nll_sum, n_scored=scored, state=model._state(plan, flat))


def _recurrent_model(module: nn.Module) -> TokenOutputModel:
    """The recurrent model inside a sharded module; an error if it cannot run block by block."""
    model = next((part for part in module.modules() if isinstance(part, _WITH_LOSS)), None)
    if model is None:
        raise ValueError(
            f"sharded_backward trains models with a loss for every token, not {type(module).__name__}. For others call "
            "the model: it keeps the graph of all windows."
        )
    if not is_sharded(module.modules()):
        raise ValueError("sharded_backward is for weights that FSDP shards. Call the model and loss.backward().")
    if is_sharded(model.memory.modules()):
        raise ValueError(
            "model.memory is an FSDP unit of its own. Not every block of windows uses it, so ranks would wait for each "
            "other forever. Leave it in the unit of the whole model: wrap the transformer layers only."
        )
    return model
