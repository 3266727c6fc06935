"""Takes the screenshots of the page for the docs: a server under load, paused at a preemption.

    .venv/bin/python docs/images/page.py

Needs Chromium; Playwright drives it.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx2
from playwright.sync_api import sync_playwright

URL = "http://127.0.0.1:8123"
SERVE = [
    "-m", "treadle", "-q", "serve", "--port", "8123", "--quantization", "int8", "--num-kv-blocks", "96",
    "--max-model-len", "600", "--max-num-batched-tokens", "96", "--admission-headroom", "0",
]  # fmt: skip


def main() -> None:
    """Serve, put load on the server, and take the pictures."""
    server = subprocess.Popen([sys.executable, *SERVE])
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx2.get(URL + "/health").raise_for_status()
                break
            except httpx2.HTTPError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.2)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            for name, scheme in (("page", "light"), ("page-dark", "dark")):
                page = browser.new_page(viewport={"width": 1360, "height": 1000}, color_scheme=scheme)
                page.goto(URL)
                page.fill("#chat textarea", "Tell me about the sea, and about a boat.")
                page.select_option("#chat select", "16")
                page.get_by_role("button", name="Send").click()
                page.locator("#events li.k-preempted").nth(2).wait_for(timeout=60_000)
                page.wait_for_timeout(1500)
                page.locator("#events li.k-preempted").first.get_by_role("button").click()
                page.evaluate("window.scrollTo(0, 0); document.getElementById('events').scrollTop = 0")
                page.wait_for_timeout(300)
                page.screenshot(path=Path(__file__).with_name(f"{name}.png"), full_page=True)
                page.wait_for_timeout(8000)
            browser.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
