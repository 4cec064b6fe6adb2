"""What the explorer's server answers: the geometry it was asked for, or a refusal with the right status."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from starlette.testclient import TestClient
from torch.distributions import Bernoulli, Categorical, Independent, Normal

import pullback as pb
from pullback.explorer import Model, render
from pullback.explorer.app import make_app
from pullback.explorer.jobs import Jobs, Superseded, TimeLimit
from pullback.explorer.security import MAX_BODY

LOCAL = "http://127.0.0.1"


def flat(z):
    """A decoder whose Fisher-Rao metric is Euclidean: distances, means and circles are those of school."""
    return Normal(z, torch.ones_like(z))


def bent(z):
    return Bernoulli(logits=torch.stack([3 * z[..., 0], z[..., 1] ** 2, z[..., 0] * z[..., 1]], -1))


def ask(client, name, **body):
    answer = client.post(f"/api/{name}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def some_codes():
    return torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def codes():
    return some_codes()


@pytest.fixture(scope="module")
def client(codes):
    with TestClient(make_app(Model("flat", flat, codes)), base_url=LOCAL) as client:
        yield client


@pytest.fixture(scope="module")
def bent_client(codes):
    lines = "from test_explorer_api import bent as decoder, some_codes\ncodes = some_codes()"
    model = Model("bent", bent, codes, labels=torch.arange(300) % 3, lines=lines)
    with TestClient(make_app(model), base_url=LOCAL) as client:
        yield client


# -- the geometry ------------------------------------------------------------------------------------------------------


def test_flat_paths_are_straight_and_as_long_as_their_ends_are_apart(client, codes):
    a, b = codes[3], torch.tensor([0.5, -0.25], dtype=torch.float64)
    path = ask(client, "path", metric="bare", a=3, b=b.tolist())
    assert path["converged"]
    assert path["length"] == pytest.approx(float((b - a).norm()), rel=1e-6)
    assert path["straight"] == pytest.approx(path["length"], rel=1e-6)
    np.testing.assert_allclose(path["geodesic"]["xy"], path["line"]["xy"], atol=1e-4)
    np.testing.assert_allclose(path["line"]["xy"][0], a, atol=1e-5)


def test_with_the_prior_squared_lengths_add_up(client, codes):
    """The prior of a flat decoder doubles the metric."""
    paths = [ask(client, "path", metric=metric, a=0, b=1) for metric in ("bare", "prior")]
    assert paths[1]["length"] == pytest.approx(2**0.5 * paths[0]["length"], rel=1e-6)


def test_flat_fans_are_round(client):
    fan = ask(client, "fan", metric="bare", z=[0.2, 0.1], reach=0.3)
    distance = (torch.tensor(fan["rays"]) - torch.tensor([0.2, 0.1])).norm(dim=-1)
    expected = fan["length"] * torch.linspace(0, 1, distance.shape[1])
    torch.testing.assert_close(distance, expected.expand_as(distance), atol=2e-4, rtol=0)


def test_flat_distances_are_euclidean_to_the_stencil(client, codes):
    field = ask(client, "field", metric="bare", z=7)
    ratio = torch.tensor(field["distances"]) / (codes - codes[7]).norm(dim=-1).float()
    ratio = ratio[ratio.isfinite()]
    assert float(ratio.min()) > 1 - 1e-3
    assert float(ratio.max()) < 1.03


def test_circles_have_their_radius(bent_client, codes):
    answer = ask(bent_client, "circles", metric="bare")
    circles = torch.tensor(answer["circles"], dtype=torch.float64)
    center = (circles[:, 0] + circles[:, 16]) / 2
    radius = pb.FisherRaoMetric(bent).norm(center[:, None].expand_as(circles), circles - center[:, None])
    assert float(radius.max()) < 1.01 * answer["radius"]
    inside = radius.mean(-1) > 0.999 * answer["radius"]
    assert int(inside.sum()) >= len(circles) // 2
    torch.testing.assert_close(radius[inside], torch.full_like(radius[inside], answer["radius"]), rtol=0.01, atol=0)


def test_flat_means_are_plain_means(client, codes):
    mean = ask(client, "mean", metric="bare", indices=[1, 5, 9, 20])
    expected = codes[[1, 5, 9, 20]].mean(0)
    np.testing.assert_allclose(mean["xy"], [expected.tolist()] * 2, atol=2e-2)
    assert mean["converged"]


def test_background_is_the_function_it_names(bent_client):
    metric = pb.FisherRaoMetric(bent)
    heat = ask(bent_client, "background", metric="bare", kind="volume", aspect=1.5)
    z = torch.tensor([[heat["x"][4], heat["y"][9]]], dtype=torch.float64)
    assert heat["values"][9][4] == pytest.approx(float(metric.log_volume(z)), abs=5e-3)
    entropy = ask(bent_client, "background", metric="bare", kind="entropy", aspect=1.5)
    assert entropy["values"][9][4] == pytest.approx(float(bent(z).entropy().sum()), abs=5e-3)
    assert len(heat["x"]) == pytest.approx(1.5 * len(heat["y"]), abs=2)


def test_exports_agree_with_the_lines_that_reproduce_them(bent_client):
    body = {"metric": "wall", "a": 0, "b": 10}
    path = ask(bent_client, "path", **body)
    files = {
        kind: bent_client.post("/api/export", json=body | {"format": kind}).content for kind in ("csv", "npz", "py")
    }
    assert files["py"].decode() == path["script"]
    namespace: dict = {}
    exec(path["script"], namespace)
    arrays = np.load(io.BytesIO(files["npz"]), allow_pickle=False)
    np.testing.assert_allclose(arrays["geodesic"], namespace["points"], atol=1e-12)
    np.testing.assert_allclose(arrays["line"], namespace["line"], atol=1e-12)
    assert float(arrays["length"]) == path["length"] == float(namespace["path"].length)
    table = np.loadtxt(io.BytesIO(files["csv"]), delimiter=",", skiprows=1)
    np.testing.assert_allclose(table[:, 1:3], arrays["geodesic"], atol=1e-12)


def test_more_dimensions_are_shown_along_the_two_that_are_used():
    codes = torch.randn(200, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def decoder(z):
        return Normal(torch.stack([3 * z[..., 1], 2 * z[..., 3]], -1), torch.ones(2, dtype=z.dtype))

    with TestClient(make_app(Model("five", decoder, codes)), base_url=LOCAL) as client:
        scene = ask(client, "scene")
        shown = torch.tensor(scene["codes"]["xy"], dtype=torch.float64)
        used = codes[:, [1, 3]] - codes[0, [1, 3]]
        residual = used - shown @ torch.linalg.lstsq(shown, used).solution
        assert float(residual.norm() / used.norm()) < 1e-3
        chosen = ask(client, "scene", axes=[4, 2], at=7)
        np.testing.assert_allclose(chosen["codes"]["xy"], codes[:, [4, 2]], atol=1e-4)
        path = ask(client, "path", metric="prior", a=[0.0, 1.0], b=12, axes=[1, 3], at=7)
        np.testing.assert_allclose(path["geodesic"]["xy"][0], [0.0, 1.0], atol=1e-5)
        np.testing.assert_allclose(path["geodesic"]["xy"][-1], codes[12, [1, 3]], atol=1e-4)


def test_an_extrapolated_decoder_brings_its_own_wall(codes):
    decoder = pb.Extrapolated(flat, pb.Support.fit(codes), strength=11.0)
    with TestClient(make_app(Model("walled", decoder, codes)), base_url=LOCAL) as client:
        far = [[5.0, 5.0], [5.0, 5.1]]
        path = ask(client, "path", metric="wall", a=far[0], b=far[1])
        line = torch.lerp(
            *(torch.tensor(z, dtype=torch.float64) for z in far),
            torch.linspace(0, 1, 129, dtype=torch.float64)[:, None],
        )
        assert path["straight"] == pytest.approx(float(pb.length(pb.FisherRaoMetric(decoder), line)), rel=1e-6)
        assert path["off"] == 1
        assert "leaves" in path["message"]


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_renderers_by_family():
    z = torch.zeros(3, 2)
    image = render.automatic(Independent(Normal(torch.full((3, 1, 8, 9), 0.5), 1.0), 3))
    assert (image["kind"], image["height"], image["width"], image["count"]) == ("images", 8, 9, 3)
    assert set(base64.b64decode(image["data"])) == {128}
    assert render.automatic(flat(z))["kind"] == "bars"
    assert render.automatic(Categorical(logits=torch.zeros(3, 4)))["frames"] == [[0.25] * 4] * 3
    certain = torch.eye(4)[[0, 2]].expand(3, 2, 4)
    logo = render.automatic(Categorical(probs=certain), names="ACGT")
    assert [position[0] for position in logo["frames"][0]] == [["A", 2.0], ["G", 2.0]]
    assert "x2" in render.automatic(flat(z))["names"]


@pytest.mark.parametrize(
    ("shown", "kind", "channels"),
    [
        (lambda p: p.mean.new_full((6, 7), 1.0), "images", 1),
        (lambda p: np.zeros((6, 7, 3), dtype=np.uint8), "images", 3),
        (lambda p: f"<b>{float(p.mean[0, 0]):.1f}</b>", "html", None),
    ],
)
def test_own_renderers_return_images_or_html(shown, kind, channels):
    frames = render.one_by_one(shown)(flat, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert (frames["kind"], frames["count"], frames.get("channels")) == (kind, 2, channels)
    if kind == "html":
        assert frames["frames"] == ["<b>1.0</b>", "<b>3.0</b>"]


def test_other_returns_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3, 4, 5\).*\(h, w\)"):
        render.one_by_one(lambda p: torch.zeros(2, 3, 4, 5))(flat, torch.zeros(1, 2))


def test_labels_become_classes():
    codes = torch.zeros(4, 2)
    assert Model("", flat, codes, ["b 10", "b 9", "b -9", "a"]).classes() == (
        ["a", "b -9", "b 9", "b 10"],
        [3, 2, 1, 0],
    )
    names, index = Model("", flat, torch.zeros(100, 2), np.linspace(0, 1, 100)).classes()
    assert len(names) == 5
    assert np.bincount(index).tolist() == pytest.approx([20] * 5, abs=1)
    with pytest.raises(ValueError, match="4 codes and 3 labels"):
        Model("", flat, codes, [1, 2, 3])
    with pytest.raises(ValueError, match="d at least 2"):
        Model("", flat, torch.zeros(4, 1))


# -- refusals ----------------------------------------------------------------------------------------------------------

PATH = {"metric": "bare", "a": 0, "b": 1}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 50_000, 400),
        (b"[1]", 422),
        (b"null", 422),
        (b'{"metric": "bare", "a": [NaN, 0], "b": 1}', 422),
        (b'{"metric": "bare", "a": [Infinity, 0], "b": 1}', 422),
        (b'{"metric": "bare", "a": [1e999, 0], "b": 1}', 422),
        (b'{"metric": "bare", "a": [1e300, 0], "b": 1}', 422),
        (b'{"metric": "bare", "a": [1' + b"0" * 400 + b', 0], "b": 1}', 422),
        (json.dumps(PATH | {"a": [0]}).encode(), 422),
        (json.dumps(PATH | {"a": ["0", 0]}).encode(), 422),
        (json.dumps(PATH | {"a": [True, 0]}).encode(), 422),
        (json.dumps(PATH | {"a": True}).encode(), 422),
        (json.dumps(PATH | {"a": -1}).encode(), 422),
        (json.dumps(PATH | {"a": 300}).encode(), 422),
        (json.dumps(PATH | {"a": None}).encode(), 422),
        (json.dumps(PATH | {"metric": "other"}).encode(), 422),
        (json.dumps(PATH | {"metric": ["bare"]}).encode(), 422),
        (json.dumps(PATH | {"axes": [0, 0]}).encode(), 422),
        (json.dumps(PATH | {"axes": [0, 7]}).encode(), 422),
        (json.dumps(PATH | {"at": 1.5}).encode(), 422),
        (json.dumps(PATH | {"aspect": 1e9}).encode(), 422),
        (b" " * (MAX_BODY + 1), 413),
    ],
)
def test_bad_bodies_are_refused(client, body, status):
    answer = client.post("/api/path", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"].endswith(".")


def test_a_stream_without_a_length_is_cut_off(client):
    sent = []

    def endless():
        for _ in range(1000):
            sent.append(1)
            yield b" " * 8192

    answer = client.post("/api/path", content=endless(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "localhost.example.com:80", "", "[::2]:80"])
@pytest.mark.parametrize("path", ["/", "/api/scene", "/static/main.js"])
def test_foreign_hosts_are_refused(client, host, path):
    assert client.get(path, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:1", "[::1]:80", "[::1]"])
def test_this_machine_is_not_foreign(client, host):
    assert client.get("/", headers={"host": host}).status_code == 200


def test_only_json_is_read(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = client.post("/api/path", content=json.dumps(PATH), headers={"content-type": kind})
        assert answer.status_code == 415


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/",
        "/api/none",
    ],
)
def test_nothing_else_is_served(client, path):
    assert client.get(path).status_code in (404, 405)


def test_questions_are_posted(client):
    assert client.get("/api/path").status_code == 405


def test_every_answer_has_a_policy(client):
    for answer in (
        client.get("/"),
        client.get("/none"),
        client.post("/api/path"),
        client.get("/", headers={"host": "example.com"}),
    ):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


def test_elsewhere_a_token_is_asked_for(codes):
    with TestClient(make_app(Model("flat", flat, codes), token="secret"), base_url="http://example.com") as client:
        assert client.get("/").status_code == 200
        assert client.post("/api/scene", json={}).status_code == 401
        for given, status in (("Bearer wrong", 401), ("Bearer ", 401), ("secret", 200), ("Bearer secret", 200)):
            assert client.post("/api/scene", json={}, headers={"authorization": given}).status_code == status


def test_a_failing_decoder_is_reported_and_survived(codes):
    def broken(z):
        if len(z) == 33:
            raise RuntimeError("out of order")
        return flat(z)

    with TestClient(make_app(Model("broken", broken, codes)), base_url=LOCAL) as client:
        answer = client.post("/api/path", json=PATH)
        assert answer.status_code == 500
        assert "out of order" in answer.json()["error"]
        assert ask(client, "scene")["num_codes"] == 300


# -- one job at a time -------------------------------------------------------------------------------------------------


def test_the_newest_job_wins_and_the_others_stop():
    jobs, running = Jobs(limit=30), threading.Lock()

    def work(number):
        assert running.acquire(blocking=False), "two jobs at once"
        try:
            for _ in range(1000 if number < 9 else 1):
                jobs.checkpoint()
                time.sleep(0.002)
            return number
        finally:
            running.release()

    async def clicks():
        tasks = []
        for number in range(10):
            tasks.append(asyncio.ensure_future(jobs.run("solve", lambda n=number: work(n))))
            await asyncio.sleep(0.01)
        other = await jobs.run("background", lambda: "drawn")
        return await asyncio.gather(*tasks, return_exceptions=True), other

    answers, other = asyncio.run(clicks())
    jobs.close()
    assert all(isinstance(answer, Superseded) for answer in answers[:-1])
    assert answers[-1] == 9
    assert other == "drawn"


def test_jobs_end_at_the_time_limit(codes):
    def slow(z):
        time.sleep(0.05)
        return flat(z)

    with TestClient(make_app(Model("slow", slow, codes), time_limit=0.2), base_url=LOCAL) as client:
        begin = time.monotonic()
        assert client.post("/api/background", json={"metric": "bare", "kind": "volume"}).status_code == 504
        assert time.monotonic() - begin < 5
    with pytest.raises(TimeLimit):
        asyncio.run(_late())


async def _late():
    jobs = Jobs(limit=0)
    try:
        await jobs.run("solve", lambda: time.sleep(0.01) or jobs.checkpoint())
    finally:
        jobs.close()


def test_memory_stays_flat(client):
    """Each request asks for something else; what is kept must not grow with them. (The benchmark sends 500.)"""
    draw = random.Random(0)

    def request(number):
        point = [draw.uniform(-2, 2), draw.uniform(-2, 2)]
        name = ("path", "circles", "background", "circles", "field")[number % 5]
        kind = {"kind": "support", "aspect": draw.uniform(0.3, 3)} if name == "background" else {}
        assert (
            client.post(f"/api/{name}", json={"metric": "bare", "a": point, "z": point, "b": 0, **kind}).status_code
            == 200
        )

    for number in range(50):
        request(number)
    before = psutil.Process().memory_info().rss
    for number in range(150):
        request(number)
    assert psutil.Process().memory_info().rss - before < 10e6
