# SPDX-License-Identifier: Apache-2.0
"""What a window runs, captured as a CUDA graph: made again with other numbers in the same places, forwards and back.

Gradients of the parameters are summed up inside a recording; whoever makes it says where. When windows are recorded,
and which recording serves which window, is `replay`'s.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones import hooks
from ..windows import IGNORE, Span
from . import chunked_loss
from .activation_budget import Kind
from .autocast_weights import AutocastWeights

AT_ONCE = 1 << 24  # numbers


@dataclass(frozen=True)
class Work:
    """What a window computes: a loss, if there are targets, or what the model's head needs, if outputs are wanted, and
    states for the windows that follow.

    Attributes:
        ids, mask: tokens [b, n] and, where an encoder needs one, the attention mask.
        leads, types: where rows have prefixes of their own, how long these are, [b, 1], and the token types [b, n].
        carried: the state, all its numbers, [b, m], or None in a document's first window.
        targets: what positions from `start` on are scored on, [b, n - start].
        outputs: what positions from `start` on give out is wanted.
        pooled: ranges of positions; a state is made of each.
        kind: which windows take as much memory as this one (`memory`).
    """

    ids: Tensor
    mask: Tensor | None = None
    leads: Tensor | None = None
    types: Tensor | None = None
    carried: Tensor | None = None
    targets: Tensor | None = None
    start: int = 0
    outputs: bool = False
    pooled: tuple[Span, ...] = ()
    kind: Kind = ()

    def copied(self) -> "Work":
        """The same on tensors of its own."""
        found: dict[str, Any] = {
            name: value.detach().clone() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **found)


# The summed loss, or outputs: for all [], for rows [b, k], for positions [b, n, ...]; and the states.
Result = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class GradientAccumulator:
    """What recordings share: where they sum up the gradients of the parameters, weights that are cast, and memory."""

    def __init__(self, parameters: Sequence[nn.Parameter] = (), casts: AutocastWeights | None = None):
        self.parameters = list(parameters)
        self.casts = casts or AutocastWeights()
        self.sums: list[Tensor] = []
        self.summed: set[int] = set()  # which of them have grown
        self._pool: Any = None

    def prepare(self) -> None:
        if not self.sums:
            self.sums = [torch.zeros_like(parameter) for parameter in self.parameters]

    def add(self, gradients: Sequence[tuple[int, Tensor]]) -> None:
        """Add gradients to the sums of the parameters with these numbers."""
        for piece in _pieces([(self.sums[number], gradient) for number, gradient in gradients]):
            sums, found = [total for total, _ in piece], [gradient for _, gradient in piece]
            if any(gradient.dtype != total.dtype for total, gradient in piece):  # or each would be added by itself
                exact = [torch.empty_like(total) for total in sums]
                torch._foreach_copy_(exact, found)
                found = exact
            torch._foreach_add_(sums, found)

    def take(self) -> list[Tensor | None]:
        """Gradients summed up since the last time, and from zero again."""
        if not self.summed:
            return []
        found = [total.clone() if i in self.summed else None for i, total in enumerate(self.sums)]
        torch._foreach_zero_([self.sums[i] for i in self.summed])
        self.summed.clear()
        return found

    def renew(self) -> None:
        """After the last recording is gone: a pool without any cannot be used again."""
        self._pool = None

    def pool(self, shared: bool = True) -> Any:
        """Memory for recordings: shared by those that leave nothing behind, of its own for one that does."""
        if not shared:
            return torch.cuda.graph_pool_handle()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool


def _pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Sums and gradients, as many at a time as are enough for a GPU and little beside the weights."""
    piece: list[tuple[Tensor, Tensor]] = []
    for pair in pairs:
        if piece and sum(total.numel() for total, _ in (*piece, pair)) > AT_ONCE:
            yield piece
            piece = []
        piece.append(pair)
    if piece:
        yield piece


class _Windows(nn.Module):
    """A model whose call is one window."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, work: Work) -> Result:
        return self.model._window(work)

    def using(self, weights: dict[nn.Parameter, Tensor]) -> Callable[[Work], Result]:
        """The same with other tensors in the place of some weights."""
        named = {name: weights[p] for name, p in self.named_parameters() if p in weights}
        return lambda work: torch.func.functional_call(self, named, (work,))


@dataclass(eq=False)
class Hold:
    """Goes with the graph that can be pulled through what a window left behind; or earlier.

    Attributes:
        lasting: other calls may come before that.
    """

    lasting: bool


class CapturedForward:
    """A window's work without gradients.

    Attributes:
        hold: what it left behind is needed still, as long as this gives something.
        draws: it draws random numbers.
        compiled: its layers were.
    """

    compiled = False

    def __init__(self, model: Any, work: Work, gathering: GradientAccumulator):
        self.hold: Callable[[], Hold | None] = _nothing
        random = _random_state(work.ids.device)
        with torch.inference_mode(False):  # what is made in that mode could not be written to outside it
            self.work = work.copied()
            with uncached_autocast(work.ids.device):
                self._make(model, gathering)
        self.draws = not torch.equal(random, _random_state(work.ids.device))

    @property
    def busy(self) -> bool:
        return self.hold() is not None

    def is_of(self, work: Work) -> bool:
        """Whether it is of such windows exactly, and not of larger ones."""
        made = self.work
        same = made.ids.shape == work.ids.shape and made.pooled == work.pooled
        return same and (made.mask is None) == (work.mask is None)

    def let_go(self) -> None:
        """At the start of a call: one that was broken off needs nothing any longer."""
        if (hold := self.hold()) is not None and not hold.lasting:
            self.hold = _nothing

    def _make(self, model: Any, gathering: GradientAccumulator) -> None:
        window = _Windows(model).using(gathering.casts.now(self.work.ids.device))
        with torch.no_grad():
            warm_up(lambda: window(self.work))
            (self.given, self.states), self.replay = record(lambda: window(self.work), gathering.pool())

    def __call__(self, work: Work, table: Tensor, lasting: bool) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            self._fill(work)
            self.replay()
            return self._result(work)

    def _fill(self, work: Work) -> None:
        """Copy a window to where the recording reads it. What it does not fill is read, and counts for nothing."""
        rows, width = work.ids.shape
        for name in ("ids", "leads", "types"):
            place, given = getattr(self.work, name), getattr(work, name)
            if place is not None:
                place[:rows, : given.shape[1]].copy_(given)
        if self.work.mask is not None:
            hidden, shown = self.work.mask[:rows, width:], self.work.mask[:rows, :width]
            hidden.zero_()
            shown.fill_(1) if work.mask is None else shown.copy_(work.mask)
        if work.targets is not None and self.work.targets is not None:
            if work.targets.shape != self.work.targets.shape:
                self.work.targets.fill_(IGNORE)
            self.work.targets[:rows, : work.targets.shape[1]].copy_(work.targets)
        if work.carried is not None and self.work.carried is not None:
            self.work.carried[:rows].copy_(work.carried)
            self.work.carried[rows:].zero_()  # of an earlier batch, perhaps not finite: no gradient is 0 times that

    def _result(self, work: Work) -> Result:
        rows, width = len(work.ids), work.ids.shape[1] - work.start
        given = (x if x.ndim == 0 else x[:rows] if x.ndim == 2 else x[:rows, :width] for x in self.given)
        states = self.states if work.pooled else ()
        return tuple(x.clone() for x in given), tuple(state[:rows].clone() for state in states)


class CapturedForwardBackward(CapturedForward):
    """A window's work, and the way back through it, which sums up the gradients of the parameters.

    Attributes:
        taken: bytes of its own, which stay taken between one window and the next.
    """

    def _make(self, model: Any, gathering: GradientAccumulator) -> None:
        # The parameters under another name: autograd may hold on to the end of the way to their gradients, on a stream
        # that is not being recorded.
        casts = gathering.casts.now(self.work.ids.device)
        twins = {weight: casts.get(weight, weight).detach().requires_grad_() for weight in gathering.parameters}
        window = _Windows(model).using({**casts, **twins})
        inputs = [*twins.values()]
        if self.work.carried is not None:
            inputs.append(self.work.carried.requires_grad_())

        def forward() -> Result:
            given, states = window(self.work)
            self.outputs = [*given, *states]
            return tuple(x.detach() for x in given), tuple(x.detach() for x in states)

        def backward() -> list[Tensor | None]:
            # with frozen weights a first window's loss depends on nothing that is trained
            pairs = [(x, up) for x, up in zip(self.outputs, self.upstream, strict=True) if x.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(inputs)
            if pairs:
                found = torch.autograd.grad([x for x, _ in pairs], inputs, [up for _, up in pairs], allow_unused=True)
            grown = [(i, gradient) for i, gradient in enumerate(found[: len(twins)]) if gradient is not None]
            self.summed = [i for i, _ in grown]
            gathering.add(grown)
            return [None if self.work.carried is None else found[-1]]

        def both() -> None:
            forward()
            self.upstream = [torch.zeros_like(output) for output in self.outputs]
            backward()  # of zeros: the sums stay as they are
            self.outputs = []  # or the end of the way to the gradients stays on this stream

        with torch.enable_grad():
            warm_up(both)
            before = reserved()
            (self.given, self.states), self.replay = record(forward, gathering.pool(shared=False))
            self.taken = max(reserved() - before, 0)
            (self.of_carried,), self.replay_back = record(backward, gathering.pool())
        self.outputs = []
        self.all_summed = gathering.summed

    def __call__(self, work: Work, table: Tensor, lasting: bool) -> Result:
        found = _Replayed.apply(self, Hold(lasting), work, table, work.carried)
        return found[: len(self.given)], found[len(self.given) :]


class _Replayed(torch.autograd.Function):
    """A recording as a differentiable function of the state. The table is an input as well, so that a first window,
    which has none, is pulled through too."""

    @staticmethod
    def forward(ctx, recording: CapturedForwardBackward, hold: Hold, work: Work, table: Tensor, carried: Tensor | None):
        ctx.set_materialize_grads(False)
        ctx.recording, ctx.hold, ctx.rows = recording, hold, len(work.ids)
        recording.hold = weakref.ref(hold)
        recording._fill(work)
        recording.replay()
        given, states = recording._result(work)
        return *given, *states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        recording, rows = ctx.recording, ctx.rows
        padded = [*gradients, *[None] * (len(recording.upstream) - len(gradients))]
        for buffer, gradient in zip(recording.upstream, padded, strict=True):
            if gradient is None or gradient.shape != buffer.shape:
                buffer.zero_()
            if gradient is not None:
                buffer[tuple(map(slice, gradient.shape))].copy_(gradient)
        recording.replay_back()
        ctx.hold = None
        recording.all_summed.update(recording.summed)
        found = recording.of_carried
        return None, None, None, None, None if found is None else found[:rows].clone()


def warm_up(function: Callable[[], Any], times: int = 3) -> None:
    """Let libraries allocate and compilers compile what they need, which cannot be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with hooks.plain_masks(), torch.cuda.stream(stream):  # or what is compiled now is not what is recorded
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def record(function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """What a function gave while it was recorded, and how to have it made again in the same place."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(torch.cuda.current_stream()),  # or a capture that fails leaves its own behind
        hooks.plain_masks(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        result = function()
    return result, graph.replay


def reserved() -> int:
    """Bytes that this process has taken from the GPU and cannot do without."""
    if not torch.cuda.is_initialized():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _nothing() -> None:
    return None


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def uncached_autocast(device: torch.device) -> torch.autocast:
    """Autocast as it is; but weights that were cast outside a recording would not be cast again inside."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False)


@contextlib.contextmanager
def compiled(model: Any) -> Iterator[None]:
    """Layers compiled, one like the other, which takes a twelfth of the time of a whole model of twelve; and the
    recurrence, which is many small operations, and passes over all that is kept."""
    parts = [*model.config.architecture.layer_list(model.backbone), model.recurrence]
    # random numbers as they are drawn without compiler: both passes over a window must draw the same
    options: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
    token = chunked_loss.FUSED.set(torch.compile(chunked_loss.fusable, **options))
    own = [part.__dict__.get("forward") for part in parts]
    for part in parts:
        part.forward = torch.compile(part.forward, **options)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):  # a variant for each kind of window
            yield
    finally:
        chunked_loss.FUSED.reset(token)
        for part, forward in zip(parts, own, strict=True):
            del part.forward
            if forward is not None:
                part.forward = forward
