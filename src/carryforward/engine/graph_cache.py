# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU: a window is captured once as a CUDA graph, which is replayed for all windows like it.

A window is little work in many small kernels, and launching them one by one takes longer than running them. Windows of
a document have the same shape, so one graph serves them all. A window that must be differentiated later keeps its
activations in a graph of its own. After many windows of a shape its layers are compiled too, and captured again.

Users ask for nothing of this, and nothing of it is saved. Where it cannot be used, windows run eagerly.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..backbones import hooks
from ..utils.checkpoints import tensor_parts
from .activation_budget import ActivationBudget
from .autocast_weights import AutocastWeights
from .cuda_graphs import CapturedForward, CapturedForwardBackward, GradientAccumulator, compiled_layers
from .run_policy import RunPolicy
from .window_buffers import Sizes, shared_room, sizes_of
from .window_model import RunWindow, WindowInputs, WindowModel, WindowOutputs

logger = logging.get_logger(__name__)

FastPath = Literal["auto", "compiled", "off"]
DEVICES = ("cuda",)
CAPTURE_AFTER = 16  # windows of a shape: a capture takes a second
COMPILE_AFTER = 1000  # windows in all: the compiler takes ten or twenty seconds
_HUGE = 1e30
MIN_COUNT_TO_COMPILE = COMPILE_AFTER // 20  # windows of a shape: ragged batches have many shapes


class GraphCache:
    """A model's captured graphs."""

    def __init__(self, path: FastPath = "auto") -> None:
        self.path: FastPath = path
        self._compiler_failed = False  # its result was wrong: it is not asked again
        self._clear()

    def __reduce__(self) -> tuple:
        return GraphCache, (self.path,)  # a copy starts without graphs: these belong to one model's weights

    def _clear(self) -> None:
        self._signature: list[tuple] = []
        self._compiles = self.path == "compiled"
        self._replays = 0
        self._seen: Counter = Counter()
        self._misses: Counter = Counter()
        self._largest = 0
        self._graphs: dict[tuple, list[CapturedForward]] = {}
        self._accumulator = GradientAccumulator()

    def possible(self, device: torch.device) -> bool:
        """Whether anything is captured on such a device at all."""
        return self.path != "off" and device.type in DEVICES

    def usable(self, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> bool:
        """Whether a model can be captured; logs the reason if it cannot on a device where it might."""
        if not self.possible(weights[0].device):
            return False
        reason = _obstacle(modules, weights)
        if reason is not None:
            logger.warning_once(f"Windows run without the fast path: {reason}.")
        return reason is None

    def session(
        self,
        model: WindowModel,
        policy: RunPolicy,
        budget: ActivationBudget,
        eager: RunWindow,
        lasting: bool = False,
    ) -> "GraphSession | None":
        """Begin a call of the model; None if its windows must run eagerly.

        Args:
            eager: runs a window for which there is no graph.
            lasting: kept windows are differentiated after the call, perhaps after other calls.
        """
        modules, weights = policy.modules, policy.weights
        if not self.usable(modules, weights):
            if self._signature:  # after a failure: no graph is used again
                self._clear()
            budget.reset_buffers()
            return None
        signature = _signature(model, modules, weights)
        if signature != self._signature:
            self._clear()
            self._signature = signature
            layers = model.config.architecture.layer_list(model.backbone)
            trainable = [weight for weight in weights if weight.requires_grad]
            self._accumulator = GradientAccumulator(trainable, AutocastWeights(layers, modules))
        if self.path == "auto" and not self._compiles and self._replays > COMPILE_AFTER:
            self._compiles, self._graphs = True, {}
            self._accumulator.reset_pool()
        if not self._graphs:
            budget.reset_buffers()
        self._accumulator.take()  # left over from an aborted call
        self._accumulator.autocast_weights.refresh()
        graphs = [*chain.from_iterable(self._graphs.values())]
        for graph in graphs:
            graph.release_unfinished()
        free = (g.buffers.shape_key for g in graphs if isinstance(g, CapturedForwardBackward) and not g.busy)
        budget.set_free_buffers(free)
        if torch.is_grad_enabled():
            self._accumulator.allocate()
        training = tuple(module.training for module in modules)
        return GraphSession(self, model, budget, eager, self._signature, self._accumulator, training, lasting)

    def run(self, session: "GraphSession", window: WindowInputs, state: Tensor) -> WindowOutputs:
        """Run a window from a graph: one that exists, or one that is captured now; eagerly otherwise."""
        device = window.ids.device.type
        with_gradients = torch.is_grad_enabled() and (state.requires_grad or bool(self._accumulator.parameters))
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        optional = (window.state, window.targets, window.prefix_lengths, window.token_types)
        absent = tuple(tensor is None for tensor in optional)
        links = None if window.links is None else window.links.layout()
        sizes = sizes_of(window)
        key = (session.training, *autocast, with_gradients, *absent, links, window.begins, window.outputs, window.start)
        shape = (*key, *sizes, window.ids.shape[1], window.mask is None, window.spans)
        self._seen[shape] += window.depth
        self._largest = max(self._largest, window.ids.numel())
        # The compiler's time pays for few shapes, and not for the many of a ragged batch. But blocks without gradients
        # can share buffers.
        shares = links is not None and not with_gradients and not window.has_fixed_sizes
        at_once = self.path == "compiled" and window.ids.numel() * (1 + shares) >= self._largest
        common = at_once or self._seen[shape] > max(MIN_COUNT_TO_COMPILE, self._replays // 20)
        graph = self._find(session, key, window)
        compiles = self._compiles and not self._compiler_failed and common
        if graph is not None and compiles and not graph.compiled and graph.can_be_replaced(window, shares):
            self._drop(session, key, graph)
            room = sizes_of(graph.buffers)
            graph = self._capture(session, key, window, room, state, with_gradients, True)
        if graph is None:
            # Documents that end leave fewer and fewer rows, and one graph serves many sizes. But buffers for windows
            # that gradients flow through are few.
            exact = with_gradients or window.has_fixed_sizes
            similar = shape if exact else (*key, window.mask is None, window.spans)
            self._misses[similar] += 1 if with_gradients else window.depth
            # Such a graph serves blocks of one shape alone, and most shapes of ragged documents come once.
            once = window.has_fixed_sizes and self._seen[shape] == window.depth
            if not once and (at_once or self._misses[similar] > CAPTURE_AFTER):
                fills = 2 * window.ids.numel() >= self._largest
                rows = self._largest // window.ids.shape[1] if fills else sizes.rows
                room = shared_room(sizes, rows) if shares else sizes
                graph = self._capture(session, key, window, room, state, with_gradients, self._compiles and common)
                if not with_gradients:
                    self._misses[similar] = 0
        if graph is None:
            return session.eager(window, state)
        self._replays += window.depth
        return graph(window, state, session.lasting)

    def disable(self, reason: str) -> None:
        """Log why, and go on without graphs; windows that are still to be differentiated hold on to theirs. Called when
        the error is gone, and with it all that its traceback referenced."""
        logger.warning_once(f"Windows run without the fast path: {reason}.")
        self.path, self._graphs = "off", {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the failure may have been the memory
            # In some versions of torch a failed capture does not release the random number generator: capture anew.
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                    torch.zeros(1, device="cuda")

    def _find(self, session: "GraphSession", key: tuple, window: WindowInputs) -> "CapturedForward | None":
        """A free graph of exactly such windows, or of longer ones and more rows of which this one fills a good part.

        If it draws random numbers, as dropout does, only the former: those of a row depend on the number of rows.
        Longer ones only if no position sees what follows it, or a mask hides it.
        """
        width, causal = window.ids.shape[1], session.model.config.architecture.causal
        free = [graph for graph in self._graphs.get(key, []) if not graph.busy]
        for graph in free:
            if graph.matches(window):
                return graph
        if window.has_fixed_sizes:
            return None
        for graph in free:
            buffers = graph.buffers
            masked, hides = window.mask is not None, buffers.mask is not None
            captured_width = buffers.ids.shape[1]
            if causal:
                long_enough = width <= captured_width
            elif hides:  # a window without a mask that is as wide is better off without one
                long_enough = width <= captured_width - (not masked)
            else:
                long_enough = width == captured_width and not masked
            fits = long_enough and sizes_of(window).fit(sizes_of(buffers)) and window.spans in ((), buffers.spans)
            if fits and not graph.draws_random and 2 * window.ids.numel() >= buffers.ids.numel():
                return graph
        return None

    def _drop(self, session: "GraphSession", key: tuple, graph: CapturedForward) -> None:
        self._graphs[key].remove(graph)
        if isinstance(graph, CapturedForwardBackward):
            session.budget.remove_buffer(graph.buffers.shape_key, graph.activation_bytes)
        if not any(self._graphs.values()):
            self._accumulator.reset_pool()

    def _capture(
        self,
        session: "GraphSession",
        key: tuple,
        window: WindowInputs,
        room: Sizes,
        state: Tensor,
        with_gradients: bool,
        compiles: bool,
    ) -> "CapturedForward | None":
        """Capture a window, with compiled layers if `compiles`. What the compiler made is used only if it computes the
        same as the eager model: compilers have bugs too."""
        graph = self._try_capture(session, key, window, room, with_gradients, compiles and not self._compiler_failed)
        if graph is None or not graph.compiled or session.agrees(graph, window, state):
            return graph
        logger.warning_once("The compiler's result differs from the model's own: windows run without it.")
        self._compiler_failed = True
        self._drop(session, key, graph)
        return self._try_capture(session, key, window, room, with_gradients, False)

    def _try_capture(
        self,
        session: "GraphSession",
        key: tuple,
        window: WindowInputs,
        room: Sizes,
        with_gradients: bool,
        compiles: bool,
    ) -> "CapturedForward | None":
        budget, model = session.budget, session.model
        if self.path == "off" or (with_gradients and not budget.has_room(window.shape_key)):
            return None
        graph, reason = None, ""
        try:
            with (
                torch.random.fork_rng([window.ids.device] if window.ids.is_cuda else []),
                compiled_layers(model) if compiles else contextlib.nullcontext(),
            ):
                graph_type = CapturedForwardBackward if with_gradients else CapturedForward
                graph = graph_type(model, window, room, self._accumulator)
        except Exception as error:  # whatever a compiler or a driver may raise: the eager way always works
            reason = first_line(error)
        if graph is None:
            self.disable(reason)
            budget.exhausted = True
            return None
        graph.compiled = compiles
        if isinstance(graph, CapturedForwardBackward):
            budget.add_buffer(window.shape_key, graph.activation_bytes)
        self._graphs.setdefault(key, []).append(graph)
        return graph


@dataclass
class GraphSession:
    """One call of the model, whose windows may run again later, when the model has changed."""

    cache: GraphCache
    model: WindowModel
    budget: ActivationBudget
    eager: RunWindow
    signature: list[tuple]  # compared by identity: comparing it whole for every window would take time
    accumulator: GradientAccumulator
    training: tuple[bool, ...]  # of each module
    lasting: bool

    def run(self, window: WindowInputs, state: Tensor) -> WindowOutputs:
        """As `model.run_window`. Gradients flow to the state; those of the parameters are accumulated."""
        if self.signature is not self.cache._signature:
            return self.eager(window, state)
        return self.cache.run(self, window, state)

    @torch.no_grad()
    def agrees(self, graph: CapturedForward, window: WindowInputs, state: Tensor) -> bool:
        """Whether a graph computes what the eager model does, to within a compiler's rounding."""
        devices = [window.ids.device] if window.ids.is_cuda else []
        results = []
        for run in (lambda: graph(window, state, False), lambda: self.eager(window, state)):
            with torch.random.fork_rng(devices):  # the same random numbers
                outputs, states = run()
            results.append([*outputs, *states])
        return all(_is_close(x, expected, window) for x, expected in zip(*results, strict=True))

    def accumulated_gradients(self) -> list[Tensor | None]:
        """Parameter gradients that this call's graphs have accumulated."""
        return self.accumulator.take()


def _signature(model: WindowModel, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> list[tuple]:
    """What a graph depends on: where weights are stored, and what decides in Python how a window runs."""
    signature: list[tuple] = [
        (part.data_ptr(), weight.dtype, weight.requires_grad) for weight in weights for part in tensor_parts(weight)
    ]
    signature.append(model.config.architecture.runtime_options(model.config.base_config))
    for module in modules:
        # dropout rates; adapters that were disabled or exchanged
        names = ("p", "_disable_adapters", "_active_adapter")
        signature.append(tuple(str(module.__dict__[name]) for name in names if name in module.__dict__))
    return signature


def _is_close(x: Tensor, expected: Tensor, window: WindowInputs) -> bool:
    """Whether two results are the same to 5 % in each row: far more than rounding, and far less than what a wrong
    kernel does."""
    x, expected = (one.detach().double() for one in (x, expected))
    mask = None if window.mask is None else window.mask[:, window.start :]
    if mask is not None and x.ndim > 1 and x.shape[:2] == mask.shape:  # padding may hold anything
        hidden = ~mask.bool().reshape(*mask.shape, *[1] * (x.ndim - 2))
        x, expected = x.masked_fill(hidden, 0), expected.masked_fill(hidden, 0)
    usual = [one.abs() < _HUGE for one in (x, expected)]  # false for NaN, infinities, and what stands for them
    if not torch.equal(*usual):
        return False
    x, expected = (one.masked_fill(~usual[0], 0).reshape(len(one) if one.ndim else 1, -1) for one in (x, expected))
    return bool(((x - expected).norm(dim=1) <= 0.05 * expected.norm(dim=1) + 1e-3).all())


def first_line(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


def _obstacle(modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> str | None:
    """Why a model cannot be captured, or None."""
    devices = {weight.device for weight in weights}
    if len(devices) > 1:
        return "its weights are on several devices"
    if (device := devices.pop()).type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        return f"it is on {device}, which is not the current GPU; call torch.cuda.set_device({device.index})"
    for module in modules:
        own = module.__dict__  # `getattr` would search parameters and submodules, at every call of every module
        if "_hf_hook" in own:
            return "its weights are offloaded or dispatched"
        if module.training and own.get("gradient_checkpointing"):
            return "gradient checkpointing reruns layers by itself"
        kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        for hook in chain.from_iterable(registered.values() for registered in kinds):
            if not getattr(hook, "func", hook).__module__.startswith(
                hooks.__package__
            ):  # our own hooks are captured with the window
                return f"{type(module).__name__} has a hook, which a captured graph would not call"
    return None
