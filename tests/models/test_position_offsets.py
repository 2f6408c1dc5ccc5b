# SPDX-License-Identifier: Apache-2.0
"""Position offsets of carried keys and values, for base models with learned positions."""

import pytest
import torch
from helpers import prose, tiny
from helpers.tiny import LEARNED, unmeasured, untrained
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import carryforward as cf
from carryforward.models import position_offsets
from carryforward.models.position_offsets import needs_position_offsets

KV = cf.KVMemoryConfig(recent=3, sinks=1)


@pytest.fixture
def warnings(monkeypatch):
    """Logged warnings, with their arguments filled in."""
    messages = []
    monkeypatch.setattr("carryforward.models.base.logger.warning_once", messages.append)
    for module in ("position_offsets", "add_recurrence"):
        monkeypatch.setattr(
            f"carryforward.models.{module}.logger.warning", lambda text, *values: messages.append(text % values)
        )
    return messages


@pytest.fixture(scope="module")
def tokenizer():
    return prose.tokenizer()


def gpt2(**fields):
    """A tiny GPT-2 for the vocabulary of `prose.tokenizer`."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=prose.VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, **fields)
    ).eval()


# --- what offsets are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_only_learned_positions_need_offsets(name):
    fields = {"prefix": (2,), "suffix": (3, 3), "window": 11} if name in tiny.ENCODERS else {"window": 8}
    model = unmeasured(cf.add_recurrence(tiny.base(name, "none"), memory=KV, documents=tiny.TEXT, **fields))
    assert needs_position_offsets(model) == (name in LEARNED)
    if name not in LEARNED:
        assert not list(model.memory.parameters())
        return
    ids, offsets = tiny.documents(1, 24), model.memory.kv.position_offsets
    before = model(ids).last_hidden_state
    with torch.no_grad():
        newest = len(model.config.recurrence.prefix) + 3
        offsets[0, 1, :, newest] = 1.0  # where the newest carried position stands, in the first layer
    assert not needs_position_offsets(model)
    changed = (model(ids).last_hidden_state - before).abs().amax(-1)[0]
    assert not changed[:5].any()
    assert changed[8:].min() > 1e-6


@pytest.mark.parametrize("name", LEARNED)
def test_offsets_are_means_over_texts(name):
    prefix = (2,) if name in tiny.ENCODERS else ()
    length = 13 - len(prefix)
    texts = tiny.documents(6, length)
    fields = {"window": 9, "prefix": prefix, "memory": KV}
    model = unmeasured(cf.add_recurrence(tiny.base(name, "none"), documents=tiny.TEXT, **fields)).train()
    cf.measure_position_offsets(model, texts.numpy(), rows=6)
    assert model.training
    first = model.backbone.get_submodule(model.config.architecture.layers)[0]
    inputs = []
    hook = first.get_submodule(model.config.architecture.attention).register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    model.eval().backbone(torch.cat([torch.tensor(prefix, dtype=torch.long).expand(6, -1), texts], dim=1))
    hook.remove()

    def projection(which):
        """The weight and bias that make the first layer's keys or values."""
        if name == "gpt2":
            part = slice(16 * (which + 1), 16 * (which + 2))
            return first.attn.c_attn.weight.T[part], first.attn.c_attn.bias[part]
        path = {"opt": "self_attn.{}_proj", "distilbert": "attention.{}_lin"}.get(name, "attention.self.{}")
        letters = ("k", "v") if name in ("opt", "distilbert") else ("key", "value")
        module = first.get_submodule(path.format(letters[which]))
        return module.weight, module.bias

    offsets = model.memory.kv.position_offsets
    for which in (0, 1):
        expected = torch.nn.functional.linear(inputs[0], *projection(which)).mean(0).view(13, 2, 8).transpose(0, 1)
        assert_close(offsets[0, which], expected, rtol=1e-4, atol=1e-5)
    assert (offsets[1:].abs().amax((-1, -2)) > 1e-3).all(), "of every layer, keys and values, every head"


def test_stretches_are_taken_from_all_documents():
    model = untrained("gpt2", recent=4)
    documents = [torch.randint(0, tiny.VOCABULARY, (n,)).numpy() for n in (5, 40, 3, 30)]
    cf.measure_position_offsets(model, documents, rows=4)
    assert not needs_position_offsets(model)
    with pytest.raises(ValueError, match="documents have 8 tokens. At least 12 are needed"):
        cf.measure_position_offsets(untrained("gpt2", recent=4), [documents[0], documents[2]])
    with pytest.raises(ValueError, match="documents have 0 tokens"):
        cf.measure_position_offsets(untrained("gpt2", recent=4), [])
    cf.measure_position_offsets(untrained("llama", recent=4), [])  # rotary: nothing to measure


def test_unmeasured_offsets_and_too_little_text_are_warned_of(warnings):
    model, ids = untrained("gpt2", recent=4), tiny.documents(1, 20)
    warnings.clear()
    model(ids, use_state=False)
    untrained("llama", recent=4)(ids)
    assert not warnings
    model(ids)
    assert "Call carryforward.measure_position_offsets(model, documents)" in warnings.pop()
    cf.measure_position_offsets(model, [ids[0].numpy()])
    assert "measured on only 1 stretches of 12 tokens" in warnings.pop()
    model(ids)
    assert not warnings


# --- what add_recurrence measures them on --------------------------------------------------------------------------


def test_offsets_are_measured_on_given_texts(tokenizer, warnings):
    texts = [text[:3000] for text in prose.TOPICS[:40]]
    model = cf.add_recurrence(gpt2(), window=16, documents=texts, tokenizer=tokenizer)
    assert model.memory.ready
    assert not warnings
    expected = unmeasured(cf.add_recurrence(gpt2(), window=16, documents=texts, tokenizer=tokenizer))
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    cf.measure_position_offsets(expected, ids)
    assert model.memory.kv.position_offsets.equal(expected.memory.kv.position_offsets)
    with_ids = cf.add_recurrence(gpt2(), window=16, documents=ids)
    assert with_ids.memory.kv.position_offsets.equal(expected.memory.kv.position_offsets)
    with pytest.raises(ValueError, match="documents are texts: give tokenizer=... as well, or token ids"):
        cf.add_recurrence(gpt2(), window=16, documents=texts)


@pytest.mark.parametrize("beside", [False, True], ids=["tokenizer given", "tokenizer saved with the model"])
def test_offsets_are_measured_on_the_built_in_text_with_a_warning(
    beside, tokenizer, warnings, tmp_path, tmp_path_factory, monkeypatch
):
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    corpora, load_documents = [], position_offsets.load_documents

    def watched(name, split, tokenizer):
        corpora.append((name, split))
        return load_documents(name, split, tokenizer)

    monkeypatch.setattr(position_offsets, "load_documents", watched)
    base = gpt2()
    if beside:
        base.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        base = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = cf.add_recurrence(base, window=16, **({} if beside else {"tokenizer": tokenizer}))
    assert corpora == [("python-docs", "train")]
    assert model.memory.ready
    (message,) = warnings
    assert message.startswith("Position offsets are measured on the built-in text, Python's documentation in English.")
    assert "give documents=..." in message
    assert model(torch.arange(40)[None], labels=torch.arange(40)[None]).loss.isfinite()


def test_without_any_text_the_model_is_refused():
    message = r"gpt2 has learned positions: .* Give documents=... \(texts or token ids\) or tokenizer=..., or use"
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(gpt2(), window=16)
    base = gpt2()
    base.config._name_or_path = "/nowhere"  # no tokenizer there
    with pytest.raises(ValueError, match=message):
        cf.add_recurrence(base, window=16)
    with pytest.raises(ValueError, match="documents have 0 tokens"):
        cf.add_recurrence(gpt2(), window=16, documents=[])
    assert cf.add_recurrence(gpt2(), window=16, memory="vector").memory.ready


def test_a_model_without_weights_is_refused(tokenizer):
    with torch.device("meta"):
        base = gpt2()
    with pytest.raises(ValueError, match=r"no weights \(meta device\), and position offsets cannot be measured"):
        cf.add_recurrence(base, window=16, tokenizer=tokenizer)
    assert cf.add_recurrence(base, window=16, memory="vector").memory.ready


def test_rotary_models_need_no_text(warnings):
    config = LlamaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=16, max_position_embeddings=64)  # fmt: skip
    model = cf.add_recurrence(LlamaForCausalLM(config), window=16)
    assert model.memory.ready
    with torch.device("meta"):
        cf.add_recurrence(LlamaForCausalLM(config), window=16)
    assert not warnings


def test_measured_offsets_are_saved(tmp_path):
    model = cf.add_recurrence(tiny.base("gpt2"), window=8, documents=tiny.TEXT)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not needs_position_offsets(loaded)
    assert loaded.memory.kv.position_offsets.equal(model.memory.kv.position_offsets)


@pytest.mark.parametrize("documents", ["a single text", (text for text in ["a generator"])])
def test_documents_that_are_no_list_are_refused(documents):
    with pytest.raises(ValueError, match="documents is a (str|generator): give a list of texts or of token ids"):
        cf.add_recurrence(tiny.base("gpt2"), window=8, documents=documents)
