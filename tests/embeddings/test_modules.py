# SPDX-License-Identifier: Apache-2.0
"""Folders of sentence-transformers: their pooling, normalization, length and prompts are used when they are named."""

import json

import numpy as np
import pytest
import torch
from helpers import tiny
from helpers.embedding import PROSE, TEXTS, TOKENIZER, model_of
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import carryforward as cf
from carryforward.cli.main import main
from carryforward.embeddings.modules import EmbeddingModules, read_modules

SHORT = ["A few words.", PROSE[:30], "", PROSE[50:70], "x"]
TYPES = "sentence_transformers.models."


@pytest.fixture
def plain(tmp_path):
    """A folder with a plain tiny encoder, whose tokenizer puts special tokens around a text."""
    tokenizer = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    special = [(token, TOKENIZER.convert_tokens_to_ids(token)) for token in TOKENIZER.convert_ids_to_tokens([5, 6])]
    (first, _), (last, _) = special
    tokenizer.post_processor = TemplateProcessing(single=[first, "$A", last], special_tokens=special)
    folder = tmp_path / "plain"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=last).save_pretrained(folder)
    tiny.base("bert", "none", vocab_size=len(TOKENIZER)).save_pretrained(folder)
    return folder


def describe(folder, pooling, *, normalize=True, length=None, **others):
    """Write the files of sentence-transformers, as older versions do."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * normalize
    entries = [{"idx": i, "name": str(i), "path": p, "type": TYPES + kind} for i, (p, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length, "do_lower_case": False}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(others))


def vectors_of(folder, text):
    """All token vectors of a short text, with special tokens, by transformers alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens", "max_tokens"])
def test_a_named_folder_is_followed(plain, pooling):
    flags = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    describe(plain, {"word_embedding_dimension": 16, **flags}, normalize=pooling != "max_tokens")
    vectors = cf.encode(plain, SHORT)
    for text, vector in zip(SHORT, vectors, strict=True):
        if not text:
            assert not vector.any()
            continue
        tokens = vectors_of(plain, text)
        expected = {"cls_token": tokens[0], "mean_tokens": tokens.mean(0), "max_tokens": tokens.max(0)}[pooling]
        expected = expected if pooling == "max_tokens" else expected / np.linalg.norm(expected)
        np.testing.assert_allclose(vector, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_short_texts_have_the_vectors_of_sentence_transformers(plain, tmp_path, mode):
    library = pytest.importorskip("sentence_transformers", reason="make test: it installs sentence-transformers")
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    modules = [Transformer(str(plain)), Pooling(16, mode), Normalize()]
    pipeline = library.SentenceTransformer(
        modules=modules, device="cpu", prompts={"query": "query: ", "passage": "x "}, default_prompt_name="passage"
    )
    pipeline.max_seq_length = 38
    pipeline.save(str(tmp_path / "saved"))
    texts = [text for text in SHORT if text]
    np.testing.assert_allclose(cf.encode(tmp_path / "saved", texts), pipeline.encode(texts), rtol=1e-4, atol=1e-5)
    expected = pipeline.encode(texts, prompt_name="query")
    vectors = cf.encode(str(tmp_path / "saved"), texts, prompt="query")
    np.testing.assert_allclose(vectors, expected, rtol=1e-4, atol=1e-5)
    assert read_modules(str(tmp_path / "saved")).max_seq_length == 38
    wide = cf.encode(tmp_path / "saved", [PROSE[:900]])
    assert not np.allclose(wide, pipeline.encode([PROSE[:900]]), atol=1e-3), "it is cut there, and read here"


def test_windows_are_no_longer_than_the_texts_it_was_trained_on(plain):
    describe(plain, {"pooling_mode": "mean"}, length=20)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    model = cf.add_recurrence(AutoModel.from_pretrained(plain), tokenizer=tokenizer, window=20, memory="vector")
    expected = cf.encode(model, TEXTS, tokenizer, use_state=False, special_tokens=True, normalize=True)
    np.testing.assert_allclose(cf.encode(plain, TEXTS), expected, rtol=1e-5, atol=1e-6)
    describe(plain, {"pooling_mode": "mean"}, length=1000)
    assert cf.encode(plain, TEXTS).shape == (len(TEXTS), 16), "at most the model's positions"


def test_the_command_gives_the_vectors_of_python(plain, tmp_path):
    describe(plain, {"pooling_mode": "mean"}, length=20, prompts={"query": "query: "})
    lines = [json.dumps({"id": str(i), "text": text, "parts": [[0, 9], [9, len(text)]]}) for i, text in
             enumerate(text for text in TEXTS if text)]  # fmt: skip
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    texts, spans = zip(*((row["text"], row["parts"]) for row in map(json.loads, lines)), strict=True)

    def run(name, *arguments):
        with pytest.raises(SystemExit) as end:
            main(["embed", str(plain), str(tmp_path / "docs.jsonl"), "--out", str(tmp_path / name), *arguments])
        assert end.value.code == 0
        return np.load(tmp_path / name)

    np.testing.assert_array_equal(run("v.npy", "--device", "cpu"), cf.encode(plain, texts))
    other = {"prompt": "query", "normalize": False, "special_tokens": False}
    flags = ["--prompt", "query", "--no-normalize", "--no-special-tokens"]
    np.testing.assert_array_equal(run("w.npy", *flags), cf.encode(plain, texts, **other))
    chunks = cf.encode(plain, texts, output="chunks", chunks=spans)
    vectors = run("c.npy", "--what", "chunks", "--chunks-field", "parts")
    np.testing.assert_array_equal(vectors, np.concatenate([one.vectors for one in chunks]))


def test_a_saved_pipeline_is_followed(tmp_path):
    """The folder of a pipeline with a `RecurrentTransformer`, which pools a text's own tokens."""
    model = model_of("bert", "none")
    model.tokenizer = TOKENIZER
    model.save_pretrained(tmp_path / "pipeline")
    describe(tmp_path / "pipeline", {"pooling_mode": "max"}, normalize=True)
    text = (tmp_path / "pipeline" / "modules.json").read_text()
    ours = "carryforward.embeddings.sentence_transformers.RecurrentTransformer"
    (tmp_path / "pipeline" / "modules.json").write_text(text.replace(f"{TYPES}Transformer", ours))
    expected = cf.encode(model, TEXTS, TOKENIZER, pooling="max", normalize=True)
    np.testing.assert_allclose(cf.encode(tmp_path / "pipeline", TEXTS), expected, rtol=1e-5, atol=1e-6)


def test_other_folders_say_nothing(plain):
    assert read_modules(str(plain)) == EmbeddingModules()


def rewrite(file, old, new):
    def change(folder):
        path = folder / file
        path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rewrite("modules.json", "Normalize", "Dense"), "has a module 'Dense', which is not supported"),
        (rewrite("modules.json", '"path": ""', '"path": "0_Transformer"'), "its transformer is in the folder '0_Tr"),
        (rewrite("modules.json", "[", '{"a": ['), "modules.json is not valid JSON"),
        (rewrite("1_Pooling/config.json", '"mean"', '"lasttoken"'), "its pooling is lasttoken. Supported are mean"),
        (rewrite("1_Pooling/config.json", '"mean"', '["mean", "max"]'), "its pooling is mean and max"),
        (rewrite("1_Pooling/config.json", "{", '{"include_prompt": false, '), "leaves out prompts"),
        (rewrite("sentence_bert_config.json", "false", "true"), "do_lower_case is not supported"),
        (rewrite("config_sentence_transformers.json", "{}", '{"prompts": [1]}'), "are not texts"),
        (rewrite("config_sentence_transformers.json", "{}", '{"default_prompt_name": "q"}'), "default prompt 'q' is"),
    ],
)
def test_what_is_not_supported_is_refused(plain, change, message):
    describe(plain, {"pooling_mode": "mean"})
    change(plain)
    with pytest.raises(ValueError, match=message):
        cf.encode(plain, ["a"])
