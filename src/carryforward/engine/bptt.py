# SPDX-License-Identifier: Apache-2.0
"""Exact backpropagation through time with one window's activations in memory (section 3.2 of the paper).

Between windows only the state passes. So a first pass without a graph stores the state that enters each window. A
second pass runs the windows again, newest first, each with a graph of its own, and hands the gradient of its incoming
state to the window before. The gradients are those of the whole graph.

Three choices shape the code:

- If windows give out nothing but their loss, the gradient to come is known up to a factor. The second pass then runs at
  once, inside the forward call, and the first pass needs neither the vocabulary projection nor windows whose state no
  later one reads, such as the last.
  `backward` only multiplies by the factor.
- Parameters are inputs of one autograd function, so that their gradients leave it once. Accumulating into `.grad`
  window by window would bypass the hooks with which distributed training keeps its ranks equal.
- The newest windows need not run twice if memory allows (`keep_windows`): the first pass then keeps their graph.

This file knows nothing of models: a `Program` says what a window computes.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .activation_budget import ActivationBudget, ShapeKey

logger = logging.get_logger(__name__)

Outputs = tuple[Tensor, ...]


class Program(Protocol):
    """What is unrolled: window batches that read and replace rows of a state [B, m]."""

    batches: Sequence[Any]
    inputs: Sequence[Tensor]  # what windows read beside the state; must not change before they run again

    def run(self, batch: Any, state: Tensor, with_outputs: bool) -> tuple[Outputs, Tensor]:
        """Run one window batch. Without `with_outputs` only the new state is needed, and the outputs may be empty."""
        ...

    def shape_key(self, batch: Any) -> ShapeKey:
        """Batches with the same key need the same activation memory."""
        ...

    def is_needed(self, batch: Any) -> bool:
        """Whether a later batch reads the state after this one."""
        ...

    def add_final_state(self, batch: Any, final: Tensor, state: Tensor) -> Tensor:
        """Replace those rows of the state after the last batch that this one wrote last, by the state after it."""
        ...

    def accumulated_gradients(self) -> Sequence[Tensor | None]:
        """Parameter gradients that windows have accumulated themselves since the last call of this method."""
        ...


@dataclass
class UnrollSettings:
    """One unrolling.

    Attributes:
        program: what to run.
        parameters: everything trainable.
        always: the parameters that receive a gradient of zero, not none, if no window used them (those of memories in a
            batch of one-window documents), so that all ranks of a distributed run agree.
        loss_only: each window gives out its summed loss, a scalar, and only their sum is returned.
        keep_graph: let autograd keep the graph of all windows.
        budget: how many windows keep their activations instead of being recomputed.
        offload: store states in host memory.
        seeds: if random numbers are drawn (dropout), one seed for each window batch, so that a second pass draws the
            same. A seed takes a thousandth of a generator's whole state.
        devices: where random numbers may be drawn, beside the CPU.
    """

    program: Program
    parameters: list[nn.Parameter]
    always: set[nn.Parameter]
    loss_only: bool
    keep_graph: bool
    budget: ActivationBudget
    offload: bool
    seeds: list[int] | None
    devices: set[torch.device]

    def run(self, i: int, state: Tensor, with_outputs: bool = True) -> tuple[Outputs, Tensor]:
        """Run the i-th window batch with its own random numbers."""
        if self.seeds is None:
            return self.program.run(self.program.batches[i], state, with_outputs)
        with seeded(self.seeds[i], self.devices):
            return self.program.run(self.program.batches[i], state, with_outputs)


def unroll(settings: UnrollSettings, state: Tensor) -> tuple[list[Outputs], Tensor]:
    """Run all window batches in order.

    Returns:
        the outputs of each (with `loss_only` the sum of the losses), and the state after the last.
    """
    batches = settings.program.batches
    differentiable = torch.is_grad_enabled() and (bool(settings.parameters) or state.requires_grad)
    if differentiable and batches and not settings.keep_graph:
        *flat, state = _Recomputed.apply(settings, state, *settings.parameters)
        arity = len(flat) if settings.loss_only else len(flat) // len(batches)
        return [tuple(flat[i : i + arity]) for i in range(0, len(flat), arity)], state

    results = []
    for i in range(len(batches)):
        outputs, state = settings.run(i, state)
        results.append(outputs)
    if settings.loss_only:
        results = [(sum((loss for (loss,) in results), torch.zeros((), device=state.device)),)]
    unused = settings.always if batches else settings.parameters
    if differentiable and unused:
        results = [(with_zero_gradients(first, unused), *rest) for first, *rest in results]
    return results, state


def has_gradient_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a hook waits for a parameter's gradient, which would be called once for every window."""
    if not any(parameter._backward_hooks for parameter in parameters):
        return False
    logger.warning_once(
        "A hook on a parameter's gradient would run once for every window: the graph of all windows is kept instead, "
        "and memory grows with their number. Tensor.register_post_accumulate_grad_hook does not need that."
    )
    return True


def with_zero_gradients(x: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """The same tensor, through which parameters that did not take part receive a gradient of zero."""
    return _ZeroGradients.apply(x, *parameters)


def offloaded(state: Tensor) -> Tensor:
    """A copy of a state in host memory."""
    if state.device.type == "cpu":
        return state
    host = torch.empty_like(state, device="cpu", pin_memory=True)
    return host.copy_(state, non_blocking=True)


class _ZeroGradients(torch.autograd.Function):
    """The identity, with a gradient of zero for parameters that did not take part."""

    @staticmethod
    def forward(ctx, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)


class _Recomputed(torch.autograd.Function):
    """The unrolling as one differentiable operation on the state and the parameters."""

    @staticmethod
    def forward(ctx, settings: UnrollSettings, state: Tensor, *parameters: Tensor):
        ctx.set_materialize_grads(False)
        # Saved so that autograd refuses a backward pass after any of them has changed in place.
        ctx.save_for_backward(*parameters, *settings.program.inputs)
        ctx.recompute = recompute = _TwoPassRecompute(settings, state.device)
        results, state = recompute.first_pass(state.detach())
        ctx.precomputed = None
        if settings.loss_only:
            ctx.precomputed = recompute.second_pass(None, None, precompute=True)
            state, results = recompute.final_state, [(recompute.loss,)]
        # Detach: outputs that reference this node would form a cycle.
        return *(tensor.detach() for outputs in results for tensor in outputs), state.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        parameters = ctx.saved_tensors[: len(ctx.recompute.settings.parameters)]
        *of_outputs, of_state = gradients
        total: _Gradients | None = None
        if ctx.precomputed is not None and of_outputs[0] is not None:
            # Used up here: a second `backward` through a retained graph computes the gradients again.
            total, ctx.precomputed = ctx.precomputed.scale_(of_outputs[0]), None
            of_outputs = [None]
        if of_state is not None or any(gradient is not None for gradient in of_outputs):
            rest = ctx.recompute.second_pass(of_outputs, of_state)
            total = rest if total is None else total.add_(rest)
        if total is None:
            return (None,) * (2 + len(parameters))
        return None, total.state, *total.filled(ctx.recompute.settings)


@dataclass
class _Gradients:
    """Gradients of the incoming state and of the parameters; None for what was not used.

    Those of the parameters are buffers of our own (`_sum` copies): autograd may return shared memory.
    """

    state: Tensor | None
    parameters: list[Tensor | None]

    def scale_(self, factor: Tensor) -> "_Gradients":
        same_type = []  # one launch for all of them, which matters on a GPU
        for gradient in [self.state, *self.parameters]:
            if gradient is None:
                continue
            if gradient.dtype == factor.dtype and gradient.device == factor.device:
                same_type.append(gradient)
            else:  # in float32 at least: rounding the factor would cost up to 0.4 %
                exact = torch.promote_types(gradient.dtype, torch.float32)
                gradient.copy_(gradient.to(exact) * factor.to(gradient.device))
        if same_type:
            torch._foreach_mul_(same_type, factor)
        return self

    def add_(self, other: "_Gradients") -> "_Gradients":
        self.state = _sum(self.state, other.state)
        self.parameters = [_sum(a, b) for a, b in zip(self.parameters, other.parameters, strict=True)]
        return self

    def filled(self, settings: UnrollSettings) -> list[Tensor | None]:
        """The parameters' gradients, zeros included."""
        return [
            torch.zeros_like(parameter) if gradient is None and parameter in settings.always else gradient
            for parameter, gradient in zip(settings.parameters, self.parameters, strict=True)
        ]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if b is None:
        return a
    return b.clone() if a is None else a.add_(b)


class _TwoPassRecompute:
    """The two passes over the windows, and what is stored between them: the states."""

    def __init__(self, settings: UnrollSettings, device: torch.device):
        self.settings = settings
        self.device = device
        self.states: list[Tensor] = []
        self.kept: dict[int, tuple[Tensor, Outputs, Tensor]] = {}  # state before, outputs and state after, with graph
        self.autocast: dict[str, Any] = {
            "device_type": device.type,
            "enabled": torch.is_autocast_enabled(device.type),
            "dtype": torch.get_autocast_dtype(device.type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self.loss = torch.zeros((), device=device)
        self.final_state = torch.empty(0)

    def first_pass(self, state: Tensor) -> tuple[list[Outputs], Tensor]:
        """Store the state before each window. Only windows that keep their activations run with a graph. If only the
        loss is needed, windows whose state is not do not run."""
        settings, results = self.settings, []
        batches = settings.program.batches
        keepable = self._keepable()
        for i in range(len(batches)):
            self.states.append(offloaded(state) if settings.offload else state)
            if settings.loss_only and not settings.program.is_needed(batches[i]):
                continue
            kept = self._run_and_keep(i, state) if keepable[i] and not settings.budget.exhausted else None
            if kept is not None:
                outputs, state = kept
            else:
                outputs, state = settings.run(i, state, with_outputs=not settings.loss_only)
            results.append(outputs)
        torch.clear_autocast_cache()  # older torch would reuse weights that were cast without a graph
        return results, state

    def _keepable(self) -> list[bool]:
        """Which windows keep their graph: the newest that fit the budget."""
        settings = self.settings
        shapes = [settings.program.shape_key(batch) for batch in reversed(settings.program.batches)]
        return settings.budget.keepable(shapes, settings.parameters, self.device)[::-1]

    def _run_and_keep(self, i: int, state: Tensor) -> tuple[Outputs, Tensor] | None:
        """Run a window and keep its graph; None if memory ran out, since others use the device too."""
        budget = self.settings.budget
        torch.clear_autocast_cache()  # as in the first pass
        incoming = state.detach().requires_grad_()
        try:
            with torch.enable_grad():
                outputs, outgoing = self.settings.run(i, incoming)
        except torch.OutOfMemoryError:
            if budget.keep != "auto":
                raise
            budget.exhausted = True
            self.kept.clear()  # or the second pass would run out of memory too
            return None
        self.kept[i] = incoming, outputs, outgoing
        return tuple(tensor.detach() for tensor in outputs), outgoing.detach()

    def second_pass(
        self, of_outputs: Sequence[Tensor | None] | None, of_state: Tensor | None, precompute: bool = False
    ) -> _Gradients:
        """Newest window first: run it with a graph, unless it kept one, and backpropagate through it.

        Args:
            of_outputs: gradients of the windows' outputs (with `loss_only` one for all of them).
            of_state: gradient of the state after the last window.
            precompute: called from the forward pass, before the gradient of the loss is known: it is taken to be 1.
        """
        gradients = _Gradients(of_state, [None] * len(self.settings.parameters))
        batches = self.settings.program.batches
        with torch.enable_grad(), contextlib.nullcontext() if precompute else torch.autocast(**self.autocast):
            for i in reversed(range(len(batches))):
                if i in self.kept:
                    incoming, outputs, outgoing = self.kept.pop(i)
                else:
                    incoming = self.states[i].to(self.device).detach().requires_grad_()
                    outputs, outgoing = self.settings.run(i, incoming)
                if precompute:
                    self.loss = self.loss + outputs[0].detach()
                    is_last, state = i == len(batches) - 1, outgoing.detach()
                    add = self.settings.program.add_final_state
                    self.final_state = state if is_last else add(batches[i], self.final_state, state)
                upstream = self._upstream(of_outputs, i, len(outputs))
                self._backward_through(gradients, incoming, outputs, outgoing, upstream)
        accumulated = self.settings.program.accumulated_gradients()  # buffers of our own already
        if accumulated:
            pairs = zip(gradients.parameters, accumulated, strict=True)
            gradients.parameters = [b if a is None else _sum(a, b) for a, b in pairs]
        return gradients

    def _upstream(self, of_outputs: Sequence[Tensor | None] | None, i: int, arity: int) -> Sequence[Tensor | None]:
        """The gradients of the i-th window's outputs."""
        if of_outputs is None:
            return [torch.ones((), device=self.loss.device)]
        return of_outputs if self.settings.loss_only else of_outputs[i * arity : (i + 1) * arity]

    def _backward_through(
        self,
        gradients: _Gradients,
        incoming: Tensor,
        outputs: Outputs,
        outgoing: Tensor,
        upstream: Sequence[Tensor | None],
    ) -> None:
        """Backpropagate through one window: add parameter gradients, replace the state's gradient."""
        pairs = [*zip(outputs, upstream, strict=True), (outgoing, gradients.state)]
        pairs = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
        gradients.state = None
        if not pairs:
            return
        state, *parameters = torch.autograd.grad(
            [output for output, _ in pairs],
            [incoming, *self.settings.parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        gradients.state = state
        gradients.parameters = [_sum(a, b) for a, b in zip(gradients.parameters, parameters, strict=True)]


def draw_seeds(count: int) -> list[int]:
    """Draw seeds from the global generator."""
    return torch.randint(2**62, (count,)).tolist()


@contextlib.contextmanager
def seeded(seed: int, devices: set[torch.device]) -> Iterator[None]:
    """Draw random numbers from a seed inside; restore every generator afterwards."""
    modules = [(device, torch.get_device_module(device)) for device in devices if device.type != "cpu"]
    before = torch.get_rng_state(), [module.get_rng_state(device) for device, module in modules]
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would look for absent devices, for 2 ms
    for device, module in modules:
        with module.device(device):
            module.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        for (device, module), state in zip(modules, before[1], strict=True):
            module.set_rng_state(state, device)
