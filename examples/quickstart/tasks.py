import time

from celery import Celery

from celery_singleton_lock import SingletonTask

app = Celery("tasks", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")


@app.task(base=SingletonTask)
def rebuild_report(tenant_id: int) -> str:
    time.sleep(5)
    return f"report of tenant {tenant_id} rebuilt"
