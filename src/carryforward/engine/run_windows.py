# SPDX-License-Identifier: Apache-2.0
"""Run the windows of a call: policy, program and BPTT come together here.

A window always runs by `model.run_window`. There are two ways to call it: eagerly (`run_eagerly`), or from a captured
CUDA graph (`graph_cache`), whose layers are compiled after many windows. `run_policy` decides which. Three functions
loop over windows: `run_windows` (loss or outputs, with gradients), `advance_state` (states only) and `stream_outputs`
(outputs that are handed out one by one). Generation reads token by token instead: `models.generation.window_cache`.
"""

import torch
from torch import Tensor

from . import bptt, run_policy
from .activation_budget import ActivationBudget
from .batch_plan import BatchPlan
from .graph_cache import GraphCache
from .window_model import RunWindow, WindowInputs, WindowModel, WindowOutputs
from .window_program import OutputSpec, WindowProgram


def run_windows(
    model: WindowModel,
    plan: BatchPlan,
    outputs: OutputSpec | None,
    *,
    budget: ActivationBudget,
    graphs: GraphCache,
    capturable: bool,
) -> tuple[list[bptt.Outputs], Tensor]:
    """Run all windows of a plan, differentiably if gradients are enabled.

    Args:
        outputs: what windows give out; None for their summed loss.
        budget: decides how many windows keep their activations.
        graphs: the model's captured graphs.
        capturable: whether `outputs` can be captured.

    Returns:
        the outputs of each window batch (without `outputs` the summed loss), and the flat state after them, [B, m].
    """
    recurrence = model.config.recurrence
    policy = run_policy.decide(model, capturable=outputs is None or capturable)
    eager = run_eagerly(model, None if policy.keep_graph else budget)  # a kept graph leaves nothing to decide
    session = None
    if policy.capture:  # outputs are differentiated after the call, perhaps after other calls
        session = graphs.session(model, policy, budget, eager, lasting=outputs is not None)
    program = WindowProgram(model, plan, outputs, policy, session.run if session else eager, session)
    if policy.sharded and outputs is None:
        program.pad_to_longest_rank()
    # Without states to pass on, windows run once, in the second pass.
    keep = recurrence.keep_windows if plan.use_state or outputs is not None else 0
    budget.keep = keep if keep == "auto" else -(-keep // plan.block_windows)  # window batches
    unroll = bptt.UnrollSettings(
        program=program,
        parameters=policy.trainable,
        always={parameter for parameter in model.memory.parameters() if parameter.requires_grad},
        loss_only=outputs is None,
        keep_graph=policy.keep_graph,
        budget=budget,
        offload=recurrence.offload_states,
        seeds=bptt.draw_seeds(len(program.batches)) if policy.training else None,
        devices={weight.device for weight in policy.weights},
    )
    return bptt.unroll(unroll, model.memory.flatten(plan.initial_state.memory))


@torch.no_grad()
def advance_state(model: WindowModel, plan: BatchPlan, budget: ActivationBudget, graphs: GraphCache) -> Tensor:
    """The flat state after a plan's windows, [B, m], without their outputs."""
    policy, eager = run_policy.decide(model, capturable=True), run_eagerly(model)
    session = graphs.session(model, policy, budget, eager) if policy.capture else None
    program = WindowProgram(model, plan, None, policy, session.run if session else eager, session)
    state = model.memory.flatten(plan.initial_state.memory)
    for batch in plan.batches:
        _, state = program.run(batch, state, with_outputs=False)
    return state


@torch.no_grad()
def stream_outputs(model: WindowModel, plan: BatchPlan, outputs: OutputSpec) -> None:
    """Run a plan's windows one after the other and hand out their outputs; nothing of a window is kept."""
    policy = run_policy.decide(model, capturable=False)
    program = WindowProgram(model, plan, outputs, policy, run_eagerly(model))
    state = model.memory.flatten(plan.initial_state.memory)
    for batch in plan.batches:
        _, state = program.run(batch, state, with_outputs=True)


def run_eagerly(model: WindowModel, budget: ActivationBudget | None = None) -> RunWindow:
    """A function that runs windows as they are.

    Args:
        budget: notes how much activation memory windows take, where that is not known yet.
    """

    def run(window: WindowInputs, state: Tensor) -> WindowOutputs:
        if budget is None or not torch.is_grad_enabled():
            return model.run_window(window)
        with budget.measuring(window.shape_key, model.parameters()):
            return model.run_window(window)

    return run
