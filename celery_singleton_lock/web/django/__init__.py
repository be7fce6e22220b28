"""The pages in Django's admin, for its staff to read: `celery_singleton_lock.web.django` in INSTALLED_APPS.

Begin with `admin.py`. Nothing moves there and nothing can be changed: see the live page for that.
"""
