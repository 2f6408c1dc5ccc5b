# SPDX-License-Identifier: Apache-2.0
"""Which document answers a question? Whole documents as vectors, however long.

    python search_documents.py [MODEL] [QUESTION]

MODEL is a recurrent model or an encoder by name or folder, such as sentence-transformers/all-MiniLM-L6-v2. Without
one, a tiny untrained encoder is made on the spot: it shows the way, and finds nothing.
"""

import sys
from pydoc_data.topics import topics

import numpy as np
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast

import carryforward as cf
from carryforward.models.loading import load_recurrent


def tiny_encoder():
    """Something to run without a download."""
    words = BertWordPieceTokenizer()
    words.train_from_iterator(list(topics.values())[:20], vocab_size=500, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=words._tokenizer)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    base = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape))
    return cf.add_recurrence(base, tokenizer=tokenizer, window=64, overlap=16), tokenizer


def main():
    trained = len(sys.argv) > 1
    if trained:
        loaded = load_recurrent(sys.argv[1])
        model, tokenizer, trained = loaded.model, loaded.tokenizer, not loaded.untrained
    else:
        model, tokenizer = tiny_encoder()
    question = sys.argv[2] if len(sys.argv) > 2 else "How does the with statement call a context manager?"
    names = sorted(topics)[:30]
    documents = cf.encode(model, [topics[name] for name in names], tokenizer, use_state=trained)
    (asked,) = cf.encode(model, [question], tokenizer, use_state=trained)
    closeness = documents @ asked / np.linalg.norm(documents, axis=1) / np.linalg.norm(asked)
    print(question)
    for i in np.argsort(-closeness)[:3]:
        print(f"{closeness[i]:.3f}  {names[i]} ({len(topics[names[i]].split()):,} words)")


if __name__ == "__main__":
    main()
