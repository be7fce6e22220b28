"""The tasks to test."""

from __future__ import annotations

from celery import Celery

from celery_singleton_lock import LockConflict, SingletonTask

app = Celery("shop", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")


@app.task(base=SingletonTask)
def rebuild_report(tenant_id: int, full: bool = False) -> str:
    return f"report of tenant {tenant_id} rebuilt"


@app.task(base=SingletonTask, lock_key=["tenant_id"], on_conflict="raise")
def bill(tenant_id: int, month: int) -> None: ...


def bill_all(month: int) -> list[int]:
    """Bill each tenant; return the tenants that are being billed already."""
    busy = []
    for tenant_id in (7, 8):
        try:
            bill.delay(tenant_id, month).get()
        except LockConflict:
            busy.append(tenant_id)
    return busy
