# SPDX-License-Identifier: Apache-2.0
"""TRL's `SFTTrainer` with a recurrent model: its loss is computed from the hidden states of `base_model`."""

import pytest
import torch
from helpers import prose, tiny
from torch.testing import assert_close
from transformers import TrainerCallback

trl = pytest.importorskip("trl", reason="make test-all: it installs trl")
import datasets  # noqa: E402
import peft  # noqa: E402

TOKENIZER = prose.tokenizer()
SETTINGS = {"vocab_size": prose.VOCABULARY, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
MEMORIES = {"vector and kv": {"recent": 3}, "kv": {"slots": 0, "recent": 4, "sinks": 1}, "tokens": tiny.TOKENS}
TEXTS = [text[:size] for text, size in zip(prose.TOPICS[:4], (200, 15, 90, 40), strict=True)]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "<|end|>{% endgeneration %}{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)


def halves(text):
    return text[: len(text) // 2], text[len(text) // 2 :]


def chat(text):
    question, answer = halves(text)
    roles = [("user", question), ("assistant", answer), ("user", "And?"), ("assistant", "No.")]
    return [{"role": role, "content": content} for role, content in roles]


ROWS = {
    "texts": ({"text": TEXTS}, {}),
    "completions": (
        {"prompt": [halves(text)[0] for text in TEXTS], "completion": [halves(text)[1] for text in TEXTS]}, {}
    ),
    "assistant": ({"messages": [chat(text) for text in TEXTS]}, {"assistant_only_loss": True}),
}  # fmt: skip


class Watch(TrainerCallback):
    """Keeps the gradients of a step."""

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def fit(model, folder, rows, rows_per_call=2, **settings):
    """One step on all texts, in calls of some of them; the trainer, and the gradients."""
    tokenizer, watch = prose.tokenizer(), Watch()
    tokenizer.chat_template = TEMPLATE
    arguments = trl.SFTConfig(
        str(folder), report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1,
        max_steps=1, per_device_train_batch_size=rows_per_call, gradient_accumulation_steps=4 // rows_per_call,
        max_grad_norm=0, learning_rate=1e-3, gradient_checkpointing=False, **settings,
    )  # fmt: skip
    peft_config = settings.pop("peft_config", None)
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_dict(rows), processing_class=tokenizer,
        callbacks=[watch], peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    return trainer, watch.gradients


def own_loss(model, trainer):
    """The model's own loss of all rows in one padded batch."""
    rows = [trainer.train_dataset[i] for i in range(len(trainer.train_dataset))]
    width = max(len(row["input_ids"]) for row in rows)

    def padded(values, fill):
        return torch.tensor([[*one, *[fill] * (width - len(one))] for one in values])

    ids = padded([row["input_ids"] for row in rows], 0)
    labels = padded([row["labels"] for row in rows], -100)
    mask = padded([[1] * len(row["input_ids"]) for row in rows], 0)
    return model(ids, attention_mask=mask, labels=labels)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", ROWS)
def test_loss_and_gradients_are_the_models_own(kind, memory, tmp_path):
    rows, settings = ROWS[kind]
    fresh = lambda: tiny.recurrent("llama", settings=SETTINGS, **MEMORIES[memory]).train()  # noqa: E731
    trainer, gradients = fit(fresh(), tmp_path, rows, **settings)
    model = fresh()
    out = own_loss(model, trainer)
    out.loss.backward()
    labels = [label for row in trainer.train_dataset for label in row["labels"][1:]]
    assert int(out.n_scored) == sum(label != -100 for label in labels)
    assert (int(out.n_scored) < len(labels)) == (kind != "texts"), "prompts are not scored"
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(float(out.loss.detach()), rel=1e-5)
    tiny.assert_same_gradients(gradients, tiny.gradients(model), tolerance=1e-5)


def test_evaluation_and_accuracy_are_the_models_own(tmp_path):
    model = tiny.recurrent("gpt2", settings=SETTINGS, recent=3)
    trainer, _ = fit(model, tmp_path, ROWS["texts"][0], rows_per_call=4, prediction_loss_only=True)
    metrics = trainer.evaluate(datasets.Dataset.from_dict({"text": TEXTS}))
    with torch.no_grad():
        out = own_loss(model.eval(), trainer)
        right = scored = 0
        for row in trainer.train_dataset:
            ids = torch.tensor([row["input_ids"]])
            right += int((model(ids).logits[:, :-1].argmax(dim=-1) == ids[:, 1:]).sum())
            scored += ids.shape[1] - 1
    assert metrics["eval_loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(right / scored)


def test_adapters_are_trained_with_the_models_own_loss(tmp_path):
    adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["memory"], init_lora_weights=False)
    fresh = lambda: tiny.recurrent("llama", settings=SETTINGS, recent=3)  # noqa: E731
    torch.manual_seed(1)
    trainer, gradients = fit(peft.get_peft_model(fresh(), adapters), tmp_path, ROWS["texts"][0])
    torch.manual_seed(1)
    model = peft.get_peft_model(fresh(), adapters)
    loss = own_loss(model, trainer).loss
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    tiny.assert_same_gradients(gradients, tiny.gradients(model), tolerance=1e-5)
    assert any("memory" in name for name in gradients)


@pytest.mark.parametrize("settings", [{"packing": True, "max_length": 64}, {"padding_free": True, "max_length": None}])
def test_packed_rows_are_refused(settings, tmp_path):
    with pytest.raises(
        ValueError, match=r"the batch is packed \(position_ids\).*own row; with TRL: packing=False and pa"
    ):
        fit(tiny.recurrent("llama", settings=SETTINGS, recent=3), tmp_path, ROWS["texts"][0], **settings)


def test_the_base_model_has_the_same_weights_and_no_head():
    model, ids = tiny.recurrent("gpt2", recent=3), tiny.documents(2, 30)
    hidden = model.base_model(ids).last_hidden_state
    assert_close(model.get_output_embeddings()(hidden), model(ids).logits)
    assert {id(p) for p in model.base_model.parameters()} <= {id(p) for p in model.parameters()}
    for training in (True, False):
        assert model.train(training).base_model.training == training
