# SPDX-License-Identifier: Apache-2.0
"""`add_recurrence` with a model's name: the same model, head and tokenizer as loaded by hand."""

import pytest
import torch
import transformers as hf
from helpers import prose
from torch.testing import assert_close

import carryforward as cf
from carryforward.models.files.base_by_name import HEADS

ENCODER = prose.encoder_tokenizer()


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(ENCODER), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48,
    )  # fmt: skip
    hf.BertForMaskedLM(config).to(torch.bfloat16).save_pretrained(folder)
    ENCODER.save_pretrained(folder)
    return folder


def test_a_causal_model_is_the_one_loaded_by_hand(tmp_path):
    folder = prose.save_model(tmp_path / "gpt2")
    documents = [[*range(prose.VOCABULARY)] * 3]
    model = cf.add_recurrence(str(folder), window=12, documents=documents)
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    expected = cf.add_recurrence(base, window=12, tokenizer=prose.tokenizer(), documents=documents)
    assert isinstance(model, cf.RecurrentForCausalLM)
    assert not model.training
    ids = torch.randint(prose.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(model(ids).logits, expected(ids).logits)  # measured position offsets, too
    model.save_pretrained(tmp_path / "saved")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.get_vocab() == prose.tokenizer().get_vocab()


def test_the_bundled_model_has_a_name_too():
    model = cf.add_recurrence("bundled", window=64, memory="vector")
    assert isinstance(model, cf.RecurrentForCausalLM)
    assert model.tokenizer is not None


def test_an_encoder_has_the_head_it_was_saved_with_or_the_one_asked_for(bert):
    model = cf.add_recurrence(bert, memory="vector")
    assert isinstance(model, cf.RecurrentForMaskedLM)
    assert model.config.recurrence.prefix == (ENCODER.cls_token_id,)
    assert model.dtype == torch.bfloat16
    for head, loader in HEADS.items():
        if head == "text-generation":  # BERT has such a head, which is no encoder's
            continue
        model = cf.add_recurrence(bert, head=head, memory="vector", dtype="float32")
        assert type(model.base) is type(loader.from_config(model.base.config))
        assert model.auto_class == loader.__name__
        assert model.dtype == torch.float32
    assert isinstance(
        cf.add_recurrence(bert, head="question-answering", preset="paper"), cf.RecurrentForQuestionAnswering
    )


def test_a_tokenizer_that_is_given_is_used(bert, tmp_path):
    other = prose.encoder_tokenizer()
    other.add_tokens(["<|new|>"])
    with pytest.raises(ValueError, match="tokenizer gives ids up to"):
        cf.add_recurrence(bert, tokenizer=other)
    model = hf.BertModel.from_pretrained(bert)
    model.save_pretrained(tmp_path / "alone")
    with pytest.raises(ValueError, match="has no tokenizer files"):
        cf.add_recurrence(tmp_path / "alone")
    assert isinstance(cf.add_recurrence(tmp_path / "alone", tokenizer=ENCODER), cf.RecurrentModel)


def test_dtype_and_revision_reach_from_pretrained(bert, monkeypatch):
    options = {}

    def load(name, **given):
        options.update(given)
        raise OSError("stop")

    monkeypatch.setattr("carryforward.models.model_files._hub_options", lambda name: {})
    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", load)
    with pytest.raises(OSError, match="stop"):
        cf.add_recurrence("some/model", revision="abc")
    assert options["revision"] == "abc"
    assert options["trust_remote_code"] is False


def test_wrong_arguments_are_refused(bert, tmp_path):
    with pytest.raises(ValueError, match="head='causal': there are 'text-generation', 'fill-mask'"):
        cf.add_recurrence(bert, head="causal")
    with pytest.raises(ValueError, match="dtype='bf16': give a floating-point type"):
        cf.add_recurrence(bert, dtype="bf16")
    with pytest.raises(ValueError, match="revision='abc': .* is a folder"):
        cf.add_recurrence(bert, revision="abc")
    with pytest.raises(ValueError, match="there is no such folder"):
        cf.add_recurrence(tmp_path / "missing")
    base = hf.BertModel.from_pretrained(bert)
    with pytest.raises(ValueError, match=r"dtype=torch.float16: the model is loaded already"):
        cf.add_recurrence(base, dtype=torch.float16)
    with pytest.raises(ValueError, match="head='fill-mask': only 'question-answering' can be added to a loaded"):
        cf.add_recurrence(base, head="fill-mask")
    with pytest.raises(ValueError, match="head of BertLMHeadModel.*head=... says which to load by name"):
        cf.add_recurrence(bert, head="text-generation")
    cf.add_recurrence(bert, memory="vector").save_pretrained(tmp_path / "recurrent")
    with pytest.raises(ValueError, match="is recurrent already: load it with from_pretrained"):
        cf.add_recurrence(tmp_path / "recurrent")
