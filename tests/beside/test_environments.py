"""The environments themselves."""

from __future__ import annotations

import subprocess

import pytest

from tests.beside.environments import python_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("group", "packages"),
    [("beside", "ddtrace flask newrelic pydantic sentry_sdk"), ("beside-older", "celery_batches sentry_sdk")],
)
def test_environment_has_the_packages_and_this_one(group: str, packages: str) -> None:
    imports = ", ".join(["celery_singleton_lock", *packages.split()])
    subprocess.run([python_of(group), "-c", f"import {imports}"], check=True)
