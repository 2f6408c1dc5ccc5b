# SPDX-License-Identifier: Apache-2.0
"""Pipelines of sentence-transformers that read whole documents."""

import numpy as np
import pytest
import torch
from helpers import encoders, tiny
from helpers.embedding import PROSE, TEXTS, TOKENIZER, model_of

import carryforward as cf
from carryforward.embeddings.encode import encode


@pytest.fixture
def pipeline_of():
    """A function that makes a pipeline of a module and mean pooling."""
    transformers = pytest.importorskip("sentence_transformers", reason="make test: it installs sentence-transformers")
    from sentence_transformers.sentence_transformer.modules import Pooling

    def make(module, **settings):
        pooling = Pooling(module.get_embedding_dimension(), **settings)
        return transformers.SentenceTransformer(modules=[module, pooling], device="cpu")

    return make


def test_sentence_transformers_reads_whole_documents(saved, tmp_path, pipeline_of):
    from sentence_transformers import SentenceTransformer

    folder, model, rows = saved
    texts = [row["text"] for row in rows]
    pipeline = pipeline_of(cf.RecurrentTransformer(str(folder / "model")))
    expected = encode(model, texts, TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(texts), expected, rtol=1e-4, atol=1e-5)
    pipeline.save(str(tmp_path / "pipeline"))
    again = SentenceTransformer(str(tmp_path / "pipeline"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(again.encode(texts), expected, rtol=1e-4, atol=1e-5)
    settings = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    half = SentenceTransformer(str(tmp_path / "pipeline"), device="cpu", trust_remote_code=True, model_kwargs=settings)
    assert half[0].auto_model.dtype == torch.bfloat16
    assert half[0].auto_model.base.config._attn_implementation != again[0].auto_model.base.config._attn_implementation


def test_a_pipeline_can_be_loaded_from_the_hub(saved, monkeypatch, pipeline_of):
    """Without the Hub: checks the arguments that the loaders of sentence-transformers receive."""
    folder, _, _ = saved
    cf.RecurrentTransformer(str(folder / "model"), use_state=False).save(str(folder / "pushed"))
    requests = []

    def load(model_name_or_path, subfolder, **where):
        requests.append((model_name_or_path, subfolder, where))
        return str(folder / "pushed")

    from sentence_transformers.base.modules import module

    monkeypatch.setattr(module, "load_dir_path", load)
    monkeypatch.setattr(module, "load_file_path", lambda filename, **where: f"{load(**where)}/{filename}")
    where = {"token": "t", "cache_folder": "c", "revision": "r", "local_files_only": True}
    loaded = cf.RecurrentTransformer.load("me/my-pipeline", subfolder="", **where, trust_remote_code=True)
    assert requests == [("me/my-pipeline", "", where)] * 2
    assert loaded.use_state is False


def test_the_vector_of_an_empty_text_is_zero(saved, pipeline_of):
    folder, model, _ = saved
    pipeline = pipeline_of(cf.RecurrentTransformer(str(folder / "model")))
    vectors = pipeline.encode(["some words", "", PROSE[:90]])
    np.testing.assert_allclose(vectors, encode(model, ["some words", "", PROSE[:90]], TOKENIZER), rtol=1e-4, atol=1e-5)
    assert not vectors[1].any()
    assert not pipeline.encode([""]).any()


def test_special_tokens_that_stand_in_a_text_are_part_of_it(tmp_path, pipeline_of):
    model, tokenizer = tiny.recurrent("bert", "none", prefix=(2,), suffix=(3,)), encoders.tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = ["[CLS] w7 w8 w9 [SEP]", "[CLS] [SEP]", "", "w7 " * 30]
    vectors = pipeline_of(cf.RecurrentTransformer(str(tmp_path))).encode(texts)
    np.testing.assert_allclose(vectors, encode(model, texts, tokenizer), rtol=1e-4, atol=1e-5)


def test_a_prompt_can_be_excluded_from_the_mean(saved, pipeline_of):
    folder, model, _ = saved
    pipeline = pipeline_of(cf.RecurrentTransformer(str(folder / "model")), include_prompt=False)
    prompt, texts = "query: ", ["the statement", PROSE[:90]]
    vectors = pipeline.encode(texts, prompt=prompt)
    encoded = encode(model, [prompt + text for text in texts], TOKENIZER, output="tokens")
    for vector, tokens in zip(vectors, encoded, strict=True):
        own = tokens.offsets[:, 1] >= len(prompt)  # the space between prompt and text counts as text
        assert not own.all()
        np.testing.assert_allclose(vector, tokens.vectors[own].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_a_pipeline_does_not_use_the_head(tmp_path, pipeline_of, capfd):
    model = model_of("gpt2", "causal")
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    pipeline = pipeline_of(cf.RecurrentTransformer(tmp_path / "model"))
    captured = capfd.readouterr()
    assert not captured.out + captured.err
    expected = encode(model, TEXTS[2:4], TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(TEXTS[2:4]), expected, rtol=1e-4, atol=1e-5)


def test_a_pipeline_of_a_question_answering_model(tmp_path, pipeline_of):
    base = tiny.base("bert", "none", vocab_size=len(TOKENIZER))
    model = cf.add_recurrence(
        base, prefix=(1,), suffix=(2,), head="question-answering", window=16, memory="vector"
    ).eval()
    torch.nn.init.normal_(model.memory.vector.networks[0][0].weight)  # no longer untrained
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    pipeline = pipeline_of(cf.RecurrentTransformer(tmp_path / "model"))
    expected = encode(model, TEXTS[2:4], TOKENIZER)
    np.testing.assert_allclose(pipeline.encode(TEXTS[2:4]), expected, rtol=1e-4, atol=1e-5)


def test_what_a_pipeline_does_not_support(saved, pipeline_of):
    folder, model, _ = saved
    with pytest.raises(ValueError, match="window: the model is recurrent already"):
        cf.RecurrentTransformer(folder / "model", window=9)
    with pytest.raises(ValueError, match="needs a recurrent model and its tokenizer"):
        cf.RecurrentTransformer(model)
    pipeline = pipeline_of(cf.RecurrentTransformer(model, TOKENIZER))
    assert pipeline.max_seq_length is None
    with pytest.raises(ValueError, match="max_seq_length=20: texts are not truncated"):
        pipeline.max_seq_length = 20
