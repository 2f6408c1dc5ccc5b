# SPDX-License-Identifier: Apache-2.0
"""A pass key in a long text: a number is said once, and asked for at the end.

The number stands at any depth, all equally likely, and is scored as a whole.
"""

from typing import Any, ClassVar

import numpy as np

from ..utils.checks import check_count
from .filler import Filler
from .text_task import Story, TextTask


class PassKey(TextTask):
    """Find a number. Sizes count tokens.

    Attributes:
        digits: of the number, the first of which is not 0.
    """

    name: ClassVar[str] = "passkey"

    def __init__(self, tokenizer: Any, filler: Filler, *, digits: int = 5):
        check_count("digits", digits)
        if digits > 18:
            raise ValueError(f"digits={digits}: use at most 18.")
        super().__init__(tokenizer, filler)
        self.digits = digits
        self.chance = 1 / (9 * 10 ** (digits - 1))

    def settings(self) -> dict[str, Any]:
        return {"digits": self.digits, "text": self.filler.name}

    def story(self, rng: np.random.Generator) -> Story:
        key = rng.integers(10 ** (self.digits - 1), 10**self.digits)
        fact = f"The pass key is {key}. Do not forget it: {key} is the pass key."
        return Story([fact], " What is the pass key? The pass key is", f" {key}", depth=rng.random())
