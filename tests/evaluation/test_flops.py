# SPDX-License-Identifier: Apache-2.0
"""FLOPs per token: equal to the paper's numbers, and to what PyTorch counts while a model runs."""

import dataclasses

import pytest
import torch
from helpers import families, tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, GPT2Config

import carryforward as cf
from carryforward.backbones.architectures import architecture_of, store_architecture
from carryforward.backbones.discovery import discover
from carryforward.evaluation import flops
from carryforward.evaluation.flops import flops_per_token, state_size

PAPER = {0: 1.75e8, 5: 1.78e8, 10: 1.81e8, 30: 1.94e8, 50: 2.10e8, 75: 2.33e8, 100: 2.62e8, 150: 3.50e8, 200: 5.25e8}


@pytest.mark.parametrize(("overlap", "printed"), PAPER.items())
def test_the_papers_column(overlap, printed):
    assert flops_per_token(GPT2Config(), 300, overlap).base == pytest.approx(printed, rel=0.005)


def test_the_papers_memory_costs_little():
    plain = flops_per_token(GPT2Config(), 300)
    recurrent = flops_per_token(GPT2Config(), recurrence=cf.RecurrenceConfig(window=300, memory="vector"))
    assert plain.recurrence == 0
    assert recurrent.base == plain.base
    assert 0 < recurrent.recurrence < 0.001 * recurrent.base
    assert recurrent.vocabulary == 2 * 768 * 50257


# --- compared with PyTorch's counter -------------------------------------------------------------------------------
# It counts matrix products exactly, so the tolerance is for rounding only. It differs from ours in two terms, which
# the tests compute: it counts masked pairs, which eager attention multiplies too, and it does not count what is no
# matrix product: pooling layers' outputs, comparing and averaging keys.


def attention_width(config):
    _, size = architecture_of(config).kv_heads(config)
    return config.num_attention_heads * size


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_base_flops_of_a_window(name):
    window = 8
    config = tiny.CONFIGS[name]()
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    layers = architecture_of(config).layers
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tiny.documents(1, window))
    counts = counter.get_flop_counts()
    measured = sum(sum(counts[f"{type(model).__name__}.{layers}.{number}"].values()) for number in range(tiny.LAYERS))
    masked = tiny.LAYERS * window**2 - sum(flops._pairs(config, window))
    counted = flops_per_token(config, window).base * window
    assert measured == pytest.approx(counted + 4 * attention_width(config) * masked, rel=1e-9)
    assert masked >= 0


EXPERTS_BY_TOKEN = ["dbrx", "jetmoe"]
MORE_TYPES = [
    *(name for name in families.REPRESENTATIVE if name not in EXPERTS_BY_TOKEN), "qwen2_moe", "laguna", "mimo_v2_flash",
    "gemma4_text", "modernbert-decoder", "granitemoeshared", "ernie4_5_moe", "xmod",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MORE_TYPES if name in families.INSTALLED])
def test_base_flops_of_a_window_of_discovered_types(name):
    """Of a mixture of experts the counter sees those that a token is sent to, and layers may have other sizes."""
    window, model = 8, families.base(name).requires_grad_(False)
    store_architecture(model.config, discover(model))
    if architecture_of(model.config).own_attention:
        model.config._attn_implementation = "eager"
    else:
        model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    architecture = architecture_of(model.config)
    backbone = architecture.backbone_of(model)
    with FlopCounterMode(display=False) as counter:
        backbone(input_ids=tiny.documents(1, window))
    counts = counter.get_flop_counts()
    items = range(len(architecture.layer_list(backbone)))  # some compute several layers
    paths = [f"{type(backbone).__name__}.{architecture.layers}.{number}" for number in items]
    measured = sum(sum(counts[path].values()) for path in paths)
    matrices = flops._matrices(flops._json(model.config))
    masked = [4 * width * (window**2 - pairs) for width, pairs in
              zip(matrices.attention_widths, flops._pairs(model.config, window), strict=True)]  # fmt: skip
    assert measured == pytest.approx(flops_per_token(model.config, window).base * window + sum(masked), rel=1e-9)


@pytest.mark.parametrize("name", EXPERTS_BY_TOKEN)
def test_experts_that_depend_on_the_token_are_not_counted(name):
    model = families.base(name)
    store_architecture(model.config, discover(model))
    with pytest.raises(ValueError, match=f"FLOPs of a model of type '{name}' cannot be counted from its config"):
        flops_per_token(model.config, 8)


RECURRENCES = {
    "paper": {},
    "slots in all layers": {"slots": 3, "insert_at": "all"},
    "a state per layer": {"slots": 2, "insert_at": (1, 3), "state_per_layer": True, "pooled_layers": "last"},
    "attention pooling": {"slots": 2, "pooling": "attention"},
    "layers below": {"slots": 2, "insert_at": "all", "pooled_layers": "below"},
    "attention pooling of layers below": {
        "slots": 2,
        "insert_at": "all",
        "pooled_layers": "below",
        "pooling": "attention",
    },
    "kv": {"slots": 0, "recent": 4, "sinks": 1},
    "kv and vector": {"slots": 2, "recent": 4},
    "tokens": {"memory": cf.TokenMemoryConfig(memory_tokens=3)},
    "associative": {"memory": cf.AssociativeMemoryConfig(memory_tokens=3, key_size=5)},
    "associative and kv": {
        "memory": [cf.AssociativeMemoryConfig(memory_tokens=2, key_size=5), cf.KVMemoryConfig(recent=4, sinks=1)]
    },
    "kv further back": {"memory": cf.KVMemoryConfig(recent=20, sinks=1)},
    "kv, far by attention": {"memory": cf.KVMemoryConfig(recent=3, sinks=1, far=9, selection="attention")},
    "kv, far dissimilar": {"memory": cf.KVMemoryConfig(recent=3, sinks=1, far=9, selection="dissimilar")},
    "kv, far merged": {"memory": cf.KVMemoryConfig(recent=3, sinks=1, far=3, selection="merged")},
    "kv, far looked up": {
        "memory": cf.KVMemoryConfig(recent=3, sinks=1, far=4, selection="lookup", group=2, archive=8)
    },
}


@pytest.mark.parametrize(("name", "kind"), [
    *((name, "paper") for name in tiny.CONFIGS),
    *((name, kind) for name in ("gpt2", "qwen3", "bert") for kind in RECURRENCES if kind != "paper"),
])  # fmt: skip
def test_flops_of_the_memories_in_a_window(name, kind):
    model = tiny.recurrent(name, "none", settings={"_attn_implementation": "eager"}, **RECURRENCES[kind])
    config, base, recurrence = model.config, model.config.base_config, model.config.recurrence

    def measure(windows, use_state):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            kwargs = {} if config.architecture.causal else {"final": True}
            model(tiny.documents(1, 2 + 6 * windows), use_state=use_state, **kwargs)
        return counter.get_total_flops()

    # A third window with a state, less one without: the difference is a state that is read and one that is written.
    measured = (measure(3, True) - measure(2, True)) - (measure(3, False) - measure(2, False))
    cost, stride = flops._window_cost(base, recurrence, recurrence.overlap), 8 - 2
    counted = sum(memory.flops(cost) for memory in recurrence.memories)
    assert flops_per_token(config).recurrence == pytest.approx(counted / stride)
    assert flops_per_token(config, use_state=False).recurrence == 0
    masked = pooling = 0
    if (kv := recurrence.find("kv")) is not None and kv.far and kv.selection != "attention":
        pooling = kv.selection_method.flops(cost, kv.slot_sizes)
        if kv.selection == "lookup":  # whose scores are products of matrices, which the counter sees
            pooling = tiny.LAYERS * cost.kv_width * stride
        assert pooling > 0
    if (vector := recurrence.find("vector")) is not None:
        entered = len(vector.insertion_layers(tiny.LAYERS))
        pooling = 2 * {"all": tiny.LAYERS, "last": 1, "below": entered}[vector.pooled_layers] * 8 * tiny.WIDTH
        if config.architecture.causal:
            masked = (vector.slots * recurrence.window + vector.slots**2 / 2) * entered
    around = sum(memory.memory_tokens for memory in recurrence.memories if memory.writes_behind)
    if around and config.architecture.causal:  # of the pairs with memory positions, half are masked
        around *= 1 + ("tokens" in model.memory.kinds)  # in front of the window and behind it
        masked = tiny.LAYERS * around * (recurrence.window + around / 2)
    assert measured == pytest.approx(counted - pooling + 4 * attention_width(base) * masked, rel=1e-9)


def test_flops_of_selecting_far_positions():
    """Counted by hand, for 2 layers with 3 heads of queries and 1 of keys of size 4, windows of 10 tokens."""
    base = tiny.hf.LlamaConfig(num_hidden_layers=2, hidden_size=12, num_attention_heads=3, num_key_value_heads=1)

    def flops_of(selection, **sizes):
        memory = cf.KVMemoryConfig(**{"recent": 5, "sinks": 1, "far": 6, **sizes}, selection=selection)
        cost = flops._window_cost(base, cf.RecurrenceConfig(window=10, overlap=2, memory=memory), 2)
        attention = memory.carried * 10 * 3 * 4 * 4 * 2  # a product and a sum for the scores, and for the values
        return memory.flops(cost) - attention

    assert flops_of("attention", far=0) == 0
    # The last token's query is compared with 12 carried keys and 10 of the window.
    assert flops_of("attention") == 2 * (12 + 10) * 3 * 4 * 2
    # 6 far keys and 8 that leave: squares and their sum, division, mean, product and sum with the mean.
    assert flops_of("dissimilar") == 6 * (6 + 8) * 4 * 2
    # Of 6 slots, 4 keys and 4 values are added up.
    assert flops_of("merged") == 2 * 4 * 6 * 4 * 2
    # Of 8 tokens the keys are averaged; 10 queries are compared with the averages of 6 groups.
    assert flops_of("lookup", group=2, archive=12) == (8 * 4 + 2 * 10 * 6 * 3 * 4) * 2


def test_flops_of_pooling():
    def pooling(overlap=0, **fields):
        memory = cf.VectorMemoryConfig(**fields)
        cost = flops._window_cost(GPT2Config(), cf.RecurrenceConfig(memory=memory), overlap)
        return memory.flops(cost) - memory.flops(dataclasses.replace(cost, pooled=0))

    assert pooling() == 2 * 12 * 300 * 768
    assert pooling(pooled_layers="last") == 2 * 300 * 768
    # Trained without overlap: the state must not run further ahead of the next window.
    assert pooling(overlap=50) == 2 * 12 * 250 * 768


def test_sliding_windows_reduce_attention():
    full = {**tiny._grouped, "sliding_window": None}
    mistral, plain = tiny.CONFIGS["mistral"](), tiny.hf.MistralConfig(**full)
    assert flops_per_token(mistral, 5) == flops_per_token(plain, 5)
    saved = flops_per_token(plain, 20).base - flops_per_token(mistral, 20).base
    assert saved * 20 == pytest.approx(tiny.LAYERS * 4 * 16 * (20 - 5) ** 2 / 2)


def test_an_encoders_special_tokens_are_read_but_not_scored():
    config = tiny.recurrent("bert", "none").config
    plain = flops_per_token(config.base_config, 11)
    assert flops_per_token(config, overlap=0).base == pytest.approx(plain.base * 11 / 8)
    assert plain.vocabulary == 0


@pytest.mark.parametrize("group", [2, 4])
def test_windows_that_are_read_again_are_counted(group):
    """What PyTorch counts for a document of many groups, over the tokens that one more group gives out."""
    memory = cf.KVMemoryConfig(recent=3, sinks=1, right=3, group_windows=group)
    settings = {"_attn_implementation": "eager"}
    model = tiny.recurrent("bert", "none", settings=settings, overlap=0, memory=memory)

    def measure(groups):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tiny.documents(1, 8 * (groups * (group - 1) + 1) + 1))
        return counter.get_total_flops()

    counted, alone = flops_per_token(model.config), flops_per_token(model.config, use_state=False)
    assert counted.base == pytest.approx(alone.base * group / (group - 1))
    pooler = 2 * tiny.WIDTH**2  # of BERT, which reads each window's first token, and belongs to no layer
    per_group = (counted.base + counted.recurrence) * 8 * (group - 1) + group * pooler
    assert measure(5) - measure(4) == pytest.approx(per_group, rel=1e-9)


def test_counting_changes_neither_random_numbers_nor_the_config():
    config = tiny.CONFIGS["gemma3_text"]()
    before, state = config.to_dict(), torch.get_rng_state()
    flops._matrices.cache_clear()
    flops_per_token(config, recurrence=cf.RecurrenceConfig(window=8, memory="vector"))
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    flops_per_token(config, 8)
    assert flops._matrices.cache_info().misses == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["paper", "kv", "kv and vector", "kv further back", "kv, far looked up",
                                  "tokens", "associative and kv"])  # fmt: skip
def test_the_size_of_a_state_is_that_of_its_tensors(kind, dtype):
    model = tiny.recurrent("llama", **RECURRENCES[kind])
    size = state_size(model.config, dtype=dtype)
    state = model.advance_state(tiny.documents(1, 40)).memory
    assert size.bytes == sum(part[0].numel() for part in state.values()) * dtype.itemsize
    archive = 8 if kind == "kv, far looked up" else 0  # which no window sees
    positions = state["kv"].shape[4] - archive if "kv" in state else 0
    assert size.positions == (state["tokens"].shape[1] if "tokens" in state else positions)
    base, recurrence = model.config.base_config, model.config.recurrence
    assert state_size(base, recurrence=recurrence, dtype=dtype) == size
    assert state_size(base, 8) == flops.StateSize(0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "window is missing"),
        ({"window": 300, "overlap": 300}, "overlap=300 must be at least 0 and smaller than the 300"),
        ({"window": 300, "overlap": -1}, "overlap=-1 must be"),
        ({"window": 0}, "window=0 leaves no room"),
        ({"window": 300.0}, "window=300.0 must be an integer"),
        ({"recurrence": cf.RecurrenceConfig(memory=cf.VectorMemoryConfig(insert_at=13))}, "layer 13 does not exist"),
        (
            {"recurrence": cf.RecurrenceConfig(memory=cf.VectorMemoryConfig(slots=8)), "overlap": 295},
            "a window has 300 document tokens and needs 303 to carry 8 pooled vectors",
        ),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        flops_per_token(GPT2Config(), **arguments)


def test_bad_configs():
    with pytest.raises(ValueError, match="config is a dict"):
        flops_per_token({}, 300)
    with pytest.raises(ValueError, match="model of type 't5'"):
        flops_per_token(tiny.hf.T5Config(), 300)
    with pytest.raises(ValueError, match="leave `recurrence` out"):
        flops_per_token(tiny.recurrent("gpt2").config, recurrence=cf.RecurrenceConfig(window=8, memory="vector"))
