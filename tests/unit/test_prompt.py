"""A counter that processes share."""

from __future__ import annotations

import os

from celery_singleton_lock.prompt import Prompt


def test_prompt_is_new_once() -> None:
    prompt = Prompt()
    assert not prompt.is_new()
    prompt.give()
    prompt.give()
    assert [prompt.is_new(), prompt.is_new()] == [True, False]


def test_forked_processes_share_the_prompt() -> None:
    prompt = Prompt()
    child = os.fork()
    if child == 0:
        prompt.give()
        os._exit(0)
    os.waitpid(child, 0)
    assert prompt.is_new()


def test_number_wraps_around() -> None:
    prompt = Prompt()
    prompt._shared[:4] = b"\xff" * 4
    assert prompt.is_new()
    prompt.give()
    assert prompt._shared[:4] == b"\0" * 4
    assert prompt.is_new()
