# SPDX-License-Identifier: Apache-2.0
"""Exact backpropagation through time with one window's activations in memory (section 3.2 of the paper).

Between windows only the state passes. So a first pass without a graph notes the state that enters each window, and
the windows are then run again, newest first, each with a graph of its own, handing the gradient of its incoming
state to the window before. The gradients are those of the whole graph.

Three choices shape the code. Where windows give out nothing but their loss, the gradient to come is known up to a
factor: the second pass is done at once, inside the forward call, and needs neither the vocabulary projection in the
first pass nor any first pass of the last window; `backward` then only applies the factor. And parameters are inputs
of one autograd function, so that their gradients leave it once: accumulating into `.grad` window by window would
bypass the hooks with which distributed training keeps its ranks equal. The newest windows need not be run twice where
there is memory for their activations (`keep_windows`): the first pass then gives them a graph that is kept.

This file knows nothing of models: a `Program` says what a window computes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .activation_budget import ActivationBudget, Kind

logger = logging.get_logger(__name__)

Emission = tuple[Tensor, ...]


class Program(Protocol):
    """What is unrolled. `table` holds the state of every row, [B, ...]; a cell reads and replaces some rows of it."""

    cells: Sequence[Any]
    inputs: Sequence[Tensor]  # what cells read beside the table; must not change before they are run again

    def advance(self, cell: Any, table: Tensor, head: bool) -> tuple[Emission, Tensor]:
        """Run one cell. Without `head` only the new table is wanted, and the emission may be empty; a cell that
        leaves the table as it is then has nothing to do."""
        ...

    def kind(self, cell: Any) -> Kind:
        """Cells of one kind take the same memory."""
        ...

    def gathered(self) -> Sequence[Tensor | None]:
        """Gradients of the parameters that cells have summed up themselves since this was last asked."""
        ...


@dataclass
class Plan:
    """One unrolling.

    Attributes:
        program: what to run.
        parameters: everything trainable.
        always: the parameters that receive a gradient of zero, not none, when no window used them (the recurrence
            module in a batch of one-window documents), so that all ranks of a distributed run agree.
        loss_only: each cell emits just its summed loss, a scalar, and only their sum is given out.
        keep_graph: let autograd keep the graph of everything, as it does everywhere else.
        allowance: how many windows may keep their activations instead of being run twice.
        offload: keep the noted tables in the host's memory.
        seeds: where random numbers are drawn (dropout), one seed for each cell, so that a second pass draws the same;
            a seed is a thousandth of what a generator's whole state takes.
        devices: where random numbers may be drawn, beside the CPU.
    """

    program: Program
    parameters: list[nn.Parameter]
    always: set[nn.Parameter]
    loss_only: bool
    keep_graph: bool
    allowance: ActivationBudget
    offload: bool
    seeds: list[int] | None
    devices: set[torch.device]

    def advance(self, i: int, table: Tensor, head: bool = True) -> tuple[Emission, Tensor]:
        """Run the i-th cell with the random numbers that belong to it."""
        if self.seeds is None:
            return self.program.advance(self.program.cells[i], table, head)
        with _seeded(self.seeds[i], self.devices):
            return self.program.advance(self.program.cells[i], table, head)


def unroll(plan: Plan, table: Tensor) -> tuple[list[Emission], Tensor]:
    """Run all cells in order.

    Returns:
        what each cell emits (with `loss_only` one emission, the sum), and the table after the last cell.
    """
    differentiable = torch.is_grad_enabled() and (bool(plan.parameters) or table.requires_grad)
    if differentiable and plan.program.cells and not plan.keep_graph:
        *flat, table = _Recomputed.apply(plan, table, *plan.parameters)
        arity = len(flat) if plan.loss_only else len(flat) // len(plan.program.cells)
        return [tuple(flat[i : i + arity]) for i in range(0, len(flat), arity)], table

    emissions = []
    for i in range(len(plan.program.cells)):
        emitted, table = plan.advance(i, table)
        emissions.append(emitted)
    if plan.loss_only:
        emissions = [(sum((nll for (nll,) in emissions), torch.zeros((), device=table.device)),)]
    unused = plan.always if plan.program.cells else plan.parameters
    if differentiable and unused:
        emissions = [(_Anchor.apply(first, *unused), *rest) for first, *rest in emissions]
    return emissions, table


def hooked(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether someone waits for a parameter's gradient, who would be called once for every window."""
    if not any(parameter._backward_hooks for parameter in parameters):
        return False
    logger.warning_once(
        "A hook on a parameter's gradient would run once for every window: the graph of all windows is kept "
        "instead, and memory grows with their number. Tensor.register_post_accumulate_grad_hook does not need that."
    )
    return True


class _Anchor(torch.autograd.Function):
    """The identity, with a gradient of zero for parameters that did not take part."""

    @staticmethod
    def forward(ctx, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        return gradient, *map(torch.zeros_like, ctx.saved_tensors)


class _Recomputed(torch.autograd.Function):
    """The unrolling as one differentiable operation on the table and the parameters."""

    @staticmethod
    def forward(ctx, plan: Plan, table: Tensor, *parameters: Tensor):
        ctx.set_materialize_grads(False)
        # so that changing any of them before `backward` is an error, as it always is
        ctx.save_for_backward(*parameters, *plan.program.inputs)
        ctx.sweep = sweep = _Sweep(plan, table.device)
        emissions, table = sweep.first_pass(table.detach())
        ctx.prepaid = None
        if plan.loss_only:
            ctx.prepaid = sweep.second_pass(None, None, prepay=True)
            table, emissions = sweep.table, [(sweep.loss,)]
        # Tensors of their own: what is returned knows this node, and what the node holds must not know it back.
        return *(tensor.detach() for emitted in emissions for tensor in emitted), table.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        parameters = ctx.saved_tensors[: len(ctx.sweep.plan.parameters)]
        *emitted, table = gradients
        total: _Gradients | None = None
        if ctx.prepaid is not None and emitted[0] is not None:
            # The prepaid gradients are spent here; a second `backward` through a retained graph computes them anew.
            total, ctx.prepaid = ctx.prepaid.scale_(emitted[0]), None
            emitted = [None]
        if table is not None or any(gradient is not None for gradient in emitted):
            rest = ctx.sweep.second_pass(emitted, table)
            total = rest if total is None else total.add_(rest)
        if total is None:
            return (None,) * (2 + len(parameters))
        return None, total.table, *total.filled(ctx.sweep.plan)


@dataclass
class _Gradients:
    """Gradients of the table that came in and of the parameters; None for what was not used.

    Those of the parameters are buffers of our own (`_sum` copies): what autograd returns may be shared memory.
    """

    table: Tensor | None
    parameters: list[Tensor | None]

    def scale_(self, factor: Tensor) -> "_Gradients":
        together = []  # in one launch for all, which counts on a GPU
        for gradient in [self.table, *self.parameters]:
            if gradient is None:
                continue
            if gradient.dtype == factor.dtype and gradient.device == factor.device:
                together.append(gradient)
            else:  # not in lower precision than float32, or the factor itself would be off by up to 0.4 %
                exact = torch.promote_types(gradient.dtype, torch.float32)
                gradient.copy_(gradient.to(exact) * factor.to(gradient.device))
        if together:
            torch._foreach_mul_(together, factor)
        return self

    def add_(self, other: "_Gradients") -> "_Gradients":
        self.table = _sum(self.table, other.table)
        self.parameters = [_sum(a, b) for a, b in zip(self.parameters, other.parameters, strict=True)]
        return self

    def filled(self, plan: Plan) -> list[Tensor | None]:
        return [
            torch.zeros_like(parameter) if gradient is None and parameter in plan.always else gradient
            for parameter, gradient in zip(plan.parameters, self.parameters, strict=True)
        ]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if b is None:
        return a
    return b.clone() if a is None else a.add_(b)


class _Sweep:
    """The two passes over the cells, and what must be remembered between them: the states."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan = plan
        self.device = device
        self.tables: list[Tensor] = []
        self.kept: dict[int, tuple[Tensor, Emission, Tensor]] = {}  # table before, emission and table after, with graph
        self.autocast: dict[str, Any] = {
            "device_type": device.type,
            "enabled": torch.is_autocast_enabled(device.type),
            "dtype": torch.get_autocast_dtype(device.type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self.loss = torch.zeros((), device=device)
        self.table = torch.empty(0)

    def first_pass(self, table: Tensor) -> tuple[list[Emission], Tensor]:
        """Without a graph, but for the newest cells that may keep theirs: note the table before each cell. The last
        cell is not run if only the loss is wanted and its graph is not kept."""
        emissions = []
        cells = self.plan.program.cells
        keep = self._keepable()
        for i in range(len(cells)):
            self.tables.append(self._noted(table))
            kept = self._keep(i, table) if keep[i] and not self.plan.allowance.full else None
            if kept is not None:
                emitted, table = kept
            elif self.plan.loss_only and i == len(cells) - 1:
                break
            else:
                emitted, table = self.plan.advance(i, table, head=not self.plan.loss_only)
            emissions.append(emitted)
        torch.clear_autocast_cache()  # older torch would use weights cast without a graph a second time
        return emissions, table

    def _keepable(self) -> list[bool]:
        """Which cells keep their graph: the newest that may."""
        kinds = [self.plan.program.kind(cell) for cell in reversed(self.plan.program.cells)]
        return self.plan.allowance.windows(kinds, self.plan.parameters, self.device)[::-1]

    def _keep(self, i: int, table: Tensor) -> tuple[Emission, Tensor] | None:
        """None where there was not as much memory as it seemed, since others use the device too."""
        allowance = self.plan.allowance
        torch.clear_autocast_cache()  # as in the first pass
        incoming = table.detach().requires_grad_()
        try:
            with torch.enable_grad():
                emitted, outgoing = self.plan.advance(i, incoming)
        except torch.OutOfMemoryError:
            if allowance.keep != "auto":
                raise
            allowance.full = True
            self.kept.clear()  # or the second pass would find as little room
            return None
        self.kept[i] = incoming, emitted, outgoing
        return tuple(tensor.detach() for tensor in emitted), outgoing.detach()

    def _noted(self, table: Tensor) -> Tensor:
        if not self.plan.offload or table.device.type == "cpu":
            return table
        host = torch.empty_like(table, device="cpu", pin_memory=True)
        return host.copy_(table, non_blocking=True)

    def second_pass(
        self, emitted: Sequence[Tensor | None] | None, table: Tensor | None, prepay: bool = False
    ) -> _Gradients:
        """Newest cell first: run it with a graph, unless it has kept one, and pull the gradients through it.

        Args:
            emitted: gradients of what the cells emitted (with `loss_only` one for all of them).
            table: gradient of the table after the last cell.
            prepay: the call comes from the forward pass: the loss is not known yet, its gradient is taken to be 1.
        """
        gradients = _Gradients(table, [None] * len(self.plan.parameters))
        cells = self.plan.program.cells
        with torch.enable_grad(), contextlib.nullcontext() if prepay else torch.autocast(**self.autocast):
            for i in reversed(range(len(cells))):
                if i in self.kept:
                    incoming, outputs, outgoing = self.kept.pop(i)
                else:
                    incoming = self.tables[i].to(self.device).detach().requires_grad_()
                    outputs, outgoing = self.plan.advance(i, incoming)
                if prepay:
                    self.loss = self.loss + outputs[0].detach()
                    if i == len(self.tables) - 1:
                        self.table = outgoing.detach()
                self._pull(gradients, incoming, outputs, outgoing, self._upstream(emitted, i, len(outputs)))
        more = self.plan.program.gathered()  # buffers of our own already
        if more:
            pairs = zip(gradients.parameters, more, strict=True)
            gradients.parameters = [b if a is None else _sum(a, b) for a, b in pairs]
        return gradients

    def _upstream(self, emitted: Sequence[Tensor | None] | None, i: int, arity: int) -> Sequence[Tensor | None]:
        if emitted is None:
            return [torch.ones((), device=self.loss.device)]
        return emitted if self.plan.loss_only else emitted[i * arity : (i + 1) * arity]

    def _pull(
        self,
        gradients: _Gradients,
        incoming: Tensor,
        outputs: Emission,
        outgoing: Tensor,
        upstream: Sequence[Tensor | None],
    ) -> None:
        pairs = [*zip(outputs, upstream, strict=True), (outgoing, gradients.table)]
        pairs = [(output, gradient) for output, gradient in pairs if gradient is not None and output.requires_grad]
        gradients.table = None
        if not pairs:
            return
        table, *found = torch.autograd.grad(
            [output for output, _ in pairs],
            [incoming, *self.plan.parameters],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        gradients.table = table
        gradients.parameters = [_sum(a, b) for a, b in zip(gradients.parameters, found, strict=True)]


def draw_seeds(count: int) -> list[int]:
    """As many seeds from the global generator."""
    return torch.randint(2**62, (count,)).tolist()


@contextlib.contextmanager
def _seeded(seed: int, devices: set[torch.device]) -> Iterator[None]:
    """Random numbers from a seed; afterwards every generator goes on where it was."""
    modules = [(device, torch.get_device_module(device)) for device in devices if device.type != "cpu"]
    before = torch.get_rng_state(), [module.get_rng_state(device) for device, module in modules]
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would see to devices that are not there, in 2 ms
    for device, module in modules:
        with module.device(device):
            module.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        for (device, module), state in zip(modules, before[1], strict=True):
            module.set_rng_state(state, device)
