"""The explorer: from a click to the drawn geodesic in Chromium, and memory over many requests.

Clicks are those of a mouse in a headless browser, at random codes of the model. The page measures from the click to the
end of drawing, and shows the server's own time beside it.

    python benchmarks/explorer.py mnist
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
import urllib.request
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

from pullback.explorer.builtin import BUILTIN, builtin
from pullback.explorer.serve import Explorer


def clicks(explorer: Explorer, count: int) -> list[tuple[float, float]]:
    """Milliseconds on the server and until drawn, of each pair of clicks."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    found, draw = [], random.Random(0)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(explorer.url)
        while page.evaluate("document.body.dataset.ready") != "yes":
            page.wait_for_timeout(50)
        for _ in range(count):
            before = int(page.evaluate("document.body.dataset.solved"))
            for place in draw.sample(page.evaluate(PLACES), 2):
                page.mouse.click(*place)
            while int(page.evaluate("document.body.dataset.solved")) == before:
                page.wait_for_timeout(20)
            words = page.inner_text("#timing").split()
            found.append((float(words[2]), float(words[-2])))
        browser.close()
    return found


PLACES = """(() => {
    const plot = document.querySelector("#plot"), box = plot.getBoundingClientRect();
    const { xaxis, yaxis } = plot._fullLayout;
    return plot.data.filter((t) => t.customdata).flatMap((t) => t.x.map((x, i) =>
        [box.left + xaxis._offset + xaxis.l2p(x), box.top + yaxis._offset + yaxis.l2p(t.y[i])]));
})()"""


def memory(explorer: Explorer, count: int) -> list[float]:
    """Megabytes of the process after every fifth part of the requests."""
    draw, found = random.Random(0), []
    for number in range(count):
        a, b = draw.sample(range(200), 2)
        body = (
            f'{{"metric": "bare", "a": {a}, "b": {b}, "z": {a}, "kind": "support", "aspect": {draw.uniform(0.5, 2)}}}'
        )
        name = ("path", "circles", "background", "field")[number % 4]
        url, headers = f"{explorer.url}api/{name}", {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)).read()
        if (number + 1) % (count // 5) == 0:
            found.append(psutil.Process().memory_info().rss / 1e6)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=BUILTIN, nargs="?", default="mnist")
    parser.add_argument("--clicks", type=int, default=20)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    model = builtin(options.model, options.out)
    begin = time.perf_counter()
    explorer = Explorer(model)
    print(
        f"{options.model}: listening after {time.perf_counter() - begin:.2f} s; load average {os.getloadavg()[0]:.1f}"
    )
    cpu = time.process_time()
    times = clicks(explorer, options.clicks)
    used = 1000 * (time.process_time() - cpu) / len(times)
    for name, column in zip(("server", "click to drawn"), zip(*times, strict=True), strict=True):
        print(f"{name}: median {statistics.median(column):.0f} ms, largest {max(column):.0f} ms, {len(column)} clicks")
    print(f"processor time of the server, with all that the page asks at its start: {used:.0f} ms per click")
    if options.requests:
        print(
            "memory, MB:",
            *(f"{x:.0f}" for x in memory(explorer, options.requests)),
            f"over {options.requests} requests",
        )
    explorer.stop()


if __name__ == "__main__":
    main()
