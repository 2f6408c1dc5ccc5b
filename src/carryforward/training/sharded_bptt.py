# SPDX-License-Identifier: Apache-2.0
"""Exact backpropagation through time where FSDP shards the weights.

FSDP gathers weights in hooks of a module's call and reduces their gradients when a backward pass ends. The two passes
of `bptt` therefore cannot run inside a call. Here they stand outside: each window batch is an ordinary forward and
backward pass of the wrapped module. The first pass stores the state that enters each window batch. The second runs the
newest first and hands the gradient of the state to the window batch before. Nothing else is kept between them.

FSDP communicates in every call, so all ranks must run equally many. A rank with fewer window batches runs idle ones,
whose gradients are zero.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine import bptt
from ..engine.run_policy import RunPolicy
from ..engine.window_program import WindowProgram

Work = Callable[[], tuple[Tensor, ...]]


@dataclass
class ShardedUnroll:
    """One unrolling.

    Attributes:
        program: what to run.
        call: calls the wrapped module, which does the given work in its forward pass and returns what that returns.
        seeds: if random numbers are drawn (dropout), one seed for each window batch.
        devices: where random numbers may be drawn, beside the CPU.
        offload: store states in host memory.
    """

    program: WindowProgram
    call: Callable[[Work], tuple[Tensor, ...]]
    seeds: list[int] | None
    devices: set[torch.device]
    offload: bool

    def backward(self, state: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Run all window batches forward and backward.

        Args:
            factor: the gradient of the summed loss.

        Returns:
            the summed loss, and the state after the last window batch.
        """
        batches = self.program.batches
        passing_on = [batch for batch in batches if self.program.is_needed(batch)]
        idle_first, idle_second = _missing([len(passing_on), len(batches)], state.device)
        with torch.no_grad():
            states = self._first_pass(state.detach())
            for _ in range(idle_first):
                self.call(lambda: (self.program.model.run_empty(with_outputs=False),))
        with torch.enable_grad(), _gradients_through_all_layers(self.program.model.get_input_embeddings()):
            result = self._second_pass(states, factor)
            for _ in range(idle_second):
                self.call(lambda: (self._with_gradients(self.program.model.run_empty()),))[0].backward()
        return result

    def _first_pass(self, state: Tensor) -> list[Tensor]:
        """The state that enters each window batch, and the one after the last that passes one on."""
        states = [self._stored(state)]
        for i, batch in enumerate(self.program.batches):
            if self.program.is_needed(batch):
                state = self._run(i, state, with_outputs=False)[-1]
            states.append(self._stored(state))
        return states

    def _second_pass(self, states: list[Tensor], factor: Tensor) -> tuple[Tensor, Tensor]:
        total, gradient, final = torch.zeros_like(factor), None, states.pop().to(factor.device)
        newest = len(self.program.batches) - 1
        for i in range(newest, -1, -1):
            incoming = states.pop().to(factor.device).detach().requires_grad_()
            loss, outgoing = self._run(i, incoming, with_outputs=True)
            outputs, gradients = [loss], [factor.to(loss.dtype)]
            if gradient is not None and outgoing.requires_grad:
                outputs, gradients = [loss, outgoing], [*gradients, gradient.to(outgoing.dtype)]
            torch.autograd.backward(outputs, gradients)
            total, gradient = total + loss.detach(), incoming.grad
            after = outgoing.detach()
            final = after if i == newest else self.program.add_final_state(self.program.batches[i], final, after)
        return total, final

    def _run(self, i: int, state: Tensor, with_outputs: bool) -> tuple[Tensor, ...]:
        """Run the i-th window batch as a call of the wrapped module: its loss, with outputs, and the state after it."""

        def work() -> tuple[Tensor, ...]:
            entering = state.to(self.program.model.memory.like.dtype)  # FSDP may gather weights in a lower precision
            outputs, after = self.program.run(self.program.batches[i], entering, with_outputs)
            return (*map(self._with_gradients, outputs), after.clone())  # FSDP warns of outputs that are views

        # The state goes around FSDP's hooks: its gradient is known before those of all weights, which FSDP would reduce
        # at that moment.
        with nullcontext() if self.seeds is None else bptt.seeded(self.seeds[i], self.devices):
            return self.call(work)

    def _with_gradients(self, loss: Tensor) -> Tensor:
        """Memories that took no part get gradients of zero: all ranks must reduce the same ones."""
        memory = [weight for weight in self.program.model.memory.parameters() if weight.requires_grad]
        return bptt.with_zero_gradients(loss, memory).clone()

    def _stored(self, state: Tensor) -> Tensor:
        return bptt.offloaded(state) if self.offload else state


def policy_of(model: nn.Module) -> RunPolicy:
    """The policy of window batches that run one by one in calls of the wrapped module."""
    modules = [*model.modules()]
    return RunPolicy(
        modules=modules, weights=[*model.parameters()], sharded=True, keep_graph=True, capture=False,
        training=any(module.training for module in modules),
    )  # fmt: skip


def _missing(counts: Sequence[int], device: torch.device) -> list[int]:
    """By how much the largest of each of these counts over all ranks exceeds this rank's."""
    own = torch.tensor(counts, device=device)
    most = own.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return (most - own).tolist()


@contextmanager
def _gradients_through_all_layers(embeddings: nn.Module) -> Iterator[None]:
    """Let gradients flow through every layer, also where embeddings and first layers are frozen.

    Otherwise autograd skips layers below the state's entry, in window batches that receive one or not, and ranks would
    gather the weights of different layers.
    """

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_()

    handle = embeddings.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
