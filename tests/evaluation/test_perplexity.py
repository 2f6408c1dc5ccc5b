# SPDX-License-Identifier: Apache-2.0
"""Perplexity on real text, against straightforward loops: every token is scored once, and ratios come from sums."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import prose, reference, tiny

import carryforward as cf
from carryforward.data.documents import Documents, tokenise
from carryforward.data.texts import Corpus, Text
from carryforward.evaluation.perplexity import Perplexity, perplexity
from carryforward.evaluation.token_losses import token_losses

T = 24  # window of the plain models
NATS = 1e-4  # tolerance of the sum over all tokens


@pytest.fixture(scope="module")
def ids():
    """The first 800 tokens of Python's documentation."""
    tokens = prose.tokenizer()("".join(prose.TOPICS)[:8_000])["input_ids"][:800]
    assert len(tokens) == 800
    return tokens


def plain(name):
    return tiny.base(name, vocab_size=prose.VOCABULARY)


def recurrent(name="gpt2", **fields):
    """In double precision, so that rounding cannot hide a wrong token."""
    return tiny.recurrent(name, settings={"vocab_size": prose.VOCABULARY}, **fields).double()


def one_window_at_a_time(model, ids, window, overlap):
    """Window n starts at n (window - overlap); a target belongs to the first window that reads the token before it."""
    nats, scored, start = 0.0, [], 0
    while len(scored) < len(ids) - 1:
        read = ids[start : start + window]
        with torch.no_grad():
            log_p = model(torch.tensor([read])).logits[0].double().log_softmax(-1)
        for target in range(start + 1, min(start + len(read) + 1, len(ids))):
            if target not in scored[-window:]:
                nats -= log_p[target - start - 1, ids[target]].item()
                scored.append(target)
        start += window - overlap
    assert scored == list(range(1, len(ids)))
    return nats


def some_documents(ids):
    """Documents that end inside a window, at its end, one token after it, or after one or two tokens."""
    borders = np.cumsum([0, 61, 1, 8, 0, 9, 2, 16, 17, 33, 100])
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


# --- against straightforward loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [0, 7, T - 1])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_plain_model_is_scored_as_by_a_straightforward_loop(ids, name, overlap):
    model = plain(name)
    score = perplexity(model, [ids], window=T, overlap=overlap, batch_size=64)
    assert score.tokens == 799
    assert score.nats == pytest.approx(one_window_at_a_time(model, ids, T, overlap), abs=NATS)


@pytest.mark.parametrize("overlap", [0, 3, 7])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_recurrent_model_is_scored_as_by_the_papers_equations(ids, name, overlap):
    model = recurrent(name, window=reference.WINDOW, overlap=overlap)
    document = ids if overlap < 7 else ids[:500]
    with torch.no_grad():
        tokens = torch.tensor([document])
        nats, count = reference.run(
            reference.REFERENCES[name], dict(model.named_parameters()) | tied(model), model.config.base_config,
            tokens, tokens, overlap,
        )  # fmt: skip
    score = perplexity(model, [document])
    assert score.tokens == count == len(document) - 1
    assert score.nats == pytest.approx(float(nats), abs=NATS)


def tied(model):
    """The output layer under its own name: it is tied to the input embeddings."""
    return {"base.lm_head.weight": model.base.lm_head.weight}


@pytest.mark.parametrize("overlap", [0, 2, 5])  # the config has 2
def test_at_any_overlap_the_state_goes_through_the_whole_document(ids, overlap):
    model = recurrent()
    with torch.no_grad():
        whole = model(torch.tensor([ids]), labels=torch.tensor([ids]), overlap=overlap)
    score = perplexity(model, [ids], overlap=overlap)
    assert score.nats == pytest.approx(whole.nll_sum.item(), abs=NATS)


@pytest.mark.parametrize("overlap", [0, 2, 7])
def test_without_its_state_a_recurrent_model_is_its_base(ids, overlap):
    model = recurrent()
    ids = ids if overlap < 7 else ids[:500]
    removed = perplexity(model, [ids], overlap=overlap, use_state=False)
    alone = perplexity(model.base, [ids], window=8, overlap=overlap)
    assert removed.nats == pytest.approx(alone.nats, rel=1e-7)
    assert removed.tokens == alone.tokens
    assert removed.nats == pytest.approx(one_window_at_a_time(model.base, ids, 8, overlap), abs=NATS)
    # Token by token: in a sum, what the state improves and what it worsens may cancel.
    with_state, without = (token_losses(model, [ids], overlap=overlap, use_state=use)[0] for use in (True, False))
    assert np.nanmax(np.abs(with_state - without)) > 0.5, "the state matters here"


@pytest.mark.parametrize(
    ("overlap", "windows", "fields"),
    [(0, 1, {}), (2, 3, {}), (2, 1000, {}), (0, 1, tiny.TOKENS), (2, 3, tiny.TOKENS), (2, 3, tiny.ASSOCIATIVE)],
)
def test_reset_every_scores_the_training_samples_one_by_one(ids, overlap, windows, fields):
    """A sample reads its windows and the target after them; the state starts empty."""
    model, nats, stride = recurrent(overlap=overlap, **fields), 0.0, 8 - overlap
    document = torch.tensor([ids[:203]])
    for start in range(0, 202, windows * stride):
        piece = document[:, start : start + (windows - 1) * stride + 8 + 1]
        labels = piece.clone()
        labels[:, : 1 + (overlap if start else 0)] = -100  # scored by the sample before
        if (labels != -100).any():
            with torch.no_grad():
                nats += model(piece, labels=labels).nll_sum.item()
    score = perplexity(model, [ids[:203]], reset_every=windows)
    assert score.tokens == 202
    assert score.nats == pytest.approx(nats, abs=NATS)
    if windows == 1000:
        assert score.nats == pytest.approx(perplexity(model, [ids[:203]]).nats, abs=NATS)


def test_a_matrix_that_is_reset_at_every_window_is_removed(ids):
    """Memory tokens are not: every window then reads the learned first ones."""
    for fields, removed in ((tiny.ASSOCIATIVE, True), (tiny.TOKENS, False)):
        model = recurrent(**fields)
        reset, without = (
            perplexity(model, [ids[:60]], **mode).nats for mode in ({"reset_every": 1}, {"use_state": False})
        )
        assert (abs(reset - without) < NATS) == removed


# --- sums ----------------------------------------------------------------------------------------------------------

MODES = {"state": {}, "removed": {"use_state": False}, "reset": {"reset_every": 2}, "other overlap": {"overlap": 5}}


@pytest.mark.parametrize("mode", MODES)
def test_batches_and_splits_do_not_change_the_sum(ids, mode, monkeypatch):
    model, documents = recurrent(), some_documents(ids)
    alone = sum((perplexity(model, [document], **MODES[mode]) for document in documents), Perplexity())
    assert alone.tokens == sum(max(len(document) - 1, 0) for document in documents)
    for batch_size, per_call in [(1, 16), (3, 2), (100, 1)]:
        monkeypatch.setattr("carryforward.evaluation.perplexity.WINDOWS_PER_CALL", per_call)
        together = perplexity(model, documents, batch_size=batch_size, **MODES[mode])
        assert (together.tokens, together.documents) == (alone.tokens, alone.documents)
        assert together.nats == pytest.approx(alone.nats, abs=NATS)
    halves = perplexity(model, documents[:4], **MODES[mode]) + perplexity(model, documents[4:], **MODES[mode])
    assert halves.nats == pytest.approx(alone.nats, abs=NATS)


def test_progress_counts_every_token_once(ids):
    for mode in MODES.values():
        seen = []
        score = perplexity(recurrent(), some_documents(ids), progress=seen.append, **mode)
        assert sum(seen) == score.tokens


def test_documents_without_targets_are_counted():
    documents = Documents.of([[], [5], [5, 6]], words=[0, 1, 2], bytes=[0, 3, 4])
    for model, window in ((recurrent(), None), (plain("gpt2"), 8)):
        score = perplexity(model, documents, window=window)
        assert (score.documents, score.tokens, score.words, score.bytes) == (3, 1, 3, 7)
        assert score.nats > 0
        assert perplexity(model, documents[:2], window=window).nats == 0
        assert perplexity(model, [], window=window).token_perplexity is None


def test_words_and_bytes_by_hand(tmp_path):
    texts = ["Two words", "three more\nwords – counted"]
    corpus = Corpus("c", "test", lambda: (Text(str(i), text) for i, text in enumerate(texts)), lambda: "x")
    score = perplexity(plain("gpt2"), tokenise(corpus, prose.tokenizer(), cache=tmp_path), window=T)
    assert (score.words, score.line_ends, score.bytes) == (2 + 5, 1, 9 + 28)  # the dash is a word of three bytes
    assert score.word_perplexity == pytest.approx(math.exp(score.nats / 7))
    assert score.token_perplexity == pytest.approx(math.exp(score.nats / score.tokens))
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / 37)


def test_ratios_are_taken_last_and_never_overflow():
    a, b = Perplexity(nats=10.0, tokens=5, words=2, bytes=9), Perplexity(nats=2.0, tokens=1, words=2, bytes=1)
    assert (a + b).word_perplexity == pytest.approx(math.exp(12 / 4))
    assert (a + b).bits_per_byte == pytest.approx(12 / 10 / math.log(2))
    assert Perplexity(nats=1e6, tokens=1).token_perplexity == math.inf
    without = Perplexity(nats=1.0, tokens=1)
    assert without.word_perplexity is without.bits_per_byte is None, "without counts there is no such thing"


# --- the model is unchanged; bad arguments -------------------------------------------------------------------------


def test_dropout_is_off_and_every_module_is_as_before(ids):
    model = recurrent()
    expected = perplexity(model, [ids[:100]])
    model.train()
    model.base.transformer.h[1].eval()  # as in a model with a frozen layer
    before = [module.training for module in model.modules()]
    assert perplexity(model, [ids[:100]]) == expected
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ValueError, match="token id"):
        perplexity(model, [[prose.VOCABULARY]] * 2 + [[1, prose.VOCABULARY]])
    assert [module.training for module in model.modules()] == before, "after an error too"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (plain("gpt2"), {}, "window is missing"),
        (plain("gpt2"), {"window": 41}, "window=41: this model has 40 positions. Use 40 or less."),
        (plain("gpt2"), {"window": 8, "overlap": 8}, "overlap=8 must be .* smaller than the 8"),
        (plain("gpt2"), {"window": 8, "batch_size": 0}, "batch_size=0 must be at least 1"),
        (recurrent(), {"window": 9}, "window=9: this recurrent model reads 8 tokens at once. Leave it out."),
        (recurrent(), {"overlap": -1}, "overlap=-1 must be at least 0"),
        (recurrent(), {"reset_every": 0}, "reset_every=0 must be at least 1"),
        (recurrent(), {"reset_every": -3}, "reset_every=-3 must be at least 1"),
        (tiny.recurrent("bert"), {}, "perplexity needs a causal language model, not RecurrentForMaskedLM"),
    ],
)
def test_bad_arguments_are_refused(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        perplexity(model, [[5, 6, 7]], **kwargs)


@pytest.mark.parametrize("wrong", [300, -1])
def test_tokens_of_another_tokenizer_are_refused_without_a_state_too(wrong):
    for model, kwargs in [(plain("gpt2"), {"window": 8}), (recurrent(), {"use_state": False}), (recurrent(), {})]:
        with pytest.raises(ValueError, match=f"token id {wrong};.*ids from 0 to 299.*tokenizer that belongs to"):
            perplexity(model, [[5, wrong, 7]], **kwargs)


# --- against lm-eval -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lm_evals_rolling_log_likelihood(name):
    """Equal on full windows after its prefix token. It fills up a short last window with earlier tokens; we do not."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="make test-all: it installs lm-eval")
    from lm_eval.api import instance

    model, tokenizer = plain(name), prose.tokenizer()
    lm = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, max_length=T, batch_size=4)
    whole, ragged = [], []
    for text, windows in zip(prose.TOPICS[:3], (1, 7, 20), strict=True):
        tokens = tokenizer(text)["input_ids"]
        whole.append(tokens[: windows * T])
        ragged.append(tokens[: windows * T + 5])

    def theirs(documents):
        texts = [tokenizer.decode(document) for document in documents]
        assert tokenizer(texts)["input_ids"] == documents, "cut where a tokenizer would not cut"
        requests = [instance.Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
        return -sum(lm.loglikelihood_rolling(requests, disable_tqdm=True))

    def ours(documents):
        return perplexity(model, [[lm.prefix_token_id, *document] for document in documents], window=T)

    assert ours(whole).tokens == 28 * T
    assert ours(whole).nats == pytest.approx(theirs(whole), abs=1e-3)  # lm-eval adds in single precision
    assert abs(ours(ragged).nats - theirs(ragged)) > 0.1


def test_it_is_public():
    assert cf.perplexity is perplexity


@pytest.mark.parametrize("head", ["masked", "none"])
def test_encoders_are_refused(head):
    with pytest.raises(ValueError, match="perplexity needs a causal language model, not Bert"):
        perplexity(tiny.base("bert", head), [[5, 6, 7, 8]], window=8)
