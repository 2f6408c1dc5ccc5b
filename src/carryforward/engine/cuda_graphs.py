# SPDX-License-Identifier: Apache-2.0
"""One window's forward pass, or forward and backward, captured as a CUDA graph and replayed with other inputs.

A graph reads its inputs from fixed buffers, to which each window's inputs are copied. Parameter gradients are
accumulated inside the graph (`GradientAccumulator`). When windows are captured, and which graph serves which window, is
decided in `graph_cache`.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones import hooks
from . import loss, window_buffers
from .autocast_weights import AutocastWeights
from .window_buffers import Sizes, sizes_of, write_gradients
from .window_model import WindowInputs, WindowModel, WindowOutputs

CHUNK = 1 << 24  # numbers added at a time


class GradientAccumulator:
    """What the captured graphs of a model share: buffers for parameter gradients, cast weights, and a memory pool."""

    def __init__(self, parameters: Sequence[nn.Parameter] = (), autocast_weights: AutocastWeights | None = None):
        self.parameters = list(parameters)
        self.autocast_weights = autocast_weights or AutocastWeights()
        self.buffers: list[Tensor] = []
        self.touched: set[int] = set()  # buffers that were added to
        self._pool: Any = None

    def allocate(self) -> None:
        if not self.buffers:
            self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]

    def add(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Add gradients to the buffers of the parameters with these numbers."""
        for chunk in _chunks([(self.buffers[number], gradient) for number, gradient in gradients]):
            buffers, grads = [buffer for buffer, _ in chunk], [gradient for _, gradient in chunk]
            if any(gradient.dtype != buffer.dtype for buffer, gradient in chunk):  # foreach would add one by one
                exact = [torch.empty_like(buffer) for buffer in buffers]
                torch._foreach_copy_(exact, grads)
                grads = exact
            torch._foreach_add_(buffers, grads)

    def take(self) -> list[Tensor | None]:
        """Return the gradients accumulated since the last call, and start from zero."""
        if not self.touched:
            return []
        gradients = [buffer.clone() if i in self.touched else None for i, buffer in enumerate(self.buffers)]
        torch._foreach_zero_([self.buffers[i] for i in self.touched])
        self.touched.clear()
        return gradients

    def reset_pool(self) -> None:
        """After the last graph is gone: a pool without graphs cannot be used again."""
        self._pool = None

    def pool(self, shared: bool = True) -> Any:
        """A memory pool: shared by graphs that keep no activations, a pool of its own for one that does."""
        if not shared:
            return torch.cuda.graph_pool_handle()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool


def _chunks(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Pairs in chunks that are large enough to use a GPU well and small beside the weights."""
    chunk: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        if chunk and sum(buffer.numel() for buffer, _ in (*chunk, pair)) > CHUNK:
            yield chunk
            chunk = []
        chunk.append(pair)
    if chunk:
        yield chunk


class _WindowModule(nn.Module):
    """A module whose call runs one window, for `functional_call`."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, window: WindowInputs) -> WindowOutputs:
        return self.model.run_window(window)

    def with_weights(self, weights: dict[nn.Parameter, Tensor]) -> Callable[[WindowInputs], WindowOutputs]:
        """The same with other tensors in place of some weights."""
        named = {name: weights[p] for name, p in self.named_parameters() if p in weights}
        return lambda window: torch.func.functional_call(self, named, (window,))


@dataclass(eq=False)
class ActivationLease:
    """While it is alive, a backward pass still needs the captured activations.

    Attributes:
        lasting: other calls may come before that backward pass.
    """

    lasting: bool


class CapturedForward:
    """A captured forward pass, without gradients.

    Attributes:
        lease: weak reference to the lease on the activations, if there is one.
        draws_random: the window draws random numbers.
        compiled: its layers were compiled.
    """

    compiled = False

    def __init__(self, model: WindowModel, window: WindowInputs, room: Sizes, accumulator: GradientAccumulator):
        """
        Args:
            window: a window batch like those that it is for.
            room: the sizes of the buffers.
        """
        self.lease: Callable[[], ActivationLease | None] = _no_lease
        random = _rng_state(window.ids.device)
        with torch.inference_mode(False):  # buffers made in inference mode could not be written to outside it
            self.buffers = window_buffers.allocate(window, room)
            with uncached_autocast(window.ids.device):
                self._capture(model, accumulator)
        self.draws_random = not torch.equal(random, _rng_state(window.ids.device))

    @property
    def busy(self) -> bool:
        return self.lease() is not None

    def matches(self, window: WindowInputs) -> bool:
        """Whether it was captured for windows of exactly this shape, and not for larger ones."""
        buffers = self.buffers
        same = buffers.ids.shape == window.ids.shape and sizes_of(buffers) == sizes_of(window)
        return same and buffers.spans == window.spans and (buffers.mask is None) == (window.mask is None)

    def can_be_replaced(self, window: WindowInputs, shares: bool) -> bool:
        """Whether the same can be captured from this window: it has exactly this shape, or blocks share buffers."""
        same_width = self.buffers.ids.shape[1] == window.ids.shape[1]
        return self.matches(window) or (shares and same_width and self.buffers.spans == window.spans)

    def release_unfinished(self) -> None:
        """At the start of a call: a call that was aborted no longer needs its activations."""
        if (lease := self.lease()) is not None and not lease.lasting:
            self.lease = _no_lease

    def _capture(self, model: WindowModel, accumulator: GradientAccumulator) -> None:
        run = _WindowModule(model).with_weights(accumulator.autocast_weights.current(self.buffers.ids.device))
        with torch.no_grad():
            warm_up(lambda: run(self.buffers))
            (self.outputs, self.states), self.replay = capture(lambda: run(self.buffers), accumulator.pool())

    def __call__(self, window: WindowInputs, state: Tensor, lasting: bool) -> WindowOutputs:
        with torch.inference_mode(False), torch.no_grad():
            window_buffers.write(self.buffers, window)
            self.replay()
            return self._results(window)

    def _results(self, window: WindowInputs) -> WindowOutputs:
        leaving = sizes_of(window).leaving
        states = self.states if window.spans else ()
        outputs = tuple(window_buffers.read(x, window, self.buffers) for x in self.outputs)
        return outputs, tuple(state[:leaving].clone() for state in states)


class CapturedForwardBackward(CapturedForward):
    """A captured forward pass and its backward pass, which accumulates the gradients of the parameters.

    Attributes:
        activation_bytes: memory of its own, which stays allocated between windows.
    """

    def _capture(self, model: WindowModel, accumulator: GradientAccumulator) -> None:
        # Aliases of the parameters: autograd may hold on to a parameter's gradient accumulation node, on a stream that
        # is not being captured.
        cast = accumulator.autocast_weights.current(self.buffers.ids.device)
        aliases = {weight: cast.get(weight, weight).detach().requires_grad_() for weight in accumulator.parameters}
        run = _WindowModule(model).with_weights({**cast, **aliases})
        inputs = [*aliases.values()]
        if self.buffers.state is not None:
            inputs.append(self.buffers.state.requires_grad_())

        def forward() -> WindowOutputs:
            outputs, states = run(self.buffers)
            self.graph_outputs = [*outputs, *states]
            return tuple(x.detach() for x in outputs), tuple(x.detach() for x in states)

        def backward() -> list[Tensor | None]:
            # With frozen weights, a first window's loss depends on nothing that is trained.
            pairs = [(x, up) for x, up in zip(self.graph_outputs, self.upstream, strict=True) if x.requires_grad]
            gradients: Sequence[Tensor | None] = [None] * len(inputs)
            if pairs:
                outputs, upstream = [x for x, _ in pairs], [up for _, up in pairs]
                gradients = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)
            used = [(i, gradient) for i, gradient in enumerate(gradients[: len(aliases)]) if gradient is not None]
            self.used = [i for i, _ in used]
            accumulator.add(used)
            return [None if self.buffers.state is None else gradients[-1]]

        def both() -> None:
            forward()
            self.upstream = [torch.zeros_like(output) for output in self.graph_outputs]
            backward()  # of zeros: the accumulated gradients do not change
            self.graph_outputs = []  # or gradient accumulation nodes stay on this stream

        with torch.enable_grad():
            warm_up(both)
            before = reserved_memory()
            (self.outputs, self.states), self.replay = capture(forward, accumulator.pool(shared=False))
            self.activation_bytes = max(reserved_memory() - before, 0)
            (self.state_gradient,), self.replay_backward = capture(backward, accumulator.pool())
        self.graph_outputs = []
        self.all_touched = accumulator.touched

    def __call__(self, window: WindowInputs, state: Tensor, lasting: bool) -> WindowOutputs:
        results = _Replayed.apply(self, ActivationLease(lasting), window, state, window.state)
        return results[: len(self.outputs)], results[len(self.outputs) :]


class _Replayed(torch.autograd.Function):
    """A captured window as a differentiable function of its state. The state of all rows is an input as well: a first
    window receives no state, and must still take part in the backward pass."""

    @staticmethod
    def forward(
        ctx,
        graph: CapturedForwardBackward,
        lease: ActivationLease,
        window: WindowInputs,
        all_rows: Tensor,
        state: Tensor | None,
    ):
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.lease, ctx.sizes = graph, lease, sizes_of(window)
        graph.lease = weakref.ref(lease)
        window_buffers.write(graph.buffers, window)
        graph.replay()
        outputs, states = graph._results(window)
        return *outputs, *states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        graph, sizes = ctx.graph, ctx.sizes
        padded = [*gradients, *[None] * (len(graph.upstream) - len(gradients))]
        room, count = sizes_of(graph.buffers), len(graph.outputs)
        write_gradients(graph.upstream[:count], padded[:count], sizes, room)
        write_gradients(graph.upstream[count:], padded[count:], sizes.states, room.states)
        graph.replay_backward()
        ctx.lease = None
        graph.all_touched.update(graph.used)
        of_state = graph.state_gradient
        return None, None, None, None, None if of_state is None else of_state[: sizes.entering].clone()


def warm_up(function: Callable[[], Any], times: int = 3) -> None:
    """Run a function before its capture: libraries allocate and compilers compile, which cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with hooks.maskless_attention(), torch.cuda.stream(stream):  # the same code path as the capture
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def capture(function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """Capture a function: its result, and a function that computes it again in the same memory."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(torch.cuda.current_stream()),  # restores the stream if a capture fails
        hooks.maskless_attention(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        result = function()
    return result, graph.replay


def reserved_memory() -> int:
    """Bytes that this process holds on the GPU, after unused ones were returned."""
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _no_lease() -> None:
    return None


def _rng_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def uncached_autocast(device: torch.device) -> torch.autocast:
    """Autocast as it is set, without its cache: weights that were cast before a capture would not be cast in it."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False)


@contextlib.contextmanager
def compiled_layers(model: WindowModel) -> Iterator[None]:
    """Compile the layers and the memories inside. All layers share one compilation, so that a model of twelve takes a
    twelfth of the time of compiling it whole. Memories are many small operations on states, or between layers."""
    between = [module for memory in model.memory for module in memory.layer_modules()]
    modules = [*model.config.architecture.layer_list(model.backbone), *between, model.memory]
    # Random numbers as without a compiler: both passes over a window must draw the same.
    options: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
    token = loss.COMPILED_LOSS.set(torch.compile(loss.fusable_loss, **options))
    own_forwards = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = torch.compile(module.forward, **options)  # type: ignore[method-assign]
    try:
        with torch._dynamo.config.patch(recompile_limit=64):  # one variant for each window shape
            yield
    finally:
        loss.COMPILED_LOSS.reset(token)
        for module, forward in zip(modules, own_forwards, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign]
