"""A headless Chromium that takes the pictures of the docs."""

from __future__ import annotations

import contextlib
import functools
import http.server
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]

# document.querySelectorAll does not search the shadow roots of TensorBoard's Polymer elements.
_DEEP = """
const found = [];
const look = (root) => {
  for (const element of root.querySelectorAll("*")) {
    if (element.matches(arguments[0])) found.push(element);
    if (element.shadowRoot) look(element.shadowRoot);
  }
};
look(document);
for (const frame of document.querySelectorAll("iframe")) look(frame.contentDocument);
return found.filter((element) => element.getClientRects().length > 0);
"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder on a free port, and yield the address."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def chromium(width: int = 1400, height: int = 900) -> Iterator[Any]:
    """Start a headless Chromium with an empty profile, and yield selenium's driver."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    with tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True) as profile:
        for flag in [*_FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"]:
            options.add_argument(flag)
        driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


def visible(driver: Any, selector: str) -> list[Any]:
    """Return the visible elements that match a CSS selector, those in shadow roots and iframes included."""
    return list(driver.execute_script(_DEEP, selector))


def wait_for(driver: Any, condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """Wait until a condition is true, and return its value."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    waiting = WebDriverWait(driver, seconds, ignored_exceptions=[StaleElementReferenceException])
    return waiting.until(lambda _: condition(), f"not found within {seconds} s: {what}")
