# SPDX-License-Identifier: Apache-2.0
"""An output is used by one process at a time, and a lock dies with its process."""

import multiprocessing
import os
import signal

import pytest

from carryforward.utils import locks

FORK = multiprocessing.get_context("fork")


def hold(path, ready):
    with locks.lock_output(path, path.parent):
        ready.set()
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock."""
    ready = FORK.Event()
    process = FORK.Process(target=hold, args=(tmp_path / locks.LOCK, ready))
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path, holder):
    path = tmp_path / locks.LOCK
    with pytest.raises(locks.OutputInUse, match=rf"{tmp_path} is in use by another process \({holder.pid}\)"):
        locks._acquire(path, tmp_path, wait=False)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert path.exists(), "a killed process leaves the file"
    with locks.lock_output(path, tmp_path):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()


def test_a_process_can_enter_its_lock_again(tmp_path):
    path = tmp_path / locks.LOCK
    with locks.lock_output(path, tmp_path):
        with locks.lock_output(path, tmp_path):
            assert path.exists()
        assert path.exists()
        child = FORK.Process(target=_expect_refusal, args=(path,))
        child.start()
        child.join()
        assert child.exitcode == 0, "a forked child does not hold its parent's lock"
    assert not path.exists()


def _expect_refusal(path):
    with pytest.raises(locks.OutputInUse), locks.lock_output(path, path.parent):
        pass


def test_a_deleted_lock_file_is_not_a_lock(tmp_path):
    """A process that opened the file before it was deleted must not believe that it holds the lock."""
    path = tmp_path / locks.LOCK
    first = locks.try_lock(path)
    path.unlink()
    second = locks.try_lock(path)
    assert first is not None
    assert second is not None, "it is another file"
    assert locks.try_lock(path) is None
    os.close(first)
    os.close(second)


def test_entries_may_be_left_in_any_order(tmp_path):
    """As threads do."""
    path = tmp_path / locks.LOCK
    first, second = locks.lock_output(path, tmp_path), locks.lock_output(path, tmp_path)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert path.exists()
    second.__exit__(None, None, None)
    assert not path.exists()
    with locks.lock_output(path, tmp_path):
        pass


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / locks.LOCK).symlink_to(tmp_path / "mine")
    with locks.lock_output(tmp_path / locks.LOCK, tmp_path):
        assert (tmp_path / "mine").read_text() == "mine"


def test_without_locks_work_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)
    with locks.lock_output(tmp_path / locks.LOCK, tmp_path):
        pass
    with pytest.raises(OSError, match="no locks"), locks.lock_output(tmp_path / "no" / locks.LOCK, tmp_path):
        pass
