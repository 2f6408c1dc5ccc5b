# SPDX-License-Identifier: Apache-2.0
"""Ways to compute attention of a window's queries over S carried positions and the window itself, for `attention.py`.

Shapes: P windows, H query heads, G heads of keys and values, T tokens of a window, S carried positions, d the size of
a key. Every query sees all carried positions and, causally, its own window.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "default": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
aten = torch.ops.aten


@dataclass(frozen=True)
class Variant:
    """A way to compute it.

    Attributes:
        takes: "full": queries, and keys and values of S + T positions; "pieces": queries, keys and values of the S
            carried positions, and those of the window; "window": the window's own queries, keys and values only.
        attend: from these to the output [P, H, T, d].
    """

    name: str
    takes: Literal["full", "pieces", "window"]
    attend: Callable[..., Tensor]


def variants(heads: int, kv_heads: int, window: int, past: int, device: str, compile: Callable) -> list[Variant]:
    """All variants for a shape. Making one does not run it, so those that are not available are listed too."""
    gqa = ("enable_gqa", "repeat_kv") if heads != kv_heads else ("",)
    found = []
    for how in gqa:
        add = partial(_sdpa_variants, how=how, groups=heads // kv_heads, window=window, past=past, device=device)
        found += add()
    found.append(Variant("flex_attention", "full", flex(window, past, device, compile, heads != kv_heads)))
    kinds = ("flash", "cuDNN") if device == "cuda" else ("cpu",)
    found += [Variant(f"merged by log-sum-exp, {kind}", "pieces", partial(merged, kind)) for kind in kinds]
    return found


def _sdpa_variants(how: str, groups: int, window: int, past: int, device: str) -> list[Variant]:
    end = f", {how}" if how else ""
    attend = partial(_sdpa, repeat=groups if how == "repeat_kv" else 1, enable_gqa=how == "enable_gqa")
    found = []
    for name, backend in BACKENDS.items():
        found.append(Variant(f"window alone, {name}{end}", "window", partial(attend, backend, is_causal=True)))
        found.append(Variant(f"padded queries, {name}{end}", "full", partial(padded, partial(attend, backend), past)))
    for name in ("flash", "efficient"):
        function = partial(lower_right, partial(attend, BACKENDS[name]))
        found.append(Variant(f"causal_lower_right, {name}{end}", "full", function))
    visible = torch.ones(window, past + window, dtype=torch.bool, device=device).tril(past)[None, None]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    additive = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, float("-inf"))
    for name in ("default", "efficient", "cuDNN"):
        masks = {"boolean mask": visible, "additive mask": additive, "additive mask, aligned rows": aligned(additive)}
        for kind, mask in masks.items():
            function = partial(attend, BACKENDS[name], attn_mask=mask)
            found.append(Variant(f"{kind}, {name}{end}", "full", function))
    return found


def aligned(mask: Tensor) -> Tensor:
    """The same mask in rows that begin at multiples of 16 elements, which kernels need: else it is copied each call."""
    width = mask.shape[-1]
    return F.pad(mask, (0, -width % 16))[..., :width]


def _sdpa(
    backend: SDPBackend | None, q: Tensor, keys: Tensor, values: Tensor, repeat: int = 1, **kwargs: Any
) -> Tensor:
    """`scaled_dot_product_attention` with one backend, or the one that torch chooses."""
    if repeat > 1:
        keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
    with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
        return F.scaled_dot_product_attention(q, keys, values, **kwargs)


def padded(attend: Callable[..., Tensor], past: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """As many queries of zeros as there are carried keys keep the causal triangle where kernels expect it."""
    return attend(F.pad(q, (0, 0, past, 0)), keys, values, is_causal=True)[:, :, past:]


def lower_right(attend: Callable[..., Tensor], q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    from torch.nn.attention.bias import causal_lower_right

    return attend(q, keys, values, attn_mask=causal_lower_right(q.shape[2], keys.shape[2]))


def flex(window: int, past: int, device: str, compile: Callable, gqa: bool) -> Callable[..., Tensor]:
    """`flex_attention` with a block mask that is made once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + past

    mask = create_block_mask(visible, None, None, window, past + window, device=device)
    return partial(compile(flex_attention), block_mask=mask, enable_gqa=gqa)


# --- two attentions, merged ------------------------------------------------------------------------------------------


class _Merged(torch.autograd.Function):
    """Attention over the carried positions, and causally over the window, merged by their log-sum-exp.

    The backward kernel of attention needs the output and the log-sum-exp only to recompute the weights and the sum of
    gradient times output. So with the merged ones it gives each part's share of the gradient of the whole.
    """

    @staticmethod
    def forward(ctx: Any, kind: str, q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, first_lse, *first_random = KERNELS[kind][0](q, past_k, past_v, False)
        second, second_lse, *second_random = KERNELS[kind][0](q, k, v, True)
        lse = torch.logaddexp(first_lse, second_lse)
        flat = first_lse.shape[-1] == 1  # cuDNN's has one dimension more
        share = (first_lse - lse).exp() if flat else (first_lse - lse).exp()[..., None]
        out = torch.lerp(second.float(), first.float(), share).to(q.dtype)
        ctx.save_for_backward(q, past_k, past_v, k, v, out, lse, *first_random, *second_random)
        ctx.kind = kind
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        q, past_k, past_v, k, v, out, lse, *random = ctx.saved_tensors
        run = KERNELS[ctx.kind][1]
        first = run(gradient, q, past_k, past_v, out, lse, False, *random[:2])
        second = run(gradient, q, k, v, out, lse, True, *random[2:])
        return None, first[0] + second[0], *first[1:], *second[1:]


def merged(kind: str, q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Merged.apply(kind, q, past_k, past_v, k, v)


# Each returns the output, the log-sum-exp and the random state (two tensors), which the backward pass takes.


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, lse, seed, offset


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, *random: Tensor
) -> Any:
    lengths = None, None, q.shape[2], k.shape[2]
    return aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, lse, *lengths, 0.0, causal, *random
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, lse, seed, offset


def _cudnn_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, *random: Tensor
) -> Any:
    lengths = None, None, q.shape[2], k.shape[2]
    return aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, lse, *random, None, *lengths, 0.0, causal
    )


def _cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    groups = q.shape[1] // k.shape[1]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, _repeat(k, groups), _repeat(v, groups), 0.0, causal)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, *random: Tensor
) -> Any:
    groups = q.shape[1] // k.shape[1]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, _repeat(k, groups), _repeat(v, groups), out, lse, 0.0, causal
    )
    return dq, dk.unflatten(1, (-1, groups)).sum(2), dv.unflatten(1, (-1, groups)).sum(2)


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=1)


KERNELS: dict[str, tuple[Callable, Callable]] = {
    "flash": (_flash, _flash_backward),
    "cuDNN": (_cudnn, _cudnn_backward),
    "cpu": (_cpu, _cpu_backward),
}


# --- preparation: a window's carried keys and values -----------------------------------------------------------------


class Preparation:
    """Carried keys and values of each window: the last S of the window before it in the same row, moved.

    Windows lie in the order (window, row). So the window before is `rows` earlier; a row's first window, which would
    take the state of the call, takes its own. Keys are re-rotated by a constant angle where positions are rotary;
    learned positions are moved by adding a difference of offsets to keys and values.
    """

    def __init__(self, inputs: dict[str, Tensor], rows: int, rotary: bool):
        self.past, self.rows, self.rotary = inputs["past_k"].shape[2], rows, rotary
        k = inputs["k"]
        windows, heads, _, size = k.shape
        own = torch.arange(windows, device=k.device)
        self.index = torch.where(own < rows, own, own - rows)
        angle = torch.arange(size // 2, device=k.device).div(size).exp().repeat(2) * self.past
        self.cos, self.sin = angle.cos().to(k.dtype), angle.sin().to(k.dtype)
        self.offsets = torch.randn(2, heads, self.past, size, device=k.device).to(k.dtype)

    def by_index(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self._move(*(x[:, :, -self.past :].index_select(0, self.index) for x in (k, v)))

    def by_slice(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The same by one slice: all windows but the last of each row."""
        tails = (x[:, :, -self.past :] for x in (k, v))
        return self._move(*(torch.cat([x[: self.rows], x[: -self.rows]]) for x in tails))

    def _move(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not self.rotary:
            return k + self.offsets[0], v + self.offsets[1]
        first, second = k.chunk(2, dim=-1)
        return k * self.cos + torch.cat([-second, first], dim=-1) * self.sin, v

    def pieces(self, gather: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *getattr(self, gather)(k, v), k, v

    def full(self, gather: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        past_k, past_v = getattr(self, gather)(k, v)
        return torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)


class Buffers:
    """Padded queries, and concatenation into buffers that are allocated once.

    Gradients of the pieces are views of the buffers' gradients, as in an autograd function that does the same.
    """

    def __init__(self, inputs: dict[str, Tensor], preparation: Preparation, attend: Callable[..., Tensor]):
        q, k, self.past = inputs["q"], inputs["k"], inputs["past_k"].shape[2]
        self.preparation, self.attend = preparation, attend
        length = self.past + k.shape[2]
        self.buffers = [
            torch.zeros(*x.shape[:2], length, x.shape[3], dtype=x.dtype, device=x.device) for x in (q, k, k)
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            past_k, past_v = self.preparation.by_index(k, v)
            for buffer, new in zip(self.buffers, (q, k, v), strict=True):
                buffer[:, :, self.past :].copy_(new)
            self.buffers[1][:, :, : self.past].copy_(past_k)
            self.buffers[2][:, :, : self.past].copy_(past_v)
        return self.attend(*self.buffers, is_causal=True)[:, :, self.past :]
