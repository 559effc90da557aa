"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.documentElement.classList.add("js");
  const style = () => getComputedStyle(document.documentElement);
  const colour = name => style().getPropertyValue("--" + name).trim();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const number = v => v == null ? "–" : Math.abs(v) >= 1e4 ? +(v / 1e3).toFixed(1) + "k" : Math.abs(v) >= 100 ? v.toFixed(0) : String(+v.toPrecision(3));
  const time = ms => ms >= 1000 ? +(ms / 1000).toPrecision(3) + " s" : ms >= 1 ? +ms.toPrecision(3) + " ms" : +(ms * 1000).toPrecision(3) + " µs";

  // --- charts ---
  const plots = [];
  /** Draws the limits and the marked percentiles. */
  const markLines = chart => u => {
    const { left, top, width, height } = u.bbox, c = u.ctx, r = devicePixelRatio;
    const line = (x0, y0, x1, y1, name, thick) => {
      if (x1 < left || x0 > left + width || y1 < top || y0 > top + height) return;
      c.strokeStyle = colour(name); c.lineWidth = thick * r; c.setLineDash(thick > 1 ? [6 * r, 4 * r] : [2 * r, 3 * r]);
      c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke();
    };
    c.save(); c.font = 12 * r + "px system-ui, DejaVu Sans, sans-serif";
    chart.marks.forEach(([label, at], i) => {
      const x = u.valToPos(at, "x", true), toLeft = x > left + width / 2;
      if (x < left || x > left + width) return;
      line(x, top, x, top + height, "soft", 1);
      c.fillStyle = colour("text"); c.textAlign = toLeft ? "right" : "left";
      c.strokeStyle = colour("card"); c.lineWidth = 4 * r; c.setLineDash([]); c.strokeText(label, x + (toLeft ? -4 : 4) * r, top + height - (8 + 15 * i) * r);
      c.fillText(label, x + (toLeft ? -4 : 4) * r, top + height - (8 + 15 * i) * r);
    });
    if (chart.limit) { const x = u.valToPos(chart.limit[1], "x", true); line(x, top, x, top + height, "bad", 2); }
    if (chart.y_limit && chart.y_limit[1] <= u.scales.y.max) { const y = u.valToPos(chart.y_limit[1], "y", true); line(left, y, left + width, y, "bad", 2); }
    c.restore();
  };
  /** Ticks' labels: as `write` writes them, or, where two would be alike, with all digits. */
  const labels = (vs, write) => {
    const found = vs.map(v => v == null ? "" : write(v)), shown = found.filter(Boolean);
    return write === number && new Set(shown).size < shown.length ? vs.map(v => v == null ? "" : String(v)) : found;
  };
  /** Round numbers from a to b, some `most` of them; `logTicks`: on a logarithmic axis. */
  const ticks = (a, b, most) => {
    const rough = (b - a || Math.abs(b) || 1) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find(n => n * power >= rough * .999) * power, found = [];
    for (let i = Math.ceil(a / step - 1e-9); i * step <= b * (1 + 1e-9); i++) found.push(+(i * step).toPrecision(12));
    return found;
  };
  const logTicks = (a, b, most) => {
    let found = [];
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      found = [];
      for (let e = Math.floor(Math.log10(a)); e <= Math.ceil(Math.log10(b)); e++) for (const n of steps) { const at = +(n * 10 ** e).toPrecision(3); if (at >= a && at <= b) found.push(at); }
      if (found.length <= most + 1) break;
    }
    return found.length > 2 ? found : ticks(a, b, most);
  };
  /** Writes the number of each point beside it. */
  const pointNumbers = chart => u => {
    if (!chart.names) return;
    const c = u.ctx, r = devicePixelRatio;
    c.save(); c.font = 12 * r + "px system-ui, DejaVu Sans, sans-serif"; c.fillStyle = colour("soft"); c.textAlign = "left";
    const texts = [];  // where some would overlap, one has all their numbers: as svg.labels
    const end = u.bbox.left + u.bbox.width, toLeft = t => t.at[0] + 7 * r + c.measureText(numbersText(t.names)).width > end;
    const span = t => { const wide = c.measureText(numbersText(t.names)).width + 7 * r; return toLeft(t) ? [t.at[0] - wide, t.at[0] + 5 * r] : [t.at[0] - 5 * r, t.at[0] + wide]; };
    const overlap = (a, b) => {
      const [p, q] = [span(a), span(b)];
      return p[0] < q[1] && q[0] < p[1] && Math.abs(a.at[1] - b.at[1]) < 14 * r;
    };
    for (const line of chart.lines) line.y.forEach((y, i) => {
      if (y == null) return;
      let text = { at: [u.valToPos(chart.x[i], "x", true), u.valToPos(y, "y", true)], names: [chart.names[i].split(" ")[0]] }, old;
      while ((old = texts.findIndex(t => overlap(t, text))) >= 0) { const [t] = texts.splice(old, 1); text = { at: t.at[0] > text.at[0] ? t.at : text.at, names: [...t.names, ...text.names] }; }
      texts.push(text);
    });
    for (const text of texts) {
      c.textAlign = toLeft(text) ? "right" : "left";
      c.fillText(numbersText(text.names), text.at[0] + (c.textAlign === "right" ? -7 : 7) * r, text.at[1] - 6 * r);
    }
    c.strokeStyle = colour("bad"); c.lineWidth = 2 * r;
    for (const i of chart.crossed) for (const line of chart.lines) {
      if (line.y[i] == null) continue;
      const x = u.valToPos(chart.x[i], "x", true), y = u.valToPos(line.y[i], "y", true), s = 5 * r;
      c.beginPath(); c.moveTo(x - s, y - s); c.lineTo(x + s, y + s); c.moveTo(x - s, y + s); c.lineTo(x + s, y - s); c.stroke();
    }
    c.restore();
  };
  /** Numbers in a few letters: 1 to 4, 7. */
  const numbersText = names => {
    if (!names.every(n => /^\d+$/.test(n))) return names.join(", ");
    const all = [...new Set(names.map(Number))].sort((a, b) => a - b), said = [];
    all.forEach((n, i) => {
      if (all[i - 1] + 1 === n && n === all[i + 1] - 1) return;
      said.push(i > 1 && all[i - 2] + 2 === n ? said.pop() + " to " + n : String(n));
    });
    return said.join(", ");
  };
  /** How a chart's x is written, on its axis and in its legend. */
  const wayOf = chart => chart.names ? { tick: number, said: (v, i) => chart.names[i] ?? "–", label: "point" }
    : chart.x_label === "ms" ? { tick: time, said: time, label: "within" }
    : { tick: number, said: v => number(v) + " s", label: "at" };
  function draw(chart) {
    const box = document.getElementById(chart.name), log = chart.x_label === "ms", way = wayOf(chart);
    const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: "12px system-ui, DejaVu Sans, sans-serif" };
    const say = (u, v, s, i) => v == null ? "" : way.said(v, i);
    const look = i => !chart.names ? { width: 1.7, points: { show: false } } : { width: 1.7, points: { show: true, size: 9, fill: colour("c" + chart.lines[i].colour % 8) }, ...(i < chart.joined ? {} : { paths: () => null }) };
    const x = { time: false, distr: log ? 3 : 1 }, known = [...chart.marks, ...(chart.limit ? [chart.limit] : [])].map(m => m[1]);
    // The whole width for what was measured: no rounding to powers of ten.
    if (log) x.range = (u, a, b) => zoomed(u, a, b) ? [a, b] : [Math.min(a, ...known) * .95, Math.max(b, ...known) * 1.05];
    if (chart.names) x.range = (u, a, b) => { const room = (b - a) * .08 || b * .2 || 1; return [Math.max(0, a - room), b + room]; };
    const zoomed = (u, a, b) => a > chart.x[0] || b < chart.x[chart.x.length - 1];
    const ys = chart.lines.flatMap(l => l.y).filter(v => v != null), yLog = !!chart.names && chart.unit === "ms" && Math.min(...ys) > 0 && Math.max(...ys) > 20 * Math.min(...ys);
    const yLimit = chart.y_limit && chart.y_limit[1] <= 1.5 * Math.max(...ys) ? chart.y_limit[1] : 0;  // a far one is in the caption only
    const whole = !chart.unit && !chart.names;  // counts
    const top = b => { if (whole && b <= 5) return Math.ceil(b); const t = ticks(0, b * 1.02, 5); return t[t.length - 1] < b ? 2 * t[t.length - 1] - t[t.length - 2] : t[t.length - 1]; };
    const most = Math.max(2, Math.floor(box.clientWidth / 80));
    const y = yLog ? { distr: 3, range: (u, a, b) => [a / 1.5, Math.max(b, yLimit) * 1.5] }
      : { range: (u, a, b) => [0, chart.unit.startsWith("%") ? 100 : top(Math.max(b || 1, yLimit) * (chart.names ? 1.1 : 1))] };
    const plot = new uPlot({
      width: box.clientWidth, height: box.closest(".wide") ? 340 : 210,
      scales: { x, y },
      axes: [
        { ...axis, values: (u, vs) => labels(vs, way.tick), splits: (u, i, a, b) => (log ? logTicks : ticks)(a, b, most), filter: (u, vs) => vs, size: 32, label: chart.x_axis, labelSize: 18, labelFont: axis.font },
        { ...axis, size: 52, values: (u, vs) => labels(vs, number), splits: (u, i, a, b) => whole && b <= 5 ? ticks(0, b, b) : yLog ? logTicks(a, b, 5) : chart.unit.startsWith("%") ? [0, 25, 50, 75, 100] : ticks(a, b, 5), filter: (u, vs) => vs, ...(chart.unit ? { label: chart.unit + (yLog ? ", log scale" : ""), labelSize: 16, labelFont: axis.font } : {}) }],
      cursor: { drag: { x: true, y: false }, sync: { key: log || box.closest("section") !== document.getElementById("generated")?.closest("section") ? chart.name : "time" } },
      legend: { live: true },
      series: [{ label: way.label, value: say },
        ...chart.lines.map((l, i) => ({ ...look(i), label: l.label, stroke: colour("c" + l.colour % 8), spanGaps: true, value: (u, v) => v == null ? "" : number(v) }))],
      // An idle legend shows names only.
      hooks: { draw: [markLines(chart), pointNumbers(chart)], setCursor: [u => u.root.classList.toggle("live", u.cursor.idx != null && u.cursor.left >= 0)] },
    }, [chart.x, ...chart.lines.map(l => l.y)], box);
    keys(box, () => [plot.scales.x.min, plot.scales.x.max], (a, b) => plot.setScale("x", { min: a, max: b }), chart.x[0], chart.x[chart.x.length - 1]);
    plots.push([box, plot]);
  }
  /** Lets the keyboard move a window [a, b] within [least, most]. */
  function keys(box, get, set, least, most) {
    box.tabIndex = 0;
    box.onkeydown = event => {
      const [a, b] = get(), w = b - a;
      const to = { "+": [a + w / 4, b - w / 4], "=": [a + w / 4, b - w / 4], "-": [a - w / 2, b + w / 2], ArrowLeft: [a - w / 4, b - w / 4], ArrowRight: [a + w / 4, b + w / 4], "0": [least, most] }[event.key];
      if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const width = Math.min(to[1] - to[0], most - least), from = Math.min(Math.max(to[0], least), most - width);
      set(from, from + width);
    };
  }
  function drawAll() {
    for (const [, plot] of plots.splice(0)) plot.destroy();
    data.charts.forEach(draw);
  }

  // --- lanes ---
  const lanes = data.lanes || { rows: [], start: 0, end: 0, kinds: [] }, box = document.getElementById("lanes");
  let canvas, tip, from = lanes.start, to = lanes.end;
  const row = 26, axisHeight = 20;
  const labelWidth = () => canvas.clientWidth < 600 ? 108 : 136;
  const names = ["context", "decode", "mixed", "busy", "handoff"];
  const least = Math.min(0, ...lanes.rows.flatMap(r => r.phases.map(p => p[1]))), most = Math.max(lanes.end, ...lanes.rows.flatMap(r => r.phases.map(p => p[2])));
  function drawLanes() {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = lanes.rows.length * row + axisHeight, left = labelWidth();
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = height + "px";
    const c = canvas.getContext("2d"); c.scale(ratio, ratio); c.font = "12px system-ui, DejaVu Sans, sans-serif";
    const scale = (width - left) / (to - from), place = t => left + (t - from) * scale;
    const fills = names.map(colour), idle = colour("idle"), soft = colour("soft"), line = colour("line");
    lanes.rows.forEach((r, i) => {
      const y = i * row;
      c.fillStyle = idle; c.fillRect(left, y, width - left, row - 4);
      c.save(); c.beginPath(); c.rect(left, y, width - left, row - 2); c.clip();
      for (const [name, a, b] of r.phases) if (b > from && a < to && name !== "test") {
        c.fillStyle = line; c.fillRect(place(a), y, Math.max(1, (b - a) * scale - 1), row - 4);
        if ((b - a) * scale > 40) { c.fillStyle = soft; c.fillText(name, Math.max(place(a), left) + 4, y + 14); }
      }
      for (const [lane, top, h] of [["steps", 0, row - 9], ["handoffs", row - 8, 4]]) {
        const s = r[lane];
        for (let k = 0; k < s.start.length; k++) {
          if (s.end[k] < from || s.start[k] > to) continue;
          const w = (s.end[k] - s.start[k]) * scale;
          c.globalAlpha = Math.max(.35, Math.min(1, s.busy_s[k] / ((s.end[k] - s.start[k]) || 1)));
          c.fillStyle = fills[s.kind[k]]; c.fillRect(place(s.start[k]), y + top, w > 3 ? w - .7 : Math.max(w, .6), h);
        }
        c.globalAlpha = 1;
      }
      c.restore();
      c.fillStyle = colour("text"); c.save(); c.beginPath(); c.rect(0, y, left - 6, row); c.clip(); c.fillText(r.label, 0, y + 15); c.restore();
    });
    c.fillStyle = soft;
    const step = [1, 2, 5].flatMap(k => [...Array(10).keys()].map(e => k * 10 ** (e - 5))).sort((a, b) => a - b).find(s => s * scale > 70) || 1e5;
    for (let t = Math.ceil(from / step) * step; t < to; t += step) {
      c.fillRect(place(t), height - axisHeight - 2, 1, 4); c.fillText(+t.toPrecision(6) + " s", place(t) + 3, height - 5);
    }
  }
  const window_ = (a, b) => { from = a; to = Math.max(b, a + 1e-5); drawLanes(); };
  function startLanes() {
    canvas = box.appendChild(document.createElement("canvas")); tip = box.appendChild(document.createElement("div")); tip.className = "tip";
    box.setAttribute("role", "application"); box.setAttribute("aria-label", "What each rank did; + and − zoom, arrows move, 0 shows all");
    keys(box, () => [from, to], window_, least, most);
    const timeAt = event => { const r = canvas.getBoundingClientRect(), left = labelWidth(); return from + (event.clientX - r.left - left) / (r.width - left) * (to - from); };
    let pressed = null;
    canvas.onpointerdown = event => { pressed = timeAt(event); if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId); };
    canvas.onpointerup = event => {
      const t = timeAt(event), a = Math.min(t, pressed), b = Math.max(t, pressed);
      if (pressed !== null && (b - a) / (to - from) > .01) window_(Math.max(a, least), Math.min(b, most));
      pressed = null; drawLanes();
    };
    canvas.ondblclick = () => window_(lanes.start, lanes.end);
    canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.shiftKey && document.activeElement !== box) return;
      event.preventDefault();
      const t = timeAt(event), f = event.deltaY > 0 ? 1.25 : .8;
      window_(Math.max(least, t - (t - from) * f), Math.min(most, t + (to - t) * f));
    }, { passive: false });
    canvas.onpointermove = event => {
      const r = canvas.getBoundingClientRect(), t = timeAt(event), which = lanes.rows[Math.floor((event.clientY - r.top) / row)];
      if (pressed !== null) {
        drawLanes();
        const c = canvas.getContext("2d"), left = labelWidth(), s = (canvas.clientWidth - left) / (to - from);
        c.fillStyle = colour("c0"); c.globalAlpha = .25; c.fillRect(left + (Math.min(t, pressed) - from) * s, 0, Math.abs(t - pressed) * s, canvas.clientHeight - axisHeight); c.globalAlpha = 1;
      }
      if (!which || t < from) { tip.style.display = "none"; return; }
      const said = [+t.toFixed(3) + " s"];
      for (const lane of ["steps", "handoffs"]) {
        const s = which[lane]; let k = s.start.findIndex((a, j) => a <= t && t <= s.end[j]);
        if (k >= 0) said.push((lanes.kinds[s.kind[k]] || "") + ", " + time(1000 * (s.end[k] - s.start[k])) + (s.n[k] > 1 ? ", " + s.n[k] + " of them" : ""));
      }
      const phase = which.phases.find(p => p[0] !== "test" && p[1] <= t && t <= p[2]);
      if (phase) said.push(phase[0]);
      if (said.length === 1) said.push("idle");
      tip.textContent = said.join(" · "); tip.style.display = "block";
      tip.style.left = Math.min(event.clientX - r.left + 12, r.width - tip.offsetWidth) + "px"; tip.style.top = event.clientY - r.top + 18 + "px";
    };
    canvas.onpointerleave = () => { tip.style.display = "none"; };
  }

  // --- a list of runs: filter, sort, groups ---
  const list = document.querySelector("table.list");
  function startList() {
    const body = list.tBodies[0], rows = [...body.rows], heads = [...list.tHead.rows[0].cells];
    const [filter, parts, group, count] = ["filter", "parts", "group", "count"].map(id => document.getElementById(id));
    let by = -1, up = false;
    const value = (row, i) => { const cell = row.cells[i], v = cell.dataset.v; return v === undefined ? cell.textContent : v === "" ? null : +v; };
    const order = (a, b) => {
      const [x, y] = [value(a, by), value(b, by)];
      if (x === null || y === null) return (x === null) - (y === null);
      return (typeof x === "number" ? x - y : x.localeCompare(y)) * (up ? 1 : -1);
    };
    const title = (name, n) => { const row = document.createElement("tr"), cell = row.appendChild(document.createElement("th")); row.className = "group"; cell.colSpan = heads.length; cell.textContent = name + " (" + n + ")"; return row; };
    const show = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const shown = rows.filter(r => (parts.checked || !r.dataset.series) && words.every(w => r.textContent.toLowerCase().includes(w)));
      if (by >= 0) shown.sort(order);
      const groups = new Map(), name = r => group.value === "" ? "" : group.value === "series" ? r.dataset.series || "single runs" : r.cells[+group.value].textContent;
      for (const r of shown) groups.set(name(r), [...groups.get(name(r)) || [], r]);
      body.replaceChildren(...[...groups].flatMap(([n, rs]) => group.value === "" ? rs : [title(n, rs.length), ...rs]));
      count.textContent = shown.length + " of " + rows.length + " runs";
      markScroll();
    };
    heads.forEach((head, i) => {
      const press = () => { up = by === i ? !up : i < 3; by = i; heads.forEach(h => h.removeAttribute("aria-sort")); head.setAttribute("aria-sort", up ? "ascending" : "descending"); show(); };
      const text = head.firstChild; text.tabIndex = 0; text.setAttribute("role", "button"); text.onclick = press;
      text.onkeydown = event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); press(); } };
    });
    for (const one of [filter, parts, group]) one.oninput = show;
    show();
  }
  /** Says of a table that is wider than the window that it goes on. */
  const markScroll = () => { for (const one of document.querySelectorAll(".scroll")) one.classList.toggle("goes-on", one.scrollWidth > one.clientWidth + 1); };

  if (box) startLanes();
  if (list) startList();
  const all = () => { drawAll(); if (box) drawLanes(); markScroll(); };
  all();
  dark.addEventListener("change", all);
  // Also when a scroll bar comes or goes: no event of the window tells that.
  const frame = document.querySelector("main");
  let wide = frame.clientWidth, due = 0;
  new ResizeObserver(() => { if (frame.clientWidth !== wide) { wide = frame.clientWidth; clearTimeout(due); due = setTimeout(all, 80); } }).observe(frame);
})();
