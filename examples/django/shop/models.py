from django.db import models


class Report(models.Model):
    tenant_id = models.IntegerField()
    ordered_by = models.CharField(max_length=30, default="beat")
    begun_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
