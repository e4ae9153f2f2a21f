"""The library's progress bars are no part of what these tests print."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="package", autouse=True)
def _without_progress_bars():
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    yield
    if shown:  # other rooms' tests may be without them, too
        logging.enable_progress_bar()
