"use strict";
// Draws each .gantt: lanes of spans on a canvas, from the JSON beside it. Times are microseconds.
(() => {
  const ROW = 26, BAR = 18, AXIS = 24, BELOW = 16, NARROW = 600, ZOOM = 1.5, NEAR_US = 20;

  const seconds = (us) => {
    const s = us / 1e6;
    if (us === 0) return "0 s";
    if (Math.abs(s) >= 1) return `${+s.toPrecision(4)} s`;
    return Math.abs(s) >= 1e-3 ? `${+(s * 1e3).toPrecision(3)} ms` : `${Math.round(us)} µs`;
  };

  // Steps of 1, 2 or 5 times a power of ten, so that about `count` of them fit.
  const step = (span, count) => {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  };

  class Gantt {
    constructor(root) {
      this.data = JSON.parse(root.querySelector("script").textContent);
      for (const lane of this.data.lanes) {
        let at = 0;
        lane.start = lane.start.map((difference) => (at += difference));
      }
      this.canvas = root.querySelector("canvas");
      this.tip = root.querySelector(".tip");
      this.pointers = new Map();
      this.showAll();
      this.listen(root);
    }

    listen(root) {
      const canvas = this.canvas;
      const tools = {
        in: () => this.zoom(ZOOM, 0.5), out: () => this.zoom(1 / ZOOM, 0.5), all: () => this.showAll(),
      };
      for (const button of root.querySelectorAll("button"))
        button.addEventListener("click", () => tools[button.dataset.do]());
      new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
      canvas.addEventListener("wheel", (event) => {
        if (event.ctrlKey || event.metaKey) this.zoom(ZOOM ** (-event.deltaY / 100), this.place(event.offsetX));
        else if (event.shiftKey || event.deltaX) this.move((event.deltaX || event.deltaY) / this.width);
        else return;
        event.preventDefault();
      }, { passive: false });
      canvas.addEventListener("dblclick", (event) => this.zoom(ZOOM ** 2, this.place(event.offsetX)));
      canvas.addEventListener("pointerdown", (event) => {
        canvas.setPointerCapture(event.pointerId);
        this.pointers.set(event.pointerId, event.offsetX);
      });
      canvas.addEventListener("pointermove", (event) => this.onMove(event));
      for (const name of ["pointerup", "pointercancel"])
        canvas.addEventListener(name, (event) => this.pointers.delete(event.pointerId));
      canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      canvas.addEventListener("keydown", (event) => {
        const keys = {
          "+": tools.in, "=": tools.in, "-": tools.out, 0: tools.all, Home: tools.all,
          ArrowLeft: () => this.move(-0.1), ArrowRight: () => this.move(0.1),
        };
        if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
      });
    }

    onMove(event) {
      const before = this.pointers.get(event.pointerId);
      if (before === undefined) { this.describe(event.offsetX, event.offsetY); return; }
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      this.pointers.set(event.pointerId, event.offsetX);
      if (others.length) {
        const apart = Math.abs(before - others[0]);
        if (apart > 4)
          this.zoom(Math.abs(event.offsetX - others[0]) / apart, this.place((event.offsetX + others[0]) / 2));
      } else {
        this.move((before - event.offsetX) / this.width);
        this.describe(event.offsetX, event.offsetY);
      }
    }

    // Where x lies between the left and the right end of what is shown.
    place(x) { return Math.min(1, Math.max(0, (x - this.left) / this.width)); }

    showAll() { this.from = 0; this.to = this.data.length; this.draw(); }

    zoom(factor, place) {
      const span = this.to - this.from, wanted = span / factor;
      const next = Math.min(this.data.length, Math.max(Math.min(NEAR_US, this.data.length), wanted));
      const at = this.from + place * span;
      this.show(at - place * next, next);
    }

    move(part) { const span = this.to - this.from; this.show(this.from + part * span, span); }

    show(from, span) {
      this.from = Math.min(Math.max(0, from), this.data.length - span);
      this.to = this.from + span;
      this.draw();
    }

    // Index of the first span of a lane that ends after `us`.
    first(lane, us) {
      let low = 0, high = lane.start.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (lane.start[middle] + lane.length[middle] <= us) low = middle + 1; else high = middle;
      }
      return low;
    }

    draw() {
      const canvas = this.canvas, across = canvas.clientWidth;
      if (!across) return;
      const narrow = across < NARROW, ratio = devicePixelRatio || 1;
      this.row = narrow ? ROW + 14 : ROW;
      this.left = narrow ? 0 : this.gutter();
      this.width = across - this.left - 1;
      const height = AXIS + this.data.lanes.length * this.row + (this.data.marks.length ? BELOW : 0);
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(across * ratio);
      canvas.height = Math.round(height * ratio);
      const pen = canvas.getContext("2d");
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      const style = getComputedStyle(document.documentElement);
      this.ink = style.getPropertyValue("--ink").trim();
      this.soft = style.getPropertyValue("--soft").trim();
      this.line = style.getPropertyValue("--line").trim();
      this.warn = style.getPropertyValue("--warn").trim();
      this.patterns = this.data.shades.map((shade) => this.pattern(pen, shade, style));
      this.axis(pen, height);
      this.data.lanes.forEach((lane, number) => this.drawLane(pen, lane, number, narrow));
      let free = this.left; // where the next label may begin
      for (const mark of this.data.marks) free = this.drawMark(pen, mark, height, free);
      canvas.dataset.from = Math.round(this.from);
      canvas.dataset.to = Math.round(this.to);
    }

    gutter() {
      const pen = this.canvas.getContext("2d");
      pen.font = "13px system-ui, sans-serif";
      return Math.min(220, 12 + Math.max(0, ...this.data.lanes.map((lane) => pen.measureText(this.name(lane)).width)));
    }

    name(lane) { return `${lane.lane} · rank ${lane.rank}`; }

    pattern(pen, shade, style) {
      if (!shade.pattern) return null;
      const tile = document.createElement("canvas");
      tile.width = tile.height = 7;
      const ink = tile.getContext("2d");
      ink.strokeStyle = ink.fillStyle = style.getPropertyValue("--hatch").trim();
      ink.lineWidth = 2;
      if (shade.pattern === ".") ink.fillRect(2, 2, 2.4, 2.4);
      else {
        const up = shade.pattern === "/";
        for (const shift of [-7, 0, 7]) {
          ink.moveTo(shift, up ? 7 : 0);
          ink.lineTo(shift + 7, up ? 0 : 7);
        }
        ink.stroke();
      }
      return pen.createPattern(tile, "repeat");
    }

    axis(pen, height) {
      const span = this.to - this.from, tick = step(span, Math.max(2, this.width / 110));
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "top";
      for (let us = Math.ceil(this.from / tick) * tick; us <= this.to; us += tick) {
        const x = this.left + ((us - this.from) / span) * this.width;
        pen.fillStyle = this.line;
        pen.fillRect(x, AXIS - 4, 1, height - AXIS + 4);
        pen.fillStyle = this.soft;
        const text = seconds(us), wide = pen.measureText(text).width;
        pen.fillText(text, Math.min(Math.max(this.left, x - wide / 2), this.left + this.width - wide), 2);
      }
    }

    drawLane(pen, lane, number, narrow) {
      const top = AXIS + number * this.row + (narrow ? 15 : 4), span = this.to - this.from;
      const scale = this.width / span;
      pen.textBaseline = "middle";
      pen.font = `${narrow ? 12 : 13}px system-ui, sans-serif`;
      pen.fillStyle = this.ink;
      pen.fillText(this.name(lane), 0, narrow ? top - 8 : top + BAR / 2, narrow ? this.width : this.left - 8);
      pen.font = "11px system-ui, sans-serif";
      let drawn = -1, doing = -1;
      for (let i = this.first(lane, this.from); i < lane.start.length && lane.start[i] < this.to; i++) {
        const x0 = this.left + Math.max(0, (lane.start[i] - this.from) * scale);
        const x1 = this.left + Math.min(this.width, (lane.start[i] + lane.length[i] - this.from) * scale);
        if (x1 <= drawn && lane.doing[i] === doing) continue; // nothing new to see
        const wide = Math.max(0.5, x1 - x0);
        const shade = this.data.shades[lane.doing[i]];
        pen.fillStyle = shade.colour;
        pen.fillRect(x0, top, wide, BAR);
        const pattern = this.patterns[lane.doing[i]];
        if (pattern && wide > 3) { pen.fillStyle = pattern; pen.fillRect(x0, top, wide, BAR); }
        if (!shade.pattern && wide > 3) { pen.fillStyle = "rgba(255,255,255,.55)"; pen.fillRect(x1 - 0.6, top, 0.6, BAR); }
        const text = lane.microbatch[i] >= 0 && !shade.pattern ? String(lane.microbatch[i]) : "";
        if (text && wide > pen.measureText(text).width + 6) {
          pen.fillStyle = "#fff";
          pen.fillText(text, x0 + (wide - pen.measureText(text).width) / 2, top + BAR / 2 + 0.5);
        }
        drawn = x1; doing = lane.doing[i];
      }
    }

    // Shades a time over all lanes, with its label below if there is room; returns where the next label may begin.
    drawMark(pen, mark, height, free) {
      const scale = this.width / (this.to - this.from);
      if (mark.end < this.from || mark.start > this.to) return free;
      const x0 = this.left + Math.max(0, (mark.start - this.from) * scale);
      const x1 = this.left + Math.min(this.width, (mark.end - this.from) * scale);
      pen.fillStyle = this.warn;
      pen.globalAlpha = 0.2;
      pen.fillRect(x0, AXIS - 4, Math.max(1, x1 - x0), height - AXIS - BELOW + 4);
      pen.globalAlpha = 1;
      pen.fillRect(x0, AXIS - 4, Math.max(1, x1 - x0), 2);
      pen.font = "bold 11px system-ui, sans-serif";
      pen.textBaseline = "top";
      const wide = pen.measureText(mark.label).width;
      const at = Math.min(x0, this.left + this.width - wide);
      if (at < free) return free;
      pen.fillText(mark.label, at, height - BELOW + 3);
      return at + wide + 6;
    }

    describe(x, y) {
      const number = Math.floor((y - AXIS) / this.row), lane = this.data.lanes[number];
      this.tip.hidden = true;
      if (!lane || x < this.left) return;
      const us = this.from + this.place(x) * (this.to - this.from), i = this.first(lane, us);
      if (i >= lane.start.length || lane.start[i] > us) return;
      const what = this.data.shades[lane.doing[i]].label;
      const which = lane.microbatch[i] >= 0 ? `, microbatch ${lane.microbatch[i]}` : "";
      this.tip.textContent =
        `${this.name(lane)}: ${what}${which}, ${seconds(lane.length[i])} from ${seconds(lane.start[i])}`;
      this.tip.hidden = false;
      const room = this.canvas.clientWidth - this.tip.offsetWidth;
      this.tip.style.left = `${Math.max(0, Math.min(room, x + 12))}px`;
      this.tip.style.top = `${AXIS + (number + 1) * this.row}px`;
    }
  }

  for (const root of document.querySelectorAll(".gantt")) new Gantt(root);
})();
