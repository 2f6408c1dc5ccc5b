# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU: what a window runs is captured once as a CUDA graph, and replayed for every other window.

A window is little work in many small kernels, and launching them one by one takes longer than running them. Windows
of a document have the same shape, so one recording serves them all: tokens, state and targets are copied to where the
recording reads them. A window that must be pulled through later keeps its activations in a recording of its own.
After many windows of a kind its layers are compiled as well, and recorded anew.

Gradients of the parameters are summed up inside the recordings (`recording.GradientAccumulator`), not returned window by window.
Nothing here is asked for by users, and nothing of it is saved; where it cannot be used, windows are run as they are.
"""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..backbones import hooks
from .autocast_weights import AutocastWeights
from .cuda_graphs import CapturedForward, CapturedForwardBackward, GradientAccumulator, Result, Work, compiled

logger = logging.get_logger(__name__)

FastPath = Literal["auto", "compiled", "off"]
DEVICES = ("cuda",)
RECORD_AFTER = 16  # windows of a kind: a recording takes a second
COMPILE_AFTER = 1000  # the compiler takes ten or twenty
COMMON = COMPILE_AFTER // 20  # windows of a kind, or it is not compiled: ragged batches have many kinds


class GraphCache:
    """A model's recordings."""

    def __init__(self, path: FastPath = "auto") -> None:
        self.path: FastPath = path
        self._forget()

    def __reduce__(self) -> tuple:
        return GraphCache, (self.path,)  # copies have none of the recordings: these belong to one model's weights

    def _forget(self) -> None:
        self._signature: list[tuple] = []
        self._compiles = self.path == "compiled"
        self._replayed = 0
        self._seen: Counter = Counter()
        self._unserved: Counter = Counter()
        self._largest = 0
        self._recordings: dict[tuple, list[CapturedForward]] = {}
        self._gathering = GradientAccumulator()

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

    def begin(
        self, model: Any, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter], lasting: bool = False
    ) -> "Call | None":
        """At the start of a call of the model; None where its windows must be run as they are.

        Args:
            lasting: windows that are kept are pulled through after the call, perhaps after others.
        """
        if not self.usable(modules, weights):
            if self._signature:  # after a failure: nothing of before is used again
                self._forget()
            model.activation_budget.release()
            return None
        signature = _signature(model, modules, weights)
        if signature != self._signature:
            self._forget()
            self._signature = signature
            layers = model.config.architecture.layer_list(model.backbone)
            self._gathering = GradientAccumulator(
                [weight for weight in weights if weight.requires_grad], AutocastWeights(layers, modules)
            )
        if self.path == "auto" and not self._compiles and self._replayed > COMPILE_AFTER:
            self._compiles, self._recordings = True, {}
            self._gathering.renew()
        if not self._recordings:
            model.activation_budget.release()
        self._gathering.take()  # of a call that was broken off
        self._gathering.casts.renew()
        made = [*chain.from_iterable(self._recordings.values())]
        for recording in made:
            recording.let_go()
        places = (one.work.kind for one in made if isinstance(one, CapturedForwardBackward) and not one.busy)
        model.activation_budget.free_places(places)
        if torch.is_grad_enabled():
            self._gathering.prepare()
        training = tuple(module.training for module in modules)
        return Call(self, model, self._signature, self._gathering, training, lasting)

    def run(self, call: "Call", work: Work, table: Tensor) -> Result:
        device = work.ids.device.type
        with_gradients = torch.is_grad_enabled() and (table.requires_grad or bool(self._gathering.parameters))
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        absent = tuple(tensor is None for tensor in (work.carried, work.targets, work.leads, work.types))
        key = (call.training, *autocast, with_gradients, *absent, work.outputs, work.start)
        kind = (*key, *work.ids.shape, work.mask is None, work.pooled)
        self._seen[kind] += 1
        self._largest = max(self._largest, work.ids.numel())
        # few kinds are worth the compiler's time; many of a ragged batch's are not
        at_once = self.path == "compiled" and work.ids.numel() == self._largest
        common = at_once or self._seen[kind] > max(COMMON, self._replayed // 20)
        recording = self._find(call, key, work)
        if recording is not None and self._compiles and common and not recording.compiled and recording.is_of(work):
            self._drop(call.model, key, recording)
            recording = self._record(call.model, key, work, with_gradients, True)
        if recording is None:
            # documents that end leave fewer and fewer rows, and one recording serves many sizes; but places for those
            # that gradients flow through are few
            alike = kind if with_gradients else (*key, work.mask is None, work.pooled)
            self._unserved[alike] += 1
            if at_once or self._unserved[alike] > RECORD_AFTER:
                recording = self._record(call.model, key, work, with_gradients, self._compiles and common)
                if not with_gradients:
                    self._unserved[alike] = 0
        if recording is None:
            return call.model._measured_window(work)
        self._replayed += 1
        return recording(work, table, call.lasting)

    def failed(self, reason: str) -> None:
        """Say why, and go on without; windows that are still to be pulled through hold on to their recordings. Called
        when the error is gone, and with it all that its traceback held on to."""
        logger.warning_once(f"Windows are run without the fast path: {reason}.")
        self.path, self._recordings = "off", {}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what failed may have been the memory
            # a capture that failed leaves the random numbers' generator in its hands, in some versions of torch
            with contextlib.suppress(Exception):
                torch.cuda.synchronize()
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                    torch.zeros(1, device="cuda")

    def _find(self, call: "Call", key: tuple, work: Work) -> "CapturedForward | None":
        """A recording of such windows, or of longer ones and more rows of which these fill a good part. If it draws
        random numbers, as dropout does, only the former: those of a row would depend on how many there are. Longer
        only where no position sees what follows it, or a mask hides it."""
        (rows, width), causal = work.ids.shape, call.model.config.architecture.causal
        free = [recording for recording in self._recordings.get(key, []) if not recording.busy]
        for recording in free:
            if recording.is_of(work):
                return recording
        for recording in free:
            made = recording.work
            masked, hides = work.mask is not None, made.mask is not None
            if causal:
                long = width <= made.ids.shape[1]
            else:  # what has no mask and is as wide is better off without one
                long = width <= made.ids.shape[1] - (not masked) if hides else width == made.ids.shape[1] and not masked
            fits = long and rows <= made.ids.shape[0] and work.pooled in ((), made.pooled)
            if fits and not recording.draws and 2 * work.ids.numel() >= made.ids.numel():
                return recording
        return None

    def _drop(self, model: Any, key: tuple, recording: CapturedForward) -> None:
        self._recordings[key].remove(recording)
        if isinstance(recording, CapturedForwardBackward):
            model.activation_budget.give_back(recording.work.kind, recording.taken)
        if not any(self._recordings.values()):
            self._gathering.renew()

    def _record(
        self, model: Any, key: tuple, work: Work, with_gradients: bool, compiles: bool
    ) -> "CapturedForward | None":
        if self.path == "off" or (with_gradients and not model.activation_budget.has_room(work.kind)):
            return None
        recording, reason = None, ""
        try:
            with (
                torch.random.fork_rng([work.ids.device] if work.ids.is_cuda else []),
                compiled(model) if compiles else contextlib.nullcontext(),
            ):
                recording = (CapturedForwardBackward if with_gradients else CapturedForward)(
                    model, work, self._gathering
                )
        except Exception as error:  # whatever a compiler or a driver may raise: the plain way is always there
            reason = told(error)
        if recording is None:
            self.failed(reason)
            model.activation_budget.full = True
            return None
        recording.compiled = compiles
        if isinstance(recording, CapturedForwardBackward):
            model.activation_budget.take(work.kind, recording.taken)
        self._recordings.setdefault(key, []).append(recording)
        return recording


@dataclass
class Call:
    """One call of the model, whose windows may be run again later, when the model has changed."""

    graph_cache: GraphCache
    model: Any
    signature: list[tuple]  # the very one: comparing it whole for every window would take time
    gathering: GradientAccumulator
    training: tuple[bool, ...]  # of each module
    lasting: bool

    def run(self, work: Work, table: Tensor) -> Result:
        """What `model._window` gives. Gradients flow to the table; those of the parameters are gathered."""
        if self.signature is not self.graph_cache._signature:
            return self.model._measured_window(work)
        return self.graph_cache.run(self, work, table)

    def gathered(self) -> list[Tensor | None]:
        """Gradients of the parameters that recordings have summed up: this call's, whatever the model has become."""
        return self.gathering.take()


def _signature(model: Any, modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> list[tuple]:
    """What a recording depends on: where weights are, and what decides in Python how a window is run."""
    found: list[tuple] = [(weight.data_ptr(), weight.dtype, weight.requires_grad) for weight in weights]
    found.append(model.config.architecture.decisions(model.config.base_config))
    for module in modules:
        # rates of dropout; adapters that were switched off or exchanged
        names = ("p", "_disable_adapters", "_active_adapter")
        found.append(tuple(str(module.__dict__[name]) for name in names if name in module.__dict__))
    return found


def told(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0].rstrip('.')}"


def _unfit(modules: Sequence[nn.Module], weights: Sequence[nn.Parameter]) -> str | None:
    """Why a model cannot be recorded, or None."""
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
            return "gradient checkpointing runs layers again by itself"
        registered = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        for some in registered:
            for hook in some.values():
                if getattr(hook, "func", hook).__module__ != hooks.__name__:
                    return f"{type(module).__name__} has a hook, which would not be called"
    return None
