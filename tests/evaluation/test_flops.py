# SPDX-License-Identifier: Apache-2.0
"""FLOPs per token: the paper's figures, and what PyTorch counts when a model really runs."""

import pytest
import torch
from helpers import tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, GPT2Config

import carryforward as cf
from carryforward.backbones.architectures import architecture_of
from carryforward.evaluation import flops
from carryforward.evaluation.flops import flops_per_token

PAPER = {0: 1.75e8, 5: 1.78e8, 10: 1.81e8, 30: 1.94e8, 50: 2.10e8, 75: 2.33e8, 100: 2.62e8, 150: 3.50e8, 200: 5.25e8}


@pytest.mark.parametrize(("overlap", "printed"), PAPER.items())
def test_the_papers_column(overlap, printed):
    assert flops_per_token(GPT2Config(), 300, overlap).base == pytest.approx(printed, rel=0.005)


def test_the_papers_module_costs_little():
    plain = flops_per_token(GPT2Config(), 300)
    carried = flops_per_token(GPT2Config(), recurrence=cf.RecurrenceConfig(window=300))
    assert plain.recurrence == 0
    assert carried.base == plain.base
    assert 0 < carried.recurrence < 0.001 * carried.base
    assert carried.vocabulary == 2 * 768 * 50257


# --- against PyTorch's own counter ---------------------------------------------------------------------------------
# It counts matrix products, each with all its entries: exactly, so the tolerance is rounding alone. Eager attention
# multiplies masked pairs too, which ours leaves out, and pooling by mean is no matrix product: the tests say so term
# by term.


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_base_is_what_a_window_computes(name):
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
    assert measured == pytest.approx(counted + 4 * flops._width(config) * masked, rel=1e-9)
    assert masked >= 0


RECURRENCES = {
    "paper": {},
    "slots at all layers": {"slots": 3, "insert_at": "all"},
    "a state per layer": {"slots": 2, "insert_at": (1, 3), "state_per_layer": True, "pooled_layers": "last"},
    "attention pooling": {"slots": 2, "pooling": "attention"},
    "kept": {"slots": 0, "kept": 4, "sinks": 1},
    "kept beside slots": {"slots": 2, "kept": 4},
}


@pytest.mark.parametrize(("name", "kind"), [
    *((name, "paper") for name in tiny.CONFIGS),
    *((name, kind) for name in ("gpt2", "qwen3", "bert") for kind in RECURRENCES if kind != "paper"),
])  # fmt: skip
def test_recurrence_is_what_one_more_window_computes(name, kind):
    model = tiny.recurrent(name, "none", settings={"_attn_implementation": "eager"}, **RECURRENCES[kind])
    config = model.config

    def measure(windows, use_state):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            settings = {} if config.architecture.causal else {"final": True}
            model(tiny.documents(1, 2 + 6 * windows), use_state=use_state, **settings)
        return counter.get_total_flops()

    # A third window and its like without state: the difference is one state pooled and one received.
    measured = (measure(3, True) - measure(2, True)) - (measure(3, False) - measure(2, False))
    parts = flops._recurrence(config.base_config, config.recurrence, config.recurrence.overlap)
    stride = 8 - 2
    assert flops_per_token(config).recurrence == pytest.approx(sum(parts.values()) / stride)
    assert flops_per_token(config, use_state=False).recurrence == 0
    recurrence, slots = config.recurrence, config.recurrence.slots
    masked = slots * recurrence.window + slots**2 / 2 if config.architecture.causal else 0
    expected = sum(parts.values()) - parts["pool"]
    assert measured == pytest.approx(
        expected + 4 * flops._width(config.base_config) * masked * len(config.insertion_layers), rel=1e-9
    )


def test_pooling_is_counted_where_it_happens():
    def pool(overlap=0, **fields):
        return flops._recurrence(GPT2Config(), cf.RecurrenceConfig(**fields), overlap)["pool"]

    assert pool() == 2 * 12 * 300 * 768
    assert pool(pooled_layers="last") == 2 * 300 * 768
    assert pool(overlap=50) == 2 * 12 * 250 * 768  # trained without overlap: the state must not run further ahead


def test_sliding_windows_cut_attention():
    full = {**tiny._grouped, "sliding_window": None}
    mistral, plain = tiny.CONFIGS["mistral"](), tiny.hf.MistralConfig(**full)
    assert flops_per_token(mistral, 5) == flops_per_token(plain, 5)
    saved = flops_per_token(plain, 20).base - flops_per_token(mistral, 20).base
    assert saved * 20 == pytest.approx(tiny.LAYERS * 4 * 16 * (20 - 5) ** 2 / 2)


def test_an_encoders_special_tokens_are_read_and_not_scored():
    config = tiny.recurrent("bert", "none").config
    plain = flops_per_token(config.base_config, 11)
    assert flops_per_token(config, overlap=0).base == pytest.approx(plain.base * 11 / 8)
    assert plain.vocabulary == 0


def test_counting_does_not_disturb_random_numbers_or_the_config():
    config = tiny.CONFIGS["gemma3_text"]()
    before, state = config.to_dict(), torch.get_rng_state()
    flops._matrices.cache_clear()
    flops_per_token(config, recurrence=cf.RecurrenceConfig(window=8))
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), state)
    flops_per_token(config, 8)
    assert flops._matrices.cache_info().misses == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "window is missing"),
        ({"window": 300, "overlap": 300}, "overlap=300 must be at least 0 and smaller than the 300"),
        ({"window": 300, "overlap": -1}, "overlap=-1 must be"),
        ({"window": 0}, "window=0 leaves no room"),
        ({"window": 300.0}, "window=300.0 must be an integer"),
        ({"recurrence": cf.RecurrenceConfig(insert_at=13)}, "layer 13 does not exist"),
        ({"recurrence": cf.RecurrenceConfig(slots=8), "overlap": 295}, "fewer than its 8 slots"),
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
        flops_per_token(tiny.recurrent("gpt2").config, recurrence=cf.RecurrenceConfig(window=8))
