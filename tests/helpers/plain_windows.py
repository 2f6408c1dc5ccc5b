# SPDX-License-Identifier: Apache-2.0
"""Windows of an unmodified base model with embeddings around their tokens: what references of memories that have
positions of their own are written with. Nothing here calls the library's own code that runs windows.

A reference is a function from a window's tokens [B, n], and whether it is written, to their logits [B, n, V]. It keeps
its memory between calls. `losses` cuts documents and sums the loss.
"""

import torch

import carryforward as cf
from helpers import tiny
from helpers.reference import PREFIX, SUFFIX, WINDOW, causal_schedule, encoder_schedule

SETTINGS = {  # other than the defaults of `tiny.CONFIGS`
    "gpt2": {"n_inner": 20, "scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"},
    "opt": {"word_embed_proj_dim": 12},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    "qwen3": {"head_dim": 6, "rms_norm_eps": 1e-3},
    "gemma3_text": {"query_pre_attn_scalar": 3, "sliding_window": 3},
    "bert": {"hidden_act": "relu", "layer_norm_eps": 1e-3},
    "roberta": {"pad_token_id": 4},
    "electra": {"embedding_size": 12},
    "modernbert": {"local_attention": 6, "norm_bias": True, "mlp_bias": True},
}
EXACT = ("gpt2", "opt", "bert", "roberta", "electra")  # others compute norms or rotations in float32
SPANS = {"mistral": 5, "gemma3_text": 3, "modernbert": 3}  # how far layers with a sliding window see
PADDED = {"roberta": 4}  # the padding id, after which positions are counted


def is_causal(name):
    return name in tiny.CAUSAL


def build(name, memory, overlap=2, **fields):
    """A tiny model in double precision in which nothing is zero and the memory is large."""
    special = {"window": WINDOW}
    if not is_causal(name):
        special = {"prefix": PREFIX, "suffix": SUFFIX, "window": WINDOW + 3}
    model = cf.add_recurrence(tiny.base(name, **SETTINGS[name]), overlap=overlap, memory=memory, **special, **fields)
    return tiny.without_zeros(model).double().eval()


def unmodified_base(name, model):
    """A base model that the library has never seen, with the same weights."""
    base = tiny.base(name, **SETTINGS[name]).double()
    base.load_state_dict(model.base.state_dict())
    return base


def sample(name, length=29):
    """Two documents and their labels; an encoder scores about half of its tokens."""
    ids = tiny.documents(2, length, seed=length)
    labels = ids.clone()
    if not is_causal(name):
        labels[torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.5] = -100
    return ids, labels


def call(name, base, tokens, before=None, after=None, unseen=0):
    """Logits of a window's tokens [B, n], and the base model's last hidden states behind the window.

    Args:
        before, after: embeddings in front of the tokens and behind them, [B, m, e].
        unseen: the last so many of an encoder are not seen from other positions.
    """
    hidden = []
    body = base.model.decoder if name == "opt" else base.base_model
    hook = body.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))
    embedded = base.get_input_embeddings()(tokens)
    parts = [part for part in (before, embedded, after) if part is not None]
    num_before, num_after = (0 if part is None else part.shape[1] for part in (before, after))
    size = num_before + tokens.shape[1] + num_after
    inputs = {"attention_mask": _masks(name, size, num_before, num_after, unseen)}
    if is_causal(name):
        inputs["use_cache"] = False
    else:  # behind a full window
        positions = torch.cat([torch.arange(tokens.shape[1]), WINDOW + 3 + torch.arange(num_after)])[None]
        inputs["position_ids"] = positions + PADDED[name] + 1 if name in PADDED else positions
    logits = base(inputs_embeds=torch.cat(parts, dim=1), **inputs).logits
    hook.remove()
    window = slice(num_before, size - num_after)
    return logits[:, window], hidden[0][:, size - num_after :]


def _masks(name, size, before, after, unseen):
    """What each position sees: all of it, or an encoder all but what is unseen; with a sliding window the tokens see
    their neighbours, and all memory positions."""
    if is_causal(name) and name not in SPANS:
        return None
    query, key = torch.arange(size)[:, None], torch.arange(size)
    seen = key <= query if is_causal(name) else (key < size - unseen) | (query >= size - unseen)
    if name not in SPANS:
        return seen[None, None]
    is_memory = [(place < before) | (place >= size - after) for place in (query, key)]
    reach = SPANS[name] if is_causal(name) else SPANS[name] + 1  # an encoder's half window, and the token itself
    near = ((query - key).abs() < reach) | is_memory[0] | is_memory[1]
    if name == "mistral":
        return (seen & near)[None, None]
    return {"full_attention": seen[None, None], "sliding_attention": (seen & near)[None, None]}


def losses(name, reference, ids, labels, overlap, detach=None):
    """The summed loss and the number of scored targets of whole documents.

    Args:
        detach: truncated BPTT: called after every window with its number, from 1.
    """
    causal = is_causal(name)
    prefix, suffix = ((), ()) if causal else (PREFIX, SUFFIX)
    total, count = 0.0, 0
    windows = (causal_schedule if causal else encoder_schedule)(ids.shape[1], overlap)
    for n, (start, stop, targets) in enumerate(windows, 1):
        sides = [torch.tensor(side, dtype=torch.long).expand(len(ids), -1) for side in (prefix, suffix)]
        logits = reference(torch.cat([sides[0], ids[:, start:stop], sides[1]], dim=1), n < len(windows))
        at = [len(prefix) + t - start - int(causal) for t in targets]  # the position that predicts target t
        log_p, expected = logits[:, at].log_softmax(-1), labels[:, targets]
        picked = log_p.gather(-1, expected.clamp(min=0)[..., None])[..., 0]
        total, count = total - picked[expected != -100].sum(), count + int((expected != -100).sum())
        if detach is not None:
            detach(n)
    return total, count


def assert_agree(name, model, make_reference, ids, labels, overlap=2, bptt_windows=None, **arguments):
    """The library's loss and all its gradients are those of a reference.

    Args:
        make_reference: from the family, an unmodified base model and the memory's weights by name.
    """
    out = model(ids, labels=labels, **arguments)
    out.loss.backward()
    ours = tiny.gradients(model)
    base = unmodified_base(name, model)
    weights = {key: p.detach().clone().requires_grad_() for key, p in model.memory.named_parameters()}
    reference = make_reference(name, base, weights, len(ids))

    def detach(number):
        if bptt_windows and number % bptt_windows == 0:
            reference.detach()

    total, count = losses(name, reference, ids, labels, overlap, detach)
    leaves = {f"base.{key}": p for key, p in base.named_parameters()} | {f"memory.{k}": p for k, p in weights.items()}
    theirs = torch.autograd.grad(total / count, list(leaves.values()), allow_unused=True, materialize_grads=True)
    tolerance = 1e-9 if name in EXACT else 1e-5
    assert out.n_scored == count
    torch.testing.assert_close(out.nll_sum.detach(), total.detach(), rtol=tolerance, atol=tolerance)
    expected = dict(zip(leaves, theirs, strict=True))
    for key in expected.keys() - ours.keys():  # what the loss does not depend on may have none
        assert not expected.pop(key).any(), key
    tiny.assert_same_gradients(ours, expected, tolerance)
    return expected
