# SPDX-License-Identifier: Apache-2.0
"""`carryforward add` as people use it."""

import pytest
from helpers import prose

import carryforward as cf
from carryforward.cli.main import main
from carryforward.models.position_offsets import needs_position_offsets


def test_a_model_that_reads_on(tmp_path, capsys):
    prose.save_model(tmp_path / "plain")
    with pytest.raises(SystemExit) as end:
        main(["add", str(tmp_path / "plain"), "--out", str(tmp_path / "on"), "--window", "16", "--sinks", "2"])
    told = capsys.readouterr()
    assert end.value.code == 0
    assert told.out == f"{tmp_path / 'on'}: windows of 16 tokens, 6 + 2 positions carried on\n"
    recurrence = cf.RecurrentForCausalLM.from_pretrained(tmp_path / "on").config.recurrence
    assert (recurrence.window, recurrence.slots, recurrence.kept, recurrence.sinks) == (16, 0, 6, 2)
    assert not needs_position_offsets(cf.RecurrentForCausalLM.from_pretrained(tmp_path / "on"))
    with pytest.raises(SystemExit) as end:
        main(["add", str(tmp_path / "plain"), "--out", str(tmp_path / "much"), "--kept", "12"])
    assert end.value.code == 0
    assert "windows of 16 tokens, 12 + 4 positions" in capsys.readouterr().out
    for model, message in (("plain", "exists already"), ("on", "is recurrent already")):
        out = "on" if model == "plain" else "other"
        with pytest.raises(SystemExit) as end:
            main(["add", str(tmp_path / model), "--out", str(tmp_path / out)])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
