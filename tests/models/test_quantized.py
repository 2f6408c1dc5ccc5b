# SPDX-License-Identifier: Apache-2.0
"""Base models with weights of 8 and 4 bits: they carry keys and values without training, and everything else holds."""

import dataclasses

import pytest
import torch
import transformers as hf
from helpers import families, prose, quantized, tiny
from helpers.commands import fail, succeed
from helpers.generation import GREEDY, decode, greedy_continuation, logits_of_one_call
from helpers.quantized import METHODS, load, recurrent
from helpers.trainers import train_with_hugging_face
from torch.testing import assert_close

import carryforward as cf
from carryforward.backbones import quantization
from carryforward.backbones.architectures import store_architecture
from carryforward.backbones.discovery import discover
from carryforward.backbones.quantization import is_quantized, is_quantized_weight
from carryforward.models import verification
from carryforward.training.trainer import RecurrentTrainer, RecurrentTrainingArguments

IDS = tiny.documents(2, 30)
KV = cf.KVMemoryConfig(recent=3, sinks=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of plain models, by name."""
    folder = tmp_path_factory.mktemp("plain")
    for name, head in (("llama", None), ("gpt2", None), ("granite", None), ("bert", "none")):
        quantized.save_plain(name, folder / name, head)
    return {path.name: path for path in folder.iterdir()}


def close(x, expected, tolerance=1e-4):
    assert x.shape == expected.shape
    assert (x - expected).norm() <= tolerance * expected.norm()


def tolerance_of(method):
    """Some methods round inputs of layers to 8 bits, too: noise may become a whole step."""
    return 0.06 if method in ("bitsandbytes 8", "torchao 8, activations too") else 1e-4


@pytest.mark.parametrize(("name", "method"), quantized.MODELS)
def test_it_is_the_base_model_without_its_state_and_reads_in_any_way(name, method, folders):
    base, tolerance = load(folders[name], method), tolerance_of(method)
    model = recurrent(base)
    assert is_quantized(model.base)
    assert not is_quantized(model.memory)
    assert model.config.verified is not None
    with torch.no_grad():
        close(model(IDS[:, :8], use_state=False).logits, base(input_ids=IDS[:, :8]).logits, tolerance)
        logits = model(IDS).logits
        assert (model(IDS, use_state=False).logits - logits).abs().max() > 1e-3
        first = model(IDS[:, :13])
        close(torch.cat([first.logits, model(IDS[:, 13:], state=first.state).logits], dim=1), logits, tolerance)
        close(decode(model, IDS, [11, 11])[0], logits_of_one_call(model, IDS, [11, 11]), tolerance)
    assert model.generate(IDS, max_new_tokens=9, **GREEDY).shape == (2, 39)
    assert cf.perplexity(model, [IDS[0].tolist()]).nats > 0


@pytest.mark.parametrize("method", ["bitsandbytes nf4", "torchao 8"])
def test_greedy_search_finds_the_tokens_of_whole_calls(method, folders):
    model = recurrent(load(folders["llama"], method))
    assert model.generate(IDS, max_new_tokens=9, **GREEDY).equal(greedy_continuation(model, IDS, 9))


@pytest.mark.parametrize(("name", "method"), quantized.MODELS)
def test_saved_and_loaded_it_computes_the_same(name, method, folders, tmp_path):
    model = recurrent(load(folders[name], method))
    with torch.no_grad():
        expected = model(IDS)
    model.save_pretrained(tmp_path / "one")
    for source, target in (("one", "two"), ("two", "three")):
        loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / source).eval()
        assert is_quantized(loaded.base)
        assert not is_quantized(loaded.memory)
        assert {type(part) for part in loaded.base.modules()} == {type(part) for part in model.base.modules()}
        with torch.no_grad():
            assert_close(loaded(IDS).logits, expected.logits, rtol=0, atol=0)
            loaded(IDS[:, :4], state=expected.state)  # it is the model that made the state
        loaded.save_pretrained(tmp_path / target)
    with torch.no_grad():
        assert_close(model(IDS).logits, expected.logits, rtol=0, atol=0)  # saving has changed nothing


@pytest.mark.parametrize("method", ["bitsandbytes nf4", "torchao 4"])
def test_the_base_model_is_saved_alone(method, folders, tmp_path):
    model = recurrent(load(folders["llama"], method))
    model.save_pretrained(tmp_path / "recurrent")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "recurrent")
    for number, base in enumerate((model.base, loaded.base)):
        base.save_pretrained(tmp_path / str(number))
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        quantization.prepare(again)
        with torch.no_grad():
            assert_close(again(IDS).logits, base(IDS).logits, rtol=0, atol=0)


def test_position_offsets_are_those_of_the_quantised_weights(folders):
    rows, kv = torch.tensor(tiny.TEXT[0][: 8 * 12]).view(8, 12), []  # a window and what is carried
    model = cf.add_recurrence(load(folders["gpt2"], "bitsandbytes nf4"), memory=KV, window=8, documents=rows.tolist())
    layer = model.base.transformer.h[1].attn.c_attn
    layer.register_forward_hook(lambda module, args, output: kv.append(output))
    with torch.no_grad():
        model.base(input_ids=rows)
    _, keys, values = kv[0].mean(0).split(64, dim=-1)
    expected = torch.stack([x.unflatten(-1, (2, 32)).transpose(0, 1) for x in (keys, values)])
    assert_close(model.memory.kv.position_offsets[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["bitsandbytes 8", "bitsandbytes nf4", "torchao 8"])
def test_windows_side_by_side_are_windows_one_after_the_other(method, folders):
    base, losses = load(folders["llama"], method), []
    for size in (1, 3):
        model = cf.add_recurrence(base, memory=KV, window=8, block_windows=size)
        losses.append(model(IDS, labels=IDS).loss.detach())
    assert_close(*losses, rtol=tolerance_of(method), atol=0)


def test_encoders_make_vectors(folders):
    model = load(folders["bert"], "bitsandbytes nf4", hf.AutoModel)
    model = recurrent(model, memory=KV, window=11, prefix=(2,), suffix=(3,))
    tokenizer = prose.tokenizer()
    texts = ["one two three four five six seven eight nine ten " * 2, "four five"]
    together, alone = cf.encode(model, texts, tokenizer), cf.encode(model, texts[1:], tokenizer)
    close(torch.as_tensor(together[1:]), torch.as_tensor(alone), 1e-3)


# --- training --------------------------------------------------------------------------------------------------------


def test_the_memory_has_the_gradients_of_the_weights_that_the_quantised_stand_for(folders):
    base, gradients = load(folders["llama"], "torchao 8"), []
    plain = hf.AutoModelForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        for weight, parameter in zip(base.parameters(), plain.parameters(), strict=True):
            parameter.copy_(weight.dequantize() if is_quantized_weight(weight) else weight)
    for model in (recurrent(base), recurrent(plain)):
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: x for name, x in tiny.gradients(model).items() if "memory" in name})
    tiny.assert_same_gradients(*gradients)


@pytest.mark.parametrize("method", quantized.TRAINED)
def test_recomputed_windows_have_the_gradients_of_a_kept_graph(method, folders):
    gradients = []
    for keep_graph in (False, True):
        model = recurrent(load(folders["llama"], method), keep_graph=keep_graph)
        with torch.no_grad():
            model(IDS)  # as in a validation before
        model(IDS, labels=IDS).loss.backward()
        gradients.append(tiny.gradients(model))
    assert any("memory.vector" in name for name in gradients[0])
    tiny.assert_same_gradients(*gradients)


@pytest.mark.parametrize("method", quantized.TRAINED)
def test_adapters_are_trained_saved_and_loaded(method, folders, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["memory"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(recurrent(load(folders["llama"], method)), config)
    documents = [tiny.documents(1, 60, seed)[0].tolist() for seed in range(4)]
    before = cf.perplexity(model, documents).nats
    arguments = RecurrentTrainingArguments(
        str(tmp_path / "run"), learning_rate=1e-2, recurrence_learning_rate=1e-2, warmup_steps=0, use_cpu=True,
        windows_per_sample=4, per_device_train_batch_size=2, num_train_epochs=2, eval_tokens=100, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    RecurrentTrainer(model, arguments, documents, documents[:2]).train()
    assert cf.perplexity(model, documents).nats < before
    model.eval().save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(recurrent(load(folders["llama"], method)), tmp_path / "adapters").eval()
    with torch.no_grad():
        close(again(input_ids=IDS).logits, model(input_ids=IDS).logits, tolerance_of(method))


def test_hugging_faces_trainer_trains_a_memory_alone(folders, tmp_path):
    model = recurrent(load(folders["llama"], "bitsandbytes nf4"))
    model.base.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss, after = train_with_hugging_face(model, tmp_path / "run")
    assert after < loss
    changed = {name.partition(".")[0] for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert changed == {"memory"}
    model.eval().save_pretrained(tmp_path / "model")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_training_without_adapters_that_saves_checkpoints_is_refused(folders, tmp_path):
    model = recurrent(load(folders["llama"], "torchao 8"))
    arguments = RecurrentTrainingArguments(str(tmp_path / "run"), use_cpu=True)
    with pytest.raises(ValueError, match="weights are quantised, and checkpoints of them cannot be loaded again"):
        RecurrentTrainer(model, arguments, [IDS[0].tolist()])


def test_weights_that_pass_no_gradients_are_refused_in_training(folders):
    model = recurrent(load(folders["llama"], "torchao 8, activations too"))
    with torch.no_grad():
        assert model(IDS, labels=IDS).loss.isfinite()
    with pytest.raises(ValueError, match=r"no gradient flows through quantised weights such as .* \(Int8Tensor\)"):
        model(IDS, labels=IDS)


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "method"), quantized.cases(("granite", "bitsandbytes nf4"), ("llama", "torchao 8")))
def test_commands_on_a_folder_with_quantised_weights(kind, method, folders, tmp_path):
    model, text = load(folders[kind], method), tmp_path / "text.txt"
    model.save_pretrained(tmp_path / "base")
    prose.tokenizer().save_pretrained(tmp_path / "base")
    text.write_text("one two three four five six seven eight nine ten " * 20)
    data = ("--data", text, "--split", "all", "--device", "cpu")
    succeed("evaluate", tmp_path / "base", *data, "--window", 10)
    succeed("add", tmp_path / "base", "--out", tmp_path / "recurrent")
    assert is_quantized(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "recurrent"))
    succeed("evaluate", tmp_path / "recurrent", *data)
    succeed("generate", tmp_path / "recurrent", "--prompt", "one two", "--max-new-tokens", 30, "--device", "cpu")
    refused = fail("train", "--model", tmp_path / "base", "--data", text, "--out", tmp_path / "run", "--device", "cpu",
                   "--window", 10, "--no-validation", code=2)  # fmt: skip
    assert "weights are quantised" in refused


# --- verification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", quantized.cases(*METHODS))
@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"norm": None}, "a vector does not enter"), ({"rotation_layout": "halves backwards"}, "are not one text"),
     ({"rotary": False}, "a vector does not enter"), ({"plain_head": True}, "its loss would be")],
)  # fmt: skip
def test_a_wrong_architecture_is_refused(method, wrong, message, folders):
    model = load(folders["granite"], method)
    found = discover(model)
    assert found == discover(hf.AutoModelForCausalLM.from_pretrained(folders["granite"]))
    store_architecture(model.config, dataclasses.replace(found, **wrong))
    with pytest.raises(ValueError, match=message):
        verification.verify(model, cf.RecurrentForCausalLM)


def test_a_type_that_is_not_in_the_table(folders, tmp_path):
    model = recurrent(load(folders["granite"], "torchao 8"))
    model.save_pretrained(tmp_path / "model")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_weights_that_were_reordered_for_a_cpu_are_refused(folders):
    model = load(folders["llama"], "bitsandbytes nf4")
    model.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"has reordered its weights \(model.layers.1.mlp.up_proj\).* Load it again"):
        cf.add_recurrence(model, window=8)


def test_another_method_is_used_and_not_saved(folders, tmp_path):
    model = recurrent(load(folders["llama"], "torchao 8"))
    model.quantization_method = "gptq"
    with pytest.raises(ValueError, match="quantised by gptq, and .* only those by bitsandbytes and torchao can be"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_another_precision_is_refused(folders):
    model = recurrent(load(folders["llama"], "bitsandbytes 8"))
    with pytest.raises(ValueError, match="cannot cast a bitsandbytes model"):
        model.to(torch.bfloat16)


def test_ordinary_weights_are_not_quantised():
    for name in families.REPRESENTATIVE:
        assert not is_quantized(families.base(name))
