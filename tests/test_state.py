# SPDX-License-Identifier: Apache-2.0
"""The state: split, concatenated, saved, and continued from."""

import pytest
import torch
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf


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
    from safetensors.torch import save_file

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
