# SPDX-License-Identifier: Apache-2.0
"""The command line, called in the same process."""

from typer.main import get_command
from typer.testing import CliRunner

from carryforward.cli.main import app
from carryforward.cli.options import repeat_flags


def invoke(*arguments, stdin=None):
    """The command line, in this process."""
    return CliRunner().invoke(app, repeat_flags(list(map(str, arguments)), get_command(app)), input=stdin)
