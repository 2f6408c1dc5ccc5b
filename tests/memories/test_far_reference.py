# SPDX-License-Identifier: Apache-2.0
"""Memories that reach further back than one window, against references made of the base model alone.

`read_windows` reads a text window by window with transformers' own cache: which positions stand in it, and where, is
decided here, token by token, with lists. The other reference is the base model on the whole text.
"""

import pytest
import torch
from helpers import tiny
from helpers.tiny import LEARNED, unmeasured, untrained
from torch.nn.functional import cosine_similarity, cross_entropy, normalize
from torch.testing import assert_close
from transformers import DynamicCache

import carryforward as cf
from carryforward.memories.kv_history import HistoryKVMemory
from carryforward.windows import encoder_schedule

WINDOW = 8
GROUP = 4  # positions that "merged" averages


# --- the reference ---------------------------------------------------------------------------------------------------


class Text:
    """Keys and values of every token read so far, those of the latest window that read it, of a single row.

    Attributes:
        kv: by layer, of every token, [2, h, tokens, d].
        made_at: for each token, the position at which they were made.
    """

    def __init__(self, config, offsets):
        """
        Args:
            offsets: position offsets [L, 2, h, positions, d]; None if positions are rotary.
        """
        self.config, self.offsets = config, offsets
        self.kv, self.made_at = [], torch.empty(0, dtype=torch.long)

    def add(self, cache, start, positions):
        """Enter the tokens of a window, the newest in a cache, which begins at the token `start`."""
        new = [torch.stack([layer.keys[0], layer.values[0]])[:, :, -len(positions) :] for layer in cache.layers]
        old = [both[:, :, :start] for both in self.kv] or [both[:, :, :0] for both in new]
        self.kv = [torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)]
        self.made_at = torch.cat([self.made_at[:start], positions])

    def moved(self, layer, tokens, to):
        """Keys and values [2, h, n, m, d] of tokens [h, n, m], as if they had been made at positions `to` [n]."""
        head = torch.arange(len(tokens))[:, None, None]
        (keys, values), at, to = self.kv[layer][:, head, tokens], self.made_at[tokens], to[:, None].expand_as(tokens)
        if self.offsets is None:
            return torch.stack([rotate(keys, to - at, *self._rotation(layer)), values])
        offsets = self.offsets[layer]
        return torch.stack([keys, values]) + offsets[:, head, to] - offsets[:, head, at]

    def keys_without_position(self, layer, head, tokens):
        """Keys [n, d] of tokens, rotated back to position 0, or less the offset of their position."""
        at, keys = self.made_at[tokens], self.kv[layer][0, head, tokens]
        if self.offsets is None:
            return rotate(keys, -at, *self._rotation(layer))
        return keys - self.offsets[layer, 0, head, at]

    def _rotation(self, layer):
        """The base of a layer's rotations, and how much of a key they rotate."""
        rope = self.config.rope_parameters
        rope = rope if "rope_theta" in rope else rope[self.config.layer_types[layer]]
        return rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)


def rotate(keys, distance, theta, share):
    """Keys [..., d] rotated to positions that much further on [...]; only the first part of them is rotated."""
    size = int(keys.shape[-1] * share)
    angle = distance[..., None] * theta ** (-torch.arange(0, size, 2) / size)
    a, b, rest = keys.split([size // 2, size // 2, keys.shape[-1] - size], dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], dim=-1)


def most_attended(text, layer, head, tokens, attention):
    return attention[layer]  # a layer's heads select the same


def least_alike(text, layer, head, tokens, attention):
    keys = text.keys_without_position(layer, head, tokens)
    mean = normalize(keys, dim=-1).mean(dim=0, keepdim=True)
    scores = -cosine_similarity(keys, mean)
    return {token: round(score, 4) for token, score in zip(tokens, scores.tolist(), strict=True)}  # equal tokens are


def most_attended_groups(text, layer, groups, queries):
    """For each group of tokens, how much attention its mean key gets from the queries of a window [t, heads, d]."""
    heads, shares = len(text.kv[layer][0]), []
    scale = getattr(text.config, "query_pre_attn_scalar", None) or queries.shape[2]
    for query_head, of_head in enumerate(queries.unbind(1)):
        head = query_head * heads // queries.shape[1]
        means = torch.stack([text.keys_without_position(layer, head, group).mean(dim=0) for group in groups])
        shares.append((of_head @ means.T / scale**0.5).softmax(-1).mean(dim=0))
    return torch.stack(shares).mean(dim=0).tolist()


# By selection, the scores of tokens, of which the highest are kept. "merged" has none: it averages all. "lookup" scores
# groups of tokens.
SCORES = {"attention": most_attended, "dissimilar": least_alike, "merged": None, "lookup": None}
# Other fields of a selection, by the number of far positions.
FIELDS = {("lookup", 4): {"group": 2, "archive": 10}, ("lookup", 3): {"group": 3, "archive": 9}}


def far_fields(far, selection):
    return {"far": far, "selection": selection, **FIELDS.get((selection, far), {})}


class Memory:
    """Which tokens a window sees: slots, each a list of tokens that are averaged."""

    def __init__(self, heads, layers, recent, sinks=0, far=0, selection="attention", group=GROUP, archive=None):
        self.recent, self.sinks, self.size, self.selection = recent, sinks, far, selection
        self.group, self.archive, self.groups = group, archive, []
        self.far = [[[] for _ in range(heads)] for _ in range(layers)]  # by layer and head
        self.left = sinks  # the first token after the sinks that is neither far nor dropped

    def slots(self, before, layer, head):
        """What a window sees that has so many tokens before it."""
        outside = max(before - self.recent, 0)
        sinks, newest = range(min(self.sinks, outside)), range(min(self.left, outside), before)
        return [[token] for token in sinks] + self.far[layer][head] + [[token] for token in newest]

    def select(self, text, after, attention, queries):
        """Choose far tokens before a window that has so many tokens before it."""
        leaving = [*range(self.left, max(after - self.recent, self.left))]
        if self.selection in ("merged", "lookup"):
            leaving = [leaving[i : i + self.group] for i in range(0, len(leaving) - self.group + 1, self.group)]
            self.left += self.group * len(leaving)
        if self.selection == "merged":
            self.far = [[(far + leaving)[-self.size :] for far in heads] for heads in self.far]
            return
        if self.selection == "lookup":
            self.groups = (self.groups + leaving)[-(self.archive // self.group) :]
            self.far = [self.look_up(text, layer, queries[layer]) for layer in range(len(self.far))]
            return
        self.left += len(leaving)
        for layer, heads in enumerate(self.far):
            for head, far in enumerate(heads):
                tokens = [token for (token,) in far] + leaving
                scores = SCORES[self.selection](text, layer, head, tokens, attention) if tokens else {}
                best = sorted(tokens, key=lambda token: -scores[token])[: self.size]
                heads[head] = [[token] for token in sorted(best)]

    def look_up(self, text, layer, queries):
        """The far slots of a layer, the same in all heads."""
        scores = most_attended_groups(text, layer, self.groups, queries) if self.groups else []
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.size // self.group]
        return [[[token] for i in sorted(best) for token in self.groups[i]] for _ in self.far[layer]]


def read_windows(base, ids, overlap, offsets=None, **memory):
    """The logits of a text [1, n]; a token's are those of the first window that reads it."""
    config = base.config
    layers, heads = config.num_hidden_layers, _kv_heads(config)
    text, memory = Text(config, offsets), Memory(heads, layers, **memory)
    logits, stride, end, start, queries = [], WINDOW - overlap, 0, 0, record_queries(base)
    while end < ids.shape[1]:
        reached, end = end, min(start + WINDOW, ids.shape[1])
        slots = [[memory.slots(start, layer, head) for head in range(heads)] for layer in range(layers)]
        count = len(slots[0][0])
        first = start if offsets is None else count  # positions: rotary ones are relative, learned ones begin with 0
        cache = _cache(text, slots, first - count + torch.arange(count))
        positions = torch.arange(first, first + end - start)
        out = base(
            ids[:, start:end], past_key_values=cache, position_ids=positions[None],
            attention_mask=_mask(count, end - start), output_attentions=True,
        )  # fmt: skip
        logits.append(out.logits[:, reached - start :])
        text.add(out.past_key_values, start, positions)
        if end - start == WINDOW:
            with torch.no_grad():
                attention = _attention(out.attentions, slots, start, stride - 1)
                memory.select(text, start + stride, attention, [queries[layer][0, :stride] for layer in range(layers)])
        start += stride
    return torch.cat(logits, dim=1)


def record_queries(base):
    """By layer, the queries of the latest call before they are rotated, [1, t, heads, d]."""
    config, queries = base.config, {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = base.base_model.h if hasattr(base.base_model, "h") else base.base_model.layers
    for number, layer in enumerate(layers):
        module = layer.attn if hasattr(layer, "attn") else getattr(layer, "self_attn", None) or layer.attention
        names = ("q_norm", "q_proj", "c_attn", "query_key_value")
        projection = next(getattr(module, name) for name in names if hasattr(module, name))
        fused = hasattr(module, "query_key_value")  # in each head: query, key, value

        def record(module, args, output, number=number, fused=fused):
            heads = output if output.ndim == 4 else output.unflatten(-1, (-1, 3 * size if fused else size))
            if config.model_type == "gemma3_text":  # whose heads come before positions here
                heads = heads.transpose(1, 2)
            queries[number] = heads[..., :size][:, :, : config.num_attention_heads]

        projection.register_forward_hook(record)
    return queries


def _kv_heads(config):
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _cache(text, slots, positions):
    """A cache in which the tokens of slots stand at positions."""
    cache = DynamicCache()
    for layer, by_head in enumerate(slots if len(positions) else []):
        most = max(len(slot) for slot in by_head[0])
        tokens = torch.tensor([[(slot * most)[:most] for slot in slots] for slots in by_head])
        keys, values = text.moved(layer, tokens, positions).mean(3)[:, None]
        cache.update(keys, values, layer)
    return cache


def _mask(count, width):
    """What a window's tokens see: everything in the cache, and each other causally."""
    visible = torch.ones(width, count + width).tril(count).bool()
    return torch.zeros(1, 1, width, count + width).masked_fill(~visible, torch.finfo(torch.float32).min)


def _attention(weights, slots, start, last):
    """By layer, the attention to each token from that at position `last` of a window, on average over heads."""
    found = []
    for layer, by_head in enumerate(slots):
        tokens = [slot[0] for slot in by_head[0]] + [start + i for i in range(last + 1)]
        found.append(dict(zip(tokens, weights[layer][0, :, last].mean(0).tolist(), strict=False)))
    return found


# --- the memory equals it --------------------------------------------------------------------------------------------

MEMORIES = [
    {"recent": 13, "sinks": 0},
    {"recent": 11, "sinks": 2},
    *({"recent": 3, "sinks": 2, **far_fields(4, selection)} for selection in SCORES),
    *({"recent": 10, "sinks": 0, **far_fields(3, selection)} for selection in SCORES),
]
BOTH_OVERLAPS = [(name, overlap) for name in ("gpt2", "llama") for overlap in (0, 3)]


def settings(name):
    return tiny.WIDE if name == "gemma3_text" else {}


def both(name, overlap, fields, **more):
    """A model with random position offsets, a base model of the same weights, and the offsets."""
    model = tiny.recurrent(name, slots=0, overlap=overlap, settings=settings(name), **fields, **more)
    assert isinstance(model.memory.kv, HistoryKVMemory)
    base, offsets = tiny.base(name, **settings(name)), model.memory.kv.position_offsets
    base.set_attn_implementation("eager")  # the only one that returns attention weights
    return model, base, None if offsets is None else offsets.detach().clone().requires_grad_()


@pytest.mark.parametrize("fields", MEMORIES, ids=str)
@pytest.mark.parametrize(("name", "overlap"), [*BOTH_OVERLAPS, ("qwen3", 3), ("gpt_neox", 0), ("gemma3_text", 2)])
def test_logits_equal_those_of_a_cache_that_is_filled_by_hand(name, overlap, fields):
    model, base, offsets = both(name, overlap, fields)
    ids = tiny.documents(2, 51)
    with torch.no_grad():
        expected = torch.cat([read_windows(base, row[None], overlap, offsets, **fields) for row in ids])
        assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", MEMORIES, ids=str)
@pytest.mark.parametrize(("name", "overlap"), [("gpt2", 0), ("llama", 3)])
def test_gradients_equal_those_through_the_cache(name, overlap, fields):
    """What is selected does not depend on the weights as far as gradients know, here and there."""
    model, base, offsets = both(name, overlap, fields, block_windows=3, keep_windows=0)
    ids = tiny.documents(1, 46)
    logits = read_windows(base, ids, overlap, offsets, **fields)
    loss = cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()
    expected = {f"base.{name}": gradient for name, gradient in tiny.gradients(base).items()}
    if offsets is not None:
        expected["memory.kv.position_offsets"] = offsets.grad
        assert offsets.grad.abs().max() > 1e-4
    out = model(ids, labels=ids)
    out.loss.backward()
    assert_close(out.loss, loss)
    tiny.assert_same_gradients(tiny.gradients(model), expected)


@pytest.mark.parametrize("selection", SCORES)
def test_the_memories_compared_differ(selection):
    """Far positions have an effect, and every selection another one."""
    base, ids = tiny.base("llama"), tiny.documents(1, 51)
    base.set_attn_implementation("eager")
    near = {"recent": 3, "sinks": 2}
    with torch.no_grad():
        logits = [
            read_windows(base, ids, 0, **near, **far)
            for far in ({}, *(far_fields(4, one) for one in (selection, *SCORES)))
        ]
    assert (logits[1] - logits[0]).abs().max() > 1e-2
    same = [one for one, other in zip(SCORES, logits[2:], strict=True) if other.equal(logits[1])]
    assert same == [selection]


# --- what holds all of a text equals the base model on it ------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "attention"),
    [({"recent": 32}, "sdpa"), ({"recent": 29, "sinks": 3}, "eager"), ({"recent": 16, "far": 14, "sinks": 2}, "sdpa"),
     ({"recent": 16, "far": 16, "selection": "dissimilar"}, "eager"),
     ({"recent": 13, "far": 16, "selection": "lookup", "group": 4, "archive": 20}, "sdpa")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_a_memory_that_holds_the_whole_text_equals_the_base_model(name, fields, attention):
    model = untrained(name, overlap=0, **fields)
    assert isinstance(model.memory.kv, HistoryKVMemory)
    model.base.set_attn_implementation(attention)
    ids = tiny.documents(2, 40)
    with torch.no_grad():
        expected = model.base(ids).logits
        assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        nearer = untrained(name, overlap=0, recent=16)(ids).logits
    assert (nearer - expected).abs().max() > 1e-2, "what is further back has an effect"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_of_a_memory_that_holds_the_whole_text_are_those_of_the_base_model(name):
    model, base, ids = untrained(name, overlap=0, recent=32, block_windows=2), tiny.base(name), tiny.documents(2, 40)
    logits = base(ids).logits
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    model(ids, labels=ids).loss.backward()
    found = tiny.gradients(model)
    found.pop("memory.kv.position_offsets", None)
    tiny.assert_same_gradients(found, {f"base.{name}": gradient for name, gradient in tiny.gradients(base).items()})


@pytest.mark.parametrize("fields", [{"recent": 16}, {"recent": 6, "far": 8, "sinks": 2}], ids=str)
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_an_encoder_of_one_layer_that_carries_everything_equals_one_text(name, fields):
    """Its keys and values depend on their own tokens alone, so the third window sees the same as in one text."""
    base = tiny.base(name, "none", num_hidden_layers=1, n_layers=1)
    prefix = (2,) if name in LEARNED else ()  # a rotary prefix stands in front of every window, not of the text
    size = {"window": WINDOW + len(prefix), "prefix": prefix, "suffix": ()}
    memory = cf.KVMemoryConfig(**{"sinks": 0, **fields})
    model = unmeasured(cf.add_recurrence(base, documents=tiny.TEXT, memory=memory, **size))
    ids = tiny.documents(2, 24)
    front = torch.tensor([prefix] * 2).long().view(2, -1)
    with torch.no_grad():
        whole = base(torch.cat([front, ids], dim=1)).last_hidden_state[:, len(prefix) :]
        assert_close(model(ids, final=True).last_hidden_state[:, 16:], whole[:, 16:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoder_of_one_layer_equals_one_call_for_each_window(name, overlap):
    """Its keys and values depend on their own tokens alone, so that tokens take the place of what is carried. The last
    token before the next window selects by its attention to itself and to what comes before it."""
    fields = {"recent": 3, "sinks": 1, "far": 4, "selection": "attention"}
    base = tiny.base(name, "none", num_hidden_layers=1)
    size = {"window": WINDOW + 2, "prefix": (2,), "suffix": (3,), "overlap": overlap}
    model = unmeasured(cf.add_recurrence(base, documents=tiny.TEXT, memory=cf.KVMemoryConfig(**fields), **size))
    base, ids = tiny.base(name, "none", num_hidden_layers=1), tiny.documents(1, 90)
    base.set_attn_implementation("eager")
    memory, made_at, stride = Memory(1, 1, **fields), torch.zeros(90, dtype=torch.long), WINDOW - overlap
    with torch.no_grad():
        hidden = model(ids).last_hidden_state
        for window in encoder_schedule(90, WINDOW + 2, overlap, prefix=1, suffix=1):
            seen = torch.tensor([token for (token,) in memory.slots(window.start, 0, 0)], dtype=torch.long)
            count, own = len(seen), torch.arange(window.start, window.end)
            first = 1 if name == "modernbert" else 1 + count
            places = first + torch.arange(len(own) + 1)
            made_at[own] = places[:-1]
            # Learned positions belong to what is carried, rotary ones to where it is seen.
            carried = 1 - count + torch.arange(count) if name == "modernbert" else made_at[seen]
            tokens = torch.cat([torch.tensor([2]), ids[0, seen], ids[0, own], torch.tensor([3])])
            positions = torch.cat([torch.tensor([0]), carried, places])
            out = base(tokens[None], position_ids=positions[None], output_attentions=True)
            scored = slice(window.score_from - window.start, window.score_to - window.start)
            expected = out.last_hidden_state[:, 1 + count :][:, scored]
            assert_close(hidden[:, window.score_from : window.score_to], expected, rtol=1e-4, atol=1e-4)
            if len(own) == WINDOW:  # not the last one
                weights = out.attentions[0][0, :, 1 + count + stride - 1, : 1 + count + stride]
                weights = (weights / weights.sum(-1, keepdim=True)).mean(0)[1:].tolist()
                tokens = [*seen.tolist(), *own[:stride].tolist()]
                memory.select(None, window.start + stride, [dict(zip(tokens, weights, strict=True))], None)


def test_the_number_of_slots_that_are_used_grows_with_the_text():
    """One text in pieces: each state has what a window after it sees, and zeros elsewhere."""
    model = untrained("llama", overlap=0, recent=9, sinks=2, far=4, selection="merged")
    for length, sinks, far, newest in ((8, 0, 0, 8), (16, 2, 1, 10), (24, 2, 3, 10), (40, 2, 4, 10)):
        state = model.advance_state(tiny.documents(1, length), final=True).memory["kv"][0]
        used = state.abs().amax((0, 1, 2, 4)) > 0  # [slots]
        assert used.tolist() == [
            *(i < sinks for i in range(2)), *(i >= 4 - far for i in range(4)), *(i >= 12 - newest for i in range(12))
        ], length  # fmt: skip
