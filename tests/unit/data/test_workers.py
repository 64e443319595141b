"""The ordered parallel map of `data prepare`: results in order, bounded, without deadlock, errors in turn."""

import os
import time

import pytest

from refusals import refuses
from shardwise.data.prepare.workers import TASKS_AHEAD, map_in_order
from shardwise.errors import DataError


def slow_first(number):
    """Compute the first task last."""
    time.sleep(0.3 if number == 0 else 0)
    return os.getpid(), number * number


def test_results_are_in_the_order_of_the_tasks_and_bounded_in_number():
    taken = []

    def tasks():
        for number in range(100):
            taken.append(number)
            yield number

    found = []
    for task, (pid, result) in map_in_order(slow_first, tasks(), processes=3):
        if task == 0:
            assert len(taken) <= 3 * TASKS_AHEAD + 1
        found.append((task, result))
        assert pid != os.getpid()
    assert found == [(number, number * number) for number in range(100)]


@pytest.mark.timeout(60)
def test_tasks_and_results_larger_than_a_pipe_do_not_wait_for_each_other():
    tasks = [bytes([number]) * 3_000_000 for number in range(12)]
    sizes = [(len(task), len(result)) for task, result in map_in_order(lambda task: task * 2, iter(tasks), processes=2)]
    assert sizes == [(3_000_000, 6_000_000)] * 12


def fail_on_five_first(number):
    """Fail on task 5 at once, and on task 3 later."""
    if number in {3, 5}:
        time.sleep(0.2 if number == 3 else 0)
        raise DataError(f"task {number}", code="data.no-input")
    return number


def test_the_error_of_the_first_failing_task_is_raised_after_the_results_before_it():
    found = []
    with refuses("data.no-input", 3, kind=DataError):
        for _, result in map_in_order(fail_on_five_first, iter(range(50)), processes=3):
            found.append(result)
    assert found == [0, 1, 2]


def test_no_tasks_give_no_results():
    assert list(map_in_order(slow_first, iter(()), processes=2)) == []
