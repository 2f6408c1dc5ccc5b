# SPDX-License-Identifier: Apache-2.0
"""A story that goes on another day: the state is saved instead of the transcript.

    python continue_a_story.py [MODEL]

MODEL is a recurrent model by folder or name, such as a run of `carryforward train`. Without one, a tiny one is made on
the spot: it has 64 positions, writes many times as many tokens, and has learned nothing to tell.
"""

import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import carryforward as cf
from carryforward.models.loading import load_causal


def tiny_model():
    """Something to run without a download."""
    words = ByteLevelBPETokenizer()
    words.train_from_iterator(list(topics.values())[:20], vocab_size=500, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=500, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=None)
    )
    return cf.add_recurrence(base.eval(), window=64), tokenizer


def main():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        loaded = load_causal(sys.argv[1])
        if not loaded.recurrent:
            sys.exit(f"{sys.argv[1]} is a plain model: give a recurrent one, such as a run of `carryforward train`.")
        model, tokenizer = loaded.model, loaded.tokenizer
    else:
        model, tokenizer = tiny_model()
    settings = {"max_new_tokens": 200, "do_sample": True, "return_dict_in_generate": True, "pad_token_id": 0}
    bare = {"add_special_tokens": False, "return_tensors": "pt"}  # a story has no beginning in its middle

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "story.safetensors"
        evening = model.generate(tokenizer("It was a dark and stormy night", **bare)["input_ids"], **settings)
        last = evening.sequences[:, -1:]  # given out, but not read yet
        model.advance_state(last, state=evening.past_key_values.state).save(saved)
        print("Evening:", tokenizer.decode(evening.sequences[0]))

        turn = tokenizer("The next morning", **bare)["input_ids"]
        morning = model.generate(turn, state=cf.State.load(saved), **settings)
        print("\nMorning:", tokenizer.decode(morning.sequences[0]))
        print(
            f"\n{morning.past_key_values.state.read.item():,} tokens were read in windows of "
            f"{model.config.recurrence.window}; the state is a file of {saved.stat().st_size:,} bytes."
        )


if __name__ == "__main__":
    main()
