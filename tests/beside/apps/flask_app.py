"""An app as in Flask's documentation, with an exclusive task; `test_order` says which of its bases comes first."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery, Task
from flask import Flask, current_app

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import SingletonTask
from tests import recording


def celery_init_app(app: Flask) -> Celery:
    class FlaskTask(Task):
        def __call__(self, *args: object, **kwargs: object) -> object:
            with app.app_context():
                return self.run(*args, **kwargs)

    class FlaskFirst(FlaskTask, SingletonTask):
        pass

    class ExclusiveFirst(SingletonTask, FlaskTask):
        pass

    celery_app = Celery(app.name, task_cls=FlaskTask)
    celery_app.config_from_object(app.config["CELERY"])
    celery_app.set_default()
    app.extensions["celery"] = celery_app
    app.extensions["base"] = {"flask": FlaskFirst, "exclusive": ExclusiveFirst}[app.config["CELERY"]["test_order"]]
    return celery_app


flask_app = Flask("shop")
flask_app.config.from_mapping(CELERY=json.loads(os.environ["TEST_CONF"]), SHOP="Berlin")
app = celery_init_app(flask_app)


@app.task(bind=True, base=flask_app.extensions["base"], name="rebuild")
def rebuild(self: Any, job: str) -> str:
    with recording.run(job, self.request.id):
        while not recording.may_end(job):
            time.sleep(0.02)
    return str(current_app.config["SHOP"])


@app.task(name="plain")
def plain() -> str:
    return str(current_app.config["SHOP"])
