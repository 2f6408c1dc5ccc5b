# SPDX-License-Identifier: Apache-2.0
"""Presets, and the limits of defaults: one place for all."""

PRESET_MEMORIES = {"recommended": ("kv",), "paper": ("vector",)}  # the memory of each preset
PAPER_WINDOW = 300  # tokens of a window in the paper's language models
PAPER_QA_WINDOW = 512  # and in its question answering, if the model has so many positions
MAX_DEFAULT_WINDOW = 1024  # a default window is no longer, however many positions a model has
# the kinds that a memory can stand beside; one that is not listed: any that can stand beside it
COMBINED_WITH: dict[str, tuple[str, ...]] = {"tokens": (), "associative": ("kv",)}
DEFAULT_KEY_SIZE = 64  # of the memory "associative"
DEFAULT_MEMORY_TOKENS = 16  # of the memories "tokens" and "associative"
DEFAULT_SINKS = 4  # attention sinks of the memory "kv"
DEFAULT_GROUP_WINDOWS = 16  # windows of a group, where they see their right neighbours
FAR_SELECTIONS = ("attention", "dissimilar", "merged", "lookup")  # how its far positions are selected
POOLINGS = ("mean", "max", "attention")  # of the memory "vector": how positions become a vector
POOLED_LAYERS = ("all", "last", "below")  # and of which layers
MASK_PROBABILITY = 0.15  # of masked language models: the share of tokens that are to be predicted
TASKS = ("causal-lm", "masked-lm", "classification", "token-classification")  # what `train` and `evaluate` can do
