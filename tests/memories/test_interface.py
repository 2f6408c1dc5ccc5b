# SPDX-License-Identifier: Apache-2.0
"""Every kind of memory against the interface, and a further kind that is defined and registered here."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers
from helpers import tiny
from helpers.generation import GREEDY, decode, greedy_continuation, logits_of_one_call
from torch.testing import assert_close

import carryforward as cf
from carryforward.backbones.hooks import HookContext
from carryforward.evaluation.flops import flops_per_token
from carryforward.memories import kinds
from carryforward.memories.base import Dependency, Memory, MemoryConfig, WindowCost, WindowRecord
from carryforward.windows import Span

WINDOW, OVERLAP = 8, 2
SPAN = Span(0, WINDOW, WINDOW - OVERLAP)
CHOICES = {
    "vector": cf.VectorMemoryConfig(hidden_sizes=(12,)),
    "vectors": cf.VectorMemoryConfig(slots=3, insert_at=(1, 3), state_per_layer=True, hidden_sizes=(12,)),
    "kv": cf.KVMemoryConfig(recent=3, sinks=2),
    "both": [cf.VectorMemoryConfig(slots=2, hidden_sizes=(12,)), cf.KVMemoryConfig(recent=4, sinks=0)],
    "tokens": cf.TokenMemoryConfig(memory_tokens=3),
    "associative": cf.AssociativeMemoryConfig(memory_tokens=3, key_size=5),
    "associative and kv": [
        cf.KVMemoryConfig(recent=3, sinks=1), cf.AssociativeMemoryConfig(memory_tokens=2, key_size=5)
    ],
}  # fmt: skip
EACH_MEMORY = pytest.mark.parametrize("memory", CHOICES.values(), ids=CHOICES)
EACH_MODEL = pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3_text"])


def build(name, memory):
    return tiny.recurrent(name, window=WINDOW, overlap=OVERLAP, memory=memory)


def window_record(model, rows=2):
    """Random layer outputs, keys and values, as a window leaves them, and outputs at three memory positions."""
    config = model.config.base_config
    heads, size = model.config.architecture.kv_heads(config)
    outputs = [torch.randn(rows, WINDOW, config.hidden_size) for _ in range(config.num_hidden_layers)]
    window_kv = [tuple(torch.randn(rows, heads, WINDOW, size) for _ in range(2)) for _ in outputs]
    after = [torch.randn(rows, 3, config.hidden_size) for _ in outputs]
    return WindowRecord(outputs, window_kv, model.rerotate, layer_after=after, last_after=after[-1])


@EACH_MODEL
@EACH_MEMORY
def test_a_memory_writes_states_of_its_shape(name, memory):
    model = build(name, memory)
    recurrence, record = model.config.recurrence, window_record(model)
    for config, (kind, module) in zip(recurrence.memories, model.memory.items(), strict=True):
        assert kind == config.kind
        assert module.shape == config.state_shape(model.config.base_config, model.config.architecture)
        state = module.write(record, SPAN, None)
        assert state.shape == (2, *module.shape)
        assert module.write(record, SPAN, state).shape == state.shape
        if module.writes_behind:
            continue  # generation does not write it token by token
        if module.token_width:
            features = module.token_features(record.layer_outputs)
            assert features.shape == (2, WINDOW, module.token_width)
        else:
            features = torch.empty(0)
        empty = WindowRecord([], record.window_kv, record.rerotate)
        assert_close(module.write_tokens(features, empty, SPAN, None), state)


@EACH_MODEL
@EACH_MEMORY
def test_a_memory_inserts_into_the_layers_it_names(name, memory):
    model = build(name, memory)
    for module in model.memory:
        context = HookContext()
        module.read(torch.randn(2, *module.shape), context)
        every = range(1, tiny.LAYERS + 1)
        attended = {*context.slots, *context.past_kv} if context.memory_positions is None else every
        assert sorted(attended) == list(module.layers())
        assert [*context.layer_inputs] == ([*every] if module.reads_every_token else [])
    everything = {layer for module in model.memory for layer in module.layers()}
    assert model.memory.layers == sorted(everything)


@EACH_MEMORY
def test_flat_states_and_states_by_kind_are_the_same(memory):
    model = build("llama", memory)
    state = {kind: torch.randn_like(zeros) for kind, zeros in model.memory.initial(3).items()}
    flat = model.memory.flatten(state)
    assert flat.shape == (3, sum(model.memory.sizes))
    by_kind = model.memory.unflatten(flat)
    assert by_kind.keys() == state.keys() == dict(model.memory.items()).keys()
    assert all(by_kind[kind].equal(state[kind]) for kind in state)
    assert model.memory.flatten(by_kind).equal(flat)


@EACH_MEMORY
def test_the_size_of_a_state_is_known(memory):
    model = build("llama", memory)
    state = model.advance_state(tiny.documents(1, 20)).memory
    assert model.memory.state_bytes == sum(part.nbytes for part in state.values())
    assert model.memory.sizes == [math.prod(module.shape) for module in model.memory]
    model.to(torch.bfloat16)
    state = model.advance_state(tiny.documents(1, 20)).memory
    assert model.memory.state_bytes == sum(part.nbytes for part in state.values())


def test_memories_are_found_by_kind():
    model = build("gpt2", CHOICES["both"])
    assert model.memory.get("vector") is model.memory.vector
    assert model.memory.get("kv") is model.memory.kv
    assert build("gpt2", CHOICES["kv"]).memory.get("vector") is None


def test_only_keys_and_values_of_learned_positions_must_be_measured():
    assert build("gpt2", CHOICES["vector"]).memory.ready
    assert build("llama", CHOICES["kv"]).memory.ready
    model = build("gpt2", CHOICES["both"])
    assert model.memory.ready
    tiny.unmeasured(model)
    assert not model.memory.ready
    assert model.memory.vector.ready
    assert not model.memory.kv.ready


@pytest.mark.parametrize(
    ("memory", "extra", "records", "previous"),
    [
        ("vector", 0, False, False), ("vectors", 0, False, False), ("kv", 5, True, True), ("both", 4, True, True),
        ("tokens", 6, False, False), ("associative", 3, False, True), ("associative and kv", 6, True, True),
    ],
)  # fmt: skip
def test_what_a_memory_needs_is_declared(memory, extra, records, previous):
    model = build("gpt2", CHOICES[memory])
    assert model.config.recurrence.extra_positions == extra
    assert model.memory.records_kv == records
    assert any(module.uses_previous for module in model.memory) == previous


@EACH_MODEL
@EACH_MEMORY
def test_flops_of_memories_add_up_to_those_of_the_recurrence(name, memory):
    model = build(name, memory)
    base, recurrence, architecture = model.config.base_config, model.config.recurrence, model.config.architecture
    attention = [layer.get_submodule(architecture.attention) for layer in architecture.layer_list(model.backbone)]
    inserted = [config.extra_queries(tiny.LAYERS) for config in recurrence.memories]
    cost = WindowCost(
        base=base,
        window=WINDOW,
        pooled=WINDOW,
        queries=[WINDOW + sum(layer) for layer in zip(*inserted, strict=True)],
        matrices=sum(p.numel() for p in architecture.layer_list(model.backbone).parameters() if p.ndim == 2),
        projections=[sum(p.numel() for p in module.parameters() if p.ndim == 2) for module in attention],
        stride=WINDOW - OVERLAP,
    )
    each = [config.flops(cost) for config in recurrence.memories]
    assert all(flops > 0 for flops in each)
    assert flops_per_token(model.config).recurrence == pytest.approx(sum(each) / (WINDOW - OVERLAP))
    assert flops_per_token(model.config, use_state=False).recurrence == 0


@pytest.mark.parametrize(("name", "memory"), [
    *((name, "both") for name in ("gpt2", "llama", "gemma3_text")), ("llama", "tokens"), ("llama", "associative"),
])  # fmt: skip
def test_memories_compile_to_one_graph(name, memory):
    """The fast path compiles them: a graph break would cost most of the gain."""
    model, ids = build(name, CHOICES[memory]), tiny.documents(2, 30)
    expected = model(ids, labels=ids).loss
    torch._dynamo.reset()
    between_layers = [module for kind in model.memory for module in kind.layer_modules()]
    for module in (model.memory, *between_layers):
        module.forward = torch.compile(module.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_close(model(ids, labels=ids).loss, expected)


# --- a further kind: one config, one module, one row ---------------------------------------------------------------


@dataclass(frozen=True)
class AverageConfig(MemoryConfig):
    """A running average of the last layer's outputs, inserted as a vector."""

    kind: ClassVar[str] = "average"
    dependency: ClassVar[Dependency] = Dependency.LAST_LAYER

    layer: int = 3

    def default_window(self, usable):
        return min(24, usable)

    def state_shape(self, base, architecture):
        return (base.hidden_size,)

    def extra_queries(self, num_layers):
        return [int(layer == self.layer) for layer in range(1, num_layers + 1)]

    def flops(self, cost):
        return 2.0 * cost.pooled * cost.base.hidden_size

    def describe(self):
        return "a running average"

    def usage_note(self):
        return "It is a test."

    def build(self, base, architecture, window):
        return Average(self, self.state_shape(base, architecture))


class Average(Memory):
    uses_previous = True

    def __init__(self, config, shape):
        super().__init__(shape, token_width=shape[0])
        self.layer = config.layer
        self.decay = torch.nn.Parameter(torch.tensor(0.5))

    def layers(self):
        return (self.layer,)

    def read(self, state, context):
        context.slots[self.layer] = state[:, None]

    def write(self, record, span, previous):
        return self.write_tokens(record.layer_outputs[-1], record, span, previous)

    def token_features(self, layer_outputs):
        return layer_outputs[-1].to(self.decay)

    def write_tokens(self, features, record, span, previous):
        mean = features[:, span.start : span.stop].mean(dim=1).to(self.decay)
        return mean if previous is None else self.decay * previous + (1 - self.decay) * mean


@pytest.fixture(params=["average", ("average", "kv"), ("average", "vector", "kv")], ids=str)
def averaging(request, monkeypatch):
    """A model with the further kind of memory, alone or beside others."""
    monkeypatch.setitem(kinds.MEMORY_KINDS, "average", AverageConfig)
    fields = {"window": WINDOW, "overlap": OVERLAP, "memory": request.param}
    model = cf.add_recurrence(tiny.base("gpt2"), documents=tiny.TEXT, **fields)
    model.memory.average.decay.data.fill_(0.3)
    return model


def test_a_further_kind_is_chosen_like_the_others(averaging):
    recurrence = averaging.config.recurrence
    assert recurrence.find("average") == AverageConfig()
    assert recurrence.dependency is Dependency.LAST_LAYER
    assert cf.RecurrenceConfig(**recurrence.to_dict()) == recurrence
    assert "a running average" in recurrence.describe()
    assert cf.add_recurrence(tiny.base("llama"), memory="average").config.recurrence.window == 24
    with pytest.raises(ValueError, match=r"'layer'. It is a field of AverageConfig: give memory=AverageConfig"):
        cf.RecurrenceConfig(layer=2)
    assert flops_per_token(averaging.config).recurrence > 0


def test_a_further_kind_is_read_and_written(averaging):
    """The state is the average over windows, and it changes the windows that follow."""
    ids, outputs = tiny.documents(2, 21), []  # the second window is complete at token 14, and followed by others
    hook = averaging.backbone.h[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    state = averaging.advance_state(ids[:, :15]).memory["average"]
    hook.remove()
    first, second = (output.mean(dim=1) for output in outputs)
    assert_close(state, 0.3 * first + 0.7 * second)
    difference = averaging(ids).logits - averaging(ids, use_state=False).logits
    assert not difference[:, :8].any()
    assert difference[:, 8:].abs().max() > 1e-3


def test_a_further_kind_is_trained_through_time(averaging):
    ids, results = tiny.documents(2, 37), []
    with_graph = cf.add_recurrence(averaging.base, averaging.config.recurrence, keep_graph=True, documents=tiny.TEXT)
    with_graph.memory.load_state_dict(averaging.memory.state_dict())
    for model in (averaging, with_graph):
        out = model(ids, labels=ids)
        out.loss.backward()
        results.append((out.loss.detach(), tiny.gradients(model)))
    assert_close(results[0][0], results[1][0])
    tiny.assert_same_gradients(results[0][1], results[1][1])
    assert results[0][1]["memory.average.decay"].abs() > 1e-6


def test_a_further_kind_generates(averaging):
    ids = tiny.documents(2, 20)
    assert averaging.generate(ids, max_new_tokens=25, **GREEDY).equal(greedy_continuation(averaging, ids, 25))
    text, lengths = tiny.documents(3, 45), [1, 9, 20]
    logits, cache = decode(averaging, text, lengths)
    assert_close(logits, logits_of_one_call(averaging, text, lengths), rtol=1e-4, atol=1e-4)
    assert cache.state.memory.keys() == averaging.fresh_state(1).memory.keys()


def test_states_of_a_further_kind_are_saved_and_continued_from(averaging, tmp_path):
    ids = tiny.documents(2, 34)
    whole = averaging(ids, labels=ids)
    first = averaging(ids[:, :19], labels=ids[:, :19])
    first.state.save(tmp_path / "state.safetensors")
    loaded = cf.State.load(tmp_path / "state.safetensors")
    assert loaded.memory["average"].equal(first.state.memory["average"])
    rest = averaging(ids[:, 19:], labels=ids[:, 19:], state=loaded)
    assert_close(first.nll_sum + rest.nll_sum, whole.nll_sum)
    for kind, expected in whole.state.memory.items():
        assert_close(rest.state.memory[kind], expected, rtol=1e-4, atol=1e-5)
    rows = cf.State.cat(first.state.split())
    assert rows.memory["average"].equal(first.state.memory["average"])
    other = cf.add_recurrence(tiny.base("gpt2"), window=WINDOW, overlap=OVERLAP, memory="vector")
    with pytest.raises(ValueError, match="state comes from another model or overlap: .* average 16"):
        other(ids[:, 19:], state=loaded)


def test_models_with_a_further_kind_are_saved_and_loaded(averaging, tmp_path):
    averaging.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.recurrence == averaging.config.recurrence
    assert loaded.memory.average.decay == averaging.memory.average.decay
    ids = tiny.documents(2, 30)
    assert loaded(ids).logits.equal(averaging(ids).logits)


def test_memories_in_another_precision_than_the_base_model():
    """Training the memory's weights in float32 above a bfloat16 model: states have the precision of these weights."""
    model = cf.add_recurrence(tiny.base("gpt2").to(torch.bfloat16), window=8, memory="vector")
    for parameter in model.memory.parameters():
        parameter.data = parameter.data.float()
    ids, mask = tiny.documents(2, 20), torch.ones(2, 20)
    mask[1, 9:] = 0
    out = model(ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    assert out.state.memory["vector"].dtype == torch.float32
    assert model.eval().generate(ids, max_new_tokens=12, pad_token_id=0, eos_token_id=None).shape == (2, 32)


def test_two_memories_in_one_layer_stand_side_by_side():
    context = HookContext()
    for i in (1.0, 2.0):
        context.add_slots(2, torch.full((1, 1, 4), i))
        context.add_past_kv(1, (torch.full((1, 1, 3, 2), i), torch.full((1, 1, 3, 2), -i)))
    assert context.slots[2][0, :, 0].tolist() == [1, 2]
    keys, values = context.past_kv[1]
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert values.equal(-keys)
