# SPDX-License-Identifier: Apache-2.0
"""Search documents of any length: embed each as one vector, and rank them by cosine similarity to a question.

    python search_documents.py [MODEL] [QUESTION]

MODEL is the folder or Hub name of an encoder or a recurrent model, such as sentence-transformers/all-MiniLM-L6-v2. The
default is a tiny encoder with random weights: it runs without a download, but its ranking means nothing.
"""

import sys
from pydoc_data.topics import topics

import numpy as np
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel, BertTokenizerFast

import carryforward as cf
from carryforward.models.loading import load_recurrent


def tiny_encoder():
    """An encoder with random weights, and its tokenizer. Its 96 positions are for a window and 32 carried ones."""
    words = BertWordPieceTokenizer()
    words.train_from_iterator(list(topics.values())[:20], vocab_size=500, show_progress=False)
    tokenizer = BertTokenizerFast(tokenizer_object=words._tokenizer)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    base = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=96, **sizes))
    return cf.add_recurrence(base, tokenizer=tokenizer, window=64, overlap=16), tokenizer


def main():
    use_state = True
    if len(sys.argv) > 1:
        loaded = load_recurrent(sys.argv[1])
        model, tokenizer, use_state = loaded.model, loaded.tokenizer, not loaded.untrained
    else:
        model, tokenizer = tiny_encoder()
    question = sys.argv[2] if len(sys.argv) > 2 else "How does the with statement call a context manager?"
    names = sorted(topics)[:30]
    documents = cf.encode(model, [topics[name] for name in names], tokenizer, use_state=use_state)
    (query,) = cf.encode(model, [question], tokenizer, use_state=use_state)
    similarity = documents @ query / np.linalg.norm(documents, axis=1) / np.linalg.norm(query)
    print(question)
    for i in np.argsort(-similarity)[:3]:
        print(f"{similarity[i]:.3f}  {names[i]} ({len(topics[names[i]].split()):,} words)")


if __name__ == "__main__":
    main()
