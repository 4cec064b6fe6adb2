// The slider and the play button: which frame of the two curves is shown.

const FRAMES_PER_SECOND = 12;
const $ = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];

export class Player {
  constructor(onMove) {
    this.onMove = onMove;
    this.frames = null;
    $("#slider").addEventListener("input", () => { this.pause(); this.show(); });
    $("#play").addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    new ResizeObserver(() => this.resize()).observe($("#previews"));
  }

  // Frames of two curves, to be moved through.
  load(frames) {
    const fraction = +$("#slider").value / +$("#slider").max;
    this.#name(frames);
    $("#strips").classList.remove("empty");
    $("#slider").max = frames.count - 1;
    $("#slider").value = Math.round(fraction * (frames.count - 1));
    frames.strips(all(".strip .cells"));
    this.show();
  }

  // One picture for each caption, and nothing to move through.
  still(frames, places) {
    this.pause();
    $("#strips").classList.add("empty");
    this.#name(frames);
    this.places = places;
    this.show();
  }

  hide() {
    this.pause();
    this.frames = null;
    $("#strips").classList.add("empty");
    for (const frame of all("#previews .frame")) frame.replaceChildren();
  }

  show() {
    if (!this.frames) return;
    const targets = all("#previews .frame");
    if (this.places) { this.places.forEach((at, k) => this.frames.show(at, targets, k)); return; }
    const slider = $("#slider"), fraction = +slider.value / +slider.max;
    this.frames.show(+slider.value, targets);
    this.frames.cursor(fraction);
    $("#time").textContent = `${Math.round(100 * fraction)} %`;
    this.onMove(fraction);
  }

  play() {
    $("#play").textContent = "Pause";
    $("#play").setAttribute("aria-pressed", "true");
    const slider = $("#slider");
    if (slider.value === slider.max) slider.value = 0;
    this.timer = setInterval(() => {
      if (+slider.value >= +slider.max) { this.pause(); return; }
      slider.value = +slider.value + 1;
      this.show();
    }, 1000 / FRAMES_PER_SECOND);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    $("#play").textContent = "Play";
    $("#play").setAttribute("aria-pressed", "false");
  }

  resize() {
    if (!this.frames) return;
    if (!this.places) this.frames.strips(all(".strip .cells"));
    this.show();
  }

  #name(frames) {
    this.frames = frames;
    this.places = null;
    all("#previews figcaption").forEach((caption, k) => { caption.textContent = frames.names[k]; });
  }
}
