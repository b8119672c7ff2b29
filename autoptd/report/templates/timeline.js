// Draw each canvas.timeline from the JSON of the script element that its data-from names: zoom by the buttons, the wheel
// with Ctrl, or + and - keys; move by dragging or the arrow keys; point at a pass to read it.
for (const canvas of document.querySelectorAll("canvas.timeline")) {
  const data = JSON.parse(document.getElementById(canvas.dataset.from).textContent);
  const units = 1e6, says = document.getElementById(canvas.dataset.says), names = {
    F: "forward", B: "backward", W: "weight gradients", REDUCE: "reduce gradients", STEP: "optimizer",
    GATHER: "gather parameters", SF: "send forward", SB: "send backward" };
  let from = 0, to = units, held = null;
  const left = 34, row = () => Math.max(4, Math.min(26, Math.floor(560 / data.ranks.length)));
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw(finer = 1) {
    const width = canvas.clientWidth, height = row() * data.ranks.length + 22;
    const scale = (window.devicePixelRatio || 1) * finer;
    canvas.width = width * scale; canvas.height = height * scale; canvas.style.height = height + "px";
    const pen = canvas.getContext("2d"), x = t => left + (t - from) / (to - from) * (width - left);
    const paint = {}; for (const name of ["forward", "backward", "again", "comm", "optimizer", "text", "soft", "line",
      "panel"]) paint[name] = color("--" + name);
    pen.scale(scale, scale); pen.clearRect(0, 0, width, height); pen.font = "11px system-ui, sans-serif";
    const fill = (name, a, b, y, h) => { pen.fillStyle = paint[name]; pen.fillRect(a, y, Math.max(.4, b - a), h); };
    if (data.hidden && x(data.hidden[1]) > left) {
      fill("panel", Math.max(left, x(data.hidden[0])), x(data.hidden[1]), 0, height - 22);
      pen.fillStyle = paint.soft;
      pen.fillText("the same again", Math.max(left, x(data.hidden[0])) + 8, 14);
    }
    data.ranks.forEach((events, rank) => {
      const y = rank * row(), h = row() - (row() > 6 ? 2 : 1);
      for (let i = 0; i < events.length; i += 5) {
        const [kind, chunk, , start, length] = events.slice(i, i + 5), a = x(start), b = x(start + length);
        if (b < left || a > width) continue;
        const name = data.kinds[kind], share = data.shares[rank][chunk] || [0, 0, 0], at = s => a + (b - a) * s;
        if (name === "F") { fill("forward", a, at(1 - share[0]), y, h); if (share[0]) fill("comm", at(1 - share[0]), b, y, h); }
        else if (name === "B") {
          if (share[1]) fill("again", a, at(share[1]), y, h);
          fill("backward", at(share[1]), at(1 - share[2]), y, h); if (share[2]) fill("comm", at(1 - share[2]), b, y, h);
        } else fill(name === "STEP" ? "optimizer" : name === "W" ? "backward" : "comm", a, b, y, h);
        if (row() > 12 && b - a > 22 && events[i + 2] >= 0) {
          pen.fillStyle = "#fff"; pen.fillText(name + events[i + 2] + (chunk ? "." + chunk : ""), a + 3, y + h - 5, b - a - 4);
        }
      }
      pen.fillStyle = paint.text;
      if (row() > 10 || rank % 8 === 0) pen.fillText(rank, 4, y + Math.min(h, 14) - 1);
    });
    pen.fillStyle = paint.soft; pen.strokeStyle = paint.line;
    const marks = width < 500 ? 2 : 4;
    for (let i = 0; i <= marks; i++) {
      const t = from + (to - from) * i / marks, at = Math.min(x(t), width - 46);
      pen.fillText(readable(t / units * data.seconds), i ? at : left, height - 6);
    }
  }
  const readable = s => !s ? "0" : s >= 1 ? s.toPrecision(4) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(4) + " ms" : (s * 1e6).toPrecision(3) + " µs";
  function view(a, b) {
    const size = Math.min(units, Math.max(units / 5000, b - a));
    from = Math.max(0, Math.min(units - size, a)); to = from + size; draw();
  }
  const zoom = (by, around = (from + to) / 2) => view(around - (around - from) * by, around + (to - around) * by);
  const time = event => from + (event.offsetX - left) / (canvas.clientWidth - left) * (to - from);
  canvas.addEventListener("wheel", event => {
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, time(event)); }
  }, { passive: false });
  canvas.addEventListener("pointerdown", event => { held = { x: event.offsetX, from, to }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held) {
      const by = (held.x - event.offsetX) / (canvas.clientWidth - left) * (held.to - held.from);
      return view(held.from + by, held.to + by);
    }
    const rank = Math.floor(event.offsetY / row()), events = data.ranks[rank] || [], t = time(event);
    says.textContent = "";
    for (let i = 0; i < events.length; i += 5) if (events[i + 3] <= t && t < events[i + 3] + events[i + 4]) {
      const microbatch = events[i + 2] < 0 ? "" : ` of microbatch ${events[i + 2]}`;
      const chunk = data.shares[rank].length > 1 ? `, chunk ${events[i + 1]}` : "";
      says.textContent = `pipeline rank ${rank}: ${names[data.kinds[events[i]]]}${microbatch}${chunk}, `
        + `${readable(events[i + 4] / units * data.seconds)} from ${readable(events[i + 3] / units * data.seconds)}`;
    }
  });
  canvas.addEventListener("keydown", event => {
    const step = (to - from) / 5, act = { "+": () => zoom(.6), "=": () => zoom(.6), "-": () => zoom(1 / .6), "0": () => view(0, units),
      ArrowRight: () => view(from + step, to + step), ArrowLeft: () => view(from - step, to - step) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  for (const button of document.querySelectorAll(`button[data-for="${canvas.id}"]`)) {
    button.addEventListener("click", () => ({ in: () => zoom(.6), out: () => zoom(1 / .6), all: () => view(0, units),
      start: () => view(0, units / 8), end: () => view(units * 7 / 8, units) })[button.dataset.act]());
  }
  window.addEventListener("resize", () => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  window.addEventListener("beforeprint", () => draw(4));
  window.addEventListener("afterprint", () => draw());
  draw();
}
