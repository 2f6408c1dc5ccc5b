# SPDX-License-Identifier: Apache-2.0
"""Benchmarks record what a quota on the processor costs, and size thread pools before libraries are loaded."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if not BENCHMARKS.exists():
    pytest.skip("benchmarks are not part of a source distribution", allow_module_level=True)


@pytest.fixture
def cpu_limits(monkeypatch, tmp_path):
    """The module, reading control groups from a temporary folder."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("cpu_limits")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "OWN", tmp_path / "cgroup")
    return module


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"cpu.{name}").write_text(text)


def version_2(folder, throttled):
    write(folder, stat=f"usage_usec 9\nnr_periods 50\nnr_throttled {throttled}\nthrottled_usec {250_000 * throttled}\n")


@pytest.mark.parametrize("path", ["", "pods/one"])
def test_counters_of_control_groups_of_version_2(cpu_limits, tmp_path, path):
    (tmp_path / "cgroup").write_text(f"1:cpu:/\n0::/{path}\n")
    version_2(tmp_path / path, 4)
    write(tmp_path / path, max="150000 100000\n")
    before = cpu_limits.throttling()
    assert before == {"periods": 50, "throttled_periods": 4, "throttled_seconds": 1.0}
    assert cpu_limits.quota() == 1.5
    version_2(tmp_path / path, 6)
    assert cpu_limits.throttled_since(before) == {"periods": 0, "throttled_periods": 2, "throttled_seconds": 0.5}
    write(tmp_path / path, max="max 100000\n")
    assert cpu_limits.quota() is None


def test_counters_of_control_groups_of_version_1(cpu_limits, tmp_path):
    (tmp_path / "cgroup").write_text("1:cpu:/\n0::/\n")
    write(tmp_path / "cpu", stat="nr_periods 7\nnr_throttled 3\nthrottled_time 2500000000\n",
          cfs_quota_us="400000\n", cfs_period_us="100000\n")  # fmt: skip
    assert cpu_limits.throttling() == {"periods": 7, "throttled_periods": 3, "throttled_seconds": 2.5}
    assert cpu_limits.quota() == 4.0
    write(tmp_path / "cpu", cfs_quota_us="-1\n")
    assert cpu_limits.quota() is None


@pytest.mark.parametrize("stat", [None, "usage_usec 9\n", "unreadable"])
def test_nothing_is_recorded_where_the_kernel_counts_nothing(cpu_limits, tmp_path, stat):
    if stat:
        write(tmp_path, stat=stat)
    assert cpu_limits.throttling() == {}
    assert cpu_limits.throttled_since({}) == {}
    assert cpu_limits.quota() is None
    assert cpu_limits.limits()["threads"]["torch"] >= 1


def test_threads_are_set_before_libraries_are_loaded(cpu_limits, tmp_path):
    """The script starts again, once, with its other arguments."""
    script = tmp_path / "script.py"
    script.write_text(
        "import argparse, json, os, torch\n"
        "from cpu_limits import THREAD_POOLS, limits, parse_arguments\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--rounds', type=int)\n"
        "rounds = parse_arguments(parser).rounds\n"
        "print(json.dumps([rounds, torch.get_num_threads(), limits()['threads']]))\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in cpu_limits.THREAD_POOLS}
    done = subprocess.run(
        [sys.executable, str(script), "--rounds", "2", "--threads", "1"], capture_output=True, text=True, check=True,
        env=clean | {"PYTHONPATH": str(BENCHMARKS)}, timeout=300,
    )  # fmt: skip
    pools = dict.fromkeys(cpu_limits.THREAD_POOLS, 1)
    assert json.loads(done.stdout) == [2, 1, {"torch": 1, **pools}]


def test_time_that_a_side_was_throttled_is_recorded_beside_its_speed(cpu_limits, tmp_path, monkeypatch):
    steps = importlib.import_module("steps")
    throttled = 0

    def side():
        nonlocal throttled
        throttled += 2
        version_2(tmp_path, throttled)

    version_2(tmp_path, 0)
    times = steps.time_interleaved({"ours": side, "theirs": lambda: None}, 3, 100, "cpu")
    assert (times["ours"]["throttled_seconds"], times["theirs"]["throttled_seconds"]) == (1.5, 0.0)
    report = importlib.import_module("speed_report")
    assert report._rate(times["ours"]).endswith(", 500 ms a round throttled")
    assert "throttled" not in report._rate(times["theirs"])
