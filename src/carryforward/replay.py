# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU: what a window runs is captured once as a CUDA graph, and replayed for every other window.

A window is little work in many small kernels, and launching them one by one takes longer than running them. Windows
of a document have the same shape, so one recording serves them all: tokens, state and targets are copied to where the
recording reads them. A window that must be pulled through later keeps its activations in a recording of its own.
After many windows of a kind its layers are compiled as well, and recorded anew.

Gradients of the parameters are summed up inside the recordings (`Replays.gathered`), not returned window by window.
Nothing here is asked for by users, and nothing of it is saved; where it cannot be used, windows are run as they are.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils import logging

from . import insertion, losses
from .reading import IGNORE

logger = logging.get_logger(__name__)

FastPath = Literal["auto", "compiled", "off"]
DEVICES = ("cuda",)
RECORD_AFTER = 16  # windows of a kind: a recording takes a second
COMPILE_AFTER = 1000  # the compiler takes ten or twenty


@dataclass(frozen=True)
class Work:
    """What a window computes: a loss, if there are targets, and states for the windows that follow.

    Attributes:
        ids, mask: tokens [b, n] and, where an encoder needs one, the attention mask.
        carried: the state, [b, G, S, k], or None in a document's first window.
        targets: what positions from `start` on are scored on, [b, n - start].
        pooled: ranges of positions; a state is made of each.
        size: bytes that its graph holds on to, as far as is known.
    """

    ids: Tensor
    mask: Tensor | None
    carried: Tensor | None
    targets: Tensor | None
    start: int
    pooled: tuple[tuple[int, int], ...]
    size: int = 0


Result = tuple[Tensor | None, tuple[Tensor, ...]]  # the summed loss, and the states


class Replays:
    """A model's recordings."""

    def __init__(self, path: FastPath = "auto") -> None:
        self.path: FastPath = path
        self._forget()

    def __reduce__(self) -> tuple:
        return Replays, (self.path,)  # copies have none of the recordings: these belong to one model's weights

    def _forget(self) -> None:
        self._signature: list[tuple] = []
        self._compiles = self.path == "compiled"
        self._replayed = 0
        self._seen: Counter = Counter()
        self._recordings: dict[tuple, list[_Recording]] = {}
        self._parameters: list[nn.Parameter] = []
        self._sums: list[Tensor] = []
        self._summed: set[int] = set()
        self._pool: Any = None

    def possible(self, device: torch.device) -> bool:
        """Whether anything is recorded on such a device at all."""
        return self.path != "off" and device.type in DEVICES

    def usable(self, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> bool:
        """Whether a model of these can be recorded; if it cannot though it might, says why."""
        if not self.possible(weights[0].device):
            return False
        reason = _unfit(modules, weights)
        if reason is not None:
            logger.warning_once(f"Windows are run without the fast path: {reason}.")
        return reason is None

    def begin(self, model: Any, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> "Call | None":
        """At the start of a call of the model; None where its windows must be run as they are."""
        if not self.usable(modules, weights):
            if self._recordings:  # after a failure: nothing of theirs is used again
                self._forget()
                model._allowance.held = 0
            return None
        signature = _signature(model, modules, weights)
        if signature != self._signature:
            self._forget()
            self._signature, self._parameters = signature, [weight for weight in weights if weight.requires_grad]
        if self.path == "auto" and not self._compiles and self._replayed > COMPILE_AFTER:
            self._compiles, self._recordings = True, {}
        if not self._recordings:
            model._allowance.held = 0
        self.gathered()  # of a call that was broken off
        for recordings in self._recordings.values():
            for recording in recordings:
                recording.busy = False
        if not self._sums and torch.is_grad_enabled():
            self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        return Call(self, model, self._signature, tuple(module.training for module in modules))

    def pool(self, shared: bool = True) -> Any:
        """Memory for recordings: shared by those that leave nothing behind, of its own for one that does."""
        if not shared:
            return torch.cuda.graph_pool_handle()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return self._pool

    def gathered(self) -> list[Tensor | None]:
        """Gradients of the parameters summed up since the last time, and from zero again."""
        if not self._summed:
            return []
        found = [total.clone() if i in self._summed else None for i, total in enumerate(self._sums)]
        torch._foreach_zero_([self._sums[i] for i in self._summed])
        self._summed.clear()
        return found

    def run(self, call: "Call", work: Work, table: Tensor) -> Result:
        device = work.ids.device.type
        with_gradients = torch.is_grad_enabled() and (table.requires_grad or bool(self._parameters))
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        key = (call.training, *autocast, with_gradients, work.carried is None, work.targets is None, work.start)
        recording = self._find(call, key, work)
        if recording is None:
            kind = (*key, *work.ids.shape, work.pooled)
            self._seen[kind] += 1
            if self._compiles or self._seen[kind] > RECORD_AFTER:
                recording = self._record(call.model, key, work, with_gradients)
        if recording is None:
            return call.model._window(work)
        self._replayed += 1
        return recording(work, table)

    def failed(self, error: Exception) -> None:
        """Say why, and go on without."""
        reason = (str(error).strip().splitlines() or [""])[0]
        logger.warning_once(f"Windows are run without the fast path: {type(error).__name__}: {reason}")
        self.path = "off"
        if torch.cuda.is_available():  # a capture that failed leaves the random numbers' generator in its hands
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device="cuda")

    def _find(self, call: "Call", key: tuple, work: Work) -> "_Recording | None":
        """A recording of such windows, or of longer ones and more rows of which these fill a good part. With dropout
        only the former: the random numbers of a row would depend on how many there are. Longer only where no position
        sees what follows it."""
        (rows, width), causal = work.ids.shape, call.model.config.architecture.causal
        for recording in self._recordings.get(key, []):
            made = recording.work
            same = made.ids.shape == work.ids.shape and made.pooled == work.pooled
            long = width <= made.ids.shape[1] if causal else width == made.ids.shape[1]
            fits = long and rows <= made.ids.shape[0] and work.pooled in ((), made.pooled)
            good = fits and not any(call.training) and 2 * work.ids.numel() >= made.ids.numel()
            if not recording.busy and (same or good):
                return recording
        return None

    def _record(self, model: Any, key: tuple, work: Work, with_gradients: bool) -> "_Recording | None":
        if self.path == "off":
            return None
        try:
            with (
                torch.random.fork_rng([work.ids.device] if work.ids.is_cuda else []),
                _compiled(model) if self._compiles else contextlib.nullcontext(),
            ):
                recording = (_Differentiable if with_gradients else _Recording)(model, work, self)
        except Exception as error:  # whatever a compiler or a driver may raise: the plain way is always there
            self.failed(error)
            return None
        if with_gradients:
            model._allowance.held += work.size
        self._recordings.setdefault(key, []).append(recording)
        return recording


@dataclass
class Call:
    """One call of the model, whose windows may be run again later, when the model has changed."""

    replays: Replays
    model: Any
    signature: list[tuple]  # the very one: comparing it whole for every window would take time
    training: tuple[bool, ...]  # of each module

    def run(self, work: Work, table: Tensor) -> Result:
        """What `model._window` gives. Gradients flow to the table; those of the parameters are gathered."""
        if work.mask is not None or self.signature is not self.replays._signature:
            return self.model._window(work)
        return self.replays.run(self, work, table)

    def gathered(self) -> list[Tensor | None]:
        """Gradients of the parameters that recordings have summed up."""
        return self.replays.gathered() if self.signature is self.replays._signature else []


class _Windows(nn.Module):
    """A model whose call is one window."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, work: Work) -> Result:
        return self.model._window(work)


class _Recording:
    """A window's work without gradients."""

    def __init__(self, model: Any, work: Work, replays: Replays):
        self.busy = False
        with torch.inference_mode(False):  # what is made in that mode could not be written to outside it
            self.work = replace(
                work, ids=work.ids.clone(), targets=None if work.targets is None else work.targets.clone(),
                carried=None if work.carried is None else work.carried.detach().clone(),
            )  # fmt: skip
            with uncached_autocast(work.ids.device):
                self._make(model, replays)

    def _make(self, model: Any, replays: Replays) -> None:
        with torch.no_grad():
            warm_up(lambda: model._window(self.work))
            (self.nll, self.states), self.replay = record(lambda: model._window(self.work), replays.pool())

    def __call__(self, work: Work, table: Tensor) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            self._fill(work)
            self.replay()
            return self._result(work)

    def _fill(self, work: Work) -> None:
        """Copy a window to where the recording reads it. What it does not fill is read, and counts for nothing."""
        rows, width = work.ids.shape
        self.work.ids[:rows, :width].copy_(work.ids)
        if work.targets is not None and self.work.targets is not None:
            if work.targets.shape != self.work.targets.shape:
                self.work.targets.fill_(IGNORE)
            self.work.targets[:rows, : work.targets.shape[1]].copy_(work.targets)
        if work.carried is not None and self.work.carried is not None:
            self.work.carried[:rows].copy_(work.carried)

    def _result(self, work: Work) -> Result:
        states = self.states if work.pooled else ()
        return None if self.nll is None else self.nll.clone(), tuple(state[: len(work.ids)].clone() for state in states)


class _Differentiable(_Recording):
    """A window's work, and the way back through it, which sums up the gradients of the parameters."""

    def _make(self, model: Any, replays: Replays) -> None:
        # The parameters under another name: autograd may hold on to the end of the way to their gradients, on a stream
        # that is not being recorded.
        twins = {parameter: parameter.detach().requires_grad_() for parameter in replays._parameters}
        windows = _Windows(model)
        named = {name: twins[p] for name, p in windows.named_parameters() if p in twins}
        inputs = [*twins.values()]
        if self.work.carried is not None:
            inputs.append(self.work.carried.requires_grad_())

        def forward() -> list[Tensor]:
            nll, states = torch.func.functional_call(windows, named, (self.work,))
            self.outputs = [*states] if nll is None else [nll, *states]
            return [output.detach() for output in self.outputs]

        def backward() -> list[Tensor | None]:
            # with frozen weights a first window's loss depends on nothing that is trained
            pairs = [(x, up) for x, up in zip(self.outputs, self.upstream, strict=True) if x.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(inputs)
            if pairs:
                found = torch.autograd.grad([x for x, _ in pairs], inputs, [up for _, up in pairs], allow_unused=True)
            grown = [(i, gradient) for i, gradient in enumerate(found[: len(twins)]) if gradient is not None]
            self.summed = [i for i, _ in grown]
            if grown:
                torch._foreach_add_([replays._sums[i] for i in self.summed], [gradient for _, gradient in grown])
            return [None if self.work.carried is None else found[-1]]

        def both() -> None:
            self.upstream = [torch.zeros_like(output) for output in forward()]
            backward()  # of zeros: the sums stay as they are
            self.outputs = []  # or the end of the way to the gradients stays on this stream

        with torch.enable_grad():
            warm_up(both)
            pool = replays.pool(shared=False)
            outputs, self.replay = record(forward, pool)
            (self.of_carried,), self.replay_back = record(backward, pool)
        self.nll = None if self.work.targets is None else outputs[0]
        self.states = tuple(outputs if self.work.targets is None else outputs[1:])
        self.outputs = []
        self.all_summed = replays._summed  # not `replays`, which holds this: both would outlive the model

    def __call__(self, work: Work, table: Tensor) -> Result:
        nll, *states = _Replayed.apply(self, work, table, work.carried)
        return nll, tuple(states)


class _Replayed(torch.autograd.Function):
    """A recording as a differentiable function of the state. The table is an input as well, so that a first window,
    which has none, is pulled through too."""

    @staticmethod
    def forward(ctx, recording: _Differentiable, work: Work, table: Tensor, carried: Tensor | None):
        ctx.set_materialize_grads(False)
        ctx.recording, ctx.rows = recording, len(work.ids)
        recording.busy = True
        recording._fill(work)
        recording.replay()
        nll, states = recording._result(work)
        return nll, *states

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients: Tensor | None):
        recording, rows = ctx.recording, ctx.rows
        padded = [*gradients, *[None] * (len(recording.upstream) - len(gradients))]
        for buffer, gradient in zip(recording.upstream, padded, strict=True):
            if gradient is None or gradient.shape != buffer.shape:
                buffer.zero_()
            if gradient is not None:
                (buffer if buffer.ndim == 0 else buffer[:rows]).copy_(gradient)
        recording.replay_back()
        recording.busy = False
        recording.all_summed.update(recording.summed)
        found = recording.of_carried
        return None, None, None, None if found is None else found[:rows].clone()


# --- recording -------------------------------------------------------------------------------------------------------


def warm_up(function: Callable[[], Any], times: int = 3) -> None:
    """Let libraries allocate and compilers compile what they need, which cannot be recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with insertion.plain_masks(), torch.cuda.stream(stream):  # or what is compiled now is not what is recorded
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def record(function: Callable[[], Any], pool: Any) -> tuple[Any, Callable[[], None]]:
    """What a function gave while it was recorded, and how to have it made again in the same place."""
    graph = torch.cuda.CUDAGraph()
    with insertion.plain_masks(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return result, graph.replay


def uncached_autocast(device: torch.device) -> torch.autocast:
    """Autocast as it is; but weights that were cast outside a recording would not be cast again inside."""
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=False)


@contextlib.contextmanager
def _compiled(model: Any) -> Iterator[None]:
    """Layers compiled, one like the other, which takes a twelfth of the time of a whole model of twelve; and the
    recurrence, which is many small operations."""
    parts = [*model.config.architecture.layer_list(model._body), model.recurrence]
    # random numbers as they are drawn without compiler: both passes over a window must draw the same
    options: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
    token = losses.FUSED.set(torch.compile(losses.fusable, **options))
    own = [part.__dict__.get("forward") for part in parts]
    for part in parts:
        part.forward = torch.compile(part.forward, **options)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):  # a variant for each kind of window
            yield
    finally:
        losses.FUSED.reset(token)
        for part, forward in zip(parts, own, strict=True):
            del part.forward
            if forward is not None:
                part.forward = forward


def _signature(model: Any, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> list[tuple]:
    """What a recording depends on: where weights are, and what decides in Python how a window is run."""
    config = model.config.base_config
    found: list[tuple] = [(weight.data_ptr(), weight.dtype, weight.requires_grad) for weight in weights]
    found.append((config._attn_implementation, getattr(config, "final_logit_softcapping", None)))
    for module in modules:
        # rates of dropout; adapters that were switched off or exchanged
        names = ("p", "_disable_adapters", "_active_adapter")
        found.append(tuple(str(module.__dict__[name]) for name in names if name in module.__dict__))
    return found


def _unfit(modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> str | None:
    """Why a model cannot be recorded, or None."""
    if len({weight.device for weight in weights}) > 1:
        return "its weights are on several devices"
    for module in modules:
        own = module.__dict__  # `getattr` would search parameters and submodules, at every call of every module
        if "_hf_hook" in own:
            return "its weights are offloaded or dispatched"
        if module.training and own.get("gradient_checkpointing"):
            return "gradient checkpointing runs layers again by itself"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        for some in hooks:
            for hook in some.values():
                if getattr(hook, "func", hook).__module__ != insertion.__name__:
                    return f"{type(module).__name__} has a hook, which would not be called"
    return None
