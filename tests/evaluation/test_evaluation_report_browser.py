"""The report in headless Chromium, from file://: filters, trajectories, tokens, safety, no request, no error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from evaluation_fakes import EVIL, hostile_run

from evaluation.report import write_report
from rollout.store import Store

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


@dataclass
class Watched:
    """A page, all that it asked the network for and all that it complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(20_000)
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("console", lambda m: self.complaints.append(f"{m.type}: {m.text}"))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))

    def show(self, file: Path) -> None:
        self.page.goto(file.as_uri())
        self.opened()

    def opened(self, rollout: str = "") -> None:
        """Waits until a trajectory (that of `rollout`) is drawn."""
        self.page.wait_for_selector(f"#detail[data-id{f'={rollout!r}' if rollout else ''}] .turns")

    def rows(self) -> list[dict[str, str]]:
        return list(self.page.eval_on_selector_all(".row", "rows => rows.map(r => ({...r.dataset}))"))

    def press(self, filters: str, value: str) -> None:
        self.page.click(f"#{filters} .seg[data-value={value!r}]")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=60_000)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(sample_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(sample_store, runs=["demo"], out=tmp_path_factory.mktemp("browser") / "report.html")


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    yield Watched(page)
    page.close()


def test_filters_by_model_family_and_outcome(watched: Watched, report: Path) -> None:
    watched.show(report)
    assert len(watched.rows()) == 198
    watched.press("filter-model", "rl")
    rl = watched.rows()
    assert {r["label"] for r in rl} == {"rl"}
    assert len(rl) == 54
    watched.press("filter-outcome", "failed")
    failed = watched.rows()
    assert {(r["label"], r["outcome"]) for r in failed} == {("rl", "failed")}
    assert failed == [r for r in rl if r["outcome"] == "failed"]
    watched.page.select_option("#filter-family", "invoice-replaced")
    narrowed = watched.rows()
    assert narrowed == [r for r in failed if r["family"] == "invoice-replaced"]
    assert watched.page.inner_text("#count") == f"{len(narrowed)} of 198"
    watched.press("filter-outcome", "passed")
    assert {(r["label"], r["outcome"], r["family"]) for r in watched.rows()} == {("rl", "passed", "invoice-replaced")}
    watched.page.click("#clear")
    assert len(watched.rows()) == 198
    watched.page.fill("#filter-task", "MERGED-00")
    assert {r["family"] for r in watched.rows()} == {"ticket-merged"}
    watched.page.fill("#filter-task", "no such task")
    assert watched.rows() == []
    assert "No trajectory fits" in watched.page.inner_text("#list")
    assert watched.complaints == []
    assert watched.requests == [report.as_uri()]


def test_a_trajectory_shows_messages_shaded_tokens_and_verdict(
    watched: Watched, report: Path, sample_store: Store
) -> None:
    watched.show(report)
    watched.press("filter-model", "sft")
    watched.press("filter-outcome", "passed")
    chosen = watched.rows()[5]["id"]
    watched.page.click(f".row[data-id={chosen!r}]")
    watched.opened(chosen)
    detail = watched.page.inner_text("#detail")
    stored = sample_store.rollouts.get(chosen)
    calls = sample_store.calls.of(chosen)
    assert stored
    assert stored.task.instruction in detail
    assert "the state is as asked" in detail
    assert watched.page.locator(".msg.assistant").count() == len(calls)
    assert watched.page.locator(".call b").all_inner_texts() == [
        c.messages[-1]["tool_calls"][0]["function"]["name"] for c in calls if c.messages[-1].get("tool_calls")
    ]
    logprobs = [p for c in calls for p in c.logprobs or ()]
    tokens = watched.page.eval_on_selector_all(
        ".tokens span", "spans => spans.map(s => [s.textContent, getComputedStyle(s).backgroundColor])"
    )
    assert len(tokens) == len(logprobs)
    assert tokens[-1][0] == "<|im_end|>"
    surest, wildest = logprobs.index(max(logprobs)), logprobs.index(min(logprobs))
    assert alpha(tokens[surest][1]) < 0.05 < 0.3 < alpha(tokens[wildest][1])
    watched.page.locator(".tokens span").nth(wildest).hover()
    assert f"logprob −{-logprobs[wildest]:.3f}" in watched.page.inner_text("#tip")
    assert watched.complaints == []


def alpha(colour: str) -> float:
    """Opacity of a computed CSS colour, `color(srgb r g b / a)` or `rgba(r, g, b, a)`."""
    inner = colour[colour.index("(") + 1 : -1]
    if "/" in inner:
        return float(inner.split("/")[1])
    return float(inner.split(",")[3]) if colour.startswith("rgba") else 1.0


def test_the_same_task_of_another_model_is_one_click_away(watched: Watched, report: Path) -> None:
    watched.show(report)
    first = watched.page.get_attribute("#detail", "data-id")
    watched.page.locator(".pip").nth(0).click()
    watched.page.wait_for_function("id => document.getElementById('detail').dataset.id !== id", arg=first)
    assert watched.page.get_attribute("#detail", "data-id").startswith("demo-eval-base-")


def test_a_cell_of_the_matrix_opens_its_task(watched: Watched, report: Path) -> None:
    watched.show(report)
    cell = watched.page.locator(".matrix button.cell[data-label='sft']").nth(9)
    task = cell.get_attribute("data-task")
    cell.click()
    watched.opened(f"demo-eval-sft-{task}-0")
    assert {r["label"] for r in watched.rows()} >= {"base", "sft", "rl"}
    assert watched.page.input_value("#filter-task") == task


def test_keys_walk_the_list(watched: Watched, report: Path) -> None:
    watched.show(report)
    ids = [r["id"] for r in watched.rows()]
    watched.page.click(f".row[data-id={ids[0]!r}]")
    watched.page.keyboard.press("ArrowDown")
    watched.opened(ids[1])


def test_dark_and_light_differ_and_the_button_switches(watched: Watched, report: Path) -> None:
    watched.page.emulate_media(color_scheme="dark")
    watched.show(report)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = watched.page.evaluate(background)
    watched.page.click("#theme")
    light = watched.page.evaluate(background)
    assert dark != light
    watched.page.click("#theme")
    assert watched.page.evaluate(background) == dark


def test_a_narrow_screen_does_not_scroll_sideways(watched: Watched, report: Path) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 800})
    watched.show(report)
    assert watched.page.evaluate("document.documentElement.scrollWidth") == 390


def test_hostile_output_is_only_read(watched: Watched, store: Store, tmp_path: Path) -> None:
    hostile_run(store)
    file = write_report(store, runs=["demo"], out=tmp_path / "hostile.html")
    watched.show(file)
    assert EVIL.split("\u2028")[0] in watched.page.inner_text("#detail")
    assert "pwned" not in watched.page.title().replace(EVIL, "")
    assert watched.page.locator("img").count() == 0
    assert watched.page.locator("script").count() == 3
    assert watched.complaints == []
    assert watched.requests == [file.as_uri()]


def test_the_policy_stops_a_script_even_if_one_got_in(watched: Watched, report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(report.read_text().replace("</footer>", "</footer><script>document.title='pwned'</script>"))
    watched.show(broken)
    assert watched.page.title() != "pwned"
    assert any("Content Security Policy" in c for c in watched.complaints)
