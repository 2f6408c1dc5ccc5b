# SPDX-License-Identifier: Apache-2.0
"""The result of `carryforward evaluate`. Its command line is tested in `tests/cli`."""

import json

from helpers import prose, tiny

import carryforward as cf
from carryforward.evaluation.evaluate import evaluate
from carryforward.settings.commands import EvaluateSettings


def test_a_result_holds_the_recurrence_with_its_memories(tmp_path):
    model = tiny.recurrent("gpt2", settings={"vocab_size": prose.VOCABULARY}, slots=2, recent=3, sinks=1)
    model.save_pretrained(tmp_path / "model")
    prose.tokenizer().save_pretrained(tmp_path / "model")
    prose.save_topics(tmp_path / "texts", 2)
    settings = EvaluateSettings(data=str(tmp_path / "texts"), split="train", max_document_tokens=20)
    result = json.loads(json.dumps(evaluate(str(tmp_path / "model"), settings, device="cpu")))
    assert cf.RecurrenceConfig(**result["model"]["recurrence"]) == model.config.recurrence
    assert [memory["kind"] for memory in result["model"]["recurrence"]["memory"]] == ["vector", "kv"]
    with_state, control = result["rows"]
    assert with_state["flops"]["recurrence"] > 0 == control["flops"]["recurrence"]
