# SPDX-License-Identifier: Apache-2.0
"""Work is divided evenly, gathered in order, and not repeated after a restart."""

import numpy as np
import pytest
from helpers import crash, launcher

from carryforward.distributed.journal import Journal
from carryforward.distributed.processes import launched
from carryforward.distributed.work_map import WorkMap, divide

SIZES = [7, 0, 12, 3, 3, 9, 1, 1, 30]


@pytest.mark.parametrize("parts", [1, 2, 3, 20])
def test_units_are_divided_evenly(parts):
    divided = divide(SIZES, parts)
    assert sorted(i for part in divided for i in part) == [*range(len(SIZES))]
    totals = [sum(SIZES[i] for i in part) for part in divided]
    assert max(totals) <= max(max(SIZES), sum(SIZES) / parts + max(SIZES))
    if parts == 2:
        assert abs(totals[0] - totals[1]) <= 1 + sum(SIZES) % 2


def test_the_largest_unit_is_never_on_top_of_a_full_part():
    sizes = np.random.default_rng(0).integers(1, 100, 200).tolist()
    totals = [sum(sizes[i] for i in part) for part in divide(sizes, 7)]
    assert max(totals) - min(totals) <= min(sizes) + 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_are_in_order_in_every_process(count, tmp_path):
    def job():
        with launched() as processes:
            results = WorkMap(processes)(
                SIZES, lambda i: [i, processes.rank], finish=lambda pair: [*pair, SIZES[i_of(pair)]]
            )
            large = processes.gather(bytes([processes.rank]) * (9 << 20))
            (tmp_path / f"{processes.rank}").write_text(repr((results, [len(set(x)) for x in large])))

    def i_of(pair):
        return pair[0]

    for result in launcher.launch(job, count):
        assert result.code == 0, result.output
    (content,) = {path.read_text() for path in tmp_path.iterdir()}
    results, pieces = eval(content)
    assert [i for i, *_ in results] == [*range(len(SIZES))]
    assert [size for *_, size in results] == SIZES
    assert {rank for _, rank, _ in results} == {*range(count)}
    assert pieces == [1] * count


def test_a_restart_repeats_no_unit(tmp_path):
    def run(failing=None, identity=0):
        calls, progress = [], []

        def work(i):
            if i == failing:
                raise ArithmeticError
            calls.append(i)
            return i / 3

        journal = Journal(tmp_path, identity)
        try:
            return WorkMap(journal=journal, name="a")(SIZES, work, progress=progress.append), calls, progress
        except ArithmeticError:
            return None, calls, progress
        finally:
            journal.close()

    _, first, _ = run(failing=5)
    (file,) = tmp_path.rglob("*.jsonl")
    file.write_text(file.read_text()[:-4])  # the last line is incomplete
    results, second, progress = run()
    assert results == [i / 3 for i in range(len(SIZES))]
    assert second == [i for i in range(len(SIZES)) if i not in first[:-2]], "the last but one was just being written"
    assert progress == [sum(SIZES[i] for i in first[:-2])]
    assert run()[1] == []
    assert run(identity=1)[1] == [*range(len(SIZES))], "another job"
    Journal(tmp_path, 0).delete()
    assert run()[1] == [*range(len(SIZES))]


def test_damaged_lines_are_not_used(tmp_path):
    journal = Journal(tmp_path, 0)
    journal.add("a", 0, 0.1)
    journal.add("a", 1, [float("inf"), "é"])
    journal.close()
    (file,) = tmp_path.rglob("*.jsonl")
    assert Journal(tmp_path, 0).found == {("a", 0): 0.1, ("a", 1): [float("inf"), "é"]}
    file.write_bytes(file.read_bytes().replace(b"0.1", b"0.2") + b"\xff\0\n\n[]")
    assert Journal(tmp_path, 0).found == {("a", 1): [float("inf"), "é"]}


def test_one_process_that_fails_ends_all(tmp_path):
    def job():
        with launched() as processes:
            if processes.rank == 1:
                raise ValueError("only here")
            processes.wait()

    results = launcher.launch(job)
    assert all(result.code for result in results)
    assert "only here" in results[1].output
    assert "only here" not in results[0].output
    assert crash.run(job).code == 0, "alone"


def test_without_a_rank_there_is_no_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a scheduler's script may export it
    monkeypatch.delenv("RANK", raising=False)
    with launched() as processes:
        assert processes.count == 1
