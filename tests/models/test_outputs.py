# SPDX-License-Identifier: Apache-2.0
"""What a call of a recurrent model returns: losses, logits, sums and counts."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from helpers import tiny
from torch.testing import assert_close

import carryforward as cf

IDS = tiny.documents(2, 37)


def test_logits_are_returned_without_labels_or_on_request():
    model = tiny.recurrent("gpt2")
    out = model(IDS)
    assert out.loss is None
    assert out.logits.shape == (2, 37, tiny.VOCABULARY)
    scored = model(IDS, labels=IDS)
    assert scored.logits is None
    both = model(IDS, labels=IDS, return_logits=True)
    assert_close(both.logits, out.logits)
    assert_close(both.loss, scored.loss)
    assert_close(both.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()))
    both.loss.backward()
    expected = tiny.gradients(model)
    scored.loss.backward()
    tiny.assert_same_gradients(expected, tiny.gradients(model))


def test_logits_to_keep_selects_columns():
    model = tiny.recurrent("llama")
    whole = model(IDS).logits
    for count in (1, 5, 20, 37, 99):
        assert_close(model(IDS, logits_to_keep=count).logits, whole[:, -count:])
    columns = torch.tensor([30, 2, 2, 17, -1, 36])
    assert_close(model(IDS, logits_to_keep=columns).logits, whole[:, columns])
    mask = torch.ones_like(IDS)
    mask[0, :9] = 0
    assert_close(
        model(IDS, attention_mask=mask, logits_to_keep=3).logits, model(IDS, attention_mask=mask).logits[:, -3:]
    )


def test_the_loss_is_that_of_a_base_model_s_own_forward():
    class Scaled(hf.GPT2LMHeadModel):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.1
            return out

    torch.manual_seed(0)
    base = Scaled(tiny.CONFIGS["gpt2"]()).eval()
    with torch.no_grad():
        for weight in base.parameters():
            weight.normal_(std=0.3)
    model, ids = cf.add_recurrence(base, window=8, memory="vector"), tiny.documents(2, 30)
    losses = [model(ids, labels=ids, return_logits=with_logits).loss for with_logits in (False, True)]
    assert_close(*losses)


def test_backward_hooks_of_the_output_layer_are_called():
    model, called, ids = tiny.recurrent("gpt2", keep_graph=True), [], tiny.documents(1, 30)
    model.base.lm_head.register_full_backward_hook(lambda *args: called.append(1))
    model(ids, labels=ids).loss.backward()
    assert called


def test_the_loss_is_a_sum_over_a_count():
    model = tiny.recurrent("gpt2")
    labels = IDS.clone()
    labels[0, :10] = -100
    out = model(IDS, labels=labels)
    assert out.n_scored == 36 + 27
    assert_close(out.loss, out.nll_sum / out.n_scored)
    assert_close(model(IDS, labels=labels, num_items_in_batch=7).loss, out.nll_sum / 7)
    nothing = model(IDS[:, :1], labels=IDS[:, :1])
    assert (nothing.loss, nothing.nll_sum, nothing.n_scored) == (0, 0, 0)


def test_return_dict_false_returns_a_tuple():
    loss, nll_sum, n_scored, _ = tiny.recurrent("gpt2")(IDS, labels=IDS, return_dict=False)
    assert_close(loss, nll_sum / n_scored)


@pytest.mark.parametrize("problem", ["regression", "single_label_classification", "multi_label_classification"])
def test_the_loss_of_a_classifier_follows_its_problem_type(problem):
    model = tiny.recurrent("roberta", "sequence")
    model.config.problem_type = problem
    labels = {"regression": torch.randn(2, 3), "multi_label_classification": torch.tensor([[1.0, 0, 1], [0, 1, 0]])}
    out = model(IDS, labels=labels.get(problem, torch.tensor([0, 2])))
    out.loss.backward()
    assert out.logits.shape == (2, 3)
    assert model.memory.vector.networks[0][-1].weight.grad.abs().max() > 0


def test_double_precision_is_kept():
    results = []
    for keep_graph in (False, True):
        model = tiny.recurrent("gpt2", keep_graph=keep_graph).double()
        out = model(IDS, labels=IDS)
        out.loss.backward()
        results.append(tiny.gradients(model))
        assert out.loss.dtype == torch.float64
    for name in results[0]:
        assert_close(results[0][name], results[1][name], rtol=1e-10, atol=1e-14)
