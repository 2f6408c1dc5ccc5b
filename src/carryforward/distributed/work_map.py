# SPDX-License-Identifier: Apache-2.0
"""A map over units of work that the processes of a command divide, and that a restart does not repeat.

What a unit computes does not depend on who computes it, so results are the same whatever the number of processes.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from .journal import Journal
from .processes import ALONE, Processes


def divide(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Divide units of these sizes into parts that are about equally large: the largest unit first, to the part with the
    least so far. Returns the indices of each part, in order.

    >>> divide([7, 5, 4, 3, 1], 2)
    [[0, 3], [1, 2, 4]]
    """
    divided: list[list[int]] = [[] for _ in range(parts)]
    fill = [(0, part) for part in range(parts)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size, part = heapq.heappop(fill)
        divided[part].append(i)
        heapq.heappush(fill, (size + sizes[i], part))
    return [sorted(part) for part in divided]


class WorkMap:
    """Calls a function for each unit of work, in one of the processes."""

    def __init__(self, processes: Processes = ALONE, journal: Journal | None = None, name: str = ""):
        """
        Args:
            journal: keeps the results of units for a restart.
            name: of these units, among others in the journal.
        """
        self._processes, self._journal, self._name = processes, journal, name

    def __call__(
        self,
        sizes: Sequence[int],
        work: Callable[[int], Any],
        *,
        finish: Callable[[Any], Any] = lambda result: result,
        progress: Callable[[int], object] = lambda size: None,
    ) -> list[Any]:
        """The result of every unit, in order, in every process.

        Args:
            sizes: how much work each unit is.
            work: computes the result of a unit, given its index.
            finish: makes JSON of a result. It is called when the next unit is under way, so that a device need not
                be waited for.
            progress: called with the sizes of units that an earlier call has finished. `work` reports its own.
        """
        results = self._processes.first(lambda: self._found(len(sizes)))
        if self._processes.is_first and results:
            progress(sum(sizes[i] for i in results))
        left = [i for i in range(len(sizes)) if i not in results]
        mine = [left[i] for i in divide([sizes[i] for i in left], self._processes.count)[self._processes.rank]]
        done: dict[int, Any] = {}

        def keep(i: int, result: Any) -> None:
            done[i] = finish(result)
            if self._journal is not None:
                self._journal.add(self._name, i, done[i])

        before: tuple[int, Any] | None = None
        for i in mine:
            result = work(i)
            if before is not None:
                keep(*before)
            before = i, result
        if before is not None:
            keep(*before)
        for part in self._processes.gather(done):
            results |= part
        return [results[i] for i in range(len(sizes))]

    def _found(self, count: int) -> dict[int, Any]:
        """The results of units that an earlier call has finished."""
        found = {} if self._journal is None else self._journal.found
        return {i: found[self._name, i] for i in range(count) if (self._name, i) in found}
