from typing import Any

from django.core.management.base import BaseCommand
from django.db import transaction

from shop.models import Report
from shop.tasks import rebuild_report


class Command(BaseCommand):
    help = "Order the report of a tenant."

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("tenant_id", type=int)

    @transaction.atomic
    def handle(self, *, tenant_id: int, **_: Any) -> None:
        report = Report.objects.create(tenant_id=tenant_id, ordered_by="a customer")
        # The worker would not find the report before the transaction is committed. A report that beat orders is
        # skipped while another report of the tenant is being made; an order of a customer waits for it.
        rebuild_report.apply_async_on_commit((tenant_id, report.id), singleton_lock={"wait": 60})
