"""The live page: locks and their holders, waiters, refusals and their reasons; `celery -A shop locks web`.

Begin with `app`, an ASGI app. `watch` looks at the locks, once for all readers; `pages` makes the pages from that.
"""

from __future__ import annotations

#: What the extra installs.
_EXTRA = ("jinja2", "markupsafe", "starlette", "uvicorn")

try:
    from celery_singleton_lock.web.app import app_of, serve
except ImportError as error:
    if (error.name or "").partition(".")[0] not in _EXTRA:
        raise  # It is something else, which one of them needs, say.
    raise ImportError(f"{error.name} is not installed: pip install 'celery-singleton-lock[web]'") from error

__all__ = ["app_of", "serve"]
