# SPDX-License-Identifier: Apache-2.0
"""Texts of several lengths, a tokenizer for them, and tiny models that read it."""

from . import prose, tiny

TOKENIZER = prose.tokenizer()
PROSE = "".join(prose.TOPICS[:3])
TEXTS = ["A few words.", "", PROSE[:900], PROSE[50:110], PROSE[100:1500]]


def model_of(name, head=None, **fields):
    """A tiny model with the vocabulary of `TOKENIZER`."""
    return tiny.recurrent(name, head, settings={"vocab_size": len(TOKENIZER)}, **fields).eval()
