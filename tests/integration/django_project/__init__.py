"""A Django project whose schedule is in its database, as django-celery-beat keeps it."""
