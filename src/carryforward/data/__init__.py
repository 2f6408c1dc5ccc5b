# SPDX-License-Identifier: Apache-2.0
"""From text to samples: corpora of texts, token documents in a memory-mapped cache, samples of whole windows."""
