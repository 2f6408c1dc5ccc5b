# SPDX-License-Identifier: Apache-2.0
"""A second implementation of the paper's equations.

Every model is computed from its raw weights. One function per architecture runs one window and returns the output of
each block; the state's keys and values come before the window's own, and the state has no query. One function cuts the
document, pools, applies the feed-forward network and sums the loss. Nothing here calls Hugging Face or the library.
"""

import math

import torch

WINDOW = 8  # document tokens of a window; an encoder's window has three special tokens in addition
PREFIX, SUFFIX = (2,), (3, 3)


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_new(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def split(x, heads):
    """[B, T, heads * d] as [B, heads, T, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x, theta):
    """Rotary positions 0, 1, ... for [B, heads, T, d]: the pair (i, i + d/2) is rotated by t * theta^(-2i/d)."""
    length, width = x.shape[-2:]
    angle = torch.arange(length)[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attend(q, k, v, causal):
    """Attention of T queries over S + T keys; the first S, those of the state, are visible to every query."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        queries, keys = scores.shape[-2:]
        visible = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def gpt2(w, config, ids, states, norm_state=True):
    """One window of GPT-2: the output of every block, and the logits. `states` has [B, S, k] by layer, from 1."""

    def norm(x, name):
        return layer_norm(x, w[name + ".weight"], w[name + ".bias"], config.layer_norm_epsilon)

    def linear(x, name):  # Conv1D: the weight is [in, out]
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x, blocks = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]], []
    for layer in range(1, config.n_layer + 1):
        at = f"transformer.h.{layer - 1}."
        q, k, v = linear(norm(x, at + "ln_1"), at + "attn.c_attn").chunk(3, -1)
        if layer in states:
            state = norm(states[layer], at + "ln_1") if norm_state else states[layer]
            _, k_state, v_state = linear(state, at + "attn.c_attn").chunk(3, -1)
            k, v = torch.cat((k_state, k), 1), torch.cat((v_state, v), 1)
        x = x + linear(attend(*(split(y, config.n_head) for y in (q, k, v)), causal=True), at + "attn.c_proj")
        x = x + linear(gelu_new(linear(norm(x, at + "ln_2"), at + "mlp.c_fc")), at + "mlp.c_proj")
        blocks.append(x)
    return blocks, norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def llama(w, config, ids, states, rotate_state=False):
    """One window of Llama; the state's keys are not rotated, as at position 0."""
    heads, groups, theta = config.num_attention_heads, config.num_key_value_heads, config.rope_parameters["rope_theta"]

    def norm(x, name):
        return rms_norm(x, w[name + ".weight"], config.rms_norm_eps)

    def linear(x, name):
        return x @ w[name + ".weight"].T

    x, blocks = w["model.embed_tokens.weight"][ids], []
    for layer in range(1, config.num_hidden_layers + 1):
        at = f"model.layers.{layer - 1}."
        y = norm(x, at + "input_layernorm")
        q = rotate(split(linear(y, at + "self_attn.q_proj"), heads), theta)
        k = rotate(split(linear(y, at + "self_attn.k_proj"), groups), theta)
        v = split(linear(y, at + "self_attn.v_proj"), groups)
        if layer in states:
            state = norm(states[layer], at + "input_layernorm")
            k_state = split(linear(state, at + "self_attn.k_proj"), groups)
            k_state = rotate(k_state, theta) if rotate_state else k_state
            k = torch.cat((k_state, k), 2)
            v = torch.cat((split(linear(state, at + "self_attn.v_proj"), groups), v), 2)
        group = torch.arange(heads) // (heads // groups)  # head h reads the keys and values of group[h]
        x = x + linear(attend(q, k[:, group], v[:, group], causal=True), at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm")
        gate, up = linear(y, at + "mlp.gate_proj"), linear(y, at + "mlp.up_proj")
        x = x + linear(gate * gate.sigmoid() * up, at + "mlp.down_proj")
        blocks.append(x)
    return blocks, linear(norm(x, "model.norm"), "lm_head")


def bert(w, config, ids, states):
    """One window of BERT with its masked-language-model head; a post-norm layer does not normalise the state."""

    def norm(x, name):
        return layer_norm(x, w[name + ".LayerNorm.weight"], w[name + ".LayerNorm.bias"], config.layer_norm_eps)

    def linear(x, name):
        return x @ w[name + ".weight"].T + w[name + ".bias"]

    words, of = w["bert.embeddings.word_embeddings.weight"], "bert.embeddings."
    x = words[ids] + w[of + "position_embeddings.weight"][: ids.shape[1]] + w[of + "token_type_embeddings.weight"][0]
    x, blocks = norm(x, "bert.embeddings"), []
    for layer in range(1, config.num_hidden_layers + 1):
        at = f"bert.encoder.layer.{layer - 1}."
        q, k, v = (linear(x, at + "attention.self." + name) for name in ("query", "key", "value"))
        if layer in states:
            k = torch.cat((linear(states[layer], at + "attention.self.key"), k), 1)
            v = torch.cat((linear(states[layer], at + "attention.self.value"), v), 1)
        y = attend(*(split(y, config.num_attention_heads) for y in (q, k, v)), causal=False)
        x = norm(x + linear(y, at + "attention.output.dense"), at + "attention.output")
        y = linear(gelu(linear(x, at + "intermediate.dense")), at + "output.dense")
        x = norm(x + y, at + "output")
        blocks.append(x)
    y = norm(gelu(linear(x, "cls.predictions.transform.dense")), "cls.predictions.transform")
    return blocks, y @ words.T + w["cls.predictions.bias"]


def causal_schedule(length, overlap):
    """(start, stop, targets) of every window: a target belongs to the first window that reads the token before it."""
    windows, scored, start = [], 0, 0  # `scored`: the last target scored so far
    while scored < length - 1:
        stop = min(start + WINDOW, length)
        targets = [t for t in range(start + 1, stop + 1) if scored < t < length]
        windows.append((start, stop, targets))
        scored, start = targets[-1], start + WINDOW - overlap
    return windows


def encoder_schedule(length, overlap):
    """The same for an encoder: of shared tokens, the first half (rounded up) belongs to the earlier window."""
    starts = [0]
    while starts[-1] + WINDOW < length:
        starts.append(starts[-1] + WINDOW - overlap)
    borders = [0] + [start + (overlap + 1) // 2 for start in starts[1:]] + [length]
    return [
        (start, min(start + WINDOW, length), list(range(borders[n], borders[n + 1]))) for n, start in enumerate(starts)
    ]


def pool(m, blocks, pooling="mean", pooled_layers="all", slots=1):
    """Equation 1 and the alternatives of section 3.1: [B, S, k] from the blocks' outputs, L times [B, P, k]."""
    if pooled_layers == "last":
        mix = blocks[-1]
    else:
        mix = sum(w * h for w, h in zip(m["layer_logits"].softmax(0), blocks, strict=True))
    if pooling == "attention":
        return torch.einsum("bps,bpk->bsk", (mix @ m["keys"].T / math.sqrt(mix.shape[-1])).softmax(1), mix)
    parts = torch.tensor_split(mix, slots, dim=1)
    return torch.stack([part.mean(1) if pooling == "mean" else part.amax(1) for part in parts], 1)


def feed_forward(m, network, z):
    """Linear layers with ReLU between them, in the order of their numbers."""
    numbers = sorted({int(name.split(".")[2]) for name in m if name.startswith(f"networks.{network}.")})
    for i in numbers:
        z = (z if i == numbers[0] else z.relu()) @ m[f"networks.{network}.{i}.weight"].T
        z = z + m[f"networks.{network}.{i}.bias"]
    return z


def run(
    window, parameters, config, ids, labels, overlap, insert_at=2, state_per_layer=False, bptt_windows=0,
    residual=False, **rest,
):  # fmt: skip
    """The summed loss and the number of scored targets of whole documents, with the state carried across windows."""
    w = {name.removeprefix("base."): p for name, p in parameters.items() if name.startswith("base.")}
    m = {name.removeprefix("memory.vector."): p for name, p in parameters.items() if name.startswith("memory.vector.")}
    encoder = window is bert
    before, after = (torch.tensor(x if encoder else (), dtype=torch.long) for x in (PREFIX, SUFFIX))
    layers = range(1, config.num_hidden_layers + 1) if insert_at == "all" else insert_at
    layers = (layers,) if isinstance(layers, int) else layers
    pooling = {key: value for key, value in rest.items() if key in ("pooling", "pooled_layers", "slots")}
    below = pooling.get("pooled_layers") == "below"
    layers = layers[1:] if below and insert_at == "all" else layers

    total, count, states = 0.0, 0, {}
    schedule = (encoder_schedule if encoder else causal_schedule)(ids.shape[1], overlap)
    for n, (start, stop, targets) in enumerate(schedule, 1):
        rows = [torch.cat((before, row, after)) for row in ids[:, start:stop]]
        blocks, logits = window(w, config, torch.stack(rows), states)
        inside = slice(len(before), len(before) + stop - start)
        at = [t - start - (0 if encoder else 1) for t in targets]  # the position that predicts target t
        log_p, expected = logits[:, inside][:, at].log_softmax(-1), labels[:, targets]
        picked = log_p.gather(-1, expected.clamp(min=0)[..., None])[..., 0]
        total, count = total - picked[expected != -100].sum(), count + int((expected != -100).sum())

        if n < len(schedule):
            outputs = [h[:, inside] for h in blocks]
            if below:  # each layer's input; attention pooling weights a position of all of them at once
                beside = torch.cat([outputs[layer - 2] for layer in layers], -1)
                zs = pool(m, [beside], **pooling | {"pooled_layers": "last"}).chunk(len(layers), -1)
            else:
                zs = [pool(m, outputs, **pooling)] * len(layers)
            states = {}
            for i, (layer, z) in enumerate(zip(layers, zs, strict=True)):
                new = feed_forward(m, i if state_per_layer or below else 0, z)
                states[layer] = z + new if residual else new
            if bptt_windows and n % bptt_windows == 0:
                states = {layer: state.detach() for layer, state in states.items()}
    return total, count


REFERENCES = {"gpt2": gpt2, "llama": llama, "bert": bert}
