"""The explorer in a real browser: JupyterLab serves a notebook, Chromium runs it, the keyboard moves its sliders."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, missing, require_tool

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
)
WAIT_MS = 120_000  # how long a busy machine may take: nothing here is timed
AT = "[...document.querySelectorAll('.widget-slider')].find(s => s.innerText.startsWith('iteration')).innerText"
CODE = (
    "from neo_lite import explorer\nexplorer.Explorer(requests=20, rate_per_s=8.0, gpu_kv_tokens=6400, on_gpu=4).root"
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(folder: Path) -> dict[str, str]:
    """Nothing of the user's is read or written, and nobody is asked for news."""
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "spaces")}
    notices = folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notices.parent.mkdir(parents=True)
    notices.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **own, "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": str(ROOT), "PATH": path}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a JupyterLab that has a notebook with the explorer open."""
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)], metadata=kernel)
    nbformat.write(notebook, tmp_path / "explorer.ipynb")
    address = f"http://127.0.0.1:{(port := free_port())}"
    options = ("--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--IdentityProvider.token=")
    options += (f"--ServerApp.root_dir={tmp_path}", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate")
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], stdout=log, stderr=log, env=environment(tmp_path / "home"),
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(f"{address}/api", server, tmp_path / "server.log")
            yield f"{address}/lab/tree/explorer.ipynb?reset"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(WAIT_MS // 200):
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-2000:])


@pytest.fixture
def page(lab: str) -> Iterator:
    """The notebook in Chromium, its one cell run."""
    chromium = require_tool("chromium", "apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed: pip install playwright")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1500})
        page.set_default_timeout(WAIT_MS)
        page.goto(lab)
        page.locator("#jp-main-statusbar", has_text="Idle").wait_for()
        page.locator(".jp-Cell .cm-content").first.click()
        page.keyboard.press("Shift+Enter")
        page.locator(".neo-decision").wait_for()
        yield page
        browser.close()


def handle(page, label: str):
    """What the keyboard moves of the slider with this label."""
    return page.locator(".widget-slider", has_text=label).locator("[role=slider]")


def press(page, target, *keys: str) -> None:
    target.focus()
    for key in keys:
        page.keyboard.press(key)


def look(page, name: str) -> None:
    """Leaves a screenshot where NEO_LITE_SCREENSHOTS says, for people."""
    if folder := os.environ.get("NEO_LITE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def expect_text(locator, text: str) -> None:
    locator.filter(has_text=text).wait_for()


@pytest.mark.slow
def test_the_keyboard_moves_sliders_plays_a_run_and_the_page_answers(page, tmp_path: Path) -> None:
    decision = page.locator(".neo-decision")
    expect_text(decision, "Two batches: the higher x/T")
    assert page.locator("svg[role=img][aria-label*='Tca1 <= Tl0 holds']").count() == 1
    look(page, "1_two_batches")

    press(page, handle(page, "CPU-requests"), "Home")  # none left
    expect_text(decision, "GPU only: no CPU decode can be hidden")
    press(page, handle(page, "CPU GB/s"), "Home")  # an impossible machine: the reason, no traceback
    expect_text(decision, "the CPU reads 0.0 GB/s: give a number above 0")
    press(page, handle(page, "CPU GB/s"), "End")
    press(page, handle(page, "CPU-requests"), "ArrowRight", "ArrowRight")  # two: they hide behind the GPU's attention
    expect_text(decision, "One batch with CPU decodes")

    press(page, page.locator("button", has_text="simulate a run"), "Enter")
    page.locator("text=simulated seconds").wait_for()
    page.locator("td", has_text="gpu-only-unchunked").wait_for()
    press(page, handle(page, "iteration"), "ArrowRight", "ArrowRight")
    at = page.locator(".widget-slider", has_text="iteration").locator(".widget-readout")
    expect_text(at, "2")
    first = page.locator("svg[aria-label*='simulated seconds'] path").last.get_attribute("d")
    press(page, page.locator(".widget-play button").first, "Enter")
    page.wait_for_function(AT + r".match(/\d+/)[0] > 5")
    press(page, page.locator(".widget-play button").first, "Enter")
    assert page.locator("svg[aria-label*='simulated seconds'] path").last.get_attribute("d") != first
    look(page, "2_run")

    press(page, page.locator("button", has_text="export the trace"), "Enter")
    with page.expect_download() as download:
        page.locator("a[download]").click()
    events = json.loads(download.value.path().read_text())["traceEvents"]
    assert {"linear", "gpu_attn"} <= {event["name"] for event in events}
    assert "Traceback" not in page.content()
