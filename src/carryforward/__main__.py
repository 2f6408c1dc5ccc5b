# SPDX-License-Identifier: Apache-2.0
"""`python -m carryforward` is the command line; also what `torchrun -m carryforward` starts."""

from .cli.main import main

main()
