// The list of cases, filtered and sorted, each drawn when it is opened. Everything above it works without scripts.

const data = JSON.parse(document.getElementById("data").textContent);
const records = data.records;
const VERDICTS = ["fail", "unknown", "pass"];
const LEVELS = ["kernel", "schedule", "engine"];
const PAGE = 100;

// ---- small tools -------------------------------------------------------------------------------------------------

function make(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}
function draw(name, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
function format(raw) {
  if (raw === null || raw === undefined) return "–";
  const number = Number(raw);
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return "∞";
  const size = Math.abs(number);
  return size === 0 || (size >= 1e-3 && size < 1e4) ? String(Number(number.toPrecision(3))) : number.toExponential(1).replace("e+", "e");
}
function times(raw) {
  const text = format(has(raw) && Number.isFinite(Number(raw)) ? Number(Number(raw).toPrecision(2)) : raw);
  return text === "0" || text === "–" || text === "∞" ? text : text + "×";
}
const has = (value) => value !== null && value !== undefined;
const count = (number) => number.toLocaleString("en");

// ---- the list ----------------------------------------------------------------------------------------------------

const totals = Object.fromEntries(VERDICTS.map((name) => [name, records.filter((r) => r.verdict === name).length]));
const state = { text: "", level: "", verdicts: new Set(["fail", "unknown"]), key: "verdict", down: false, shown: PAGE };
const open = new Set(records.length && records[0].verdict !== "pass" ? [0] : []);
const list = document.getElementById("list");
const more = make("button", { type: "button", class: "more" });
list.after(more);

const COLUMNS = [
  ["verdict", "verdict", (r) => VERDICTS.indexOf(r.verdict)],
  ["id", "case", (r) => r.id],
  ["level", "level", (r) => LEVELS.indexOf(r.level)],
  ["target", "target", (r) => r.target || ""],
  ["regime", "regime", (r) => r.regime || ""],
  ["symptom", "symptom", (r) => r.symptom || ""],
  // largest first: what a reader asks of this column
  ["ratio", "of limit", (r) => (r.worst ? -Number(r.worst[3]) : 1)],
];
const words = records.map((r) =>
  [r.id, r.level, r.target, r.regime, r.fault, r.verdict, r.symptom, r.stage, r.reason, ...r.situations.map((i) => data.situations[i])]
    .filter(has).join(" ").toLowerCase());

function matching() {
  const wanted = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const value = COLUMNS.find(([key]) => key === state.key)[2];
  const found = records.map((_, index) => index).filter((index) => {
    const record = records[index];
    return state.verdicts.has(record.verdict) && (!state.level || record.level === state.level)
      && wanted.every((word) => words[index].includes(word));
  });
  const sign = state.down ? -1 : 1;
  return found.sort((a, b) => {
    const [left, right] = [value(records[a]), value(records[b])];
    return left < right ? -sign : left > right ? sign : a - b;
  });
}

function refresh() {
  const found = matching();
  list.replaceChildren(...found.slice(0, state.shown).map(card));
  if (!found.length) list.append(make("li", { class: "empty" }, nothing()));
  const left = found.length - state.shown;
  more.hidden = left <= 0;
  more.textContent = `Show ${count(Math.min(PAGE, left))} more of ${count(Math.max(left, 0))}`;
}

function nothing() {
  if (!records.length) return "No case was judged.";
  const clean = !totals.fail && !totals.unknown && !state.verdicts.has("pass");
  return clean ? `No case failed. ${count(totals.pass)} passing cases are folded.` : "No case matches.";
}

function card(index) {
  const record = records[index];
  const node = make("details", { class: `case ${record.verdict}` },
    make("summary", null,
      make("span", { class: `verdict ${record.verdict}` }, record.verdict),
      make("code", { class: "id", title: record.id }, record.id),
      ...["level", "target", "regime", "symptom"].map((key) => make("span", { class: key }, record[key] || "")),
      make("span", { class: "ratio" }, record.worst ? times(record.worst[3]) : "")));
  const unfold = () => {
    if (node.open && node.children.length === 1) {
      node.append(detail(record));
      showFirstBad(node);
    }
  };
  node.addEventListener("toggle", () => {
    if (node.open) open.add(index); else open.delete(index);
    unfold();
  });
  if (open.has(index)) {
    node.open = true;
    node.append(detail(record));
  }
  return make("li", null, node);
}

function controls() {
  const bar = document.getElementById("controls");
  const search = make("input", { type: "search", placeholder: "Filter by name, situation, fault, reason", "aria-label": "Filter cases" });
  const level = make("select", { "aria-label": "Level" }, make("option", { value: "" }, "every level"),
    ...LEVELS.filter((name) => records.some((r) => r.level === name)).map((name) => make("option", null, name)));
  const change = (edit) => { edit(); state.shown = PAGE; refresh(); };
  search.addEventListener("input", () => change(() => { state.text = search.value; }));
  level.addEventListener("change", () => change(() => { state.level = level.value; }));
  const toggles = VERDICTS.map((name) => {
    const button = make("button", { type: "button", class: name, "aria-pressed": state.verdicts.has(name) }, `${name} ${count(totals[name])}`);
    button.addEventListener("click", () => change(() => {
      if (!state.verdicts.delete(name)) state.verdicts.add(name);
      button.setAttribute("aria-pressed", state.verdicts.has(name));
    }));
    return button;
  });
  bar.append(search, level, ...toggles);
  bar.hidden = false;
  bar.after(headings());
  more.addEventListener("click", () => { state.shown += PAGE; refresh(); });
  // "#case=ID", from the table of largest errors
  const follow = () => {
    const asked = /^#case=(.*)$/.exec(location.hash);
    if (!asked) return;
    search.value = decodeURIComponent(asked[1]);
    state.verdicts = new Set(VERDICTS);
    toggles.forEach((button) => button.setAttribute("aria-pressed", true));
    records.forEach((record, index) => { if (record.id === search.value) open.add(index); });
    change(() => { state.text = search.value; });
    document.getElementById("cases").scrollIntoView();
  };
  addEventListener("hashchange", follow);
  follow();
}

function headings() {
  const buttons = COLUMNS.map(([key, title]) => {
    const button = make("button", { type: "button", "aria-pressed": key === state.key, title: `Sort by ${title}` }, title);
    button.addEventListener("click", () => {
      state.down = state.key === key && !state.down;
      state.key = key;
      buttons.forEach((other) => other.setAttribute("aria-pressed", other === button));
      refresh();
    });
    return button;
  });
  return make("div", { class: "columns" }, ...buttons);
}

// ---- one case ----------------------------------------------------------------------------------------------------

function detail(record) {
  return make("div", { class: "detail" },
    record.reason ? make("p", { class: "reason" }, record.reason) : null,
    facts(record),
    record.timeline && record.timeline.steps.length ? timeline(record) : null,
    record.rerun ? titled("Run this case again", make("div", { class: "command" }, make("code", null, record.rerun), copier())) : null,
    make("div", { class: "pair" },
      record.distances ? titled("Distances, log scale; the tick is the limit", distances(record)) : null,
      make("div", { class: "beside" },
        record.guards ? titled("Guards", make("p", null, record.guards)) : null,
        record.situations.length
          ? titled("Situations", make("ul", { class: "chips" }, ...record.situations.map((i) => make("li", null, data.situations[i])))) : null)),
    record.case ? folded("Case JSON", source(record.case)) : null,
    record.text ? folded("More", record.text) : null,
    record.cut ? make("p", { class: "note" }, "Its timeline and case are in records.jsonl: this page holds those of the first cases only.") : null);
}

function titled(title, node) {
  return make("div", null, make("h4", null, title), node);
}
function folded(title, text) {
  return make("details", null, make("summary", null, title), make("div", { class: "source" }, make("pre", null, text), copier()));
}
function copier() {
  return make("button", { type: "button", class: "copy" }, "Copy");
}

function facts(record) {
  const bad = record.first_bad || {};
  const pairs = [["symptom", record.symptom], ["stage", record.stage], ["planted fault", record.fault],
    ["first bad step", bad.step], ["row", bad.row], ["head", bad.head], ["request", bad.request], ["token", bad.position],
    ...Object.entries(record.counts || {}).map(([name, n]) => [name.replaceAll("_", " "), n]),
    ["seconds", has(record.seconds) ? format(record.seconds) : null]];
  return make("dl", { class: "facts" },
    ...pairs.filter(([, value]) => has(value)).map(([name, value]) => make("div", null, make("dt", null, name), make("dd", null, String(value)))));
}

// one line a request or step: what a person can read and edit
function source(body) {
  const lines = Object.entries(body).map(([key, value]) => {
    const long = Array.isArray(value) && value.length;
    return `  ${JSON.stringify(key)}: ` + (long ? `[\n${value.map((item) => "    " + JSON.stringify(item)).join(",\n")}\n  ]` : JSON.stringify(value));
  });
  return `{\n${lines.join(",\n")}\n}\n`;
}

function distances(record) {
  const limits = record.limits || {};
  const rows = Object.entries(record.distances).map(([name, raw]) => ({ name, raw, limit: limits[name] }));
  const sizes = rows.flatMap((row) => [row.raw, row.limit]).filter(has).map(Number).filter((n) => n > 0 && Number.isFinite(n)).map(Math.log10);
  const low = Math.floor(Math.min(-1, ...sizes)) - 1;
  const high = Math.max(Math.ceil(Math.max(...sizes, low + 2)), low + 2);
  const at = (number) => (Number.isNaN(number) ? 100 : number <= 0 ? 0 : Math.min(100, Math.max(1, (100 * (Math.log10(number) - low)) / (high - low))));
  const cells = rows.flatMap(({ name, raw, limit }) => {
    const value = has(raw) ? Number(raw) : 0;
    const over = has(limit) && !(value <= Number(limit));
    const track = make("span", { class: over ? "track over" : "track" }, make("i", { style: `width:${at(value)}%` }),
      has(limit) ? make("b", { style: `left:${at(Number(limit))}%`, title: `limit ${format(limit)}` }) : null);
    return [make("span", null, name), track, make("span", { class: over ? "value fail" : "value" }, format(raw)),
      make("small", null, !has(limit) ? "no limit" : Number(limit) === 0 ? "must be 0" : `limit ${format(limit)}`)];
  });
  const axis = make("small", { class: "axis" }, make("span", null, `1e${low}`), make("span", null, `1e${high}`));
  return make("div", { class: "logs" }, ...cells, make("span", { class: "axis" }), axis);
}

// ---- start -------------------------------------------------------------------------------------------------------

addEventListener("click", (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  const text = button.previousElementSibling.textContent;
  const done = (word) => { button.textContent = word; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
  navigator.clipboard ? navigator.clipboard.writeText(text).then(() => done("Copied"), () => done("Failed")) : done("Failed");
});
document.querySelectorAll(".copy").forEach((button) => { button.hidden = false; });
const note = document.getElementById("unlisted");
if (note) note.remove();
controls();
refresh();
showFirstBad(document);
