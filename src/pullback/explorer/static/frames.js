// What is decoded: images, stick figures, bars, logos, rankings or HTML, in a preview and in a strip along the path.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const element = (tag, props = {}, ...children) => { const e = Object.assign(document.createElement(tag), props); e.append(...children); return e; };

function canvasIn(parent, label) {
  const canvas = element("canvas", { role: "img" });
  canvas.setAttribute("aria-label", label);
  parent.replaceChildren(canvas);
  const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = parent;
  canvas.width = Math.max(1, width * ratio); canvas.height = Math.max(1, height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return { pen, width, height };
}

// Each kind draws frame i of a payload into a box. `shared` is what both curves have in common, such as the scale.
const kinds = {
  images: {
    aspect: (p) => p.width / p.height,
    prepare: (payloads) => payloads.map((p) => Uint8Array.from(atob(p.data), (c) => c.charCodeAt(0))),
    draw(pen, box, p, i, pixels) {
      const { width: w, height: h, channels: c } = p, image = new ImageData(w, h);
      for (let k = 0; k < w * h; k++) {
        for (let j = 0; j < 3; j++) image.data[4 * k + j] = pixels[(i * w * h + k) * c + (c === 3 ? j : 0)];
        image.data[4 * k + 3] = 255;
      }
      const small = new OffscreenCanvas(w, h);
      small.getContext("2d").putImageData(image, 0, 0);
      const scale = Math.min(box.width / w, box.height / h);
      pen.imageSmoothingEnabled = scale < 4;
      pen.drawImage(small, box.x + (box.width - scale * w) / 2, box.y + (box.height - scale * h) / 2, scale * w, scale * h);
    },
  },
  lines: {
    aspect: () => 0.62,
    prepare(payloads) {
      const all = payloads.flatMap((p) => p.frames.flat());
      const xs = all.filter((_, i) => i % 2 === 0), ys = all.filter((_, i) => i % 2 === 1);
      const shared = { x: Math.max(...xs.map(Math.abs)), low: Math.min(...ys), high: Math.max(...ys) };
      return payloads.map(() => shared);
    },
    draw(pen, box, p, i, s, color) {
      const scale = 0.92 * Math.min(box.width / (2 * s.x), box.height / (s.high - s.low)), f = p.frames[i];
      const x = (v) => box.x + box.width / 2 + scale * v, y = (v) => box.y + box.height / 2 - scale * (v - (s.low + s.high) / 2);
      pen.strokeStyle = color; pen.lineWidth = Math.max(1.3, scale * (s.high - s.low) / 70); pen.lineCap = "round";
      pen.beginPath();
      for (let k = 0; k < f.length; k += 4) { pen.moveTo(x(f[k]), y(f[k + 1])); pen.lineTo(x(f[k + 2]), y(f[k + 3])); }
      pen.stroke();
    },
  },
  bars: {
    aspect: () => 1.25,
    prepare(payloads) {
      const ends = payloads.flatMap((p) => p.mean.flatMap((row, i) => row.flatMap((m, k) => [m - (p.stddev[i][k] ?? 0), m + (p.stddev[i][k] ?? 0)])));
      const shared = { low: Math.min(0, ...ends), high: Math.max(0, ...ends) };
      return payloads.map(() => shared);
    },
    draw(pen, box, p, i, s, color) {
      const named = box.height > 110 && p.names.length <= 8, foot = named ? 16 : 0, pad = Math.min(8, box.width / 12);
      const y = (v) => box.y + 5 + (box.height - 10 - foot) * (1 - (v - s.low) / (s.high - s.low || 1)), step = (box.width - 2 * pad) / p.names.length;
      pen.strokeStyle = css("--rule"); pen.lineWidth = 1; pen.beginPath(); pen.moveTo(box.x + pad, y(0)); pen.lineTo(box.x + box.width - pad, y(0)); pen.stroke();
      p.mean[i].forEach((m, k) => {
        const middle = box.x + pad + (k + 0.5) * step, sd = p.stddev[i][k] ?? 0;
        pen.fillStyle = color; pen.globalAlpha = 0.55; pen.fillRect(middle - 0.32 * step, Math.min(y(0), y(m)), 0.64 * step, Math.abs(y(m) - y(0))); pen.globalAlpha = 1;
        pen.strokeStyle = css("--ink"); pen.lineWidth = 1.2; pen.beginPath(); pen.moveTo(middle, y(m - sd)); pen.lineTo(middle, y(m + sd)); pen.stroke();
        if (named) { pen.fillStyle = css("--soft"); pen.font = "11px system-ui, sans-serif"; pen.textAlign = "center"; pen.fillText(p.names[k], middle, box.y + box.height - 4); }
      });
    },
  },
  logo: {
    aspect: (p) => Math.max(2, p.frames[0].length / 4),
    prepare: (payloads) => payloads.map(() => ({ hue: (letter) => ([...letter].reduce((h, c) => 31 * h + c.charCodeAt(0), 7) * 47) % 360 })),
    draw(pen, box, p, i, s) {
      const step = box.width / p.frames[i].length;
      p.frames[i].forEach((letters, k) => {
        let base = box.y + box.height - 2;
        for (const [letter, bits] of [...letters].reverse()) {
          const height = (bits / p.bits) * (box.height - 4);
          if (height < 1) continue;
          pen.save(); pen.translate(box.x + (k + 0.5) * step, base); pen.scale(step / 11, height / 11);
          pen.fillStyle = `hsl(${s.hue(letter)} 60% 45%)`; pen.font = "700 15px system-ui, sans-serif"; pen.textAlign = "center"; pen.fillText(letter, 0, 0); pen.restore();
          base -= height;
        }
      });
    },
  },
};

const percent = (x) => `${Math.round(100 * x)} %`;

function rankingPreview(parent, p, i) {
  const change = p.names.map((name, k) => ({ name, before: p.frames[0][k], after: p.frames[i][k] })).map((m) => ({ ...m, by: m.after - m.before }));
  const list = (items) => element("ol", {}, ...items.map((m) => element("li", { title: m.name }, element("span", { textContent: m.name }), element("span", { textContent: i ? `${Math.round(100 * m.before)} → ${percent(m.after)}` : percent(m.after) }))));
  const top = (sign) => change.filter((m) => sign * m.by > 0.005).sort((m, n) => sign * (n.by - m.by)).slice(0, 5);
  const likely = [...change].sort((m, n) => n.after - m.after).slice(0, 9);
  const box = element("div", { className: "ranking" });
  if (i === 0 || change.every((m) => Math.abs(m.by) <= 0.005)) box.append(element("h3", { textContent: "most likely" }), list(likely));
  else box.append(element("h3", { textContent: "gained" }), list(top(1)), element("h3", { textContent: "lost" }), list(top(-1)));
  parent.replaceChildren(box);
}

function rankingStrip(parent, p, label, color) {
  const { pen, width, height } = canvasIn(parent, label), rows = Math.max(3, Math.floor(height / 13)), n = p.frames.length;
  const swing = p.names.map((_, k) => { const column = p.frames.map((f) => f[k]); return Math.max(...column) - Math.min(...column); });
  const chosen = swing.map((s, k) => [s, k]).sort((a, b) => b[0] - a[0]).slice(0, rows).map(([, k]) => k);
  const left = Math.round(Math.min(280, 0.42 * width)), step = height / rows, edge = (i) => Math.round(left + (i * (width - left)) / n);
  chosen.forEach((k, r) => {
    pen.fillStyle = css("--soft"); pen.font = "11px system-ui, sans-serif"; pen.textAlign = "left"; pen.textBaseline = "middle";
    pen.save(); pen.beginPath(); pen.rect(0, r * step, left - 8, step); pen.clip(); pen.fillText(p.names[k], 6, (r + 0.5) * step); pen.restore();
    for (let i = 0; i < n; i++) { pen.globalAlpha = p.frames[i][k]; pen.fillStyle = color; pen.fillRect(edge(i), r * step + 1, edge(i + 1) - edge(i), step - 2); pen.globalAlpha = 1; }
  });
  return left;
}

const page = (body) => `<!doctype html><meta charset="utf-8"><style>body{margin:4px;font:12px system-ui,sans-serif}</style>${body}`;
function frameOf(body) { const e = element("iframe", { srcdoc: page(body), title: "decoded" }); e.setAttribute("sandbox", ""); return e; }

// Both curves together: `show(i)` draws frame i into the previews, `strips()` draws the strips.
export class Frames {
  constructor(curves) {
    this.names = Object.keys(curves);
    this.payloads = Object.values(curves);
    this.kind = kinds[this.payloads[0].kind];
    this.shared = this.kind?.prepare(this.payloads);
    this.count = this.payloads[0].count;
  }

  // Frame i of both curves, or of only one of them.
  show(i, previews, only = null) {
    this.payloads.forEach((p, k) => {
      if (only !== null && only !== k) return;
      const parent = previews[k], at = Math.min(i, p.count - 1);
      if (p.kind === "ranking") rankingPreview(parent, p, at);
      else if (p.kind === "html") parent.replaceChildren(frameOf(p.frames[at]));
      else { const { pen, width, height } = canvasIn(parent, `${this.names[k]}, ${p.kind}`); this.kind.draw(pen, { x: 4, y: 4, width: width - 8, height: height - 8 }, p, at, this.shared[k], this.#color(k)); }
    });
  }

  strips(parents) {
    this.left = this.payloads.map((p, k) => this.#strip(parents[k], p, k));
    this.cursors = parents.map((parent) => parent.appendChild(element("div", { className: "cursor" })));
  }

  cursor(fraction) {
    this.cursors?.forEach((bar, k) => { bar.style.left = `calc(${this.left[k]}px + ${fraction} * (100% - ${this.left[k]}px))`; });
  }

  #color(k) { return css(k === 0 ? "--geodesic" : "--line"); }

  #strip(parent, p, k) {
    const label = `${this.names[k]}: what is decoded along it`;
    if (p.kind === "ranking") return rankingStrip(parent, p, label, this.#color(k));
    if (p.kind === "html") {
      const at = [0, 0.25, 0.5, 0.75, 1].map((t) => Math.round(t * (p.count - 1)));
      parent.replaceChildren(element("div", { className: "pieces" }, ...at.map((i) => frameOf(p.frames[i]))));
      return 0;
    }
    const { pen, width, height } = canvasIn(parent, label);
    const cells = Math.max(2, Math.min(p.count, Math.floor(width / (height * this.kind.aspect(p) + 6)))), step = width / cells;
    for (let c = 0; c < cells; c++) this.kind.draw(pen, { x: c * step + 2, y: 2, width: step - 4, height: height - 4 }, p, Math.round((c * (p.count - 1)) / (cells - 1)), this.shared[k], this.#color(k));
    return 0;
  }
}
