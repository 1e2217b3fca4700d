"""Test the pages in a real browser: nothing overflows, nothing is fetched, nothing is executed, all works."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_client import ServedModel, ask
from saved_reports import NASTY, poisoned, recovered_epochs, simulated_body, through_json
from served_models import CLASSES, save_bert

from pipeedge.report import read_run, render_comparison, render_run
from pipeedge.report.plan_changes import epochs_body

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra dev)")

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """Return a tab that all tests use, one after the other: the browser starts processes for each anew."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@contextlib.contextmanager
def visited(tab: Any, url: str, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """Open a page, which must cause no errors, and no requests to anybody else."""
    complaints: list[str] = []

    def check(request: Any) -> None:
        if not request.url.startswith(url):
            complaints.append(request.url)

    def dismiss(dialog: Any) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    listeners = {
        "console": lambda message: complaints.append(message.text),
        "pageerror": lambda error: complaints.append(str(error)),
        "dialog": dismiss,
        "request": check,
    }
    tab.set_viewport_size({"width": width, "height": 900})
    tab.emulate_media(color_scheme=scheme)
    for event, listener in listeners.items():
        tab.on(event, listener)
    try:
        tab.goto(url)
        yield tab
    finally:
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
        tab.mouse.move(0, 0)
        tab.goto("about:blank")  # what this page still asks for is not the next one's
    assert [line for line in complaints if "status of 400" not in line] == []


@contextlib.contextmanager
def opened(tab: Any, html: str, tmp_path: Path, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """Open a saved page, which must cause no requests at all."""
    file = tmp_path / "page.html"
    file.write_text(html, "utf-8")
    with visited(tab, file.as_uri(), width, scheme) as page:
        page.wait_for_selector("canvas[data-to]", state="attached")
        yield page


@functools.cache
def whole() -> str:
    return render_run(read_run(through_json(simulated_body([1.0, 1.6, 0.7], [0.2])), "run.json"))


@functools.cache
def recovered() -> str:
    body = simulated_body([1.0, 1.6, 0.7], [0.2]) | {"epochs": epochs_body(recovered_epochs())}
    return render_run(read_run(through_json(body), "run.json"))


@functools.cache
def both() -> str:
    run = read_run(through_json(simulated_body([1.0, 1.6])), "a rather long name of a report.json")
    return render_comparison(run, run)


@pytest.mark.parametrize("make", [whole, recovered, both])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_overflows_the_page(make: Any, width: int, scheme: str, tab: Any, tmp_path: Path) -> None:
    with opened(tab, make(), tmp_path, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            """width => [...document.querySelectorAll('main *')]
               .filter(e => !e.closest('.scroll, svg'))
               .filter(e => e.getBoundingClientRect().right > width + 1)
               .map(e => e.outerHTML.slice(0, 80))""",
            width,
        )
        assert outside == []


@pytest.mark.parametrize("width", [1280, 390])
def test_the_flag_of_a_slow_link_stays_within_its_box(width: int, tab: Any, tmp_path: Path) -> None:
    html = render_run(read_run(through_json(simulated_body([1.0] * 9, [3.0])), "run.json"))
    with opened(tab, html, tmp_path, width) as page:
        found = page.evaluate(
            """() => [...document.querySelectorAll('.flag')].map(e => {
               const [flag, box] = [e.getBoundingClientRect(), e.closest('.box').getBoundingClientRect()];
               return flag.left >= box.left - 1 && flag.right <= box.right + 1; })"""
        )
        assert found == [True]


def contrast(one: list[float], other: list[float]) -> float:
    """Return the contrast ratio, as defined by WCAG 2."""

    def luminance(colour: list[float]) -> float:
        parts = [
            c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


COLOURS = """() => [...document.querySelectorAll('main *')].filter(e => [...e.childNodes].some(
  n => n.nodeType === 3 && n.textContent.trim()) && e.getClientRects().length).map(e => {
    let back = e;
    const of = e => getComputedStyle(e).backgroundColor;
    while (back && of(back) === 'rgba(0, 0, 0, 0)') back = back.parentElement;
    const rgb = text => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
    return [e.textContent.trim().slice(0, 30), rgb(getComputedStyle(e).color), rgb(of(back))];
  })"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme: str, tab: Any, tmp_path: Path) -> None:
    with opened(tab, whole(), tmp_path, scheme=scheme) as page:
        faint = [
            (text, round(contrast(ink, back), 1))
            for text, ink, back in page.evaluate(COLOURS)
            if contrast(ink, back) < 4.5
        ]
        assert faint == []


def test_the_chart_is_zoomed_moved_and_reset(tab: Any, tmp_path: Path) -> None:
    with opened(tab, whole(), tmp_path) as page:
        canvas = page.locator("canvas")

        def shown() -> tuple[int, int]:
            return int(canvas.get_attribute("data-from")), int(canvas.get_attribute("data-to"))

        everything = shown()
        assert everything[0] == 0
        page.get_by_role("button", name="zoom in").click()
        closer = shown()
        assert closer[1] - closer[0] == pytest.approx((everything[1]) / 1.5, rel=0.01)
        canvas.focus()
        page.keyboard.press("ArrowRight")
        assert shown()[0] > closer[0]
        box = canvas.bounding_box()
        x, y = box["x"] + 0.6 * box["width"], box["y"] + 30
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + 100, y)
        page.mouse.up()
        moved = shown()
        assert moved[0] < closer[1]
        page.keyboard.down("Control")
        page.mouse.wheel(0, -400)
        page.keyboard.up("Control")
        page.wait_for_function(
            f"document.querySelector('canvas').dataset.to - {moved[0]} < {moved[1] - moved[0]}"
        )
        for _ in range(60):
            page.keyboard.press("+")
        assert shown()[1] - shown()[0] >= 19
        page.get_by_role("button", name="all").click()
        assert shown() == everything
        page.mouse.move(x - 200, y)
        assert "microbatch" in page.locator(".tip").inner_text()


def test_the_canvas_shows_the_colour_of_what_was_done(tab: Any, tmp_path: Path) -> None:
    with opened(tab, whole(), tmp_path) as page:
        pixel = page.evaluate(
            """() => { const c = document.querySelector('canvas'), r = devicePixelRatio;
               const row = c.getContext('2d').getImageData(0, (24 + 4 + 2) * r, c.width, 1).data;
               const colour = (_, x) => row.slice(4 * x, 4 * x + 3).join();
               return [...new Set(Array.from({length: c.width}, colour))];
             }"""
        )
        assert "0,114,178" in pixel  # computing
        assert "213,94,0" in pixel  # waiting for the link: stage 1 is slow


def test_the_time_without_a_new_result_is_marked(tab: Any, tmp_path: Path) -> None:
    with opened(tab, recovered(), tmp_path) as page:
        marked = page.evaluate(
            """() => { const c = document.querySelector('canvas'), r = devicePixelRatio;
               const row = c.getContext('2d').getImageData(0, (24 - 3) * r, c.width, 1).data;
               const warn = getComputedStyle(document.documentElement).getPropertyValue('--warn').trim();
               const part = (x, n) => row[4 * x + n].toString(16).padStart(2, '0');
               return Array.from({length: c.width}, (_, x) => '#' + part(x, 0) + part(x, 1) + part(x, 2))
                 .filter(colour => colour === warn).length; }"""
        )
        assert marked > 10


def test_report_text_is_not_executed(tab: Any, tmp_path: Path) -> None:
    run = read_run(through_json(poisoned(simulated_body([1.0, 2.0]))), f"run{NASTY}.json")
    for html in (render_run(run), render_comparison(run, run)):
        with opened(tab, html, tmp_path) as page:
            assert page.locator("img").count() == 0
            assert json.dumps(NASTY[:20])[1:-1] in json.dumps(page.locator("h1, h2").all_inner_texts())


# --- the page of a service ------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve a model whose name and classes are HTML; return its address."""
    directory = tmp_path_factory.mktemp("served") / HOSTILE
    save_bert(directory)
    config = json.loads((directory / "config.json").read_text())
    config["id2label"] = {str(number): f"{HOSTILE}{number}" for number in range(len(CLASSES))}
    (directory / "config.json").write_text(json.dumps(config))
    with ServedModel("-m", directory) as served:
        yield f"http://127.0.0.1:{served.port}/"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_sentence_is_tried_on_the_page(width: int, scheme: str, tab: Any, service: str) -> None:
    sentence = "the cat sat"
    expected = ask(int(service.split(":")[2].strip("/")), "POST", "/predict", {"inputs": sentence}).json
    with visited(tab, service, width, scheme) as page:
        page.get_by_label("A sentence").fill(sentence)
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector("#answer li")
        assert page.locator("#answer .label").all_inner_texts() == [one["label"] for one in expected]
        assert page.locator("#answer .score").all_inner_texts() == [
            f"{100 * one['score']:.1f} %" for one in expected
        ]
        assert expected[0]["label"].startswith(HOSTILE)
        assert HOSTILE in page.locator("h1").inner_text()
        page.wait_for_selector("#stages li")
        assert "layers 1-8" in page.locator("#stages").inner_text()
        assert "runs with layers 1-8 on rank 0" in page.locator("#events").inner_text()
        assert page.locator("img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert [text for text, ink, back in page.evaluate(COLOURS) if contrast(ink, back) < 4.5] == []
        page.get_by_role("link", name="Routes").click()
        page.wait_for_selector("article")
        assert HOSTILE in page.locator("h1").inner_text()
        assert page.locator("img, script").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert [text for text, ink, back in page.evaluate(COLOURS) if contrast(ink, back) < 4.5] == []


def test_a_ranker_takes_a_pair_and_shows_its_number(tab: Any, tmp_path: Path) -> None:
    save_bert(tmp_path / "ranker", classes=1)
    with (
        ServedModel("-m", tmp_path / "ranker") as served,
        visited(tab, f"http://127.0.0.1:{served.port}/") as page,
    ):
        for words, inputs in (
            (("the cat", "sat on a mat"), [["the cat", "sat on a mat"]]),
            (("day", ""), "day"),
        ):
            page.get_by_label("A query").fill(words[0])
            page.get_by_label("A passage").fill(words[1])
            page.get_by_role("button", name="Ask").click()
            (expected,) = ask(served.port, "POST", "/", {"inputs": inputs}).json[0]
            page.wait_for_function(
                "score => +document.querySelector('#answer output')?.textContent === score",
                arg=float(f"{expected['score']:.4g}"),
            )
            assert "%" not in page.locator("#answer").inner_text()


def test_two_sentences_are_compared_on_the_page(tab: Any, service: str) -> None:
    pair = ["the cat", "sat on a mat"]
    expected = ask(int(service.split(":")[2].strip("/")), "POST", "/predict", {"inputs": pair}).json
    with visited(tab, service) as page:
        page.get_by_label("A sentence").fill(pair[0])
        page.locator("summary", has_text="Add a second sentence").click()
        page.get_by_label("The second sentence").fill(pair[1])
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector("#answer li")
        assert page.locator("#answer .label").all_inner_texts() == [one["label"] for one in expected]
        assert page.locator("#answer .score").all_inner_texts() == [
            f"{100 * one['score']:.1f} %" for one in expected
        ]


def test_a_refusal_is_text_on_the_page(tab: Any, service: str) -> None:
    with visited(tab, service) as page:
        page.get_by_label("A sentence").fill(f"{HOSTILE} " * 20)
        page.get_by_role("button", name="Ask").click()
        page.wait_for_selector("#answer > .failed")
        assert "tokens" in page.locator("#answer").inner_text()
        assert page.locator("img").count() == 0
