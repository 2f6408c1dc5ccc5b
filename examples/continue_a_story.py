# SPDX-License-Identifier: Apache-2.0
"""Generate a story, save the state, and continue the story later without reading its beginning again.

    python continue_a_story.py [MODEL]

MODEL is the folder or Hub name of a recurrent model, such as a run of `carryforward train`. The default is the small
model that comes with the package: recurrence is added to it without training.
"""

import sys
import tempfile
from pathlib import Path

import torch

import carryforward as cf
from carryforward.models.loading import load_causal


def load(name):
    """A recurrent model and its tokenizer."""
    loaded = load_causal(name)
    if not loaded.recurrent:
        sys.exit(f"{name} is a plain model: give a recurrent one, such as a run of `carryforward train`.")
    return loaded.model, loaded.tokenizer


def small_model():
    """The model that comes with the package, with keys and values carried from each window of 64 tokens to the next."""
    base, tokenizer = cf.load_bundled()
    return cf.add_recurrence(base.eval(), tokenizer=tokenizer, window=64), tokenizer


def main():
    torch.manual_seed(0)
    model, tokenizer = load(sys.argv[1]) if len(sys.argv) > 1 else small_model()
    options = {"max_new_tokens": 150, "do_sample": True, "return_dict_in_generate": True, "pad_token_id": 0}

    def encode(text):
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "story.safetensors"
        evening = model.generate(encode("It was a dark and stormy night"), **options)
        last = evening.sequences[:, -1:]  # the last token was generated, but not read yet
        model.advance_state(last, state=evening.past_key_values.state).save(file)
        print("Evening:", tokenizer.decode(evening.sequences[0]))

        morning = model.generate(encode(" The next morning"), state=cf.State.load(file), **options)
        print("\nMorning:", tokenizer.decode(morning.sequences[0]).strip())
        print(
            f"\n{morning.past_key_values.state.read.item():,} tokens were read in windows of "
            f"{model.config.recurrence.window}. The saved state has {file.stat().st_size:,} bytes."
        )


if __name__ == "__main__":
    main()
