# SPDX-License-Identifier: Apache-2.0
"""The question-answering pipeline: compared with the definition of the one that transformers removed, written here
once more, and with `carryforward.answer`."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from helpers import prose, tiny

import carryforward as cf
from carryforward.qa.plain_reader import PlainReader

TOKENIZER = prose.encoder_tokenizer()
CONTEXT = "The cat of the house sat, the dog did not."
QUESTION = "Who sat?"
LONG = prose.TOPICS[3][:700]
CONFIG = {
    "vocab_size": len(TOKENIZER), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": TOKENIZER.pad_token_id,
}  # fmt: skip


def weighted(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.4, generator=generator)
    return model.eval()


@pytest.fixture(scope="module")
def plain():
    return weighted(hf.BertForQuestionAnswering(hf.BertConfig(**CONFIG)))


@pytest.fixture(scope="module")
def recurrent():
    frame = {"window": 24, "memory": cf.VectorMemoryConfig(pooled_layers="last", hidden_sizes=(16,))}
    model = cf.add_recurrence(hf.BertModel(hf.BertConfig(**CONFIG)), tokenizer=TOKENIZER, head="question-answering",
                              **frame)  # fmt: skip
    return weighted(model)


def make(model, tokenizer=TOKENIZER, **options):
    return hf.pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu", **options)


def reference(model, question, context, top_k, max_answer_len, handle_impossible_answer=False):
    """The earlier pipeline on a text of one window: softmax over [CLS] and the context, for starts and ends."""
    encoded = TOKENIZER(question, context, return_tensors="pt", return_offsets_mapping=True)
    with torch.no_grad():
        out = model(**{name: encoded[name] for name in TOKENIZER.model_input_names})
    inside = np.array([sequence == 1 for sequence in encoded.sequence_ids(0)])
    probabilities = []
    for logits in (out.start_logits[0].numpy(), out.end_logits[0].numpy()):
        kept = np.where(inside | (np.arange(len(inside)) == 0), np.exp(logits - logits.max()), 0.0)
        probabilities.append(kept / kept.sum())
    starts, ends = probabilities
    null = {"score": float(starts[0] * ends[0]), "start": 0, "end": 0, "answer": ""}
    blank = [not context[a:b].strip() and ours for (a, b), ours in zip(encoded.offset_mapping[0], inside, strict=True)]
    for side in probabilities:
        side[[0, *np.flatnonzero(blank)]] = 0  # (tokens of white space were answers, too)
    table = np.tril(np.triu(np.outer(starts, ends)), max_answer_len - 1)
    answers = {}
    for flat in np.argsort(-table, axis=None)[:top_k]:
        first, last = np.unravel_index(flat, table.shape)
        start = encoded.word_to_chars(0, encoded.token_to_word(0, int(first)), 1).start
        end = encoded.word_to_chars(0, encoded.token_to_word(0, int(last)), 1).end
        start += len(context[start:end]) - len(context[start:end].lstrip())  # (answers had leading spaces, too)
        answer = {"score": 0.0, "start": start, "end": end, "answer": context[start:end]}
        answers.setdefault(answer["answer"].lower(), answer)["score"] += float(table[first, last])
    found = [*answers.values(), *[null] * handle_impossible_answer]
    found = sorted(found, key=lambda one: -one["score"])[:top_k]
    return found[0] if len(found) == 1 else found


def close(found, expected):
    found, expected = ([one] if isinstance(one, dict) else one for one in (found, expected))
    assert [(one["start"], one["end"], one["answer"]) for one in found] == [
        (one["start"], one["end"], one["answer"]) for one in expected
    ]
    assert [one["score"] for one in found] == pytest.approx([one["score"] for one in expected], rel=1e-4)
    assert all([*one] == ["score", "start", "end", "answer"] for one in found)


@pytest.mark.parametrize("top_k", [1, 2, 9])
@pytest.mark.parametrize("impossible", [False, True])
def test_on_one_window_results_are_those_of_the_earlier_pipeline(plain, top_k, impossible):
    pipe = make(plain)
    for max_answer_len in (1, 4, 15):
        options = {"top_k": top_k, "max_answer_len": max_answer_len, "handle_impossible_answer": impossible}
        found = pipe(question=QUESTION, context=CONTEXT, max_seq_len=64, **options)
        close(found, reference(plain, QUESTION, CONTEXT, **options))


def test_no_answer_can_be_the_best_one(plain):
    weights = plain.qa_outputs.weight.detach().clone()
    options = {"question": QUESTION, "context": CONTEXT, "max_seq_len": 64}
    with torch.no_grad():
        hidden = plain.bert(**TOKENIZER(QUESTION, CONTEXT, return_tensors="pt")).last_hidden_state[0]
        plain.qa_outputs.weight.copy_((5 * (hidden[0] - hidden.mean(dim=0))).expand(2, -1))  # [CLS] scores highest
    try:
        best, span = (make(plain)(**options, handle_impossible_answer=flag) for flag in (True, False))
        close(best, reference(plain, QUESTION, CONTEXT, 1, 15, handle_impossible_answer=True))
    finally:
        plain.qa_outputs.weight.data.copy_(weights)
    assert (best["answer"], best["start"], best["end"]) == ("", 0, 0)
    assert span["answer"]


@pytest.mark.parametrize("stride", [0, 5])
def test_windows_of_a_plain_model_are_those_of_a_recurrent_one_without_state(plain, stride):
    pipe = make(plain)
    model = cf.add_recurrence(plain, tokenizer=TOKENIZER, preset="paper", window=24)
    model.config.use_state = False
    found = pipe(question=QUESTION, context=LONG, max_seq_len=24, doc_stride=stride, top_k=7)
    close(found, make(model)(question=QUESTION, context=LONG, doc_stride=stride, top_k=7))
    assert len({one["start"] // 100 for one in found}) > 1, "answers from several windows"
    both = hf.AutoModelForQuestionAnswering.from_config(plain.config)  # hooks do not change the model alone
    both.load_state_dict(plain.state_dict())
    close(found, make(both.eval())(question=QUESTION, context=LONG, max_seq_len=24, doc_stride=stride, top_k=7))


def test_models_that_recurrence_does_not_support_are_read(plain):
    config = hf.DebertaV2Config(**CONFIG, type_vocab_size=2, relative_attention=True, position_biased_input=False)
    model = weighted(hf.DebertaV2ForQuestionAnswering(config))
    found = make(model)(question=QUESTION, context=CONTEXT, max_seq_len=64, top_k=3)
    close(found, reference(model, QUESTION, CONTEXT, 3, 15))
    assert make(model)(question=QUESTION, context=LONG, max_seq_len=30)["answer"] in LONG


def test_a_recurrent_model_gives_the_answers_of_answer(recurrent):
    assert recurrent.predicts_kinds
    pipe = make(recurrent, tokenizer=recurrent.tokenizer)
    for impossible in (False, True):
        found = pipe(
            question=QUESTION, context=LONG, top_k=9, handle_impossible_answer=impossible, align_to_words=False
        )
        expected = cf.answer(recurrent, QUESTION, LONG, top_k=9, max_answer_tokens=15, allow_none=impossible)
        close(found, [{"score": one.probability, "start": one.start or 0, "end": one.end or 0, "answer": one.text}
                      for one in expected])  # fmt: skip
    assert {one.kind for one in expected} > {"span", "none"}
    words = pipe(question=QUESTION, context=LONG, top_k=9)
    inside = [one for one in words if one["end"]]
    assert all(LONG[one["start"] : one["end"]] == one["answer"] for one in inside)
    assert all(not LONG[one["start"] - 1 : one["start"] + 1].isalpha() for one in inside), "words begin there"


@pytest.mark.parametrize("kind", ["plain", "recurrent"])
def test_all_forms_of_input_and_batches(kind, request):
    model = request.getfixturevalue(kind)
    options = {"max_seq_len": 30, "doc_stride": 4} if kind == "plain" else {"doc_stride": 2}
    pipe = make(model, **options)
    contexts, questions = [LONG, CONTEXT, LONG[:200], CONTEXT], [QUESTION, "What of the dog?", "Why?", QUESTION]
    examples = [{"question": one, "context": about} for one, about in zip(questions, contexts, strict=True)]
    alone = [pipe(question=one, context=about) for one, about in zip(questions, contexts, strict=True)]
    assert all(isinstance(one, dict) for one in alone)
    for found in (
        pipe(question=questions, context=contexts), pipe(examples), pipe(examples, batch_size=3),
        [*pipe(one for one in examples)], [pipe(one) for one in examples],
        make(model, batch_size=2, **options)(examples),
    ):  # fmt: skip
        close(found, alone)
    close(pipe(question=questions[:2], context=LONG), [pipe(question=one, context=LONG) for one in questions[:2]])
    close(pipe(examples[:1]), alone[0])  # as it was: a list of one gives one result


def test_it_comes_with_the_import_and_loads_by_name(plain, tmp_path):
    plain.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    code = (
        "import carryforward, sys; assert 'transformers.pipelines' not in sys.modules and 'torch' not in sys.modules\n"
        "from transformers import pipeline\n"
        f"pipe = pipeline('question-answering', model={str(tmp_path)!r}, device='cpu')\n"
        f"print(pipe(question={QUESTION!r}, context={CONTEXT!r}, max_seq_len=64)['answer'])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == make(plain)(question=QUESTION, context=CONTEXT, max_seq_len=64)["answer"]
    assert process.returncode == 0, process.stderr
    make(plain).save_pretrained(tmp_path / "again")
    assert not [*(tmp_path / "again").glob("*.py")], "no copy of the pipeline's code"


def test_wrong_arguments_are_refused(plain, recurrent):
    pipe, other = make(plain), make(recurrent)
    for call, message in (
        (lambda: pipe(question=QUESTION), "question is of type str and context of type NoneType"),
        (lambda: pipe(question=["a", "b"], context=["c"]), "question has 2 texts, and context 1"),
        (lambda: pipe({"question": "a"}), "give a dictionary with keys question and context"),
        (lambda: pipe(question="", context="a"), "question is empty"),
        (lambda: pipe(question="a", context=" "), "has no words"),
        (lambda: pipe(question=QUESTION, context="a", top_k=0), "top_k=0 must be at least 1"),
        (lambda: pipe(question=QUESTION, context="a", max_seq_len=8), "max_seq_len=8, doc_stride="),
        (lambda: pipe(question=QUESTION, context="a", doc_stride=64), "doc_stride=64: beside a question of"),
        (lambda: pipe(question=QUESTION * 2, context="a", max_question_len=3), "max_question_len=3: the question has"),
        (lambda: other(question=QUESTION, context="a", max_seq_len=8), "max_seq_len=8: the model reads 24 tokens"),
        (lambda: other(question=QUESTION, context="a", doc_stride=24), "overlap=24 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="max_answer_length"):
        pipe(question=QUESTION, context="a", max_answer_length=3)


def test_null_scores_are_the_lowest_of_all_windows(plain):
    """Over several windows a document has no answer only if no window has one."""
    ids = TOKENIZER(LONG, add_special_tokens=False, return_tensors="pt")["input_ids"]
    question = TOKENIZER(QUESTION, add_special_tokens=False, return_tensors="pt")["input_ids"]
    ones = torch.ones_like
    with torch.no_grad():
        out = PlainReader(plain, TOKENIZER)(ids, ones(ids), question, ones(question), max_seq_len=24, doc_stride=0)
        room, scores = 24 - 3 - question.shape[1], []
        for start in range(0, ids.shape[1], room):
            part = ids[:, start : start + room]
            special = [torch.tensor([[token]]) for token in (TOKENIZER.cls_token_id, TOKENIZER.sep_token_id)]
            window = torch.cat([special[0], question, special[1], part, special[1]], dim=1)
            types = (torch.arange(window.shape[1]) >= question.shape[1] + 2).long()[None]
            one = plain(window, token_type_ids=types)
            scores.append(torch.stack([one.start_logits[0, 0], one.end_logits[0, 0]]))
    torch.testing.assert_close(out.null_logits[0], torch.stack(scores).amin(dim=0), rtol=1e-4, atol=1e-5)
    finder = tiny.answering("bert")
    document = tiny.documents(1, 25)
    with torch.no_grad():
        null = finder(document, question_ids=[[5, 6]], use_state=False).null_logits
        windows = [finder(document[:, i : i + 8], question_ids=[[5, 6]]).null_logits for i in (0, 8, 16, 24)]
    torch.testing.assert_close(null, torch.stack(windows).amin(dim=0), rtol=1e-4, atol=1e-5)
