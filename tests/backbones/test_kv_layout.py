# SPDX-License-Identifier: Apache-2.0
"""Keys of any layer, put as they stand in a state, turn and score as in the layer itself."""

import pytest
import torch

from carryforward.backbones.kv_layout import KVLayout
from carryforward.backbones.rotations import LAYOUTS, rotate_keys

LAYERS = [  # heads, key size, value size, rotated
    KVLayout(2, 8, 8, 8, 2, 8, 8),
    KVLayout(2, 8, 8, 8, 2, 8, 8, neighbours=True),
    KVLayout(2, 8, 6, 4, 3, 12, 8),
    KVLayout(1, 10, 8, 4, 2, 14, 8, neighbours=True),
    KVLayout(2, 8, 8, 0, 2, 16, 8),
]


@pytest.mark.parametrize("layout", LAYERS)
def test_what_stands_in_a_state_comes_back(layout):
    keys = torch.randn(2, layout.heads, 5, layout.key_size)
    values = torch.randn(2, layout.heads, 5, layout.value_size)
    assert layout.keys(keys).shape == layout.values(values).shape == (2, layout.state_heads, 5, layout.state_size)
    torch.testing.assert_close(layout.layer_keys(layout.keys(keys)), keys, rtol=0, atol=0)
    torch.testing.assert_close(layout.layer_values(layout.values(values)), values, rtol=0, atol=0)


def test_layouts_that_change_nothing_are_plain():
    assert [layout.is_plain for layout in LAYERS] == [True, False, False, False, False]


@pytest.mark.parametrize("layout", LAYERS)
def test_scores_stay_what_they_are(layout):
    queries = torch.randn(1, 2 * layout.heads, 3, layout.key_size, dtype=torch.double)
    keys = torch.randn(1, layout.heads, 5, layout.key_size, dtype=torch.double)
    values = torch.randn(1, layout.heads, 5, layout.value_size, dtype=torch.double)

    def attend(queries, keys, values):
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, scale=0.3, enable_gqa=True)

    expected = attend(queries, keys, values).transpose(1, 2)
    output = attend(layout.keys(queries), layout.keys(keys), layout.values(values)).transpose(1, 2)
    torch.testing.assert_close(layout.layer_output(output, 2 * layout.heads), expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rotating_in_a_state_is_rotating_in_the_layer(name):
    """The layer rotates as its model says; a state rotates halves, and is wider."""
    rotated, layout = 4, LAYOUTS[name]
    in_state = KVLayout(2, 10, 10, rotated, 2, 14, 8, layout.neighbours)
    angles = torch.randn(rotated // 2, dtype=torch.double)
    key = torch.randn(1, 2, 1, 10, dtype=torch.double)
    expected = key.clone()
    sign = -1 if layout.backwards else 1
    for i, angle in enumerate(angles):
        pair = (2 * i, 2 * i + 1) if layout.neighbours else (i, i + rotated // 2)
        x, y = (key[..., n] for n in pair)
        expected[..., pair[0]] = x * angle.cos() - sign * y * angle.sin()
        expected[..., pair[1]] = y * angle.cos() + sign * x * angle.sin()
    written = {"halves": angles.repeat(2), "neighbours": angles.repeat_interleave(2), "once": angles}[layout.angles]
    cos, sin = layout.in_halves(written.cos(), written.sin())
    missing = torch.zeros(2, dtype=torch.double)
    cos, sin = (torch.cat([x[:2], fill, x[2:], fill]) for x, fill in ((cos, missing + 1), (sin, missing)))
    torch.testing.assert_close(in_state.layer_keys(rotate_keys(in_state.keys(key), cos, sin)), expected)
