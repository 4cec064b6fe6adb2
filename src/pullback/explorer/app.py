"""The routes of the explorer: the page, what it loads, and what it asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from pullback.explorer.export import FORMATS, export, script
from pullback.explorer.jobs import Jobs, Superseded, TimeLimit
from pullback.explorer.model import Model
from pullback.explorer.query import Query, parse
from pullback.explorer.render import rounded
from pullback.explorer.scene import EVERY, Scene
from pullback.explorer.security import Gate, Refused, body_of

STATIC = Path(str(files("pullback.explorer") / "static"))
PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
# Seconds after which a computation stops.
TIME_LIMIT = 30.0

log = logging.getLogger(__name__)


def make_app(model: Model, *, token: str | None = None, time_limit: float = TIME_LIMIT) -> Starlette:
    """The web application that explores a model.

    Args:
        model: what to show.
        token: that every question must carry, or None on the local machine.
        time_limit: seconds after which a computation stops.
    """
    jobs = Jobs(time_limit)
    scene = Scene(model, jobs.checkpoint)

    @asynccontextmanager
    async def lifespan(app: Starlette):
        yield
        jobs.close()

    answers = {
        "scene": _scene,
        "background": _background,
        "path": _path,
        "fan": _fan,
        "field": _field,
        "circles": _circles,
        "mean": _mean,
    }
    lanes = {"scene": "scene", "background": "background"}
    routes = [
        Route(f"/api/{name}", _endpoint(scene, jobs, lanes.get(name, "solve"), answer), methods=["POST"])
        for name, answer in answers.items()
    ]
    routes += [
        Route("/api/export", _endpoint(scene, jobs, "export", _export), methods=["POST"]),
        Route("/", lambda request: FileResponse(STATIC / "index.html")),
        Route("/plotly.min.js", lambda request: FileResponse(PLOTLY, headers={"cache-control": "max-age=86400"})),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Gate, token=token)], lifespan=lifespan)


def _endpoint(scene: Scene, jobs: Jobs, lane: str, answer: Callable[[Query], Any]) -> Callable[..., Any]:
    """A route that checks the body, waits for its turn, computes, and says how long that took."""

    async def endpoint(request: Request) -> Response:
        try:
            query = Query(scene, parse(await body_of(request)))

            def work() -> Any:
                begin = time.perf_counter()
                found = answer(query)
                return found | {"seconds": time.perf_counter() - begin} if isinstance(found, dict) else found

            found = await jobs.run(lane, work)
        except Refused as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status)
        except Superseded as error:
            return JSONResponse({"error": str(error)}, 409)
        except TimeLimit as error:
            return JSONResponse({"error": str(error)}, 504)
        except Exception as error:  # the decoder is the user's, and may raise anything
            log.exception("The explorer could not answer %s.", request.url.path)
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
        return found if isinstance(found, Response) else JSONResponse(found, background=_preparation(jobs, query, lane))

    return endpoint


def _preparation(jobs: Jobs, query: Query, lane: str) -> BackgroundTask | None:
    """After a background was drawn: the graph where paths start, so that the first click need not wait for it."""
    if lane != "background":
        return None

    async def prepare() -> None:
        with suppress(Superseded, TimeLimit):
            await jobs.run("prepare", lambda: query.scene.graph(query.metric))

    return BackgroundTask(prepare)


def _scene(query: Query) -> dict[str, Any]:
    return query.scene.describe(query.plane())


def _background(query: Query) -> dict[str, Any]:
    return query.scene.background(query.metric, query.word("kind", query.scene.backgrounds), query.plane())


def _path(query: Query) -> dict[str, Any]:
    scene, plane, metric = query.scene, query.plane(), query.metric
    a, b = query.code("a", plane), query.code("b", plane)
    found = scene.path(metric, a, b)
    curves = {"geodesic": found.geodesic, "line": found.line}
    return found.numbers | {
        "script": script(scene, metric, a, b),
        **{
            name: {"xy": rounded(plane.project(z), 5), "frames": scene.frames(z[::EVERY])} for name, z in curves.items()
        },
    }


def _fan(query: Query) -> dict[str, Any]:
    plane = query.plane()
    return query.scene.fan(query.metric, query.code("z", plane), plane, query.number("reach", 0.01, 2.0))


def _field(query: Query) -> dict[str, Any]:
    return query.scene.field(query.metric, query.code("z", query.plane()))


def _circles(query: Query) -> dict[str, Any]:
    return query.scene.circles(query.metric, query.plane())


def _mean(query: Query) -> dict[str, Any]:
    means, numbers = query.scene.mean(query.metric, query.indices("indices"))
    return numbers | {"xy": rounded(query.plane().project(means), 5), "frames": query.scene.frames(means)}


def _export(query: Query) -> Response:
    plane, metric = query.plane(), query.metric
    kind = query.word("format", FORMATS)
    a, b = query.code("a", plane), query.code("b", plane)
    found = query.scene.path(metric, a, b)
    name = f'attachment; filename="path.{kind}"'
    return Response(
        export(kind, found, script(query.scene, metric, a, b)),
        media_type=FORMATS[kind],
        headers={"content-disposition": name},
    )
