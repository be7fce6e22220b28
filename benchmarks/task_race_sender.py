"""`python -m benchmarks.task_race_sender TASK JOB SECONDS`: kills itself when it is about to hand its message over."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from kombu import Producer

from benchmarks.task_race_app import app


def main(task: str, job: str, seconds: str) -> None:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Producer.publish = die
    app.tasks[task].apply_async([job, float(seconds)], queue="one")


if __name__ == "__main__":
    main(*sys.argv[1:])
