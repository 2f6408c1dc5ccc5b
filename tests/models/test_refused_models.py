# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be loaded: by a name that is not there, of a type that is not supported, without the Hub."""

import huggingface_hub
import pytest
import transformers as hf
from helpers import prose, tiny
from helpers.commands import fail

from carryforward.models import loading, model_files


@pytest.fixture
def unreachable(monkeypatch):
    """A Hub that cannot be reached; returns the list of requests."""
    requests = []

    def refuse(url, **options):
        requests.append((url, options))
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    model_files._hub_options.cache_clear()
    yield requests
    model_files._hub_options.cache_clear()


def test_without_the_hub_a_name_fails_after_one_request(unreachable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ValueError, match="'my-modle' is no folder here .* cannot be reached .*mean 'my-model'"):
        loading.load_causal("my-modle")
    ((url, options),) = unreachable
    assert url.endswith("/my-modle/resolve/main/config.json")
    assert options["timeout"] <= 10
    assert not options.get("retry_on_errors")


def test_without_the_hub_a_cached_model_is_loaded_from_the_cache(unreachable, monkeypatch):
    monkeypatch.setattr(model_files, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    assert model_files.find("owner/name") == ("owner/name", {"local_files_only": True})


def test_a_hub_that_answers_leaves_the_rest_to_transformers(unreachable, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    assert model_files.find("owner/name") == ("owner/name", {})


def test_a_folder_with_nearly_this_name_is_named(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ValueError, match=f"there is no such folder. Did you mean '{tmp_path}/runs'?"):
        model_files.load_config(str(tmp_path / "rusn"))


def test_another_type_is_refused_in_one_sentence(tmp_path):
    """transformers lists some 200 classes."""
    config = hf.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    hf.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    prose.tokenizer().save_pretrained(tmp_path / "t5")
    for command in (["add", tmp_path / "t5", "--out", tmp_path / "out"], ["evaluate", tmp_path / "t5", "--window", 8]):
        message = fail(*command, code=2)
        assert "of type 't5'" in message
        assert len(message) < 500
    assert not (tmp_path / "out").exists()


def test_a_recurrent_model_of_an_unknown_class_is_refused(saved):
    file = saved / "config.json"
    prose.tokenizer().save_pretrained(saved)
    content = file.read_text()
    assert "RecurrentForCausalLM" in content
    file.write_text(content.replace("RecurrentForCausalLM", "os.system"))
    with pytest.raises(ValueError, match=r"config.json has architectures=\['os.system'\], not one of"):
        loading.load_recurrent(str(saved))


def test_a_config_without_its_recurrence_is_refused(saved):
    """Its defaults would make another model of it."""
    tiny.recurrent("llama", slots=0, recent=3).save_pretrained(saved)
    file = saved / "config.json"
    file.write_text(file.read_text().replace('"recurrence"', '"recurence"'))
    with pytest.raises(ValueError, match="config.json has no recurrence"):
        hf.AutoModelForCausalLM.from_pretrained(saved)
