"""What every test relies on."""

import os
from pathlib import Path

import pytest

import zckpt


def pytest_configure():
    """Refuse to test the checkout when the caller meant to test the installed wheel."""
    if os.environ.get("ZCKPT_TEST_INSTALLED") != "1":
        return
    location = Path(zckpt.__file__)
    if "site-packages" not in location.parts:
        pytest.exit(f"ZCKPT_TEST_INSTALLED=1, but zckpt was imported from {location}", returncode=3)
