# SPDX-License-Identifier: Apache-2.0
"""`carryforward generate` as people use it."""

import io
import json
import os
import shutil
import signal
import sys

import pytest
import torch
import transformers
from helpers import prose
from helpers.commands import fail, into_a_closed_pipe, run, succeed
from safetensors import SafetensorError

import carryforward as cf
from carryforward.cli import text_generation

WINDOW, POSITIONS = 12, 32
LONG = 5 * POSITIONS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A plain model and a recurrent one, whose texts go on and on in many ways and depend on the state."""
    folder = tmp_path_factory.mktemp("models")
    prose.save_model(folder / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "plain")
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "plain")
    recurrent = cf.add_recurrence(model, window=WINDOW, overlap=2, memory="vector")
    with torch.no_grad():  # as tests/tiny.py does: the paper starts it near zero
        for parameter in recurrent.memory.parameters():
            parameter.normal_(std=0.6)
    recurrent.save_pretrained(folder / "recurrent")
    prose.tokenizer().save_pretrained(folder / "recurrent")
    return folder


@pytest.fixture
def recurrent(models):
    return ["generate", models / "recurrent"]


def test_far_beyond_the_positions_and_the_same_again(recurrent):
    result = succeed(*recurrent, "--prompt", "The with statement", "--max-new-tokens", LONG, "--seed", 3)
    assert f"{LONG} tokens, " in result.err
    record = json.loads(succeed(*recurrent, "--prompt", "The with statement", "--max-new-tokens", LONG, "--seed", 3,
                                "--json").out)  # fmt: skip
    assert record["text"] == result.out
    assert record["prompt"] == "The with statement"
    assert (record["tokens"], record["ended"], record["seed"]) == (LONG, "length", 3)
    assert record["seconds"] > record["prompt_seconds"] > 0
    assert record["tokens_per_second"] > 0
    other = json.loads(succeed(*recurrent, "--prompt", "The with statement", "--max-new-tokens", LONG, "--json").out)
    assert other["text"] != result.out
    again = succeed(*recurrent, "--prompt", "The with statement", "--max-new-tokens", LONG, "--seed", other["seed"])
    assert again.out == other["text"], "a seed that was drawn is on record"


def test_the_likeliest_token(recurrent, models):
    greedy = succeed(*recurrent, "--prompt", "It", "--greedy", "--max-new-tokens", 30).out
    assert succeed(*recurrent, "--prompt", "It", "--temperature", 0, "--max-new-tokens", 30).out == greedy
    tokenizer = prose.tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "recurrent")
    ids = tokenizer("It", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert greedy == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    penalised = succeed(*recurrent, "--prompt", "It", "--greedy", "--max-new-tokens", 30, "--repetition-penalty", 2)
    assert penalised.out != greedy
    flags = ["--temperature", 0.5, "--top-k", 3, "--top-p", 0.9, "--min-p", 0.1, "--seed", 1]
    assert succeed(*recurrent, "--prompt", "It", *flags, "--max-new-tokens", 30).out != greedy


def test_where_a_prompt_can_come_from(recurrent, tmp_path, monkeypatch):
    flags = ["--greedy", "--max-new-tokens", 9]
    expected = succeed(*recurrent, "--prompt", "Ein Käse\n", *flags).out
    (tmp_path / "p.txt").write_text("Ein Käse\n", encoding="utf-8")
    assert succeed(*recurrent, "--prompt-file", tmp_path / "p.txt", *flags).out == expected
    for dash in (["-"], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Ein Käse\n".encode())))
        assert succeed(*recurrent, *dash, *flags).out == expected
    assert succeed(*recurrent, "--prompt", "", *flags).out, "the bos token begins"


def test_stopped_and_continued_is_never_stopped(recurrent, tmp_path):
    """Everything is in the state; what comes next is a new prompt, or nothing."""
    flags = ["--greedy", "--max-new-tokens"]
    whole = succeed(*recurrent, "--prompt", "It was", *flags, 60).out
    state = tmp_path / "a.state"
    first = succeed(*recurrent, "--prompt", "It was", *flags, 25, "--state-out", state).out
    assert cf.State.load(state).read.item() == len(prose.tokenizer()("It was")["input_ids"]) + 25
    deaf = succeed(*recurrent, "--state-in", state, "--no-state", *flags, 20).out
    second = succeed(*recurrent, "--state-in", state, *flags, 20, "--state-out", state).out
    assert second != deaf, "the state takes part"
    third = succeed(*recurrent, "--state-in", state, "--prompt", "", *flags, 15).out
    assert first + second + third == whole
    answer = succeed(*recurrent, "--state-in", state, "--prompt", " in May", *flags, 20).out
    model = transformers.AutoModelForCausalLM.from_pretrained(recurrent[1])
    tokenizer = prose.tokenizer()
    ids = tokenizer("It was")["input_ids"]
    ids = model.generate(torch.tensor([ids]), max_new_tokens=45, do_sample=False, pad_token_id=0)[0].tolist()
    ids = torch.tensor([ids + tokenizer(" in May")["input_ids"]])
    out = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert answer == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_overlap_state_and_precision(recurrent):
    flags = ["--prompt", "It was", "--greedy", "--max-new-tokens", 60]
    texts = [
        succeed(*recurrent, *flags, *more).out
        for more in ([], ["--overlap", 2], ["--overlap", 5], ["--no-state"], ["--dtype", "bfloat16"])
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[:4])) == 3, "another overlap and no state are other texts"
    model = transformers.AutoModelForCausalLM.from_pretrained(recurrent[1], dtype=torch.bfloat16)
    ids = prose.tokenizer()("It was", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert texts[4] == prose.tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_model_may_end_it(models, tmp_path):
    copy = shutil.copytree(models / "recurrent", tmp_path / "copy")
    model = transformers.AutoModelForCausalLM.from_pretrained(copy)
    prompt = prose.tokenizer()("It", return_tensors="pt")["input_ids"]
    ids = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :].tolist()
    model.generation_config.eos_token_id = [ids[4], 1]
    model.generation_config.save_pretrained(copy)
    result = succeed("generate", copy, "--prompt", "It", "--greedy", "--max-new-tokens", 20, "--json")
    assert "the model ended the text" in result.err
    record = json.loads(result.out)
    assert (record["tokens"], record["ended"]) == (ids.index(ids[4]) + 1, "eos")


def test_a_plain_model_up_to_its_positions(models):
    plain = ["generate", models / "plain", "--prompt", "It was", "--greedy", "--json"]
    record = json.loads(succeed(*plain, "--max-new-tokens", 5).out)
    assert (record["tokens"], record["ended"]) == (5, "length")
    result = succeed(*plain)
    record = json.loads(result.out)
    assert record["ended"] == "positions"
    assert record["tokens"] + record["prompt_tokens"] == POSITIONS
    assert "all that" in result.err
    assert "a recurrent model has no limit" in result.err
    message = fail("generate", models / "plain", "--prompt", "word " * 40, code=2)
    assert "positions. Give a shorter prompt, or make the model recurrent" in message
    for flag in (["--no-state"], ["--overlap", 3], ["--state-out", models / "s"]):
        assert f"{flag[0]} is for recurrent models" in fail(*plain, *flag, code=2)


# --- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_was_written(recurrent, tmp_path, monkeypatch, as_json):
    put, state, handler = text_generation.IncrementalStreamer.put, tmp_path / "state", signal.getsignal(signal.SIGINT)

    def interrupted(self, value):
        put(self, value)
        if len(self.times) == 23:
            os.kill(os.getpid(), signal.SIGINT)

    flags = ["--prompt", "It was", "--greedy", "--max-new-tokens", 60]
    whole = succeed(*recurrent, *flags).out
    with monkeypatch.context() as patch:
        patch.setattr(text_generation.IncrementalStreamer, "put", interrupted)
        result = run(*recurrent, *flags, "--state-out", state, *["--json"] * as_json)
    assert result.code == 130
    assert "interrupted" in result.err
    text = json.loads(result.out)["text"] if as_json else result.out
    assert whole.startswith(text)
    assert text
    more = json.loads(succeed(*recurrent, "--state-in", state, "--greedy", "--max-new-tokens", 60, "--json").out)
    assert (text + more["text"]).startswith(whole)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_ends_at_once(recurrent, monkeypatch):
    def interrupted(self, value):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(text_generation.IncrementalStreamer, "put", interrupted)
    assert fail(*recurrent, "--prompt", "It was", code=130) == "interrupted"


def test_a_reader_that_has_enough(recurrent):
    """`carryforward generate ... | head -c 10`: no message, no traceback."""
    into_a_closed_pipe(*recurrent, "--prompt", "It")


# --- pieces of text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["naïve café – 日本語のテキスト 🙂 done", "a  b\n\n c ", "🙂", "\ufffd x"])
def test_pieces_join_to_the_text(text):
    """One byte a token: nothing is given out before its character is whole."""
    tokenizer = prose.tokenizer()
    ids = tokenizer(text)["input_ids"]
    shown = []
    pieces = text_generation.IncrementalStreamer(tokenizer, tokenizer("before ")["input_ids"], shown.append)
    pieces.put(torch.tensor([[1, 2, 3]]))
    for token in ids:
        pieces.put(torch.tensor([token]))
    pieces.end()
    assert "".join(shown) == pieces.text == text
    assert len(pieces.times) == len(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_half_a_character_at_the_end_is_shown():
    tokenizer = prose.tokenizer()
    pieces = text_generation.IncrementalStreamer(tokenizer, [])
    pieces.put(torch.tensor([[]]))
    for token in tokenizer("a🙂")["input_ids"][:-1]:
        pieces.put(torch.tensor([token]))
    assert pieces.text == "a"
    pieces.end()
    assert pieces.text.startswith("a\ufffd")


@pytest.mark.parametrize("text", ["a🙂b", "🙂🙂", "ab\ufffd\ufffdc"])
def test_two_runs_over_a_character(text):
    """Wherever the first one ends, the second shows what it left."""
    tokenizer = prose.tokenizer()
    ids = tokenizer(text)["input_ids"]
    for first in range(len(ids) + 1):
        shown = []
        for before, new in ((0, ids[:first]), (first, ids[first:])):
            pieces = text_generation.IncrementalStreamer(
                tokenizer, ids[:before], shown.append, continues=before > 0, continued=before == 0
            )
            pieces.put(torch.tensor([[]]))
            for token in new:
                pieces.put(torch.tensor([token]))
            pieces.end()
        assert "".join(shown) == text, first
    prompt = text_generation.IncrementalStreamer(tokenizer, ids, shown.append)
    prompt.put(torch.tensor([ids]))
    prompt.put(torch.tensor(tokenizer("!")["input_ids"]))
    assert prompt.text == "!", "what stands in a prompt is not shown again"


def test_two_runs_over_a_character_on_a_windows_border(recurrent, tmp_path, monkeypatch):
    """A state has no tokens from before its window, and the first ones of a character may be there."""
    text = "ab🙂🙂🙂🙂🙂c"
    script = prose.tokenizer()(text)["input_ids"]
    assert len(script) > WINDOW + 4

    def scripted(input_ids, scores):
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([next(tokens)]), 0.0)

    monkeypatch.setattr(text_generation, "_refuse_nan", scripted)
    for first in range(WINDOW - 5, WINDOW + 4):
        tokens, state = iter(script), tmp_path / f"{first}.state"
        begun = succeed(*recurrent, "--prompt", "x", "--max-new-tokens", first, "--state-out", state).out
        more = succeed(*recurrent, "--state-in", state, "--max-new-tokens", len(script) - first).out
        assert begun + more == text, first


@pytest.mark.parametrize("what", ["junk", "nothing"])
def test_what_never_is_a_character_costs_no_more_and_more(what):
    tokenizer = prose.tokenizer()
    smile = tokenizer("🙂")["input_ids"]
    stray = smile[-1] if what == "junk" else tokenizer.eos_token_id
    pieces = text_generation.IncrementalStreamer(tokenizer, tokenizer("a")["input_ids"])
    decode, most = pieces._decode, 0

    def measured(ids):
        nonlocal most
        most = max(most, len(ids))
        return decode(ids)

    pieces._decode = measured
    pieces.put(torch.tensor([[]]))
    for token in [stray] * 50 + smile:
        pieces.put(torch.tensor([token]))
    pieces.end()
    assert most < 20
    assert pieces.text == "\ufffd" * 50 * (what == "junk") + "🙂"


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt: give --prompt TEXT, --prompt-file FILE or - for standard input"),
        (["text"], "'text' is not a prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "there are several prompts"),
        (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens 0: it must be at least 1"),
        (["--prompt", "a", "--temperature", -1], "--temperature -1.0: it must be at least 0"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature nan: it must be a finite number"),
        (["--prompt", "a", "--top-k", 0], "--top-k 0: it must be at least 1"),
        (["--prompt", "a", "--top-p", 1.5], "--top-p 1.5: it must be above 0 and at most 1"),
        (["--prompt", "a", "--min-p", 2], "--min-p 2.0: it must be from 0 to 1"),
        (["--prompt", "a", "--repetition-penalty", 0], "--repetition-penalty 0.0: it must be above 0"),
        (["--prompt", "a", "--greedy", "--top-k", 3], "--top-k has no effect on greedy decoding"),
        (["--prompt", "a", "--greedy", "--temperature", 1], "--temperature has no effect"),
        (["--prompt", "a", "--dtype", "int8"], "--dtype int8: it must be one of float32, bfloat16, float16"),
        (["--prompt", "a", "--device", "tpu"], "--device tpu: PyTorch finds no such device here"),
        (["--prompt", "a", "--overlap", WINDOW], "overlap=12 must be at least 0"),
        (["--prompt", "a", "--state-out", "none/here"], "--state-out none/here: there is no such folder"),
        (["--prompt", "a", "--state-out", "/"], "--state-out / is a folder: give the name of a file"),
        (["--prompt", "a", "--state-in", "/"], "--state-in / is a folder: give the file that --state-out wrote"),
        (["--prompt", "a", "--seed", 2**70], f"--seed {2**70}: it must be below 2**64"),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8 (character 1). Convert it"),
    ],
)
def test_commands_that_make_no_sense(recurrent, arguments, message):
    assert message in fail(*recurrent, *arguments, code=2)


def test_files_that_cannot_be_used(recurrent, models, tmp_path):
    assert "No such file" in fail(*recurrent, "--prompt-file", tmp_path / "none", code=2)
    assert "there is no such file" in fail(*recurrent, "--prompt", "a", "--state-in", tmp_path / "none", code=2)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "latin is not UTF-8 (byte 0xe9 at offset 3)" in fail(*recurrent, "--prompt-file", tmp_path / "latin", code=2)
    assert "not a state written by State.save" in fail(*recurrent, "--state-in", tmp_path / "latin", code=2)
    assert "there is no such folder" in fail("generate", tmp_path / "none", "--prompt", "a", code=2)
    state = tmp_path / "state"
    succeed(*recurrent, "--prompt", "a", "--max-new-tokens", 3, "--state-out", state)
    message = fail(*recurrent, "--prompt", "a", "--state-in", state, "--overlap", 0, code=2)
    assert "state comes from another model or overlap" in message
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "recurrent")
    model.fresh_state(1).save(state)
    assert "nothing was read" in fail(*recurrent, "--state-in", state, code=2)
    model.advance_state(torch.tensor([[5, 6], [7, 8]])).save(state)
    message = fail(*recurrent, "--state-in", state, code=2)
    assert "holds 2 texts, and one is generated at a time" in message
    code = message[message.index("carryforward.State") :].removesuffix(" is the first.")
    exec(code.replace("first.state", str(state)), {"carryforward": cf})
    succeed(*recurrent, "--state-in", state, "--max-new-tokens", 3)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_state_that_cannot_be_saved(recurrent, tmp_path, monkeypatch, as_json):
    """The text is given out all the same."""

    def full(tensors, path, metadata):
        raise SafetensorError("No space left on device")

    flags = ["--prompt", "It was", "--greedy", "--max-new-tokens", 20]
    expected = succeed(*recurrent, *flags).out
    monkeypatch.setattr("safetensors.torch.save_file", full)
    result = run(*recurrent, *flags, "--state-out", tmp_path / "state", *["--json"] * as_json)
    assert result.code == 1
    assert "could not be written: No space left" in result.err
    assert (json.loads(result.out)["text"] if as_json else result.out) == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["--greedy", "--temperature=1"])
def test_weights_that_are_not_numbers(models, tmp_path, how):
    copy = shutil.copytree(models / "recurrent", tmp_path / "copy")
    model = transformers.AutoModelForCausalLM.from_pretrained(copy)
    with torch.no_grad():
        model.base.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    model.save_pretrained(copy)
    assert "the model's logits are NaN" in fail("generate", copy, "--prompt", "a", how, code=1)


@pytest.mark.parametrize("recent", ["", "null", "[1.5]", '["a"]', "{", "[[1]]"])
def test_damaged_metadata_of_a_state_is_named(models, tmp_path, recent):
    name, state = models / "recurrent", tmp_path / "state"
    transformers.AutoModelForCausalLM.from_pretrained(name).fresh_state(1).save(state, recent_tokens=recent)
    message = fail("generate", name, "--state-in", state, "--prompt", "a", "--max-new-tokens", "1", code=2)
    assert "is damaged: its metadata has no valid recent_tokens" in message
