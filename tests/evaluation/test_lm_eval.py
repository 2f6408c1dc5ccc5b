# SPDX-License-Identifier: Apache-2.0
"""The model of lm-eval: against lm-eval's own, against `perplexity`, and on tasks of files."""

import json
import math
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from helpers import prose, tiny
from helpers.cli_runner import invoke

import carryforward as cf

api = pytest.importorskip("lm_eval.api.instance", reason="make test-all: it installs lm-eval")
from lm_eval.models import huggingface  # noqa: E402

from carryforward.evaluation import lm_eval as integration  # noqa: E402

ROOT = Path(__file__).parents[2]
TOKENIZER = prose.tokenizer()
SHORT = [
    TOKENIZER.decode(TOKENIZER(text)["input_ids"][:length])
    for text, length in zip(prose.TOPICS[:4], (3, 20, 31, 9), strict=True)
]
LONG = [text[:size] for text, size in zip(prose.TOPICS[:5], (900, 90, 333, 40, 1), strict=True)]
SETTINGS = {"vocab_size": prose.VOCABULARY, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
MEMORIES = {
    "vector": {},
    "kv": {"slots": 0, "recent": 3, "sinks": 1},
    "tokens": tiny.TOKENS,
}


def recurrent(name="gpt2", **fields):
    return tiny.recurrent(name, settings=SETTINGS, **fields)


def ours(model, **arguments):
    return integration.RecurrentLM(model, tokenizer=TOKENIZER, **{"batch_size": 3, **arguments})


def theirs(model, **arguments):
    return huggingface.HFLM(pretrained=model, tokenizer=TOKENIZER, **{"batch_size": 3, **arguments})


def ask(lm, kind, arguments):
    requests = [api.Instance(kind, {}, one, i) for i, one in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


def choices():
    """Contexts, one of them empty, with continuations: of one token and several, some with equal beginnings."""
    pairs = [(context, context_end) for context in SHORT[:3] for context_end in (" a", " the end", " then")]
    return [*pairs, ("", " of"), ("", " a list of")]


# --- equal to lm-eval's own model, where that can read the text -------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["recurrent", "plain"])
def test_texts_within_one_window_have_the_scores_of_lm_evals_own_model(name, kind):
    model = recurrent(name, window=40, overlap=0)
    lm = ours(model) if kind == "recurrent" else ours(tiny.base(name, **SETTINGS), window=40)
    own = theirs(tiny.base(name, **SETTINGS))
    assert lm.use_state == (kind == "recurrent")
    for (likelihood, greedy), (expected, expected_greedy) in zip(
        ask(lm, "loglikelihood", choices()), ask(own, "loglikelihood", choices()), strict=True
    ):
        assert likelihood == pytest.approx(expected, abs=1e-4)
        assert greedy == expected_greedy
    rolling = [(text,) for text in SHORT]
    assert ask(lm, "loglikelihood_rolling", rolling) == pytest.approx(
        ask(own, "loglikelihood_rolling", rolling), abs=1e-4
    )
    settings = {"until": ["\n\n"], "max_gen_toks": 5}
    prompts = [(text, settings) for text in (SHORT[0], SHORT[1], SHORT[3])]
    assert ask(lm, "generate_until", prompts) == ask(own, "generate_until", prompts)


def test_greedy_continuations_are_known_as_such():
    lm = ours(recurrent())
    context = LONG[2]
    ids = lm.tok_encode(context)
    with torch.no_grad():
        out = lm.model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0, len(ids) :].tolist()
    other = [*out[:-1], (out[-1] + 1) % prose.VOCABULARY]
    wrong_before = [(out[0] + 1) % prose.VOCABULARY, *out[1:]]
    requests = [(("", ""), ids, continuation) for continuation in (out, other, wrong_before)]
    scores = lm._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [greedy for _, greedy in scores] == [True, False, False]
    assert scores[0][0] > scores[1][0]


# --- texts of any length ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_state", [True, False])
@pytest.mark.parametrize("overlap", [None, 3])
@pytest.mark.parametrize("memory", MEMORIES)
def test_rolling_log_likelihood_is_the_perplexity_of_whole_documents(memory, overlap, use_state):
    model = recurrent(**MEMORIES[memory])
    lm = ours(model, use_state=use_state, overlap=overlap)
    results = ask(lm, "loglikelihood_rolling", [(text,) for text in LONG])
    for text, result in zip(LONG, results, strict=True):
        document = [lm.prefix_token_id, *TOKENIZER(text)["input_ids"]]
        expected = cf.perplexity(model, [document], overlap=overlap, use_state=use_state)
        assert result == pytest.approx(-expected.nats, rel=1e-5)


@pytest.mark.parametrize("use_state", [True, False])
def test_continuations_of_long_contexts_are_scored_as_the_model_predicts_them(use_state):
    """Against the logits of the whole text in one call; batched equals one by one."""
    model = recurrent("llama", recent=3)
    contexts = [text.rstrip() for text in LONG]  # lm-eval gives spaces at the end of a context to the continuation
    pairs = [(contexts[0], " one"), (contexts[0], " two things"), (contexts[2], " of"), (contexts[3], " " + LONG[2])]
    results = ask(ours(model, use_state=use_state), "loglikelihood", pairs)
    alone = ask(ours(model, use_state=use_state, batch_size=1), "loglikelihood", pairs)
    for (context, continuation), (result, greedy), (one, one_greedy) in zip(pairs, results, alone, strict=True):
        ids = torch.tensor([TOKENIZER(context + continuation)["input_ids"]])
        start = len(TOKENIZER(context)["input_ids"])
        with torch.no_grad():
            scores = model(ids, use_state=use_state).logits[0, start - 1 : -1].log_softmax(dim=-1)
        targets = ids[0, start:]
        assert result == pytest.approx(float(scores.gather(1, targets[:, None]).sum()), rel=1e-4)
        assert greedy == bool((scores.argmax(dim=-1) == targets).all())
        assert (one, one_greedy) == (pytest.approx(result, rel=1e-5), greedy)


@pytest.mark.parametrize("use_state", [True, False])
def test_generation_reads_the_whole_prompt(use_state):
    model = recurrent(recent=3)
    lm = ours(model, use_state=use_state, overlap=1)
    settings = {"until": ["zzzz"], "max_gen_toks": 12}
    results = ask(lm, "generate_until", [(text, settings) for text in LONG])
    for text, result in zip(LONG, results, strict=True):
        ids = torch.tensor([TOKENIZER(text)["input_ids"]])
        out = model.generate(ids, max_new_tokens=12, do_sample=False, use_state=use_state, overlap=1)
        assert TOKENIZER.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == result


def test_the_control_differs():
    model = recurrent()
    rolling = [(LONG[0],)]
    with_state, without = (
        ask(ours(model, use_state=one), "loglikelihood_rolling", rolling)[0] for one in (True, False)
    )
    assert abs(with_state - without) > 1


# --- tasks, by import and on the command line -------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path):
    """A model on disk, and a folder of tasks whose data is beside them."""
    model = recurrent()
    model.tokenizer = TOKENIZER
    model.save_pretrained(tmp_path / "model")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in LONG))
    (tasks / "choices.jsonl").write_text(
        "".join(json.dumps({"text": text, "answer": i % 2}) + "\n" for i, text in enumerate(LONG))
    )
    data = {"dataset_path": "json", "test_split": "test"}
    metrics = [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    perplexity = {
        **data, "task": "local_perplexity", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{text}}", "metric_list": metrics,
        "dataset_kwargs": {"data_files": {"test": str(tasks / "texts.jsonl")}},
    }  # fmt: skip
    multiple_choice = {
        **data, "task": "local_choices", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": [" first", " second"], "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
        "dataset_kwargs": {"data_files": {"test": str(tasks / "choices.jsonl")}},
    }  # fmt: skip
    for task in (perplexity, multiple_choice):
        (tasks / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(LONG):
        (tmp_path / "texts" / f"{i}.txt").write_text(text)
    return tmp_path


def test_tasks_by_name_of_the_model(home, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "datasets"))
    results = lm_eval.simple_evaluate(
        model="carryforward", model_args={"pretrained": str(home / "model"), "use_state": False}, batch_size=2,
        tasks=["local_perplexity", "local_choices"], device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(home / "tasks"), include_defaults=False),
    )  # fmt: skip
    documents = [[0, *TOKENIZER(text)["input_ids"]] for text in LONG]
    model = cf.RecurrentForCausalLM.from_pretrained(home / "model")
    nats = cf.perplexity(model, documents, use_state=False).nats
    size = sum(len(text.encode()) for text in LONG)
    bits = results["results"]["local_perplexity"]["bits_per_byte,none"]
    assert bits == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert 0 <= results["results"]["local_choices"]["acc,none"] <= 1


def test_the_command_gives_the_perplexity_of_carryforward_evaluate(home, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "datasets"))
    monkeypatch.setattr("sys.argv", [])
    result = invoke(
        "lm-eval", "--model_args", f"pretrained={home / 'model'},overlap=1", "--tasks", "local_perplexity",
        "--include_path", home / "tasks", "--device", "cpu", "--output_path", home / "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (file,) = home.glob("**/*out*.json")
    theirs = json.loads(file.read_text())["results"]["local_perplexity"]
    evaluated = invoke(
        "evaluate", home / "model", "--data", home / "texts", "--split", "all", "--overlap", 1, "--bos", "--json",
        "--no-control", "--device", "cpu",
    )  # fmt: skip
    assert evaluated.exit_code == 0, evaluated.output
    (row,) = json.loads(evaluated.stdout)[0]["rows"]
    assert theirs["bits_per_byte,none"] == pytest.approx(row["bits_per_byte"], rel=1e-5)
    assert row["tokens"] == sum(len(TOKENIZER(text)["input_ids"]) for text in LONG), "the first token is scored too"


def test_the_entry_point_names_the_model():
    """lm-eval finds models by it from the version after 0.4.13 on."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    module, _, name = points["carryforward"].partition(":")
    assert getattr(__import__(module, fromlist=[name]), name) is integration.RecurrentLM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 100}, "max_length=100: texts are not truncated. Leave it out."),
        ({"truncation": True}, "truncation=True: texts are not truncated"),
        ({"batch_size": "auto:4"}, "batch_size='auto:4' would be measured with a longest text.*Give a number"),
        ({"use_state": "no"}, "use_state='no' must be True or False"),
        ({"overlap": 8}, "overlap=8 must be .* smaller than the 8"),
        ({"window": 9}, "--window 9: .* reads 8 tokens at once. Leave it out."),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ours(recurrent(), **arguments)


def test_encoders_are_refused(tmp_path):
    tiny.recurrent("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an encoder .*needs a causal language model"):
        integration.RecurrentLM(str(tmp_path))
