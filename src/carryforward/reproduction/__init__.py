# SPDX-License-Identifier: Apache-2.0
"""The paper's tables, figures and claims, from recipes in `experiments/`: what to run, running it, telling it."""
