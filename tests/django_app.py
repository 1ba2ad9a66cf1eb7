"""Django as an application has it: set up once, by whichever test comes first; databases are named by the tests."""

from __future__ import annotations

import django
from django.conf import settings


def ready() -> None:
    """Set Django up in this process, unless a test before this one did."""
    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()
