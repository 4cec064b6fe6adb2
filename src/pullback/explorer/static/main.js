// The page: what was chosen, what is asked for it, and where the answers go.

import { ask, file, superseded } from "./api.js";
import { Frames } from "./frames.js";
import { LatentMap } from "./map.js";
import { Player } from "./player.js";

const $ = (selector) => document.querySelector(selector);
const state = { mode: "path", a: null, b: null, z: null, indices: null, scene: null, cross: null };
const hints = {
  path: () => (state.a === null ? "Click the start of a path" : state.b === null ? "Click its end" : ""),
  fan: () => (state.z === null ? "Click a point: geodesics leave it in all directions" : ""),
  field: () => (state.z === null ? "Click a point: codes are colored by their distance from it" : ""),
  circles: () => "",
  mean: () => (state.indices === null ? "Draw a lasso around some codes" : ""),
};
const map = new LatentMap($("#plot"), { onPoint: choose, onLasso: (indices) => { state.indices = indices; solve(); } });
const player = new Player((fraction) => map.move(fraction));

const plane = () => ({ axes: state.scene?.dimension > 2 && $("#axis-x").value !== "" ? [+$("#axis-x").value, +$("#axis-y").value] : null, at: +$("#at").value || 0, aspect: state.aspect });
const metric = () => $("#metric").value;
const place = (point) => (Array.isArray(point) ? point : state.scene.codes.xy[state.scene.codes.index.indexOf(point)] ?? null);
const ends = () => (state.mode === "path" ? [state.a, state.b] : ["fan", "field"].includes(state.mode) ? [state.z] : []).filter((p) => p !== null).map(place).filter(Boolean);
const clean = () => ({ path: null, fan: null, field: null, circles: null, mean: null });

function say(text, bad = false) {
  $("#message").textContent = text;
  $("#message").classList.toggle("bad", bad);
}

function numbers(rows) {
  $("#numbers").replaceChildren(...rows.flatMap(([name, value, note, kind]) => {
    const dt = document.createElement("dt"), dd = document.createElement("dd"), more = document.createElement("dd");
    dt.textContent = name; dd.textContent = value; more.textContent = note ?? "";
    dt.className = kind ?? ""; dd.className = "big";
    return [dt, dd, more];
  }));
}

const digits = (x) => (x === null || x === undefined ? "–" : x.toPrecision(4));
const off = (share) => (share < 0.005 ? "stays on the data" : `${Math.round(100 * share)} % off the data`);

// What to ask in each mode, once everything was chosen, and what to do with the answer.
const modes = {
  path: {
    ready: () => state.a !== null && state.b !== null,
    body: () => ({ a: state.a, b: state.b }),
    show(answer) {
      numbers([["geodesic", digits(answer.length), off(answer.off), "geodesic"], ["straight line", digits(answer.straight), off(answer.straight_off)]]);
      say(sentence(answer.message), !answer.converged);
      return { path: answer };
    },
    after(answer) { player.load(new Frames({ geodesic: answer.geodesic.frames, "straight line": answer.line.frames })); },
  },
  fan: {
    ready: () => state.z !== null,
    body: () => ({ z: state.z, reach: +$("#reach").value }),
    show(answer) { numbers([["length", digits(answer.length), "of each geodesic"]]); say(answer.message); return { fan: answer }; },
  },
  field: {
    ready: () => state.z !== null,
    body: () => ({ z: state.z }),
    show(answer) { numbers([["median distance", digits(answer.median), "to a code"]]); say(answer.message); return { field: answer }; },
  },
  circles: {
    ready: () => true,
    body: () => ({}),
    show(answer) { numbers([["radius", digits(answer.radius), "of every circle"]]); say(answer.message); return { circles: answer }; },
  },
  mean: {
    ready: () => state.indices?.length > 1,
    body: () => ({ indices: state.indices }),
    show(answer) { numbers([["deviation", digits(answer.deviation), "from the Fréchet mean"]]); say(answer.message, !answer.converged); return { mean: answer }; },
    after(answer) { player.still(new Frames({ "Fréchet mean": answer.frames, "plain mean": { ...answer.frames } }), [0, 1]); },
  },
};
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");

async function solve() {
  const begin = performance.now(), mode = modes[state.mode], asked = state.mode;
  $("#hint").textContent = hints[state.mode]();
  if (!mode.ready()) { await map.draw({ ...clean(), ends: ends(), cross: state.cross }); return; }
  $("#timing").textContent = "computing …";
  try {
    const answer = await ask(asked, { metric: metric(), ...plane(), ...mode.body() });
    await map.draw({ ...clean(), ...mode.show(answer), ends: ends(), cross: state.cross });
    const shown = performance.now() - begin;
    mode.after?.(answer);
    state.script = answer.script;
    for (const button of document.querySelectorAll("[data-file], #copy")) button.disabled = asked !== "path";
    $("#timing").textContent = `computed in ${Math.round(1000 * answer.seconds)} ms, on screen after ${Math.round(shown)} ms`;
    document.body.dataset.solved = String(+(document.body.dataset.solved ?? 0) + 1);
  } catch (error) { fail(error); }
}

function fail(error) {
  if (superseded(error)) return;
  $("#timing").textContent = "";
  say(error.message, true);
}

function choose(point) {
  if (state.mode === "path") {
    if (state.a === null || state.b !== null) { state.a = point; state.b = null; } else state.b = point;
  } else if (state.mode === "fan" || state.mode === "field") state.z = point;
  else return;
  solve();
}

async function background() {
  const begin = performance.now();
  try {
    const heat = await ask("background", { metric: metric(), kind: $("#background").value, ...plane() }, "background");
    await map.draw({ heat });
    document.body.dataset.background = String(Math.round(performance.now() - begin));
  } catch (error) { fail(error); }
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
}

async function load() {
  state.aspect = Math.round(10 * map.aspect()) / 10;
  const scene = (state.scene = await ask("scene", plane(), "scene"));
  $("#title").textContent = scene.title;
  document.title = `${scene.title} · pullback explorer`;
  const shown = scene.codes.index.length;
  const count = `${shown < scene.num_codes ? `${shown} of ${scene.num_codes}` : scene.num_codes} codes in ${scene.dimension} dimensions.`;
  $("#source").textContent = `${count} ${scene.source}`;
  await map.draw({ scene, ...clean(), ends: [] });
}

async function start() {
  try {
    await load();
    const { scene } = state;
    options($("#metric"), Object.entries(scene.metrics));
    options($("#background"), Object.entries(scene.backgrounds));
    const axes = [...Array(scene.dimension).keys()].map((i) => [String(i), `z${i + 1}`]);
    options($("#axis-x"), [["", "most used"], ...axes]);
    options($("#axis-y"), [["", "second"], ...axes]);
    $("#plane").hidden = scene.dimension === 2;
    $("#at").max = scene.num_codes - 1;
    await background();
    [state.a, state.b] = scene.example;
    await solve();
    document.body.dataset.ready = "yes";
  } catch (error) { fail(error); }
}

// The picture fills its place: where that has changed its shape, the background is computed anew.
async function refit() {
  try {
    if (!(Math.abs(map.aspect() - state.aspect) <= 0.15)) { await load(); await background(); }
    await solve();
  } catch (error) { fail(error); }
}

let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(refit, 400); });

function clear() {
  Object.assign(state, { a: null, b: null, z: null, indices: null, cross: null });
  player.hide();
  numbers([]);
  say("");
  $("#timing").textContent = "";
  for (const button of document.querySelectorAll("[data-file], #copy")) button.disabled = true;
}

for (const radio of document.querySelectorAll("[name=mode]")) {
  radio.addEventListener("change", () => {
    const kept = state.z ?? state.a;
    clear();
    state.mode = radio.value;
    if (["fan", "field"].includes(state.mode)) state.z = kept;
    $("#reach-field").hidden = state.mode !== "fan";
    $("#strips").hidden = state.mode !== "path";
    $("#previews").classList.toggle("empty", !["path", "mean"].includes(state.mode));
    map.state.lasso = state.mode === "mean";
    refit();
  });
}
$("#metric").addEventListener("change", () => { if ($("#background").value === "volume") background(); solve(); });
$("#background").addEventListener("change", background);
$("#reach").addEventListener("change", solve);
for (const select of ["#axis-x", "#axis-y", "#at"]) $(select).addEventListener("change", changePlane);
async function changePlane(event) {
  const [x, y] = [$("#axis-x"), $("#axis-y")];
  if ((x.value === "") !== (y.value === "") || (x.value !== "" && x.value === y.value)) {
    const other = event.target === x ? y : x;
    other.value = event.target.value === "" ? "" : event.target.value === "0" ? "1" : "0";
  }
  state.aspect = NaN;
  refit();
}
$("#clear").addEventListener("click", () => { clear(); solve(); });
$("#swap").addEventListener("click", () => { [state.a, state.b] = [state.b, state.a]; solve(); });
$("#pair").addEventListener("click", () => {
  const { index } = state.scene.codes, any = () => index[Math.floor(Math.random() * index.length)];
  $("[name=mode][value=path]").checked || $("[name=mode][value=path]").click();
  [state.a, state.b] = [any(), any()];
  solve();
});

// A cross moved by the arrow keys chooses points without a mouse.
$("#plot").addEventListener("keydown", (event) => {
  const [left, right, bottom, top] = state.scene.bounds, step = (event.shiftKey ? 0.1 : 0.02) * (right - left);
  const move = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, step], ArrowDown: [0, -step] }[event.key];
  if (move) state.cross = (state.cross ?? [(left + right) / 2, (bottom + top) / 2]).map((x, i) => x + move[i]);
  else if (event.key === "Enter" && state.cross) { choose(state.cross); return; } else return;
  event.preventDefault();
  map.draw({ cross: state.cross });
});

function download(blob, name) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
for (const button of document.querySelectorAll("[data-figure]")) {
  button.addEventListener("click", () => Plotly.downloadImage($("#plot"), { format: button.dataset.figure, filename: "latent-space", width: 900, height: 700, scale: 2 }));
}
for (const button of document.querySelectorAll("[data-file]")) {
  const format = button.dataset.file;
  button.addEventListener("click", async () => {
    try { download(await file({ metric: metric(), ...plane(), a: state.a, b: state.b, format }), `path.${format}`); } catch (error) { fail(error); }
  });
}
$("#copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(state.script);
  $("#copy").textContent = "Copied";
  setTimeout(() => { $("#copy").textContent = "Copy Python"; }, 1200);
});

start();
