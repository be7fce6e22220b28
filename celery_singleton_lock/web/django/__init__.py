"""The pages in Django's admin, for staff to read: `celery_singleton_lock.web.django` in INSTALLED_APPS.

Begin with `admin.py`. The pages do not update themselves and change nothing: see the live page for that.
"""
