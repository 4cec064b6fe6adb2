// The picture of the latent space: a heat map, the codes, and what was computed on top of them.

const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1", "#999933", "#66a61e", "#a6761d", "#1b9e77", "#7570b3"];
const LIGHT = [[0, "#fcfcfb"], [0.35, "#dadfe5"], [0.7, "#a3adb9"], [1, "#66717f"]];
const DARK = [[0, "#1a1d21"], [0.35, "#2b3037"], [0.7, "#4a535e"], [1, "#7d8896"]];
const dark = matchMedia("(prefers-color-scheme: dark)");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const columns = (xy) => ({ x: xy.map((p) => p[0]), y: xy.map((p) => p[1]) });
// Pixels from a code at which a click means the code.
const SNAP = 6;
// Several curves as one trace, with gaps between them.
const joined = (curves) => columns(curves.flatMap((curve) => [...curve, [null, null]]));
const config = { responsive: true, displaylogo: false, doubleClick: false, modeBarButtonsToRemove: ["select2d", "autoScale2d", "toImage"] };
const upright = { orientation: "v", len: 1, xpad: 8, title: { side: "right" } };
const lying = { orientation: "h", len: 1, x: 0.5, y: -0.09, yanchor: "top", title: { side: "bottom" } };

export class LatentMap {
  constructor(element, { onPoint, onLasso }) {
    this.element = element;
    this.handlers = { onPoint, onLasso };
    this.state = {};
    dark.addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.element.data && Plotly.Plots.resize(this.element)).observe(element);
  }

  // Draws again with some of the state changed: scene, heat, path, ends, cross, fan, field, circles, mean, lasso.
  async draw(change = {}) {
    Object.assign(this.state, change);
    // Plotly does not take away a color bar that turns from upright to lying.
    if (this.drawnSmall !== this.#small) Plotly.purge(this.element);
    this.drawnSmall = this.#small;
    const first = !this.element.data;
    await Plotly.react(this.element, this.#traces(), this.#layout(), config);
    if (first) this.#listen();
  }

  // Moves the markers along both curves.
  move(fraction) {
    const { path } = this.state;
    if (!path) return;
    const places = ["geodesic", "line"].map((name) => path[name].xy[Math.round(fraction * (path[name].xy.length - 1))]);
    const last = this.element.data.length - 1;
    Plotly.restyle(this.element, columns(places).x.length ? { x: [columns(places).x], y: [columns(places).y] } : {}, [last]);
  }

  #listen() {
    this.element.on("plotly_click", ({ event }) => this.handlers.onPoint(this.#at(event.clientX, event.clientY)));
    this.element.on("plotly_selected", (event) => {
      const chosen = event?.points?.map((point) => point.customdata).filter((index) => index !== undefined) ?? [];
      if (chosen.length) this.handlers.onLasso([...new Set(chosen)]);
    });
  }

  // What was clicked: the index of the nearest code, or the coordinates of the place. (What Plotly says of a click is
  // where the mouse was when it last looked, up to a twentieth of a second ago.)
  #at(clientX, clientY) {
    const { xaxis, yaxis } = this.element._fullLayout, box = this.element.getBoundingClientRect(), { index, xy } = this.state.scene.codes;
    const x = clientX - box.left - xaxis._offset, y = clientY - box.top - yaxis._offset;
    const far = xy.map((p) => Math.hypot(xaxis.l2p(p[0]) - x, yaxis.l2p(p[1]) - y));
    const nearest = far.reduce((best, d, i) => (d < far[best] ? i : best), 0);
    return far[nearest] <= SNAP ? index[nearest] : [xaxis.p2l(x), yaxis.p2l(y)];
  }

  #traces() {
    const { heat, path, ends = [], cross, fan, circles, mean } = this.state;
    const ink = css("--ink"), hot = css("--geodesic"), straight = css("--line"), page = css("--card");
    const line = (xy, color, width, extra = {}) => ({ ...columns(xy), type: "scatter", mode: "lines", line: { color, width, ...extra }, hoverinfo: "skip", showlegend: false });
    const dots = (xy, marker) => ({ ...columns(xy), type: "scatter", mode: "markers", marker, hoverinfo: "skip", showlegend: false });
    const traces = [this.#heat(heat), ...this.#codes()];
    if (circles) traces.push({ ...line([], hot, 1.2), ...joined(circles.circles) });
    if (fan) traces.push(...this.#fan(fan, line));
    if (path) {
      const every = path.geodesic.xy.filter((_, i) => i % 8 === 0);
      traces.push(line(path.line.xy, page, 4.5), line(path.line.xy, straight, 2, { dash: "6px,5px" }));
      traces.push(line(path.geodesic.xy, page, 6), line(path.geodesic.xy, hot, 3.2), dots(every, { color: page, size: 5, line: { color: hot, width: 1.5 } }));
    }
    if (mean) {
      traces.push(dots([mean.xy[1]], { symbol: "x-thin", size: 13, line: { color: straight, width: 3 } }));
      traces.push(dots([mean.xy[0]], { symbol: "star", size: 19, color: hot, line: { color: page, width: 1.5 } }));
    }
    if (cross) traces.push(dots([cross], { symbol: "cross-thin", size: 22, line: { color: ink, width: 2 } }));
    traces.push(dots(ends, { size: 13, color: ends.map((_, i) => (i ? hot : page)), line: { color: hot, width: 3 } }));
    traces.push(dots([], { size: 11, color: [hot, straight], line: { color: page, width: 2 } }));
    return traces;
  }

  get #small() { return this.element.clientWidth < 560; }

  #bar(text) {
    const way = this.#small ? lying : upright;
    return { thickness: 12, outlinewidth: 0, tickfont: { size: 11 }, ...way, title: { text, font: { size: 12 }, ...way.title } };
  }

  #heat(heat) {
    const shown = heat ? { x: heat.x, y: heat.y, z: heat.values, zmin: heat.low, zmax: heat.high } : { z: [[0]], visible: false };
    const scale = { colorscale: dark.matches ? DARK : LIGHT, showscale: !this.state.field, colorbar: this.#bar(heat?.label ?? "") };
    return { type: "heatmap", zsmooth: "best", hoverinfo: "skip", ...scale, ...shown };
  }

  #codes() {
    const { scene, field } = this.state;
    const { index, xy, class: classes } = scene.codes;
    const base = { type: "scatter", mode: "markers", hovertemplate: "code %{customdata}<extra></extra>", unselected: { marker: { opacity: 0.35 } } };
    if (field) {
      const marker = { size: 6, color: field.distances, colorscale: "Viridis", reversescale: true, colorbar: this.#bar("distance"), showscale: true };
      return [{ ...base, ...columns(xy), customdata: index, marker, text: field.distances, hovertemplate: "code %{customdata}: %{text:.3f}<extra></extra>", showlegend: false }];
    }
    return scene.classes.map((name, k) => {
      const own = index.map((_, i) => i).filter((i) => classes[i] === k);
      const marker = { size: xy.length > 800 ? 4 : 5.5, opacity: 0.6, color: scene.classes.length > 1 ? COLORS[k % COLORS.length] : css("--code") };
      return { ...base, name, ...columns(own.map((i) => xy[i])), customdata: own.map((i) => index[i]), marker, showlegend: scene.classes.length > 1 };
    });
  }

  #fan({ rays }, line) {
    const finite = rays.map((ray) => ray.filter((p) => p[0] !== null));
    const rings = [10, 20, 30, 40].map((i) => [...rays, rays[0]].map((ray) => ray[i]));
    return [{ ...line([], css("--geodesic"), 1.4), ...joined(finite) }, { ...line([], css("--line"), 1.2), ...joined(rings), connectgaps: false }];
  }

  get #margin() {
    const top = this.state.scene.classes.length > 1 ? 30 : 10;
    return this.#small ? { l: 38, r: 8, t: top + (top > 10 ? 16 : 0), b: 92 } : { l: 46, r: 84, t: top, b: 40 };
  }

  // Width over height of the picture, without axes, legend and color bar.
  aspect() {
    const { clientWidth: width, clientHeight: height } = this.element, small = width < 560;
    return (width - (small ? 46 : 130)) / Math.max(1, height - (small ? 122 : 60));
  }

  #layout() {
    const { scene, lasso } = this.state;
    const [left, right, bottom, top] = scene.bounds;
    const axis = (text, range) => ({ title: { text, font: { size: 12 }, standoff: 4 }, range, zeroline: false, showgrid: false, ticks: "outside", ticklen: 3, color: css("--soft"), tickfont: { size: 11 }, constrain: "domain" });
    return {
      uirevision: scene.axes.join(), clickanywhere: true, hovermode: "closest", hoverdistance: 8, dragmode: lasso ? "lasso" : false,
      margin: this.#margin,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), family: "inherit" },
      xaxis: axis(scene.axes[0], [left, right]), yaxis: { ...axis(scene.axes[1], [bottom, top]), scaleanchor: "x" },
      legend: { orientation: "h", x: 0, y: 1, xanchor: "left", yanchor: "bottom", font: { size: 11 }, bgcolor: "rgba(0,0,0,0)", itemsizing: "constant" },
    };
  }
}
