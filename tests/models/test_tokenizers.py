# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a model: missing, damaged or another model's are refused, and the right one is saved with it."""

import json
import logging

import pytest
import torch
import transformers as hf
from helpers import prose, tiny
from helpers.commands import fail, succeed
from tokenizers import normalizers

import carryforward as cf
from carryforward.data.tokenization import check_tokenizer, fingerprint
from carryforward.models.loading import load_causal
from carryforward.models.model_files import load_tokenizer

TOKENIZER = prose.tokenizer()
SIZE = len(TOKENIZER)


def larger(tokens=("beyond",), special=False):
    """The same tokenizer with added tokens."""
    tokenizer = prose.tokenizer()
    tokenizer.add_tokens(list(tokens), special_tokens=special)
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    return prose.save_model(tmp_path / "model")


def without_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--prompt", "a"),
        ("add", "--out", "new"),
        ("evaluate", "--data", "texts", "--window", "16", "--out", "results"),
        ("train", "--data", "texts", "--out", "run"),
    ],
    ids=lambda command: command[0],
)
def test_commands_name_the_folder_that_has_no_tokenizer(folder, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prose.save_topics(tmp_path / "texts", 2)
    verb, *rest = command
    model = ["--model", without_tokenizer(folder)] if verb == "train" else [without_tokenizer(folder)]
    message = fail(verb, *model, *rest, code=2)
    assert "has no tokenizer files. Save the model's own tokenizer there: tokenizer.save_pretrained(" in message
    assert "sentencepiece" not in message


@pytest.mark.parametrize("name", ["bert", "roberta", "llama", "gpt2", "xlm-roberta", "modernbert"])
def test_a_folder_without_tokenizer_files_is_refused(name, tmp_path):
    tiny.base(name).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer files. Save .*tokenizer.save_pretrained\('.*'\)"):
        load_tokenizer(str(tmp_path))


def test_damaged_tokenizer_files_are_named(folder):
    for content in ("", "{", "null", "{}", "[]"):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"its tokenizer \(.*tokenizer.json.* cannot be loaded|has . tokens, and"):
            load_tokenizer(str(folder))


def test_tokenizers_that_cannot_be_the_models_are_refused():
    check_tokenizer(TOKENIZER, SIZE)
    check_tokenizer(TOKENIZER, 2 * SIZE - 1)  # embeddings are padded
    check_tokenizer(larger(special=True), SIZE)  # as Gemma's: no text contains it
    with pytest.raises(ValueError, match=f"tokenizer has {SIZE} tokens, and the model a vocabulary of 30,522. Give"):
        check_tokenizer(TOKENIZER, 30522)
    with pytest.raises(ValueError, match=f"ids up to {SIZE} .'beyond'., and the model's vocabulary ends at {SIZE - 1}"):
        check_tokenizer(larger(), SIZE)
    for wrong in (None, "gpt2", hf.GPT2Tokenizer):
        with pytest.raises(ValueError, match="tokenizer is of type .*: give a tokenizer of transformers"):
            check_tokenizer(wrong, SIZE)


def test_the_library_refuses_tokenizers_of_other_models():
    model = tiny.recurrent("gpt2", settings={"vocab_size": SIZE})
    answering = tiny.answering("bert")  # has 67 tokens
    plain = tiny.base("gpt2", vocab_size=SIZE)
    for call in (
        lambda: cf.encode(model, ["a"], larger()),
        lambda: cf.answer(answering, "a?", "b", TOKENIZER),
        lambda: cf.add_recurrence(plain, window=8, memory="vector", tokenizer=larger()),
        lambda: cf.RecurrentTransformer(model, larger()),
    ):
        with pytest.raises(ValueError, match="tokenizer gives ids up to .* and the model's vocabulary ends at"):
            call()


def test_position_offsets_are_not_measured_with_an_empty_tokenizer(folder):
    base = hf.AutoModelForCausalLM.from_pretrained(without_tokenizer(folder))
    with pytest.raises(ValueError, match="Give documents=.* or tokenizer="):
        cf.add_recurrence(base, window=8)


# --- saved with the model ------------------------------------------------------------------------------------------


def test_the_tokenizer_that_was_given_is_saved(folder, tmp_path):
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    model = cf.add_recurrence(base, window=8, memory="vector", tokenizer=TOKENIZER)
    model.save_pretrained(tmp_path / "saved")
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == TOKENIZER.get_vocab()
    assert succeed("generate", tmp_path / "saved", "--prompt", "The", "--max-new-tokens", "3").out
    again = load_causal(str(tmp_path / "saved")).model
    again.save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).get_vocab() == TOKENIZER.get_vocab()


def test_another_tokenizer_than_that_of_saving_is_warned_of(folder, tmp_path, caplog):
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    cf.add_recurrence(base, window=8, memory="vector", tokenizer=TOKENIZER).save_pretrained(tmp_path / "saved")
    with caplog.at_level(logging.WARNING):
        load_tokenizer(str(tmp_path / "saved"))
    assert not caplog.text
    content = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    first, second = list(content["model"]["vocab"])[40:42]
    vocabulary = content["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        load_tokenizer(str(tmp_path / "saved"))
    assert "is not the one that the model was saved with" in caplog.text


def test_commands_record_the_fingerprint(folder, tmp_path):
    succeed("add", folder, "--out", tmp_path / "new", "--preset", "paper", "--window", "8")
    assert hf.AutoConfig.from_pretrained(tmp_path / "new").tokenizer_fingerprint == fingerprint(TOKENIZER)


def test_a_fingerprint_does_not_depend_on_settings_or_saving(tmp_path):
    expected = fingerprint(TOKENIZER)
    TOKENIZER.save_pretrained(tmp_path)
    again = hf.AutoTokenizer.from_pretrained(tmp_path)
    again.pad_token = again.eos_token
    again(["a", "a longer one"], padding=True, truncation=True, max_length=4)
    again.padding_side, again.model_max_length = "left", 5
    assert fingerprint(again) == expected
    assert fingerprint(larger()) != expected
    lower = prose.tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert fingerprint(lower) != expected, "the same vocabulary, but other tokens"


# --- untrained memories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"pooling": "state"}, {"output": "windows"}], ids=str)
def test_states_of_an_untrained_memory_are_refused(folder, tmp_path, arguments):
    texts = [prose.TOPICS[0][:300]]
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    model = cf.add_recurrence(base, window=8, memory="vector", tokenizer=TOKENIZER)
    model.save_pretrained(tmp_path / "saved")
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for untrained in (model, loaded):
        with pytest.raises(
            ValueError, match="the model's memory is untrained, so its states mean nothing. Train it, or"
        ):
            cf.encode(untrained, texts, TOKENIZER, **arguments)
    ids = torch.tensor([TOKENIZER(texts[0])["input_ids"]])
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.save_pretrained(tmp_path / "trained")
    for trained in (model, hf.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")):
        assert len(cf.encode(trained, texts, TOKENIZER, **arguments)) == 1


def test_a_memory_that_means_something_before_training_is_not_refused(folder):
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    memory = cf.VectorMemoryConfig(residual=True, pooled_layers="last")
    model = cf.add_recurrence(base, window=8, memory=memory, tokenizer=TOKENIZER)
    assert cf.encode(model, [prose.TOPICS[0][:300]], TOKENIZER, pooling="state").any()
