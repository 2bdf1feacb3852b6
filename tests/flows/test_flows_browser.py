"""The Prefect UI in headless Chromium: the single stage `refine/claw` is run again from its page and completes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Up
    from playwright.sync_api import Page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.prefect,
    pytest.mark.sandbox,
    pytest.mark.model,
    pytest.mark.timeout(420),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install -y chromium"),
]


@pytest.fixture
def page(up: Up) -> Iterator[Page]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(30_000)
        try:
            yield opened
        finally:
            if shots := os.environ.get("OPENFORGE_TEST_SCREENSHOTS"):
                opened.screenshot(path=f"{shots}/prefect-ui.png")
            browser.close()


def _refine_runs(up: Up) -> set[str]:
    body = {"deployments": {"name": {"any_": ["claw"]}}, "flows": {"name": {"any_": ["refine"]}}}
    return {run["id"] for run in up.client.post(f"{up.url}/api/flow_runs/filter", json=body).json()}


def test_refine_is_run_again_from_the_ui(up: Up, page: Page) -> None:
    first = up.ended(up.start("synth/claw"), 300)
    assert first == "COMPLETED"
    earlier = up.start("refine/claw")
    assert up.ended(earlier) == "COMPLETED"
    known = _refine_runs(up)

    deployment = up.client.get(f"{up.url}/api/deployments/name/refine/claw").json()["id"]
    page.goto(f"{up.url}/deployments/deployment/{deployment}")
    page.get_by_text("refine", exact=True).first.wait_for()
    page.get_by_role("button", name=re.compile("^Run$")).first.click()
    page.get_by_text("Custom run").first.click()
    page.get_by_text("Parameters of one stage").wait_for()
    preset = page.locator("textarea").first
    assert preset.input_value() == "demo"
    preset.fill("smoke")
    page.get_by_role("button", name=re.compile("^Submit$")).first.click()

    run_id = up.until(lambda: next(iter(_refine_runs(up) - known), None), 60)
    assert up.ended(run_id, 120) == "COMPLETED"
    parameters = up.client.get(f"{up.url}/api/flow_runs/{run_id}").json()["parameters"]
    assert parameters["params"]["preset"] == "smoke"
    page.goto(f"{up.url}/runs/flow-run/{run_id}")
    page.get_by_text("Completed").first.wait_for()
