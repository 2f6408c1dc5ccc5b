# SPDX-License-Identifier: Apache-2.0
"""The state: split, concatenated, saved, and continued from."""

import dataclasses

import pytest
import torch
import transformers as hf
from helpers import tiny
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close

import carryforward as cf
from carryforward.models.headless import without_head


@pytest.fixture
def model():
    return tiny.recurrent("gpt2", slots=2, insert_at=(1, 3), state_per_layer=True)


def read(model, length, seed):
    ids = tiny.documents(1, length, seed)
    return ids, model(ids, labels=ids)


def same(a: cf.State, b: cf.State) -> None:
    assert a.signature == b.signature
    for name in ("started", "pending", "read"):
        assert getattr(a, name).equal(getattr(b, name))
    assert_close(a.memory["vector"][a.started], b.memory["vector"][b.started])
    for row, pending in enumerate(a.pending):
        assert a.tokens[row, :pending].equal(b.tokens[row, :pending])


def test_documents_of_different_progress_continue_as_one_batch(model):
    """One has just started, one is inside its first window and one is far along: each continues as if alone."""
    (_, young), (_, old) = read(model, 5, 1), read(model, 30, 2)
    fresh = model(tiny.documents(1, 1, 3))
    batch = cf.State.cat([fresh.state, young.state, old.state])
    assert batch.started.tolist() == [False, False, True]
    assert batch.read.tolist() == [1, 5, 30]
    more = tiny.documents(3, 17, 4)
    together = model(more, labels=more, state=batch)
    alone = [
        model(more[i : i + 1], labels=more[i : i + 1], state=out.state) for i, out in enumerate((fresh, young, old))
    ]
    assert_close(together.nll_sum, sum(out.nll_sum for out in alone))
    assert together.n_scored == sum(out.n_scored for out in alone) == 3 * 17
    for piece, out in zip(together.state.split(), alone, strict=True):
        same(piece, out.state)
    same(cf.State.cat(together.state.split(2)), together.state)
    same(together.state[torch.tensor([False, True, False])], alone[1].state)
    same(together.state[[2, 0]], cf.State.cat([alone[2].state, alone[0].state]))


def test_a_saved_state_is_loaded_unchanged(model, tmp_path):
    _, out = read(model, 30, 1)
    out.state.save(tmp_path / "state.safetensors")
    loaded = cf.State.load(tmp_path / "state.safetensors")
    same(loaded, out.state)
    assert not loaded.memory["vector"].requires_grad
    more = tiny.documents(1, 12, 9)
    assert_close(model(more, state=loaded).logits, model(more, state=out.state).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"], "no temporary file is left"


def test_a_truncated_or_foreign_file_is_refused(model, tmp_path):
    _, out = read(model, 30, 1)
    path = tmp_path / "state.safetensors"
    out.state.save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="is truncated or not a state written by State.save"):
        cf.State.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"not one written by State\.save"):
        cf.State.load(path)


def test_a_failed_save_leaves_the_old_file(model, tmp_path, monkeypatch):
    _, out = read(model, 30, 1)
    path = tmp_path / "state.safetensors"
    out.state.save(path)
    before = path.read_bytes()

    def full_disk(tensors, filename, metadata=None):
        filename.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        out.state[:1].save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_gradients_flow_through_a_state_until_it_is_detached(model):
    _, out = read(model, 30, 1)
    assert out.state.memory["vector"].requires_grad
    assert cf.State.cat(out.state.split()).memory["vector"].requires_grad
    assert not out.state.detach().memory["vector"].requires_grad
    with torch.no_grad():
        assert not read(model, 30, 1)[1].state.memory["vector"].requires_grad


def test_states_of_other_models_overlaps_and_sizes_are_refused(model):
    _, out = read(model, 30, 1)
    more = tiny.documents(1, 5)
    with pytest.raises(ValueError, match="another model or overlap"):
        tiny.recurrent("llama")(more, state=out.state)
    with pytest.raises(ValueError, match="overlap 2.*overlap 0"):
        model(more, state=out.state, overlap=0)
    with pytest.raises(ValueError, match="state has 1 rows, input_ids has 2"):
        model(tiny.documents(2, 5), state=out.state)
    with pytest.raises(ValueError, match="cannot be concatenated: they come from different models"):
        cf.State.cat([out.state, read(tiny.recurrent("llama"), 30, 1)[1].state])
    assert len(out.state[0]) == 1, "a batch of one: pipelines index outputs by row"
    with pytest.raises(IndexError):
        out.state[1]


def test_an_ended_document_cannot_be_continued():
    model = tiny.recurrent("bert")
    out = model(tiny.documents(1, 20))
    with pytest.raises(ValueError, match="final=False"):
        model(tiny.documents(1, 5), state=out.state)


def test_encoder_documents_of_different_progress_continue_as_one_batch():
    """One has pending labels, or a window that was classified; the other has none."""
    model = tiny.recurrent("bert")
    ids = tiny.documents(2, 34)
    states = [model(ids[:1, :4], final=False).state, model(ids[1:, :20], labels=ids[1:, :20], final=False).state]
    more = tiny.documents(2, 9, 5)
    together = model(more, labels=more, state=cf.State.cat(states))
    alone = [model(more[i : i + 1], labels=more[i : i + 1], state=state) for i, state in enumerate(states)]
    assert_close(together.nll_sum, alone[0].nll_sum + alone[1].nll_sum)
    assert together.n_scored == alone[0].n_scored + alone[1].n_scored

    model = tiny.recurrent("bert", "sequence")
    states = [model(ids[:1, :4], final=False).state, model(ids[1:, :20], final=False).state]
    together = model(more, state=cf.State.cat(states)).logits
    for i, state in enumerate(states):
        assert_close(together[i : i + 1], model(more[i : i + 1], state=state).logits, rtol=1e-4, atol=1e-5)


def test_pending_labels_are_scored_even_if_the_next_piece_has_none():
    model = tiny.recurrent("bert")
    ids = tiny.documents(2, 37)
    whole = model(ids, labels=ids)
    first = model(ids, labels=ids, final=False)
    last = model(state=first.state)
    assert first.n_scored + last.n_scored == whole.n_scored == 74
    assert_close(first.nll_sum + last.nll_sum, whole.nll_sum)
    assert last.logits is not None


def test_a_state_from_inference_mode_can_be_trained_on(model):
    ids = tiny.documents(1, 30)
    with torch.inference_mode():
        state = model(ids[:, :20]).state
    model(ids[:, 20:], labels=ids[:, 20:], state=state.detach()).loss.backward()
    assert all(weight.grad is not None for weight in model.memory.parameters())


def test_a_state_read_without_memory_carries_nothing(model):
    """If the first piece is read with use_state=False, the second starts like a document's first window."""
    ids = tiny.documents(1, 30)
    first = model(ids[:, :20], use_state=False).state
    assert not first.started.any()
    logits = model(ids[:, 20:], state=first).logits
    assert first.pending.item() == 8, "the window from token 12 on is full, but its last target is still to come"
    assert_close(logits, model(ids[:, 12:]).logits[:, 8:])


def test_the_state_does_not_grow_with_the_document(model):
    sizes = []
    for length in (50, 500):
        state = read(model, length, 1)[1].state
        sizes.append(state.memory["vector"].numel() + state.tokens.numel())
        assert state.tokens.shape[1] <= model.config.recurrence.window
    assert sizes[1] <= sizes[0] + model.config.recurrence.window


# --- the model of a state ------------------------------------------------------------------------------------------


def changed(model, name="base"):
    """The same model with other weights in one part."""
    other = tiny.recurrent("gpt2", slots=2, insert_at=(1, 3), state_per_layer=True)
    with torch.no_grad():
        next(getattr(other, name).parameters()).add_(0.5)
    return other


@pytest.mark.parametrize("part", ["base", "memory"])
def test_a_state_of_other_weights_is_refused(model, part):
    ids, more = tiny.documents(1, 30), tiny.documents(1, 5)
    state, other = model.advance_state(ids), changed(model, part)
    assert state.model
    calls = (other, other.advance_state, lambda ids, **kwargs: other.generate(ids, max_new_tokens=2, **kwargs))
    for call in calls:
        with pytest.raises(ValueError, match="state comes from another model, whose weights or settings differ"):
            call(more, state=state)
        call(more, state=state, allow_other_model=True)
    taken_over = other.advance_state(more, state=state, allow_other_model=True)
    other(more, state=taken_over)
    with pytest.raises(ValueError, match="cannot be concatenated: they come from different models"):
        cf.State.cat([state, taken_over])


def test_a_state_of_other_settings_is_refused():
    """Of equal shapes, so that only the settings tell them apart."""
    models = [tiny.recurrent("gpt2", pooling=pooling) for pooling in ("mean", "max")]
    state = models[0].advance_state(tiny.documents(1, 30))
    with pytest.raises(ValueError, match="weights or settings differ"):
        models[1](tiny.documents(1, 5), state=state)
    bert = tiny.recurrent("bert", prefix=(2,)), tiny.recurrent("bert", prefix=(4,))
    state = bert[0](tiny.documents(1, 30), final=False).state
    with pytest.raises(ValueError, match="weights or settings differ"):
        bert[1](tiny.documents(1, 5), state=state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_belongs_to_its_model_saved_and_loaded_and_in_other_precision(model, tmp_path, dtype):
    model.eval()
    state = model.advance_state(tiny.documents(1, 30))
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert again.fresh_state(1).model == state.model
    again(tiny.documents(1, 5), state=state)
    again.config.recurrence = dataclasses.replace(again.config.recurrence, keep_graph=True, bptt_windows=2)
    assert again.fresh_state(1).model == state.model, "how gradients are computed does not change a state"


def test_states_pass_between_a_model_and_the_same_without_its_head(model):
    ids = tiny.documents(1, 30)
    state = without_head(model).advance_state(ids[:, :20])
    assert_close(model(ids[:, 20:], state=state).logits, model(ids).logits[:, 20:])


def test_training_steps_do_not_name_a_model(model):
    """Their states are carried from step to step, though the weights change in between."""
    ids = tiny.documents(1, 30)
    model(ids)  # its fingerprint is known before the first step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(ids, labels=ids)
    out.loss.backward()
    optimizer.step()
    assert out.state.model == ""
    model.train()
    assert model(ids, state=out.state.detach()).state.model == ""
    model.eval()
    with torch.no_grad():
        named = model(ids, labels=ids, state=out.state.detach()).state
    assert named.model == model.fresh_state(1).model != ""
    for parameter in model.parameters():
        parameter.data.add_(0.1)  # leaves no trace
    model(ids, labels=ids, state=named).loss.backward()  # a step is not checked, and makes the fingerprint new
    with pytest.raises(ValueError, match="another model"):
        model(ids, state=named)


def test_weights_that_are_not_here_have_no_fingerprint():
    with torch.device("meta"):
        model = cf.RecurrentForCausalLM(tiny.recurrent("gpt2").config)
    assert model.fresh_state(1).model == ""


# --- damaged files -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model, tmp_path):
    """The file of a state, its tensors and its metadata."""
    path = tmp_path / "state.safetensors"
    model.advance_state(tiny.documents(2, 30)).save(path, note="kept")
    with safe_open(path, framework="pt") as file:
        return path, {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def test_a_flipped_bit_is_found(saved):
    path, _, _ = saved
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for position in (header, (header + len(content)) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state.safetensors is damaged: .*(digest|holds|dtype|shape)"):
            cf.State.load(path)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"tokens": None}, {}, "the tensor 'tokens' is missing"),
        ({"memory.vector": None}, {}, "the tensor 'memory' is missing"),
        ({"extra": torch.zeros(2)}, {}, "the tensor 'extra' does not belong to a state"),
        ({"read": torch.zeros(3, dtype=torch.long)}, {}, "the tensor '.*' has shape"),
        (
            {"tokens": torch.zeros(2, dtype=torch.long)},
            {},
            "the tensor 'pending' holds .6, 6., which must be between 0",
        ),
        ({"read": torch.tensor(3)}, {}, "the tensor '.*' has shape"),
        ({"memory.vector": torch.tensor(3.0)}, {}, "the tensor 'memory.vector' has shape"),
        ({"tokens": torch.zeros(2, 9)}, {}, "the tensor 'tokens' has dtype torch.float32"),
        ({"started": torch.zeros(2)}, {}, "the tensor 'started' has dtype torch.float32"),
        ({"memory.vector": torch.zeros(2, 2, 2, 16, dtype=torch.long)}, {}, "the tensor '.*' has dtype torch.int64"),
        ({"pending": torch.tensor([99, 1])}, {}, "the tensor 'pending' holds .99, 1."),
        ({"pending": torch.tensor([-1, 1])}, {}, "the tensor 'pending' holds .-1, 1."),
        ({}, {"signature": None}, "its metadata has no 'signature'"),
        ({}, {"ended": None}, "its metadata has no 'ended'"),
        ({}, {"ended": "maybe"}, "its metadata has ended='maybe'"),
        ({}, {"note": "other"}, "its content differs from the digest"),
        ({}, {"signature": "another"}, "its content differs from the digest"),
    ],
)
def test_damaged_content_is_named(saved, tensors, metadata, message):
    path, old_tensors, old_metadata = saved
    save_file(
        {name: x for name, x in {**old_tensors, **tensors}.items() if x is not None}, path,
        metadata={name: x for name, x in {**old_metadata, **metadata}.items() if x is not None},
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"state file .*state.safetensors is damaged: {message}"):
        cf.State.load(path)


def test_files_without_a_digest_are_read(saved):
    path, tensors, metadata = saved
    save_file(tensors, path, metadata={name: x for name, x in metadata.items() if name not in ("digest", "model")})
    assert cf.State.load(path).model == ""


def test_folders_and_missing_files_are_named(tmp_path):
    for path, problem in ((tmp_path, "is a folder"), (tmp_path / "none", "does not exist")):
        with pytest.raises(ValueError, match=f"state file {path} {problem}: give a file written by State.save"):
            cf.State.load(path)


def test_a_state_is_described_in_a_line(model):
    text = repr(model.advance_state(tiny.documents(2, 300)))
    assert "2 rows, 300 to 300 tokens read; memory: vector [2, 2, 2, 16]" in text
    assert len(text) < 400
