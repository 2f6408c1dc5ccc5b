# SPDX-License-Identifier: Apache-2.0
"""HTML reports of random token gains, without a model."""

import numpy as np

from carryforward.analysis.html_report import render_html
from carryforward.analysis.token_gains import Predictions, TokenGains
from carryforward.windows import schedule

# tokens that would break a page in which texts are not escaped
MARKUP = ["</script><script>document.title='1'</script>", "<script>", "<!--", " {{data}}", "&amp;", "\r\n", "\0", "🙂",
          "", " a"]  # fmt: skip


def random_report(count, window=128, seed=0, pieces=MARKUP):
    """Token gains made of random numbers, the text of each token, and the page."""
    random = np.random.default_rng(seed)
    pieces = [pieces[i % len(pieces)] for i in range(count)]
    ids, windows = np.arange(count) % 400, list(schedule(count, window))

    def predictions(log_probs):
        top_log_probs = -np.sort(random.exponential(2.0, (count, 5)))
        return Predictions(log_probs, random.integers(0, 400, (count, 5)), top_log_probs)

    without = -random.exponential(3.0, count)
    with_state = np.minimum(without + random.normal(0.1, 0.8, count), -1e-3)
    with_state[: windows[0].score_to] = without[: windows[0].score_to]
    without[0] = with_state[0] = np.nan
    attention = random.random((4, 3))
    attention[0] = np.nan
    tokens = TokenGains(ids, predictions(with_state), predictions(without), windows, attention, random.random(4))
    provenance = {"carryforward": "0", "commit": "unknown", "date": "today", "command": "carryforward inspect <a>",
                  "versions": {"python": "3"}, "hardware": {"cpu": "one"}}  # fmt: skip
    page = render_html(tokens, pieces, lambda ids: [f"<b>{i}</b></script>" for i in ids],
                       title="<script>document.title='2'</script>", model="m", provenance=provenance)  # fmt: skip
    return tokens, pieces, page
