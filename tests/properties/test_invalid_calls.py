# SPDX-License-Identifier: Apache-2.0
"""Invalid calls of the public functions, systematically: each raises a ValueError that names the argument.

A call is a function of this file, by name; a case gives one of its arguments a wrong value. The message must name that
argument, or what the case says instead.
"""

import functools

import numpy as np
import pytest
import torch
import transformers as hf
from helpers import prose, tiny
from helpers.corpora import corpus_of

import carryforward as cf
from carryforward.evaluation.token_losses import loss_by_depth, token_losses

IDS = tiny.documents(2, 20)
LISTS = IDS.tolist()
MASK = torch.ones_like(IDS)
NAN = float("nan")


class Case:
    """A wrong value of an argument, and what the message must name."""

    def __init__(self, value, names=None):
        self.value, self.names = value, names


# --- wrong values, by kind of argument -------------------------------------------------------------------------------

NO_COUNT = [0, -1, "2", True, 1.5, NAN, None, [1]]
NO_OPTIONAL_COUNT = [value for value in NO_COUNT if value is not None]
NO_FLAG = [1, 0, "no", torch.tensor(True), NAN]
NO_OVERLAP = [-1, 8, 2.0, "2", True, torch.tensor(2), NAN, [2]]
NO_FUNCTION = [5, "print", [print]]
NO_IDS = [
    LISTS, IDS.numpy(), "text", 3.5, IDS.float(), IDS.bool(), IDS.to(torch.complex64), IDS[0], IDS[None], IDS[:0],
    IDS[:, :0], IDS.to("meta"), IDS.clone().fill_(67), IDS.clone().fill_(-1),
]  # fmt: skip
NO_MASK = [
    MASK.tolist(), MASK.numpy(), "ones", 1, MASK[:, :-1], MASK[0], MASK[:1], MASK.to("meta"), MASK * 0.5, MASK * NAN,
    torch.zeros(2, 20).index_fill(1, torch.tensor([19]), -torch.inf), MASK * 2, MASK - 2,
    Case(MASK * torch.tensor([[1], [0]]), "input_ids"),
]  # fmt: skip
NO_LABELS = [
    LISTS, IDS.numpy(), "text", 5, IDS.float(), IDS.bool(), IDS[:, :-1], IDS[0], IDS[:1], IDS.to("meta"),
    IDS.clone().fill_(67), IDS.clone().fill_(-1),
]  # fmt: skip
NO_STATE = ["state", 5, {}, IDS, Case(lambda: causal().fresh_state(3)), Case(lambda: llama().fresh_state(2))]
NO_COLUMNS = [
    -1, True, 1.5, "all", None, [1], torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(3), torch.tensor([20]),
    torch.ones(19, dtype=torch.bool), torch.tensor([0]).to("meta"),
]  # fmt: skip
NO_ITEMS = [0, -1, "3", True, NAN, torch.tensor([1, 2]), [3]]
NO_TOKENIZER = ["gpt2", 5, hf.GPT2Tokenizer, Case(lambda: prose.tokenizer())]
NO_DOCUMENTS = ["text", 5, {"input_ids": LISTS}, ["text"], [None], [5], [[1.5, 2.5]], [[[1, 2]]], [["a", "b"]],
                [{"input_ids": [1, 2]}], [[True, False]]]  # fmt: skip
BEYOND = [Case([[5, 67]], "token id 67"), Case([[5, -1]], "token id -1")]

READING = {"input_ids": NO_IDS, "attention_mask": NO_MASK, "state": NO_STATE, "overlap": NO_OVERLAP,
           "allow_other_model": [*NO_FLAG, None]}  # fmt: skip
UNSUPPORTED = {"inputs_embeds": [IDS.float()], "position_ids": [IDS], "output_attentions": [True]}
OF_ENCODERS = {**READING, "use_state": [*NO_FLAG, None], "final": [*NO_FLAG, None],
               "token_type_ids": [MASK, MASK.tolist(), "zero"]}  # fmt: skip

# --- calls -----------------------------------------------------------------------------------------------------------


@functools.cache
def causal():
    return tiny.recurrent("gpt2")


@functools.cache
def llama():
    return tiny.recurrent("llama")


@functools.cache
def encoder(head=None):
    return tiny.recurrent("bert", head)


@functools.cache
def answering():
    return tiny.answering("bert")


@functools.cache
def plain(name="gpt2"):
    return tiny.base(name)


@functools.cache
def reading():
    """A model with the vocabulary of the tests' tokenizer, and that tokenizer."""
    tokenizer = prose.tokenizer()
    return tiny.recurrent("gpt2", settings={"vocab_size": len(tokenizer)}), tokenizer


def call_causal(**kwargs):
    return causal()(**{"input_ids": IDS, **kwargs})


def call_masked(**kwargs):
    return encoder()(**{"input_ids": IDS, **kwargs})


def call_token_classifier(**kwargs):
    return encoder("token")(**{"input_ids": IDS, **kwargs})


def call_classifier(**kwargs):
    return encoder("sequence")(**{"input_ids": IDS, **kwargs})


def call_headless(**kwargs):
    return encoder("none")(**{"input_ids": IDS, **kwargs})


def call_answering(**kwargs):
    if "end_positions" in kwargs:
        kwargs["start_positions"] = torch.tensor([0, 0])
    return answering()(**{"input_ids": IDS, "question_ids": [[5, 6], [7]], **kwargs})


def advance_state(**kwargs):
    return causal().advance_state(**{"input_ids": IDS, **kwargs})


def generate(**kwargs):
    arguments = {"inputs": IDS, "max_new_tokens": 2, "do_sample": False, **kwargs}
    return causal().generate(arguments.pop("inputs"), **arguments)


def fresh_state(**kwargs):
    return causal().fresh_state(**{"batch": 2, **kwargs})


def state_split(**kwargs):
    return causal().fresh_state(2).split(**kwargs)


def state_rows(rows):
    return causal().fresh_state(2)[rows]


def state_cat(**kwargs):
    return cf.State.cat(**kwargs)


def state_to(**kwargs):
    return causal().fresh_state(2).to(**kwargs)


def state_load(**kwargs):
    return cf.State.load(**kwargs)


def state_save(**kwargs):
    return causal().fresh_state(2).save("/nowhere/state", **kwargs)


def add_recurrence(**kwargs):
    arguments = {"model": plain("gpt2"), "window": 8, "documents": tiny.TEXT, **kwargs}
    return cf.add_recurrence(arguments.pop("model"), **arguments)


def add_to_encoder(**kwargs):
    return cf.add_recurrence(plain("bert"), **{"window": 11, "memory": "vector", "prefix": (), **kwargs})


def recurrence_config(**kwargs):
    return cf.RecurrenceConfig(**{"memory": "vector", **kwargs})


def vector_memory(**kwargs):
    return cf.VectorMemoryConfig(**kwargs)


def kv_memory(**kwargs):
    return cf.KVMemoryConfig(**kwargs)


def encode(**kwargs):
    model, tokenizer = reading()
    arguments = {"model": model, "texts": ["A text."], "tokenizer": tokenizer, **kwargs}
    return cf.encode(arguments.pop("model"), **arguments)


def answer(**kwargs):
    return cf.answer(**{"model": answering(), "question": "a", "document": "b", "tokenizer": characters, **kwargs})


def characters(texts, return_offsets_mapping=False, **kwargs):
    """A tokenizer of sorts: every text is five tokens."""
    return {"input_ids": [[5, 6, 7, 8, 9]] * len(texts), "offset_mapping": [[(0, 1)] * 5] * len(texts)}


characters.is_fast = True


def perplexity(**kwargs):
    return cf.perplexity(**{"model": causal(), "documents": LISTS, **kwargs})


def perplexity_of_plain(**kwargs):
    return cf.perplexity(**{"model": plain(), "documents": LISTS, "window": 8, **kwargs})


def losses_of_tokens(**kwargs):
    return token_losses(**{"model": causal(), "documents": LISTS, **kwargs})


def losses_by_depth(**kwargs):
    return loss_by_depth(**{"model": causal(), "documents": LISTS, "depths": [0, 1], **kwargs})


def measure(**kwargs):
    return cf.measure_position_offsets(**{"model": tiny.recurrent("gpt2", recent=4), "documents": tiny.TEXT, **kwargs})


def documents_of(**kwargs):
    return cf.Documents.of(**{"token_lists": LISTS, **kwargs})


def tokenise(**kwargs):
    return cf.tokenise(**{"corpus": corpus_of("a"), "tokenizer": reading()[1], **kwargs})


def flops(**kwargs):
    return cf.flops_per_token(**{"config": causal().config, **kwargs})


def schedule(**kwargs):
    return list(cf.windows.schedule(**{"length": 20, "window": 8, **kwargs}))


def training_arguments(**kwargs):
    return cf.RecurrentTrainingArguments(output_dir="/nowhere/run", use_cpu=True, report_to="none", **kwargs)


def trainer(**kwargs):
    arguments = {"model": tiny.recurrent("gpt2"), "args": training_arguments(), "train_dataset": LISTS, **kwargs}
    return cf.RecurrentTrainer(**arguments)


def question_trainer(**kwargs):
    args = cf.QuestionTrainingArguments(output_dir="/nowhere/run", use_cpu=True, report_to="none")
    arguments = {"model": answering(), "args": args, "train_dataset": [], "tokenizer": characters, **kwargs}
    return cf.QuestionTrainer(**arguments)


def fast_path(value):
    tiny.recurrent("gpt2").fast_path = value


CASES = {
    call_causal: {
        **READING, **UNSUPPORTED, "labels": NO_LABELS, "use_state": NO_FLAG, "logits_to_keep": NO_COLUMNS,
        "return_logits": NO_FLAG, "num_items_in_batch": NO_ITEMS, "past_key_values": ["cache", IDS],
    },
    call_masked: {**OF_ENCODERS, "labels": NO_LABELS, "return_logits": NO_FLAG, "num_items_in_batch": NO_ITEMS},
    call_token_classifier: {**OF_ENCODERS, "labels": [*NO_LABELS, IDS.clamp(max=3)]},
    call_classifier: {
        **OF_ENCODERS, "num_items_in_batch": [5],
        "labels": [[0, 1], "text", 1, torch.tensor([0, 3]), torch.tensor([0, -1]), torch.tensor([0, 1, 2]), IDS,
                   torch.tensor(1), torch.tensor([0.0, 1.0]), torch.zeros(2, 4), torch.tensor([0, 1]).to("meta")],
    },
    call_headless: {**OF_ENCODERS, **UNSUPPORTED},
    call_answering: {
        **UNSUPPORTED, "input_ids": NO_IDS, "attention_mask": NO_MASK, "overlap": [-1, 12, 2.0, "2", True],
        "use_state": NO_FLAG, "progress": NO_FUNCTION,
        "question_ids": [None, "ab", [5, 6], [[5]], [[5], [6], [7]], [["a"], ["b"]], [[1.5], [2]], [[True], [5]],
                         [[67], [5]], [[-1], [5]], torch.tensor([5, 6]), torch.ones(2, 2), torch.ones(3, 2).long(),
                         Case([[5] * 12, [6]], "overlap|window|question")],
        "question_mask": [torch.ones(2, 2)],
        "start_positions": [[0, 1], "a", torch.tensor([0.0, 1.0]), torch.tensor([0, 20]), torch.tensor([0])],
        "end_positions": [torch.tensor([0, 20]), torch.tensor([[0, 1]]), torch.tensor([-1, 0])],
        "answer_kinds": [[0, 1], torch.tensor([0, 4]), torch.tensor([0.0, 1.0]), torch.tensor([0]), "yes"],
    },
    advance_state: {**READING, "use_state": [*NO_FLAG, None], "final": [*NO_FLAG, None]},
    generate: {
        "inputs": [Case(value, "input_ids") for value in NO_IDS], "state": NO_STATE, "overlap": NO_OVERLAP,
        "use_state": NO_FLAG, "allow_other_model": [*NO_FLAG, None], "past_key_values": ["cache", IDS],
        "attention_mask": [MASK[:, :-1], MASK.tolist(), MASK * 0.5, MASK * torch.tensor([1] * 19 + [0])],
        "cache_implementation": ["static"], "guidance_scale": [2.0],
    },
    fresh_state: {"batch": NO_COUNT, "overlap": NO_OVERLAP},
    state_split: {"size": NO_COUNT},
    state_rows: {"rows": ["a", None, 1.5, {0}, torch.tensor([True]), torch.tensor([0.5]), ["a"], [0.5], [[0], [1]]]},
    state_cat: {"states": [[], None, 5, "states", [1], {}, [None]]},
    state_to: {"device": ["nowhere", 1.5, "cuda:99"]},
    state_load: {"path": [Case("/nowhere/state", "/nowhere/state"), Case("/", "state file /"), 5, None]},
    state_save: {"signature": ["x"], "note": [5, None]},
    add_recurrence: {
        "model": [None, torch.nn.Linear(2, 2), 5, causal],
        "config": ["kv", 5, [8]], "preset": ["best", 5, True], "head": ["lm", 5, True],
        "memory": [5, "lstm", [], {}, {"kind": "lstm"}, [5], ["kv", "kv"], True,
                   Case({"kind": "kv", "recnt": 5}, "recnt")],
        "tokenizer": NO_TOKENIZER, "window": [0, -1, "8", 8.0, True, NAN, [8], 41], "overlap": NO_OVERLAP,
        "documents": ["text", 5, [], [[]], [["a"]], [[1.5] * 100], [[67] * 2000], [None], ["text"], {"a": [1]}],
        "widow": [8],
    },
    add_to_encoder: {
        "prefix": ["ab", 5, [1.5], [True], [-1], [67], Case([1] * 11, "special tokens")],
        "suffix": ["ab", [67]], "separator": [5, [67]],
    },
    recurrence_config: {
        "window": NO_COUNT, "overlap": [-1, 300, "0", True, 1.5, None, NAN], "memory": [None, 5, "lstm", []],
        "bptt_windows": NO_OPTIONAL_COUNT, "keep_windows": [-1, "all", 1.5, True, None, NAN],
        "block_windows": [0, -1, "all", 1.5, True, None, NAN],
        "keep_graph": NO_FLAG, "offload_states": NO_FLAG, "slots": [2],
    },
    vector_memory: {
        "slots": NO_COUNT, "pooling": ["median", None, 5, ["mean"]], "pooled_layers": ["first", None, 5, [1]],
        "hidden_sizes": [200, "200", [0], [1.5], [True], None], "residual": NO_FLAG, "state_per_layer": NO_FLAG,
        "insert_at": [0, -1, "every", [1, 1], [], 1.5, True, None, NAN, ["a"]],
        "init_std": [-1.0, NAN, "small", None, float("inf"), True], "window": [8],
    },
    kv_memory: {"recent": NO_OPTIONAL_COUNT, "sinks": [-1, "4", True, 1.5, NAN], "window": [8]},
    encode: {
        "model": [None, "gpt2"], "texts": ["text", None, 5, [1], [None], ["\ud800"], [["a"]], [b"a"]],
        "tokenizer": [None, "gpt2", 5, hf.GPT2Tokenizer], "output": ["vectors", None, 5],
        "pooling": ["sum", 5, ["max"]], "chunks": [5, [[(0, 1)]]],
        "normalize": NO_FLAG, "special_tokens": NO_FLAG, "prompt": [5, ["a"], "\ud800"],
        "overlap": NO_OVERLAP, "use_state": [*NO_FLAG, None], "batch_size": NO_COUNT, "progress": NO_FUNCTION,
    },
    answer: {
        "model": [None, "bert", causal, plain], "question": [None, 5, ["a"], "\ud800"],
        "document": [None, 5, ["a"], "", "\ud800"], "tokenizer": [None, "bert", 5, *NO_TOKENIZER],
        "top_k": NO_COUNT, "max_answer_tokens": NO_COUNT, "allow_none": [*NO_FLAG, None],
        "overlap": [-1, 12, 2.0, "2", True], "use_state": NO_FLAG,
    },
    perplexity: {
        "model": [None, "gpt2", encoder, Case(lambda: plain("bert"))], "documents": [*NO_DOCUMENTS, None, *BEYOND],
        "overlap": NO_OVERLAP, "window": [9, "8"], "use_state": [*NO_FLAG, None], "reset_every": NO_OPTIONAL_COUNT,
        "batch_size": NO_COUNT, "progress": [*NO_FUNCTION, None],
    },
    perplexity_of_plain: {"window": [None, 0, -1, "8", True, 8.0, NAN, 41], "overlap": NO_OVERLAP, "documents": BEYOND},
    losses_of_tokens: {
        "model": [None, encoder, plain], "documents": [*NO_DOCUMENTS, None, *BEYOND], "overlap": NO_OVERLAP,
        "use_state": [*NO_FLAG, None], "batch_size": NO_COUNT, "progress": [*NO_FUNCTION, None],
    },
    losses_by_depth: {
        "model": [None, encoder, plain], "documents": [*NO_DOCUMENTS, None, Case([[5]], "document")],
        "depths": [[], None, 5, "ab", [-1], [1.5], [True], ["a"]], "batch_size": NO_COUNT, "progress": NO_FUNCTION,
    },
    measure: {
        "model": [None, "gpt2", plain], "rows": NO_COUNT, "progress": NO_FUNCTION,
        "documents": ["text", 5, None, [], [[]], [["a"]], [[1.5] * 100], [None], {"a": [1]}, Case([[67] * 99], "67")],
    },
    documents_of: {
        "token_lists": ["text", None, 5, [["a"]], [[1.5]], [[-1]], [[2**33]], [5], [[[1]]], [[True]]],
        "words": ["ab", 5, [1], ["a", "b"], [1.5, 2.5]], "bytes": [[1]], "line_ends": [[1, 2, 3]], "names": [5, ["a"]],
    },
    tokenise: {
        "corpus": ["corpus", None, 5, LISTS], "tokenizer": [None, "gpt2", 5, hf.GPT2Tokenizer],
        "max_tokens": NO_OPTIONAL_COUNT, "bos": [*NO_FLAG, None], "progress": NO_FUNCTION,
    },
    flops: {"config": [None, 5], "window": [0, "8", True, 1.5], "overlap": [-1, "2", True, 1.5], "use_state": NO_FLAG},
    schedule: {"window": NO_COUNT, "overlap": [-1, 8, "2", True, 1.5, None, NAN]},
    training_arguments: {
        "windows_per_sample": NO_COUNT, "eval_tokens": NO_COUNT, "train_tokens": NO_OPTIONAL_COUNT,
        "save_tokens": NO_OPTIONAL_COUNT, "freeze_base": NO_FLAG, "carry_state": NO_FLAG, "use_state": NO_FLAG,
        "label_smoothing_factor": [0.1], "recurrence_learning_rate": [-1.0, NAN, "fast", True],
    },
    trainer: {
        "model": [None, "gpt2", plain, encoder], "args": [None, {}, hf.TrainingArguments],
        "train_dataset": [*NO_DOCUMENTS, None, Case([], "documents"), Case([[5]], "documents")],
        "eval_dataset": [*[value for value in NO_DOCUMENTS if not isinstance(value, dict)], {"a": LISTS}, [[5]]],
    },
    question_trainer: {"model": [None, causal, plain], "train_dataset": [[], None, ["question"], 5]},
    fast_path: {"value": [Case(value, "fast_path") for value in ("quick", None, True, 5)]},
}  # fmt: skip

LIST = [
    (call, name, value) for call, arguments in CASES.items() for name, values in arguments.items() for value in values
]


def _id(parameter):
    if hasattr(parameter, "__name__"):
        return parameter.__name__
    value = parameter.value if isinstance(parameter, Case) else parameter
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}-{'x'.join(map(str, value.shape))}".removeprefix("torch.")
    return ascii(value)[:20] if not isinstance(value, np.ndarray) else "array"


MODELS = (causal, llama, encoder, plain)  # are values where a model is expected


@pytest.mark.parametrize(("call", "argument", "value"), LIST, ids=_id)
def test_the_argument_is_named(call, argument, value):
    names = argument
    if isinstance(value, Case):
        value, names = value.value() if callable(value.value) else value.value, value.names or argument
    value = value() if any(value is model for model in MODELS) else value
    with pytest.raises(ValueError, match=names) as raised:
        call(**{argument: value})
    assert len(str(raised.value)) < 600, "one or two sentences"


@pytest.mark.parametrize(
    "call",
    [call_causal, call_masked, call_classifier, call_headless, call_answering, advance_state, encode, perplexity],
)
def test_unknown_arguments_are_named(call):
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        call(unknown=1)


def test_there_are_many():
    assert len(LIST) > 700
