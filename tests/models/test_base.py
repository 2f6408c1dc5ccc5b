# SPDX-License-Identifier: Apache-2.0
"""The model as a Hugging Face citizen, and what a call gives back."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from helpers import tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_logits_come_without_labels_or_when_asked_for():
    model = tiny.recurrent("gpt2")
    out = model(IDS)
    assert out.loss is None
    assert out.logits.shape == (2, 37, tiny.VOCABULARY)
    scored = model(IDS, labels=IDS)
    assert scored.logits is None
    both = model(IDS, labels=IDS, return_logits=True)
    assert_close(both.logits, out.logits)
    assert_close(both.loss, scored.loss)
    assert_close(both.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
    both.loss.backward()
    expected = tiny.gradients(model)
    scored.loss.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


def test_logits_to_keep():
    model = tiny.recurrent("llama")
    whole = model(IDS).logits
    for kept in (1, 5, 20, 37, 99):
        assert_close(model(IDS, logits_to_keep=kept).logits, whole[:, -kept:])
    columns = torch.tensor([30, 2, 2, 17, -1, 36])
    assert_close(model(IDS, logits_to_keep=columns).logits, whole[:, columns])
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    assert_close(
        model(IDS, attention_mask=mask, logits_to_keep=3).logits, model(IDS, attention_mask=mask).logits[:, -3:]
    )


def test_columns_that_are_not_there():
    with pytest.raises(ValueError, match="columns are -30 to 29, not"):
        tiny.recurrent("gpt2")(tiny.documents(2, 30), logits_to_keep=torch.tensor([3, 100]))


def test_a_base_model_with_a_forward_of_its_own_has_its_own_loss():
    class Scaled(hf.GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.1
            return out

    torch.manual_seed(0)
    base = Scaled(tiny.CONFIGS["gpt2"]()).eval()
    with torch.no_grad():
        for weight in base.parameters():
            weight.normal_(std=0.3)
    model, ids = cf.add_recurrence(base, window=8), tiny.documents(2, 30)
    losses = [model(ids, labels=ids, return_logits=wanted).loss for wanted in (False, True)]
    torch.testing.assert_close(*losses)


def test_hooks_on_gradients_of_the_output_layer_are_called():
    model, called, ids = tiny.recurrent("gpt2", keep_graph=True), [], tiny.documents(1, 30)
    model.base.lm_head.register_full_backward_hook(lambda *args: called.append(1))
    model(ids, labels=ids).loss.backward()
    assert called


def test_label_smoothing_shifts_the_labels(tmp_path):
    model, ids = tiny.recurrent("gpt2"), tiny.documents(2, 30)
    arguments = hf.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, label_smoothing_factor=1e-9)
    with torch.no_grad():
        smoothed = hf.Trainer(model=model, args=arguments).compute_loss(
            model, {"input_ids": ids, "labels": ids.clone()}
        )
        torch.testing.assert_close(smoothed, model(ids, labels=ids).loss)


def test_another_recurrence_on_loading(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    own = dataclasses.asdict(model.config.recurrence)
    load = hf.AutoModelForCausalLM.from_pretrained
    assert load(tmp_path, recurrence={**own, "keep_windows": 0}).config.recurrence.keep_windows == 0
    with pytest.raises(ValueError, match="window=64 is larger than the 40 learned positions"):
        load(tmp_path, recurrence={**own, "window": 64})
    assert cf.add_recurrence(tiny.base("gpt2"), {"window": 8}).config.recurrence.window == 8


def test_a_generation_config_that_cannot_be_saved_is_mended(tmp_path):
    base = tiny.base("gpt2")
    base.generation_config.temperature = 0.6
    model = cf.add_recurrence(base, window=8)
    model.save_pretrained(tmp_path)
    assert hf.GenerationConfig.from_pretrained(tmp_path).temperature == 0.6


def test_on_the_hub_it_has_its_folders_name(tmp_path, monkeypatch):
    given = {}
    model = tiny.recurrent("gpt2")
    monkeypatch.setattr(hf.PreTrainedModel, "save_pretrained", lambda self, folder, **kwargs: given.update(kwargs))
    model.save_pretrained(tmp_path / "my-model", push_to_hub=True)
    assert given["repo_id"] == "my-model"


def test_a_batched_pipeline():
    from helpers.prose import tokenizer

    words = tokenizer()
    words.pad_token = words.eos_token
    config = hf.BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                           intermediate_size=16, max_position_embeddings=40)  # fmt: skip
    model = cf.add_recurrence(hf.BertForSequenceClassification(config).eval(), window=16, prefix=())
    texts = ["The first of them.", "Another " * 30]
    found = [hf.pipeline("text-classification", model=model, tokenizer=words, batch_size=n)(texts) for n in (1, 2)]
    for one, other in zip(*found, strict=True):
        assert one["label"] == other["label"]
        assert one["score"] == pytest.approx(other["score"], abs=1e-5)


def test_sums_and_counts():
    model = tiny.recurrent("gpt2")
    labels = IDS.clone()
    labels[0, :10] = -100
    out = model(IDS, labels=labels)
    assert out.n_scored == 36 + 27
    assert_close(out.loss, out.nll_sum / out.n_scored)
    assert_close(model(IDS, labels=labels, num_items_in_batch=7).loss, out.nll_sum / 7)
    nothing = model(IDS[:, :1], labels=IDS[:, :1])
    assert (nothing.loss, nothing.nll_sum, nothing.n_scored) == (0, 0, 0)


def test_a_tuple_when_asked_for():
    loss, nll_sum, n_scored, _ = tiny.recurrent("gpt2")(IDS, labels=IDS, return_dict=False)
    assert_close(loss, nll_sum / n_scored)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_another_overlap_than_in_training_pools_as_far_ahead(name):
    """Footnote 3: the state must run exactly as far ahead of the next window's first token as it did in training."""
    seen = []
    model = tiny.recurrent(name, overlap=3)
    model.recurrence.register_forward_pre_hook(lambda _, args: seen.append(args[1][:2]))
    first = 0 if name == "gpt2" else 1
    for overlap, stop in ((3, 8), (5, 6), (7, 4), (1, 8), (0, 8)):
        seen.clear()
        model(IDS, overlap=overlap)
        assert set(seen) == {(first, first + stop)}
    with pytest.raises(ValueError, match="fewer than its 4 slots"):
        tiny.recurrent(name, overlap=0, slots=4)(IDS, overlap=5)


def test_tied_weights_stay_tied(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for one in (model, again):
        assert one.base.lm_head.weight is one.base.transformer.wte.weight
        assert one.get_output_embeddings().weight is one.get_input_embeddings().weight


def test_the_base_model_is_left_as_it_was():
    base = tiny.base("llama")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    logits = base(IDS).logits
    model = cf.add_recurrence(base, window=8)
    assert model.base is base
    assert base.config._attn_implementation == "sdpa"
    assert base.state_dict().keys() == before.keys()
    assert all(value.equal(before[name]) for name, value in base.state_dict().items())
    assert base(IDS).logits.equal(logits)


def test_the_papers_module_is_the_default():
    module = cf.add_recurrence(tiny.base("gpt2"), window=8).recurrence
    linear = [layer for layer in module.networks[0] if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in linear] == [200, 200, 200, tiny.WIDTH]
    assert module.layer_logits.tolist() == [0] * tiny.LAYERS
    assert linear[-1].bias.abs().max() == 0
    assert 0.015 < linear[-1].weight.std() < 0.025
    assert all(linear[i].weight.std() > 0.03 for i in range(3))


@pytest.mark.parametrize(
    "fields", [{}, {"pooled_layers": "last"}, {"pooled_layers": "below"}, {"pooling": "attention"}]
)
def test_how_the_network_starts(fields):
    torch.manual_seed(0)
    start = cf.add_recurrence(tiny.base("llama"), window=8, hidden_sizes=(400,), **fields).recurrence
    *_, last = start.networks[0]
    assert 0.019 < last.weight.std() < 0.021
    assert not last.bias.any()
    residual = cf.add_recurrence(tiny.base("llama"), window=8, residual=True, **fields).recurrence
    assert not residual.networks[0][-1].weight.any(), "what was pooled is carried as it is"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype, tmp_path):
    model = cf.add_recurrence(tiny.base("gpt2").to(dtype), window=8)
    assert {p.dtype for p in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).recurrence.weight.dtype == dtype
    assert (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).recurrence.weight.dtype == torch.float32
    )
    assert model.to(torch.bfloat16)(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_attention_implementations_agree(name, implementation, tmp_path):
    model = tiny.recurrent(name)
    expected = model(IDS).logits
    model.set_attn_implementation(implementation)
    assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
    assert again.base.config._attn_implementation == implementation
    assert_close(again(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_device_map(tmp_path):
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    for device_map in ("auto", {"": "cpu"}):
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        assert again(IDS).logits.equal(model(IDS).logits)


def test_weights_offloaded_to_disk(tmp_path):
    """Layer by layer on disk: accelerate brings weights in as they are used, and the state's norm with them."""
    model = tiny.recurrent("gpt2")
    model.save_pretrained(tmp_path)
    places = {"base.transformer.wte": "cpu", "base.transformer.wpe": "cpu", "base.transformer.drop": "cpu"}
    places |= {"base.transformer.h.0": "cpu", "base.transformer.h.1": "disk", "base.transformer.h.2": "disk"}
    places |= {"base.transformer.ln_f": "cpu", "base.lm_head": "cpu", "recurrence": "cpu"}
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "off")
    with torch.no_grad():
        assert_close(again(IDS).logits, model(IDS).logits)


def test_train_mode_follows_the_base_model():
    assert cf.add_recurrence(tiny.base("gpt2").train(), window=8).training
    assert not cf.add_recurrence(tiny.base("gpt2").eval(), window=8).training


def test_a_config_and_fields_on_top():
    config = cf.RecurrenceConfig(window=8, overlap=3, slots=2)
    model = cf.add_recurrence(tiny.base("gpt2"), config, overlap=1)
    assert (model.config.recurrence.slots, model.config.recurrence.overlap) == (2, 1)
    assert config.overlap == 3


def test_special_tokens_come_from_the_tokenizer():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend)
    config = cf.add_recurrence(tiny.base("bert"), window=8, tokenizer=tokenizer).config.recurrence
    assert (config.prefix, config.suffix) == ((2,), (3,))
    assert cf.add_recurrence(tiny.base("gpt2"), window=8, tokenizer=tokenizer).config.recurrence.prefix == ()


def test_labels_of_a_classifier_are_its_own(tmp_path):
    base = tiny.base("bert", "token")
    base.config.id2label = {0: "O", 1: "PER", 2: "LOC"}
    model = cf.add_recurrence(base, window=8, prefix=())
    model.save_pretrained(tmp_path)
    for one in (model, hf.AutoModelForTokenClassification.from_pretrained(tmp_path)):
        assert one.config.id2label == {0: "O", 1: "PER", 2: "LOC"}
    with pytest.raises(ValueError, match="labels holds 3; accepted are 0 to 2"):
        model(IDS, labels=torch.full_like(IDS, 3))


def test_a_classifier_of_documents_takes_the_maximum_over_windows():
    """Section 5.4, with the state removed so that the base model can be run window by window."""
    model = tiny.recurrent("bert", "sequence", overlap=0)
    firsts = [
        model.base.bert(F.pad(F.pad(IDS[:, i : i + 8], (1, 0), value=2), (0, 2), value=3)).last_hidden_state[:, 0]
        for i in range(0, 37, 8)
    ]
    pooled = model.base.bert.pooler(torch.stack(firsts).amax(dim=0)[:, None])
    assert_close(model(IDS, use_state=False).logits, model.base.classifier(pooled), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("problem", ["regression", "single_label_classification", "multi_label_classification"])
def test_problem_types(problem):
    model = tiny.recurrent("roberta", "sequence")
    model.config.problem_type = problem
    labels = {"regression": torch.randn(2, 3), "multi_label_classification": torch.tensor([[1.0, 0, 1], [0, 1, 0]])}
    out = model(IDS, labels=labels.get(problem, torch.tensor([0, 2])))
    out.loss.backward()
    assert out.logits.shape == (2, 3)
    assert model.recurrence.weight.grad.abs().max() > 0


def test_trainer_trains_it(tmp_path):
    """Hugging Face's own Trainer, untouched: it passes `num_items_in_batch` and gathers what it should."""
    model = cf.add_recurrence(tiny.base("gpt2"), window=8)
    rows = [{"input_ids": row, "labels": row} for row in tiny.documents(8, 30)]
    arguments = hf.TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        report_to=[], use_cpu=True, eval_strategy="steps", eval_steps=3, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("head", ["sequence", "token"])
def test_trainer_trains_and_evaluates_classifiers(head, tmp_path):
    model = tiny.recurrent("bert", head).train()
    documents = tiny.documents(8, 30)
    labels = documents[:, 0] % 3 if head == "sequence" else documents % 3
    rows = [{"input_ids": row, "labels": label} for row, label in zip(documents, labels, strict=True)]
    arguments = hf.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    predictions = trainer.predict(rows).predictions
    assert predictions.shape == ((8, 3) if head == "sequence" else (8, 30, 3))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_embeddings_can_be_resized_before_and_after(name, tmp_path):
    model = tiny.recurrent(name)
    model.resize_token_embeddings(tiny.VOCABULARY + 5)
    ids = torch.full((1, 20), tiny.VOCABULARY + 4)
    assert model(ids).logits.shape[-1] == tiny.VOCABULARY + 5
    model.save_pretrained(tmp_path)
    assert_close(type(model).from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    base = tiny.base(name)
    base.resize_token_embeddings(tiny.VOCABULARY + 5)
    assert cf.add_recurrence(base, window=8, prefix=())(ids).logits.shape[-1] == tiny.VOCABULARY + 5


def test_embeddings_added_later_start_as_the_base_models_do():
    model = tiny.recurrent("llama")
    model.resize_token_embeddings(tiny.VOCABULARY + 500, mean_resizing=False)
    assert 0.015 < model.get_input_embeddings().weight[tiny.VOCABULARY :].std() < 0.025


def test_the_same_model_wrapped_twice():
    base = tiny.base("gpt2")
    first = cf.add_recurrence(base, window=8, insert_at="all")
    expected = first(IDS).logits
    cf.add_recurrence(base, window=8)
    assert first(IDS).logits.equal(expected)


def test_double_precision_is_double():
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("gpt2", keep_graph=keep_graph).double()
        out = model(IDS, labels=IDS)
        out.loss.backward()
        results.append(tiny.gradients(model))
        assert out.loss.dtype == torch.float64
    for name in results[0]:
        assert_close(results[0][name], results[1][name], rtol=1e-10, atol=1e-14)


def test_import_is_instant_and_auto_classes_still_know_the_models(tmp_path):
    """Without importing torch or transformers; the registration follows when the Auto classes are imported."""
    tiny.recurrent("gpt2").save_pretrained(tmp_path)
    script = f"""
import sys, carryforward
heavy = {{"torch", "transformers"}} & sys.modules.keys()
assert not heavy, heavy
from transformers import AutoModelForCausalLM, AutoConfig
model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
assert type(model).__name__ == "RecurrentForCausalLM"
assert not any(type(finder).__module__.startswith("carryforward") for finder in sys.meta_path)
assert set(carryforward.__all__) <= set(dir(carryforward))
assert all(getattr(carryforward, name) for name in carryforward.__all__)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    after = f"""
import carryforward, importlib.util
importlib.util.find_spec("transformers.models.auto.modeling_auto")
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", after], check=True)
    after = f"""
from transformers import AutoModelForCausalLM
import carryforward
AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
"""
    subprocess.run([sys.executable, "-c", after], check=True)


def test_pooling_holds_in_half_precision():
    """A sum over a window may be more than float16 can hold; a mean is not."""
    model = cf.add_recurrence(tiny.base("gpt2", n_positions=1024), window=1000)
    hidden = [torch.full((1, 1000, tiny.WIDTH), 100.0, dtype=torch.half) for _ in range(tiny.LAYERS)]
    assert_close(model.recurrence.pool(hidden), torch.full((1, 1, tiny.WIDTH), 100.0, dtype=torch.half))
