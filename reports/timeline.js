// The picture of one case's schedule: requests down, steps across. template.html puts this before page.js, in one block.

// ---- the timeline picture ----------------------------------------------------------------------------------------

const WIDE = 40, HIGH = 30, ABOVE = 15, BELOW = 15, CALLOUT = 34, NAMES = 118, AXIS = 20;
const MOST_STEPS = 240, MOST_LANES = 32;
// one hue from light to dark: order survives colour blindness and grey print
const RAMP = [[227, 238, 249], [156, 195, 230], [74, 144, 201], [31, 95, 168], [10, 47, 102]];
const KINDS = { first_chunk: "first prefill chunk", prefill: "prefill chunk", leftover: "one-token prompt tail, runs as decode", decode: "decode" };

const share = (position, length) => (length > 1 ? Math.min(1, Math.max(0, position / (length - 1))) : 0);
function shade(position, length) {
  const place = share(position, length) * (RAMP.length - 1);
  const low = Math.min(Math.floor(place), RAMP.length - 2);
  return `rgb(${RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (place - low))).join(",")})`;
}
const inkOn = (position, length) => (share(position, length) > 0.4 ? "#ffffff" : "#12202f");
const line = (name, x1, y1, x2, y2) => draw("line", { class: name, x1, y1, x2, y2 });
const box = (name, x, y, width, height, rest) => draw("rect", { class: name, x, y, width, height, rx: 3, ...rest });
const label = (name, x, y, text, rest) => draw("text", { class: name, x, y, "text-anchor": "middle", ...rest }, text);

function timeline(record) {
  const plan = layout(record);
  const grid = draw("svg", { width: plan.width, height: plan.height, tabindex: 0, role: "img", "aria-label": spoken(record, plan) });
  const names = draw("svg", { width: NAMES, height: plan.height, class: "names", "aria-hidden": "true" });
  names.append(label("small", NAMES - 12, 12, "step", { "text-anchor": "end" }));
  if (plan.badColumn !== null) grid.append(box("band", plan.badColumn, 0, WIDE, plan.height));
  for (let step = plan.from; step < plan.to; step++) {
    grid.append(label(step === plan.bad.step ? "small bad-text" : "small", plan.x(step) + WIDE / 2, 12, String(step)));
  }
  plan.lanes.forEach((lane) => {
    names.append(...nameOf(lane, record));
    grid.append(...laneLines(lane, plan));
  });
  plan.steps.forEach((step, offset) => stepCells(step, plan.from + offset, plan).forEach((cell) => grid.append(cell)));
  if (plan.padLane !== null) {
    names.append(label("small", NAMES - 12, plan.padLane + HIGH / 2 + 4, "padding rows", { "text-anchor": "end" }));
  }
  if (plan.badLane) grid.append(...callout(record, plan));
  browse(grid);
  const cut = plan.cut ? make("p", { class: "legend" }, plan.cut) : null;
  return make("figure", { class: "timeline", style: "margin:0" },
    make("div", { class: "frame" }, names, make("div", { class: "scroll", "data-bad": plan.badColumn }, grid)), cut, legend(record, plan));
}

function layout(record) {
  const { steps, buffer_len: length } = record.timeline;
  const bad = record.first_bad || {};
  const from = Math.max(0, Math.min((has(bad.step) ? bad.step : 0) - MOST_STEPS / 2, steps.length - MOST_STEPS));
  const to = Math.min(steps.length, from + MOST_STEPS);
  const shown = steps.slice(from, to);
  const seen = new Set(shown.flatMap((step) => [...step.rows.map((row) => row.request), ...(step.preempt || []), ...(step.abort || [])]));
  const first = (request) => (request === bad.request ? 0 : 1);
  const requests = [...seen].sort((a, b) => first(a) - first(b) || a - b).slice(0, MOST_LANES).sort((a, b) => a - b);
  let y = AXIS;
  const lanes = requests.map((request) => {
    const lane = { request, y: y + ABOVE };
    y += ABOVE + HIGH + BELOW + (request === bad.request && has(bad.step) ? CALLOUT : 0);
    return lane;
  });
  const padded = shown.some((step) => has(step.padded_to) && step.padded_to > step.rows.length);
  const padLane = padded ? y + 4 : null;
  const cuts = [];
  if (shown.length < steps.length) cuts.push(`steps ${from} to ${to - 1} of ${steps.length}`);
  if (lanes.length < seen.size) cuts.push(`${lanes.length} of ${seen.size} requests`);
  const inside = has(bad.step) && bad.step >= from && bad.step < to;
  return {
    steps: shown, from, to, length, bad, lanes, padLane,
    x: (step) => (step - from) * WIDE,
    lane: new Map(lanes.map((lane) => [lane.request, lane])),
    end: shown.length * WIDE,
    // a short schedule still has room for the sentence about its first bad cell
    width: Math.max(shown.length * WIDE + 8, 760),
    height: padded ? y + HIGH + 8 : y,
    badColumn: inside ? (bad.step - from) * WIDE : null,
    badLane: inside ? lanes.find((lane) => lane.request === bad.request) || null : null,
    cut: cuts.length ? `Drawn: ${cuts.join(", ")}.` : "",
    slots: new Map(),
    used: new Set(),
  };
}

function spoken(record, plan) {
  const place = has(plan.bad.step) ? ` First bad: step ${plan.bad.step}, row ${plan.bad.row}, request ${plan.bad.request}.` : "";
  return `Timeline: ${record.timeline.steps.length} steps, ${plan.lanes.length} requests, ring of ${plan.length}.${place} Arrow keys read the cells.`;
}

function nameOf(lane, record) {
  const request = (record.case && record.case.requests || [])[lane.request];
  const nodes = [label("label", NAMES - 12, lane.y + (request ? 13 : 19), `request ${lane.request}`, { "text-anchor": "end" })];
  if (request) nodes.push(label("small", NAMES - 12, lane.y + 26, `${request.prompt_len} in, ${request.output_len} out`, { "text-anchor": "end" }));
  return nodes;
}

// a solid line while the request lives, a dashed one while it is preempted
function laneLines(lane, plan) {
  const nodes = [];
  let start = null, away = false;
  const close = (x) => {
    if (start !== null && x > start) nodes.push(line(away ? "lane away" : "lane", start, lane.y + HIGH / 2, x, lane.y + HIGH / 2));
  };
  plan.steps.forEach((step, offset) => {
    const x = offset * WIDE;
    const runs = step.rows.some((row) => row.request === lane.request);
    const turn = (next) => { close(x); start = x; away = next; };
    if ((step.preempt || []).includes(lane.request)) turn(true);
    else if ((step.abort || []).includes(lane.request)) { close(x); start = null; }
    if (runs && (start === null || away)) turn(false);
    if ((step.finished || []).includes(lane.request)) { close(x + WIDE); start = null; }
  });
  close(plan.end);
  return nodes;
}

function stepCells(step, index, plan) {
  const x = plan.x(index) + 2;
  const cells = [];
  for (const request of step.preempt || []) {
    plan.slots.delete(request);
    cells.push(event(plan, request, x, "preempt", `step ${index}: request ${request} preempted, its state is given up`));
  }
  for (const request of step.abort || []) cells.push(event(plan, request, x, "abort", `step ${index}: request ${request} aborted`));
  step.rows.forEach((row, place) => {
    const lane = plan.lane.get(row.request);
    if (lane) cells.push(cell(row, place, index, x, lane, plan));
  });
  for (const request of step.finished || []) {
    const lane = plan.lane.get(request);
    if (lane) cells.push(line("mark", x + WIDE - 2, lane.y + 2, x + WIDE - 2, lane.y + HIGH - 2));
    plan.used.add("finish");
  }
  const extra = has(step.padded_to) ? step.padded_to - step.rows.length : 0;
  if (extra > 0) {
    plan.used.add("padding");
    cells.push(withTip(draw("g", { class: "cell" }, box("padding hit", x, plan.padLane, WIDE - 4, HIGH), label("small", x + WIDE / 2 - 2, plan.padLane + 19, `+${extra}`)),
      `step ${index}: ${step.rows.length} rows padded to ${step.padded_to}`));
  }
  return cells;
}

function event(plan, request, x, kind, tip) {
  const lane = plan.lane.get(request);
  plan.used.add(kind);
  if (!lane) return draw("g");
  const [cx, cy] = [x + WIDE / 2 - 2, lane.y + HIGH / 2];
  return withTip(draw("g", { class: "cell", "data-lane": lane.y }, box("hit", x, lane.y, WIDE - 4, HIGH), ...cross(kind, cx, cy)), tip);
}

function cross(kind, cx, cy) {
  const stroke = kind === "abort" ? "on-block" : "mark";
  const arms = [line(stroke, cx - 5, cy - 5, cx + 5, cy + 5), line(stroke, cx - 5, cy + 5, cx + 5, cy - 5)];
  return kind === "abort" ? [box("block", cx - 9, cy - 9, 18, 18), ...arms] : arms;
}

function cell(row, place, index, x, lane, plan) {
  const { length, bad } = plan;
  const [width, middle] = [WIDE - 4, x + WIDE / 2 - 2];
  const wrong = differences(row);
  const nodes = [];
  plan.used.add(row.kind);
  if (row.kind === "decode" || row.kind === "leftover") {
    const position = has(row.write_pos) ? row.write_pos : 0;
    nodes.push(box("decode", x, lane.y, width, HIGH, { style: `fill:${shade(position, length)}` }),
      label("", middle, lane.y + 20, has(row.write_pos) ? String(row.write_pos) : "?", { style: `fill:${inkOn(position, length)}` }));
  } else {
    nodes.push(box("prefill", x, lane.y, width, HIGH), label("on-prefill", middle, lane.y + 20, String(row.num_tokens)));
    if (row.kind === "first_chunk") nodes.push(box("first", x, lane.y, 4, HIGH, { rx: 1 }));
  }
  if (row.is_flush) { plan.used.add("flush"); nodes.push(flushMark(x, lane.y, width)); }
  if (row.kind === "leftover") nodes.push(tailMark(x, lane.y, width));
  if (has(row.slot) && plan.slots.get(row.request) !== row.slot) nodes.push(label("small", x, lane.y - 4, `slot ${row.slot}`, { "text-anchor": "start" }));
  plan.slots.set(row.request, row.slot);
  const isBad = index === bad.step && row.request === bad.request;
  if (isBad) { plan.used.add("bad"); nodes.push(box("bad", x - 1, lane.y - 1, width + 2, HIGH + 2)); }
  else if (wrong.length) {
    plan.used.add("wrong");
    nodes.push(box("wrong", x, lane.y, width, HIGH),
      label("small bad-text", middle, lane.y + HIGH + 11, wrong[0].short));
  }
  nodes.push(box("hit", x, lane.y, width, HIGH));
  return withTip(draw("g", { class: "cell", "data-lane": lane.y }, ...nodes), told(row, place, index, wrong));
}

const flushMark = (x, y, width) => draw("path", { class: "flush", d: `M${x + 1} ${y + HIGH - 6}h${width - 2}v6h${2 - width}z` });
const tailMark = (x, y, width) => draw("path", { class: "tail", d: `M${x + width - 12} ${y}h12v12z` });

function differences(row) {
  const found = [];
  if (has(row.got_write_pos) && row.got_write_pos !== row.write_pos) {
    found.push({ short: `got ${row.got_write_pos}`, long: `got write_pos ${row.got_write_pos}, right ${has(row.write_pos) ? row.write_pos : "none"}` });
  }
  if (has(row.got_is_flush) && row.got_is_flush !== Boolean(row.is_flush)) {
    found.push({ short: row.got_is_flush ? "flushed" : "no flush", long: row.got_is_flush ? "got a flush, right is none" : "got no flush, right is one" });
  }
  return found;
}

function told(row, place, index, wrong) {
  const last = row.num_computed + row.num_tokens - 1;
  const tokens = row.num_tokens === 1 ? `token ${last}` : `tokens ${row.num_computed} to ${last}`;
  const cursor = has(row.write_pos) ? `\nwrite_pos ${row.write_pos}, ${row.is_flush ? "flush" : "no flush"}` : "";
  const slot = has(row.slot) ? `, slot ${row.slot}` : "";
  return `step ${index}, row ${place}: request ${row.request}\n${KINDS[row.kind] || row.kind} of ${tokens}${slot}${cursor}${wrong.map((w) => "\n" + w.long).join("")}`;
}

function callout(record, plan) {
  const { bad, badLane: lane } = plan;
  const row = plan.steps[bad.step - plan.from].rows.find((candidate) => candidate.request === bad.request);
  const place = [["row", bad.row], ["head", bad.head], ["token", bad.position]].filter(([, n]) => has(n)).map(([name, n]) => `${name} ${n}`).join(", ");
  const lines = [`first bad: ${place}`, ...(row ? differences(row) : []).map((w) => w.long)];
  const x = plan.x(bad.step) + WIDE / 2;
  const [top, text] = [lane.y + HIGH + 3, lines.join("; ")];
  const space = 7 * text.length;
  // the sentence stands on the side of the arrow that has room for it
  const right = x + 14 + space < plan.width || x - 14 < space;
  return [draw("path", { class: "arrow", d: `M${right ? x + 12 : x - 12} ${top + 27}H${x}V${top + 8}` }),
    draw("path", { class: "arrowhead", d: `M${x} ${top}l5 9h-10z` }),
    label("label bad-text", right ? x + 17 : x - 17, top + 31, text, { "text-anchor": right ? "start" : "end" })];
}

function legend(record, plan) {
  const icon = (width, ...nodes) => draw("svg", { width, height: 16, "aria-hidden": "true" }, ...nodes);
  const small = (scale, ...nodes) => icon(20, draw("g", { transform: `scale(${scale})` }, ...nodes));
  const ring = plan.length <= 8 ? [...Array(plan.length).keys()] : [0, 1, 2, 3, 4, 5, 6, 7].map((i) => Math.round((i * (plan.length - 1)) / 7));
  const swatches = icon(ring.length * 17, ...ring.flatMap((position, i) => [
    box("decode", i * 17, 0.5, 16, 15, { style: `fill:${shade(position, plan.length)}` }),
    label("", i * 17 + 8, 12, String(position), { style: `fill:${inkOn(position, plan.length)}` })]));
  const entries = [
    [["decode", "leftover"], swatches, `decode, at ring position write_pos (L = ${plan.length})`],
    [["prefill", "first_chunk"], icon(18, box("prefill", 0, 1, 17, 14), label("on-prefill", 8.5, 12, "8")), "prefill chunk, its tokens"],
    [["first_chunk"], icon(18, box("prefill", 0, 1, 17, 14), box("first", 0, 1, 4, 14, { rx: 1 })), "first chunk: from zero state"],
    [["flush"], small(0.5, box("decode", 0, 1, 34, HIGH, { style: `fill:${shade(0, 2)}` }), flushMark(0, 1, 34)), "flush into the checkpoint"],
    [["leftover"], small(0.5, box("decode", 0, 1, 34, HIGH, { style: `fill:${shade(0, 2)}` }), tailMark(0, 1, 34)), "one-token prompt tail"],
    [["preempt"], icon(34, ...cross("preempt", 8, 8), line("lane away", 16, 8, 34, 8)), "preempted"],
    [["abort"], icon(18, ...cross("abort", 9, 8)), "aborted"],
    [["finish"], icon(6, line("mark", 3, 1, 3, 15)), "finished"],
    [["padding"], icon(18, box("padding", 1, 1, 16, 14)), "rows padded up to a captured graph"],
    [["bad"], icon(18, box("bad", 1.5, 1.5, 15, 13)), "first bad"],
    [["wrong"], icon(18, box("wrong", 1, 1, 16, 14)), "cursor differs"],
  ];
  return make("ul", { class: "legend" }, ...entries.filter(([kinds]) => kinds.some((kind) => plan.used.has(kind)))
    .map(([, picture, text]) => make("li", null, picture, text)));
}

function showFirstBad(root) {
  for (const pane of root.querySelectorAll(".scroll[data-bad]")) pane.scrollLeft = Number(pane.dataset.bad) - pane.clientWidth / 2;
}

// ---- tips, by pointer and by arrow keys --------------------------------------------------------------------------

const tip = document.getElementById("tip");
function withTip(node, text) {
  node.dataset.tip = text;
  return node;
}
function showTip(cell) {
  tip.textContent = cell.dataset.tip;
  tip.hidden = false;
  const place = cell.querySelector(".hit").getBoundingClientRect();
  const left = Math.min(place.left, innerWidth - tip.offsetWidth - 8);
  const under = place.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${under ? place.bottom + 8 : place.top - tip.offsetHeight - 8}px`;
}
function browse(grid) {
  let picked = null;
  const pick = (cell) => {
    if (picked) picked.classList.remove("picked");
    picked = cell;
    if (!cell) { tip.hidden = true; return; }
    cell.classList.add("picked");
    cell.scrollIntoView({ block: "nearest", inline: "nearest" });
    showTip(cell);
  };
  grid.addEventListener("pointerover", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) showTip(cell); else tip.hidden = true;
  });
  grid.addEventListener("pointerleave", () => { tip.hidden = true; });
  grid.addEventListener("blur", () => pick(null));
  grid.addEventListener("keydown", (event) => {
    const cells = [...grid.querySelectorAll(".cell[data-tip]")];
    const ways = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    if (event.key === "Escape") pick(null);
    if (!(event.key in ways) || !cells.length) return;
    event.preventDefault();
    pick(picked ? neighbour(picked, cells, ways[event.key]) : cells.find((cell) => cell.querySelector(".bad")) || cells[0]);
  });
}
// nearest cell that way; one lane or column off counts as far
function neighbour(from, cells, [right, down]) {
  const centre = (cell) => { const r = cell.querySelector(".hit").getBBox(); return [r.x, r.y]; };
  const [x, y] = centre(from);
  const cost = (cell) => {
    const [dx, dy] = [centre(cell)[0] - x, centre(cell)[1] - y];
    const ahead = dx * right + dy * down;
    return ahead > 1 ? ahead + 10 * Math.abs(right ? dy : dx) : Infinity;
  };
  return cells.reduce((best, cell) => (cost(cell) < cost(best) ? cell : best), from);
}
