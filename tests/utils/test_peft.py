# SPDX-License-Identifier: Apache-2.0
"""peft's adapters in recurrent models: exact gradients, training and saving. Uses that would lose them are refused."""

import dataclasses
import json

import pytest
import torch
from helpers import prose, tiny
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import carryforward as cf
from carryforward.analysis.continuations import continue_greedily
from carryforward.analysis.token_gains import measure_token_gains
from carryforward.qa.dataset import Answer, Question
from carryforward.qa.trainer import QuestionTrainer, QuestionTrainingArguments
from carryforward.training.trainer import RecurrentTrainer, RecurrentTrainingArguments

peft = pytest.importorskip("peft")

IDS = tiny.documents(2, 45)
DOCUMENTS = [tiny.documents(1, 60, seed)[0].tolist() for seed in range(6)]
TARGETS = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "up_proj"], "bert": ["query", "value"]}


def main_output(output):
    return output.last_hidden_state if output.logits is None else output.logits


def with_lora(name="llama", task=None, saved=("memory",), fields=None, **settings):
    """A tiny recurrent model with LoRA adapters."""
    torch.manual_seed(3)
    settings = {"r": 2, "target_modules": TARGETS[name], "init_lora_weights": False, **settings}
    config = peft.LoraConfig(task_type=task, modules_to_save=list(saved) or None, **settings)
    return peft.get_peft_model(tiny.recurrent(name, **(fields or {})), config)


@pytest.mark.parametrize(
    ("name", "fields"),
    [*((name, fields) for name in ("gpt2", "llama") for fields in ({}, {"slots": 0, "recent": 3, "sinks": 1})),
     ("gpt2", tiny.TOKENS), ("llama", tiny.ASSOCIATIVE)],
)  # fmt: skip
def test_gradients_of_recomputed_windows_equal_those_of_a_kept_graph(name, fields):
    model = with_lora(name, "CAUSAL_LM", fields=fields, lora_dropout=0.1).train()
    inner, gradients = model.get_base_model(), []
    for changes in ({"keep_windows": 0}, {"keep_graph": True}):
        inner.config.recurrence = dataclasses.replace(inner.config.recurrence, **changes)
        torch.manual_seed(0)
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append(tiny.gradients(model))
    assert any("lora" in name for name in gradients[0])
    tiny.assert_same_gradients(*gradients)


@pytest.mark.parametrize(("head", "task"), [("token", "TOKEN_CLS"), ("sequence", "SEQ_CLS"),
                                            ("none", "FEATURE_EXTRACTION")])  # fmt: skip
def test_encoders_take_the_arguments_that_peft_passes(head, task):
    config = peft.LoraConfig(r=2, target_modules=TARGETS["bert"], task_type=task, init_lora_weights=False)
    model = tiny.recurrent("bert", head=head)
    before = main_output(model(input_ids=IDS))
    wrapped = peft.get_peft_model(model, config).eval()
    output = main_output(wrapped(input_ids=IDS))
    assert (output - before).abs().max() > 0.01
    assert_close(main_output(wrapped.merge_and_unload()(input_ids=IDS)), output, rtol=1e-4, atol=1e-5)


def test_training_resuming_saving_and_merging(tmp_path):
    def run(epochs):
        model = with_lora()
        args = RecurrentTrainingArguments(
            str(tmp_path / "run"), learning_rate=1e-2, recurrence_learning_rate=1e-2, warmup_steps=0, use_cpu=True,
            windows_per_sample=4, per_device_train_batch_size=2, num_train_epochs=epochs, eval_tokens=50,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = RecurrentTrainer(model, args, DOCUMENTS, DOCUMENTS[:2])
        trainer.train(resume_from_checkpoint=True)
        return model, trainer

    start = {name: value.clone() for name, value in with_lora().state_dict().items()}
    run(1)
    model, trainer = run(2)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}
    assert any("lora" in name for name in changed)
    assert any("modules_to_save" in name and "memory" in name for name in changed)
    assert not any("base_layer" in name or "original_module" in name for name in changed)
    assert trainer.evaluate()["eval_token_perplexity"] == pytest.approx(trainer.state.best_metric)

    model.save_pretrained(tmp_path / "adapters")
    model.eval()
    expected = model(input_ids=IDS).logits
    again = peft.PeftModel.from_pretrained(tiny.recurrent("llama"), tmp_path / "adapters").eval()
    assert_close(again(input_ids=IDS).logits, expected)
    assert_close(cf.perplexity(again, DOCUMENTS[:2]).nats, cf.perplexity(model, DOCUMENTS[:2]).nats)
    generated = [each.generate(input_ids=IDS, max_new_tokens=20) for each in (again, model)]
    assert torch.equal(*generated)

    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert_close(loaded(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_new_tokens_are_saved_with_the_adapters(tmp_path):
    """peft reads the vocabulary's size before the change from the config."""
    model = tiny.recurrent("llama")
    model.config._name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "base")
    model.resize_token_embeddings(model.config.vocab_size + 3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(tmp_path / "adapters")
    fresh = tiny.recurrent("llama")
    fresh.resize_token_embeddings(fresh.config.vocab_size + 3)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapters")
    assert_close(again.eval()(input_ids=IDS).logits, wrapped.eval()(input_ids=IDS).logits)


def test_adapters_are_loaded_onto_a_saved_model(tmp_path):
    tiny.recurrent("llama").save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config).eval()
    wrapped.save_pretrained(tmp_path / "adapters")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    assert_close(again(input_ids=IDS).logits, wrapped(input_ids=IDS).logits)


def test_tied_weights_stay_tied():
    """peft looks for tied weights in the config, then in the modules."""
    model = with_lora("gpt2", saved=(), trainable_token_indices={"wte": [5, 6, 7]}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    expected = model(input_ids=IDS).logits
    assert_close(model.merge_and_unload()(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_config_has_the_sizes_of_the_base_model(tmp_path):
    model = tiny.recurrent("gpt2")
    model.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "vocab_size" not in saved
    (tmp_path / "config.json").write_text(json.dumps({**saved, "vocab_size": tiny.VOCABULARY}))
    again = AutoConfig.from_pretrained(tmp_path)
    assert (again.vocab_size, again.hidden_size, again.num_hidden_layers) == (tiny.VOCABULARY, tiny.WIDTH, tiny.LAYERS)
    again.vocab_size = 90
    assert again.base_config.vocab_size == 90


def test_continuations_use_the_adapters():
    model = with_lora().eval()
    contexts = IDS[:, :14].numpy()
    wrapped, inner = (continue_greedily(each, contexts, 5) for each in (model, model.get_base_model()))
    assert wrapped.shape == (2, 5)
    assert (wrapped == inner).all()
    with pytest.raises(ValueError, match="get_base_model"):
        measure_token_gains(model, IDS[0].tolist())


def test_a_memory_that_peft_has_frozen_is_reported(tmp_path, caplog):
    args = RecurrentTrainingArguments(str(tmp_path), use_cpu=True)
    RecurrentTrainer(with_lora(saved=()), args, DOCUMENTS)
    assert 'modules_to_save=["memory"]' in caplog.text
    args = RecurrentTrainingArguments(str(tmp_path), use_cpu=True, freeze_base=True)
    with pytest.raises(ValueError, match="no parameters to train"):
        RecurrentTrainer(with_lora(saved=()), args, DOCUMENTS)


def test_a_question_answering_head_must_be_trained_too(tmp_path):
    tokenizer = prose.tokenizer()
    text = prose.TOPICS[1][:400]
    questions = [Question("a", "what?", text, (Answer(text[20:40], 20),), "span", "squad")]
    args = QuestionTrainingArguments(str(tmp_path), use_cpu=True)

    def wrapped(saved):
        base = tiny.base("bert", "none", vocab_size=prose.VOCABULARY)
        model = cf.add_recurrence(base, head="question-answering", window=30, memory="vector", **tiny.FRAME)
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=saved))

    with pytest.raises(ValueError, match=r"modules_to_save=\['memory', 'kinds', 'qa_outputs'\]"):
        QuestionTrainer(wrapped(["memory"]), args, questions, tokenizer=tokenizer)
    model = wrapped(["memory", "kinds", "qa_outputs"])
    trainer = QuestionTrainer(model, args, questions, tokenizer=tokenizer)
    assert model.base_model.model.kinds.modules_to_save["default"].bias[0] == 0  # log 1: all answers are spans
    assert model.base_model.model.kinds.modules_to_save["default"].bias[1] < -3
    trainer.train()


def test_adapters_that_trainer_cannot_load_again_are_refused(tmp_path):
    args = RecurrentTrainingArguments(str(tmp_path), use_cpu=True)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    named = peft.get_peft_model(tiny.recurrent("llama"), config, adapter_name="mine")
    several = with_lora()
    several.add_adapter("other", config)
    for model in (named, several):
        with pytest.raises(ValueError, match="train one at a time"):
            RecurrentTrainer(model, args, DOCUMENTS)
    mixed = peft.get_peft_model(tiny.recurrent("llama"), config, mixed=True)
    with pytest.raises(ValueError, match="PeftMixedModel"):
        cf.perplexity(mixed, DOCUMENTS)


def test_uses_that_would_lose_adapters_or_memory_are_refused(tmp_path):
    base = tiny.base("llama")
    wrapped = peft.get_peft_model(tiny.base("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    base.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for model in (base, wrapped, wrapped.base_model.model):
        with pytest.raises(ValueError, match="merge_and_unload"):
            cf.add_recurrence(model, window=16, memory="vector")
    merged = cf.add_recurrence(wrapped.merge_and_unload(), window=16, memory="vector")
    merged.save_pretrained(tmp_path / "merged")

    own = tiny.recurrent("llama")
    own.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    own.save_pretrained(tmp_path / "adapter")  # the memory is frozen, so nothing is lost
    with pytest.raises(ValueError, match="get_peft_model"):
        RecurrentTrainer(own, RecurrentTrainingArguments(str(tmp_path), use_cpu=True), DOCUMENTS)
    own.memory.requires_grad_(True)
    with pytest.raises(ValueError, match="modules_to_save"):
        own.save_pretrained(tmp_path / "lost")

    prompts = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=2, num_layers=2, num_attention_heads=2,
        token_dim=own.config.hidden_size,
    )  # fmt: skip
    with pytest.raises(ValueError, match="LoRA"):
        cf.perplexity(peft.get_peft_model(tiny.recurrent("llama"), prompts), DOCUMENTS)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"inputs_embeds": torch.zeros(1)}, "inputs_embeds is not supported"),
     ({"output_attentions": True}, "output_attentions is not supported"),
     ({"use_cache": True}, "use_cache is not supported: generate has its own cache"),
     ({"token_type_ids": torch.ones(2, 45)}, "must be all zero")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_arguments_that_peft_passes_must_request_nothing(name, kwargs, message):
    model = tiny.recurrent(name)
    before = model(input_ids=IDS).logits
    neutral = {"inputs_embeds": None, "output_attentions": False, "use_cache": False, "token_type_ids": IDS * 0}
    assert torch.equal(model(input_ids=IDS, **neutral).logits, before)
    with pytest.raises(ValueError, match=message):
        model(input_ids=IDS, **kwargs)
    with pytest.raises(TypeError, match="'inputs_embed'"):
        model(input_ids=IDS, inputs_embed=None)


def test_token_types_reach_the_model_through_trainer(tmp_path):
    """`Trainer` drops columns that `forward` does not name."""
    rows = [{"input_ids": row, "token_type_ids": row * 0 + 1, "labels": row[0] % 3} for row in IDS]
    args = TrainingArguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=2, report_to=[])
    with pytest.raises(ValueError, match="token_type_ids must be all zero"):
        Trainer(tiny.recurrent("bert", "sequence"), args, train_dataset=rows).train()
