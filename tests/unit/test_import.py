"""What `import celery_singleton_lock` brings to a web process that only sends tasks."""

from __future__ import annotations

import subprocess
import sys

#: Of these a program that sends tasks needs none before it sends one.
HEAVY = ("redis", "opentelemetry", "prometheus_client", "sqlalchemy", "pytest", "rich")


def test_import_brings_no_heavy_library() -> None:
    program = f"import sys, celery_singleton_lock; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
