# SPDX-License-Identifier: Apache-2.0
"""`carryforward lm-eval`."""

import sys
from importlib.util import find_spec

import typer

from ..utils.install import install_hint
from .errors import user_errors

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # arguments are read by lm-eval
_SUBCOMMANDS = ("run", "ls", "validate")


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval with a model read in windows: --model_args pretrained=MODEL,use_state=false --tasks wikitext, ...

    All arguments are those of lm-eval (`lm-eval run --help`). Its --model is "carryforward" by default.
    """
    with user_errors():
        if find_spec("lm_eval") is None:
            raise ValueError(f"this command needs lm-eval: {install_hint('lm-eval')}")
        from lm_eval.__main__ import cli_evaluate

        from ..evaluation import lm_eval as _  # noqa: F401  # registers the model

        sys.argv = ["lm-eval", *_with_model(context.args)]
        cli_evaluate()


def _with_model(arguments: list[str]) -> list[str]:
    """The arguments of lm-eval, with a model where they name none."""
    subcommand = arguments[0] if arguments and arguments[0] in _SUBCOMMANDS else "run"
    rest = arguments[1:] if arguments[:1] == [subcommand] else arguments
    named = {argument.partition("=")[0] for argument in rest} & {"--model", "-M", "--config", "-C"}
    return [subcommand, *(["--model", "carryforward"] if subcommand == "run" and not named else []), *rest]
