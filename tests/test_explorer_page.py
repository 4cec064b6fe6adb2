"""The explorer's page in a browser: clicked, dragged and switched as by a person; it must never look elsewhere.

Needs Chromium; without it these tests are skipped, and ``make test`` says so.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import time
import xml.etree.ElementTree
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
import torch
from playwright.sync_api import Page, sync_playwright
from torch.distributions import Bernoulli

from pullback.explorer import Model, render
from pullback.explorer.serve import Explorer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed: the explorer's page was NOT tested"
)

PATIENCE = 60_000


def ring() -> Model:
    """Codes on a ring, and images of a dot that moves with the code."""
    angle = torch.linspace(0, 2 * math.pi, 241, dtype=torch.float64)[:-1]
    noise = 0.1 * torch.randn(240, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes = 2 * torch.stack([angle.cos(), angle.sin()], -1) + noise
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-3, 3, 8, dtype=torch.float64)] * 2, indexing="xy"), -1).flatten(
        0, 1
    )

    def decoder(z):
        return Bernoulli(logits=2 - (z[..., None, :] - grid).square().sum(-1))

    draw = render.together(lambda p: render.images(p.mean, (8, 8)))
    return Model("A ring", decoder, codes, ["left" if x < 0 else "right" for x in codes[:, 0]], draw, "Generated.")


@pytest.fixture(scope="module")
def explorer():
    explorer = Explorer(ring())
    yield explorer
    explorer.stop()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to the superuser, which tests in containers often are.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def loaded(browser, explorer):
    """The page, and what went wrong in it: messages in its console, and requests to other hosts."""
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    home = urlparse(explorer.url).netloc
    page.on("request", lambda request: _check_home(request.url, home, wrong))
    page.goto(explorer.url)
    until(page, "document.body.dataset.ready === 'yes'")
    yield page, wrong
    page.close()


@pytest.fixture
def page(loaded):
    """The page with a path in it; after each test nothing must have gone wrong."""
    page, wrong = loaded
    choose_mode(page, "path")
    page.select_option("#metric", "wall")
    page.locator("#clear").click()
    click(page, 1.0, -0.5)
    solved(page, lambda: click(page, -0.5, 1.0))
    yield page
    assert wrong == []


def _check_home(url: str, home: str, wrong: list[str]) -> None:
    if urlparse(url).scheme not in ("data", "blob") and urlparse(url).netloc != home:
        wrong.append(f"request to {url}")


def until(page: Page, condition: str) -> None:
    """Waits for a condition. (Playwright's own way evaluates it in the page, which the page's policy forbids.)"""
    end = time.monotonic() + PATIENCE / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}; the page says: {page.inner_text('#result')}"
        page.wait_for_timeout(20)


def solved(page: Page, act) -> None:
    """Does something, and waits until the page has drawn the answer."""
    before = int(page.evaluate("document.body.dataset.solved ?? 0"))
    act()
    until(page, f"+document.body.dataset.solved > {before}")


def pixel(page: Page, x: float, y: float) -> tuple[float, float]:
    """Where a point of the latent plane is on the screen."""
    script = """([x, y]) => {
        const plot = document.querySelector('#plot'), box = plot.getBoundingClientRect();
        const { xaxis, yaxis } = plot._fullLayout;
        return [box.left + xaxis._offset + xaxis.l2p(x), box.top + yaxis._offset + yaxis.l2p(y)];
    }"""
    return tuple(page.evaluate(script, [x, y]))


def click(page: Page, x: float, y: float) -> None:
    page.mouse.click(*pixel(page, x, y))


def numbers(page: Page) -> list[float]:
    return [float(text) for text in page.locator("#numbers dd.big").all_inner_texts()]


def state(page: Page, expression: str):
    """Something of what the picture is drawn from."""
    return page.evaluate(f"(() => {{ const data = document.querySelector('#plot').data; return {expression}; }})()")


def choose_mode(page: Page, name: str) -> None:
    page.locator(f"#modes label:has(input[value={name}])").click()


def test_two_clicks_draw_both_paths(page):
    click(page, 1.2, 0.3)
    assert page.inner_text("#hint") == "Click its end"
    solved(page, lambda: click(page, -0.4, 1.1))
    length, straight = numbers(page)
    assert 0 < length <= straight * (1 + 1e-3)
    assert "onverged" in page.inner_text("#message")
    assert "computed in" in page.inner_text("#timing")
    lines = state(
        page,
        "data.filter(t => t.mode === 'lines' && t.x.length === 129).map(t => [t.x[0], t.y[0], t.x[128], t.y[128]])",
    )
    assert len(lines) == 4  # each of the two on a pale one
    np.testing.assert_allclose(lines, [[1.2, 0.3, -0.4, 1.1]] * 4, atol=0.02)


def test_a_click_on_a_code_chooses_the_code(page):
    x, y, index = state(page, "[data[1].x[7], data[1].y[7], data[1].customdata[7]]")
    asked = []
    page.on("request", lambda request: asked.append(request.post_data) if request.url.endswith("/api/path") else None)
    click(page, x, y)
    solved(page, lambda: click(page, 0.0, 0.0))
    assert json.loads(asked[-1])["a"] == index


def test_ten_clicks_a_second_end_with_the_last(page):
    page.locator("#clear").click()
    solved(
        page,
        lambda: [click(page, 1.5 * math.cos(k), 1.5 * math.sin(k)) or page.wait_for_timeout(100) for k in range(10)],
    )
    until(page, "document.querySelector('#timing').textContent.startsWith('computed')")
    x, y = state(page, "(t => [t.x.at(-1), t.y.at(-1)])(data.findLast(t => t.mode === 'lines' && t.x.length === 129))")
    assert (x, y) == pytest.approx((1.5 * math.cos(9), 1.5 * math.sin(9)), abs=0.03)


def test_slider_and_play_move_both_pictures(page):
    look = "[...document.querySelectorAll('#previews canvas')].map(c => c.toDataURL())"
    page.locator("#slider").fill("0")
    first = page.evaluate(look)
    assert len(first) == 2
    page.locator("#slider").fill("16")
    assert page.inner_text("#time") == "50 %"
    middle = page.evaluate(look)
    assert all(a != b for a, b in zip(first, middle, strict=True))
    assert len(state(page, "data.at(-1).x")) == 2
    page.locator("#play").click()
    # paused from within the page: a click from outside may come after the end
    pause = """() => new Promise(done => {
        const slider = document.querySelector("#slider"), play = document.querySelector("#play");
        const look = setInterval(() => {
            if (+slider.value > 20) { clearInterval(look); play.click(); done(play.textContent); }
        }, 5);
    })"""
    assert page.evaluate(pause) == "Play"
    held = page.locator("#slider").input_value()
    page.wait_for_timeout(300)
    assert page.locator("#slider").input_value() == held


def test_background_and_metric_can_be_switched(page):
    picture = "data[0].colorbar.title.text + data[0].z[3].join()"
    seen = {state(page, picture)}
    for kind in ("entropy", "support"):
        with page.expect_response("**/api/background"):
            page.select_option("#background", kind)
        page.wait_for_timeout(300)
        seen.add(state(page, picture))
    assert len(seen) == 3
    lengths = set()
    for metric in ("bare", "prior", "euclidean", "wall"):
        solved(page, lambda metric=metric: page.select_option("#metric", metric))
        lengths.add(round(numbers(page)[0], 3))
    assert len(lengths) == 4


def test_fan_distances_and_circles(page):
    page.select_option("#metric", "bare")
    choose_mode(page, "fan")
    solved(page, lambda: click(page, 2.0, 0.0))
    assert "24 of 24" in page.inner_text("#message")
    solved(page, lambda: choose_mode(page, "field"))
    assert state(page, "data[1].marker.color.length") == 240
    solved(page, lambda: choose_mode(page, "circles"))
    assert state(page, "data.some(t => t.mode === 'lines' && t.x.length > 1000)")


def test_a_lasso_has_a_mean(page):
    choose_mode(page, "mean")
    until(page, "document.querySelector('#plot').layout.dragmode === 'lasso'")
    corners = [pixel(page, x, y) for x, y in ((1.2, -0.9), (2.6, -0.9), (2.6, 0.9), (1.2, 0.9), (1.2, -0.9))]

    def lasso():
        page.mouse.move(*corners[0])
        page.mouse.down()
        for corner in corners[1:]:
            page.mouse.move(*corner, steps=6)
            # plotly looks at the lasso every 50 ms, later under load, and only when the mouse moves
            for shift in (1, 0):
                page.wait_for_timeout(150)
                page.mouse.move(corner[0] + shift, corner[1])
        page.mouse.up()

    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    solved(page, lasso)
    x, y = state(page, "(t => [t.x[0], t.y[0]])(data.find(t => t.marker?.symbol === 'star'))")
    # plotly may miss a corner under load, so the codes it took are what the star is compared with
    chosen = next(body["indices"] for body in reversed(asked) if "indices" in body)
    assert len(chosen) > 5
    assert (x, y) == pytest.approx(tuple(ring().codes[chosen].mean(0).tolist()), abs=0.3)
    assert page.locator("#previews canvas").count() == 2


def test_exports(page, tmp_path):
    def saved(selector: str) -> Path:
        with page.expect_download() as download:
            page.locator(selector).click()
        file = tmp_path / download.value.suggested_filename
        download.value.save_as(file)
        return file

    assert saved("[data-figure=png]").read_bytes().startswith(b"\x89PNG")
    assert xml.etree.ElementTree.parse(saved("[data-figure=svg]")).getroot().tag.endswith("svg")
    table = np.loadtxt(saved("[data-file=csv]"), delimiter=",", skiprows=1)
    arrays = np.load(io.BytesIO(saved("[data-file=npz]").read_bytes()), allow_pickle=False)
    np.testing.assert_allclose(table[:, 1:3], arrays["geodesic"], atol=1e-12)
    assert f"{arrays['length']:.4}" == f"{numbers(page)[0]:.4}"
    assert "pb.geodesic(metric, a, b" in saved("[data-file=py]").read_text()


def test_keys_choose_points_too(page):
    page.locator("#clear").click()
    page.locator("#plot").focus()
    for key in ("Shift+ArrowRight", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    until(page, "document.querySelector('#hint').textContent === 'Click its end'")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowLeft")
    solved(page, lambda: page.keyboard.press("Enter"))
    assert len(numbers(page)) == 2


def test_nothing_is_cut_off_on_a_phone(page):
    solved(page, lambda: page.set_viewport_size({"width": 390, "height": 844}))
    boxes = [control.bounding_box() for control in page.locator("button, select, #plot").all() if control.is_visible()]
    width = page.evaluate("document.documentElement.scrollWidth")
    solved(page, lambda: page.set_viewport_size({"width": 1280, "height": 800}))
    assert width <= 390
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)


def test_everything_that_can_be_used_has_a_name(page):
    nameless = """[...document.querySelectorAll('button, select, input, [role=application], canvas')]
        .filter(e => !e.getAttribute('aria-label') && !e.textContent.trim() && !e.labels?.length)
        .map(e => e.outerHTML)"""
    assert page.evaluate(nameless) == []
