"""Takes the pictures of the live page in docs/pictures, in Debian's chromium: `python -m docs.web_pictures`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from playwright.sync_api import expect

from celery_singleton_lock import clock
from celery_singleton_lock.runtime import in_memory
from celery_singleton_lock.web import app_of
from tests.web.browser import launched, served
from tests.web.scenes import app_in_memory, entry, hold, write

HERE = Path(__file__).parent / "pictures"

#: Names, addresses, widths and heights, and colours.
PICTURES = (
    ("web-overview", "", 1100, 760, "light"),
    ("web-timeline", "timeline", 1100, 560, "dark"),
    ("web-phone", "locks", 375, 700, "light"),
)

TENANTS = ("acme", "globex", "initech", "umbrella", "hooli")


def main() -> None:
    with in_memory(), launched() as browser:
        app = app_in_memory()
        now = clock.wall()
        for number, tenant in enumerate(TENANTS[:4]):
            hold(app, tenant, since=now - 12 - 47 * number, task_id=f"4c1f0f6e-{number}b0a-4f5e-9d4b", ttl=30.0)
        hold(app, "hooli", queued=True)
        entries = []
        for number, turn in product(range(len(TENANTS)), range(5)):
            tenant, ago = TENANTS[number], 690.0 - 97 * turn - 13 * number
            outcome = "FAILURE" if (turn, number) == (2, 1) else "SUCCESS"
            lasted, waited = 35.0 + 7 * number, 4.0 * number
            entries.append(entry(app, tenant, ago=ago, lasted=lasted, outcome=outcome, waited=waited))
            if (turn + number) % 3 == 0:
                refusal = {"holder": f"id-of-{tenant}", "holder_node": "one@web", "holder_since": now - ago}
                entries.append(entry(app, tenant, "skip", ago=ago - 9, **refusal))
        write(app, *entries)
        with served(app_of(app)) as url:
            for name, address, width, height, scheme in PICTURES:
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                page = context.new_page()
                page.goto(f"{url}/{address}")
                expect(page.locator("#state")).to_have_text("Live")
                page.screenshot(path=HERE / f"{name}.png")
                context.close()


if __name__ == "__main__":
    main()
