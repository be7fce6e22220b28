import time

from celery import shared_task
from django.utils import timezone

from celery_singleton_lock.contrib.django import DjangoSingletonTask

from .models import Report

#: Seconds that a report takes: longer than beat's interval.
DURATION = 1.5


@shared_task(base=DjangoSingletonTask, lock_key=["tenant_id"])
def rebuild_report(tenant_id: int, report_id: int | None = None) -> None:
    """Rebuild a tenant's reports one at a time: the report that was ordered, or a new one."""
    report = Report(tenant_id=tenant_id) if report_id is None else Report.objects.get(id=report_id)
    report.begun_at = timezone.now()
    time.sleep(DURATION)
    report.ended_at = timezone.now()
    report.save()
