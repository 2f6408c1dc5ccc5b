# SPDX-License-Identifier: Apache-2.0
"""Files for the tests of embeddings."""

import json

import pytest
from helpers.embedding import PROSE, TOKENIZER, model_of


@pytest.fixture
def saved(tmp_path):
    """A folder with a model and nine documents: the folder, the model and the documents' rows."""
    model = model_of("bert", "none")
    model.save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    rows = [{"id": f"doc {i}", "text": PROSE[i * 50 : i * 50 + 40 + 13 * i]} for i in range(9)]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path, model, rows
