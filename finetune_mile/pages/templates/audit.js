"use strict";
// The rows of the lists come in files beside the page, because fetch does not work from file://. Each calls `rows`.
// A row: [kind, photo, given, suggested, p given, p suggested, p wrong, split, id, path, other photo, other path].
const PAGE = 24, MOST_HEAT = 30, NAMES = FACTS.classes, KINDS = FACTS.kinds;
const VERDICTS = { right: "✓ right", wrong: "✗ wrong", unsure: "? unsure", relabel: "↦ " };
const COLUMNS = ["audit", "kind", "split", "id", "path", "other", "given", "suggested", "verdict", "labels"];
const ABOUT = {
  wrong: "Photos whose label is more likely wrong than on average, by a model of other photos. The most likely errors come first.",
  missing: "Photos that seem to have a class which is not given, most likely first.",
  duplicate: "The photo on the left is, or looks like, the one on the right. Those with different labels come first.",
  outlier: "Photos that are far from all others, the farthest first. Not every one is a mistake.",
};
const $ = (id) => document.getElementById(id);
const all = [], ticks = new Map();
let kind = KINDS[0], shown = [], at = 0, page = 0, waiting = FACTS.files.slice(), kept = true;

function make(tag, text, properties) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  return Object.assign(element, properties || {});
}

const names = (numbers) => numbers.map((number) => NAMES[number]);
const path = (row) => row[9] || FACTS.prefix[FACTS.splits[row[7]]] + row[8];
const key = (row) => [KINDS[row[0]], FACTS.splits[row[7]], row[8], names(row[3]).join("\u0001"), row[11] || ""].join("\u0002");

function suggestion(row) {
  if (KINDS[row[0]] === "missing") return row[2].concat(row[3].filter((label) => !row[2].includes(label)));
  return row[3];
}

// ---------------------------------------------------------------------------- rows and ticks

function rows(some) {
  for (const row of some) { row.number = all.length; row.key = key(row); all.push(row); }
  if (all.length === some.length) start(); else later();
}

let refresh = 0;
function later() {  // what came in the background is shown once, not file by file
  clearTimeout(refresh);
  refresh = setTimeout(() => { panels(); choose(false); }, waiting.length ? 400 : 0);
}

function more() {
  const name = waiting.shift();
  if (!name) return;
  const script = make("script", undefined, { src: name });
  script.onload = script.onerror = () => { script.remove(); more(); };
  document.head.append(script);
}

function remember() {
  try { localStorage.setItem(FACTS.store, JSON.stringify([...ticks])); }
  catch (error) { kept = false; }
  say();
}

function say(text) {
  const ticked = `${ticks.size.toLocaleString()} ticked`;
  $("said").textContent = text || (kept ? ticked : `${ticked}; this browser does not keep them: export before you close`);
}

function tick(row, verdict, labels) {
  if (verdict) ticks.set(row.key, { verdict, labels: labels || [] }); else ticks.delete(row.key);
  remember();
  const old = $("grid").children[shown.indexOf(row) - page * PAGE];
  if (old) old.replaceWith(card(row));
}

function take(row) {
  const labels = names(suggestion(row));
  if (labels.length) tick(row, "relabel", labels);
}

// ---------------------------------------------------------------------------- what is shown

function choose(restart = true) {
  const words = $("search").value.toLocaleLowerCase().split(/\s+/).filter(Boolean), wanted = KINDS.indexOf(kind);
  const given = $("given").value, suggested = $("suggested").value, split = $("split").value, verdict = $("verdict").value;
  shown = all.filter((row) => {
    if (row[0] !== wanted || (split !== "" && row[7] !== +split)) return false;
    if ((given !== "" && !row[2].includes(+given)) || (suggested !== "" && !row[3].includes(+suggested))) return false;
    const mark = ticks.get(row.key);
    if (verdict && (verdict === "open" ? mark : verdict === "ticked" ? !mark : !mark || mark.verdict !== verdict)) return false;
    if (!words.length) return true;
    const text = [path(row), ...names(row[2]), ...names(row[3])].join(" ").toLocaleLowerCase();
    return words.every((word) => text.includes(word));
  });
  const by = $("order").value, first = (row, column) => names(row[column]).join(", ");
  const compare = {
    likely: (a, b) => a.number - b.number,
    unlikely: (a, b) => b.number - a.number,
    given: (a, b) => first(a, 2).localeCompare(first(b, 2)) || a.number - b.number,
    suggested: (a, b) => first(a, 3).localeCompare(first(b, 3)) || a.number - b.number,
    name: (a, b) => path(a).localeCompare(path(b)),
  }[by];
  shown.sort(compare);
  if (restart) { page = 0; at = 0; }
  draw();
}

function draw() {
  const pages = Math.max(Math.ceil(shown.length / PAGE), 1);
  page = Math.min(Math.max(page, 0), pages - 1);
  at = Math.min(Math.max(at, page * PAGE), Math.max(Math.min((page + 1) * PAGE, shown.length) - 1, 0));
  const visible = shown.slice(page * PAGE, (page + 1) * PAGE);
  $("grid").replaceChildren(...visible.map(card));
  if (!visible.length) $("grid").append(make("p", "No photo in this list.", { className: "quiet" }));
  const end = Math.min((page + 1) * PAGE, shown.length);
  $("where").textContent = shown.length ? `${(page * PAGE + 1).toLocaleString()} to ${end.toLocaleString()} of ${shown.length.toLocaleString()}` : "";
  $("previous").disabled = page === 0;
  $("next").disabled = page >= pages - 1;
  mark();
}

function mark() {
  [...$("grid").children].forEach((element, i) => element.classList.toggle("at", page * PAGE + i === at && shown.length > 0));
}

function picture(photo, name) {
  const folder = Math.floor(photo / 1000);
  return make("img", undefined, { src: `thumbs/${folder}/${photo}.jpg`, alt: name, loading: "lazy", decoding: "async" });
}

function card(row) {
  const tickOf = ticks.get(row.key), one = make("article", undefined, { className: "card" });
  const pictures = make("div", undefined, { className: "pictures" });
  pictures.append(picture(row[1], path(row)));
  if (row[10] !== null) pictures.append(picture(row[10], row[11]));
  one.append(pictures);
  if (tickOf) {
    one.classList.add(`is-${tickOf.verdict}`);
    one.append(make("span", VERDICTS[tickOf.verdict] + (tickOf.verdict === "relabel" ? tickOf.labels.join(", ") : ""), { className: "mark" }));
  }
  const list = make("dl"), percent = (value) => (value === null ? "" : `${(100 * value).toFixed(0)} %`);
  const line = (title, text, value) => list.append(make("dt", title), make("dd", text), make("dd", percent(value), { className: "number" }));
  line("given", names(row[2]).join(", ") || "no label", row[4]);
  if (row[3].length) line({ duplicate: "other", missing: "also" }[KINDS[row[0]]] || "rather", names(row[3]).join(", "), row[5]);
  if (row[6] !== null) line("error", "", row[6]);
  one.append(list, make("div", brief(path(row)), { className: "name", title: path(row) }));
  const keys = make("div", undefined, { className: "keys" });
  for (const verdict of ["right", "wrong", "unsure"]) {
    const button = make("button", verdict[0].toUpperCase() + verdict.slice(1), { type: "button" });
    button.setAttribute("aria-pressed", String(Boolean(tickOf) && tickOf.verdict === verdict));
    button.onclick = () => { focus(row); tick(row, verdict); mark(); };
    keys.append(button);
  }
  const labels = names(suggestion(row));
  const accept = make("button", labels.length ? `↦ ${labels.join(", ")}` : "no suggestion", { type: "button", className: "wide", disabled: !labels.length, title: labels.join(", ") });
  accept.onclick = () => { focus(row); take(row); mark(); };
  const other = make("button", "Relabel", { type: "button" });
  other.onclick = () => { focus(row); relabel(row); };
  keys.append(accept, other);
  one.append(keys);
  one.onclick = () => focus(row);
  return one;
}

function brief(text) {  // the class folder and the file of a long path
  const parts = text.split("/");
  return text.length > 40 && parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : text;
}

function focus(row) { at = shown.indexOf(row); mark(); }

function relabel(row) {
  const old = ticks.get(row.key), labels = old && old.labels.length ? old.labels : names(suggestion(row));
  $("labels").value = labels.join(FACTS.several ? ", " : "");
  $("labels").setCustomValidity("");
  $("relabel").onclose = () => {
    if ($("relabel").returnValue !== "accept") return;
    const typed = written();
    if (typed) { tick(row, "relabel", typed); mark(); }
  };
  $("relabel").returnValue = "";
  $("relabel").showModal();
  $("labels").select();
}

function written() {  // the class names in the box; null where one is unknown
  const text = $("labels").value.trim();
  if (NAMES.includes(text)) return [text];
  const typed = text.split(",").map((name) => name.trim()).filter(Boolean);
  const good = typed.length && typed.every((name) => NAMES.includes(name)) && (FACTS.several || kind === "missing" || typed.length === 1);
  return good ? typed : null;
}

// ---------------------------------------------------------------------------- pairs and heat map

function panels() {
  const wanted = KINDS.indexOf(kind), pairs = new Map(), of = new Map();
  for (const row of all) {
    if (row[0] !== wanted) continue;
    for (const given of row[2]) for (const suggested of row[3]) {
      if (given === suggested) continue;
      const name = `${given},${suggested}`;
      pairs.set(name, (pairs.get(name) || 0) + 1);
      for (const label of [given, suggested]) of.set(label, (of.get(label) || 0) + 1);
    }
  }
  const sorted = [...pairs].sort((a, b) => b[1] - a[1]);
  $("panels").hidden = !sorted.length;
  $("pairs").replaceChildren(...sorted.slice(0, 200).map(([name, count]) => {
    const [given, suggested] = name.split(",").map(Number), line = make("tr", undefined, { tabIndex: 0 });
    line.append(make("td", NAMES[given]), make("td", "→ " + NAMES[suggested]), make("td", count.toLocaleString()));
    line.onclick = () => pick(given, suggested);
    line.onkeydown = (event) => { if (event.key === "Enter") pick(given, suggested); };
    return line;
  }));
  const classes = [...of].sort((a, b) => b[1] - a[1]).slice(0, MOST_HEAT).map(([label]) => label).sort((a, b) => a - b);
  const together = kind === "missing" ? "Classes that occur together" : "Given (rows) against suggested (columns)";
  $("heat-title").textContent = together + (of.size > MOST_HEAT ? `, the ${MOST_HEAT} most frequent of ${of.size} classes` : "");
  const most = Math.max(...sorted.map(([, count]) => count), 1), head = make("tr"), lines = [];
  head.append(make("th"), ...classes.map((label) => make("th", NAMES[label], { title: NAMES[label] })));
  for (const given of classes) {
    const line = make("tr");
    line.append(make("th", NAMES[given], { title: NAMES[given] }));
    for (const suggested of classes) {
      const count = pairs.get(`${given},${suggested}`) || 0, cell = make("td", count ? String(count) : "");
      if (count) {
        cell.style.background = `rgba(var(--heat), ${(0.12 + 0.38 * Math.sqrt(count / most)).toFixed(2)})`;
        cell.title = `${NAMES[given]} → ${NAMES[suggested]}: ${count}`;
        cell.onclick = () => pick(given, suggested);
      }
      line.append(cell);
    }
    lines.push(line);
  }
  const top = make("thead"), body = make("tbody");
  top.append(head);
  body.append(...lines);
  $("heat").replaceChildren(top, body);
}

function pick(given, suggested) {
  $("given").value = given;
  $("suggested").value = suggested;
  choose();
  $("bar").scrollIntoView({ block: "nearest" });
}

// ---------------------------------------------------------------------------- ticks as CSV

// A cell that begins like a formula gets an apostrophe, which --apply and the import remove.
const cell = (text) => `"${(/^[=+\-@\t\r\n']/.test(text) ? "'" + text : text).replaceAll('"', '""')}"`;

function csv() {
  const known = new Map(all.map((row) => [row.key, row])), lines = [COLUMNS.map(cell).join(",")];
  for (const [name, { verdict, labels }] of ticks) {
    const row = known.get(name);
    if (!row) continue;
    const values = [FACTS.audit, KINDS[row[0]], FACTS.splits[row[7]], row[8], path(row), row[11] || "", JSON.stringify(names(row[2])),
      JSON.stringify(names(row[3])), verdict, JSON.stringify(labels)];
    lines.push(values.map(cell).join(","));
  }
  return lines.join("\r\n") + "\r\n";
}

function save() {
  const link = make("a", undefined, { href: URL.createObjectURL(new Blob([csv()], { type: "text/csv" })), download: "ticks.csv" });
  document.body.append(link);
  link.click();
  link.remove();
}

function table(text) {  // the cells of a CSV file
  const found = [[]];
  let value = "", quoted = false;
  for (let i = 0; i < text.length; i++) {
    const c = text[i];
    if (quoted) {
      if (c !== '"') value += c; else if (text[i + 1] === '"') { value += c; i++; } else quoted = false;
    } else if (c === '"') quoted = true;
    else if (c === "," || c === "\n") { found.at(-1).push(value.replace(/^'/, "")); value = ""; if (c === "\n") found.push([]); }
    else if (c !== "\r") value += c;
  }
  if (value || found.at(-1).length) found.at(-1).push(value.replace(/^'/, ""));
  return found.filter((line) => line.length > 1);
}

function load(text) {
  const [head, ...lines] = table(text.replace(/^\ufeff/, "")), known = new Set(all.map((row) => row.key));
  if (!head || COLUMNS.some((name) => !head.includes(name))) return say("this file is no ticks.csv of an audit");
  let count = 0;
  for (const line of lines) {
    const value = Object.fromEntries(head.map((name, i) => [name, line[i]]));
    try {
      const name = [value.kind, value.split, value.id, JSON.parse(value.suggested).join("\u0001"), value.other].join("\u0002");
      if (!known.has(name) || !(value.verdict in VERDICTS)) continue;
      ticks.set(name, { verdict: value.verdict, labels: JSON.parse(value.labels).filter((label) => NAMES.includes(label)) });
      count++;
    } catch (error) { continue; }  // a line that was edited by hand
  }
  remember();
  choose(false);
  say(`${count.toLocaleString()} of ${lines.length.toLocaleString()} ticks were read`);
}

// ---------------------------------------------------------------------------- the beginning

function options(id, entries) { $(id).replaceChildren(...entries.map(([value, text]) => make("option", text, { value }))); }

function tabs() {
  $("tabs").replaceChildren(...KINDS.map((name) => {
    const title = { wrong: "Wrong labels", missing: "More classes", duplicate: "Duplicates", outlier: "Outliers" }[name];
    const button = make("button", `${title} ${FACTS.counts[name].toLocaleString()}`, { type: "button", role: "tab" });
    button.dataset.kind = name;
    button.setAttribute("aria-selected", String(name === kind));
    button.onclick = () => { kind = name; tabs(); panels(); choose(); };
    return button;
  }));
  const [here, listed] = [FACTS.shown[kind], FACTS.counts[kind]];
  const cut = here < listed ? `This page has the first ${here.toLocaleString()} of ${listed.toLocaleString()}. audit.csv has all.` : "";
  $("about").textContent = [ABOUT[kind], FACTS.about[kind], cut].filter(Boolean).join(" ");
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("relabel").open) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const row = shown[at], mine = getComputedStyle($("grid")).gridTemplateColumns.split(" ").length;
  const move = (steps) => { at = Math.min(Math.max(at + steps, 0), Math.max(shown.length - 1, 0)); const wanted = Math.floor(at / PAGE);
    if (wanted !== page) { page = wanted; draw(); } else mark();
    const now = $("grid").children[at - page * PAGE];
    if (now) now.scrollIntoView({ block: "nearest" }); };
  const ticked = (verdict) => { if (row) { tick(row, verdict); move(1); } };
  const actions = {
    ArrowRight: () => move(1), ArrowLeft: () => move(-1), ArrowDown: () => move(mine), ArrowUp: () => move(-mine),
    r: () => ticked("right"), w: () => ticked("wrong"), u: () => ticked("unsure"), s: () => { if (row && suggestion(row).length) { take(row); move(1); } },
    l: () => { if (row) relabel(row); }, x: () => { if (row) { tick(row, null); mark(); } },
    n: () => { page++; draw(); }, p: () => { page--; draw(); }, "/": () => $("search").focus(),
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function start() {
  try { for (const [name, value] of JSON.parse(localStorage.getItem(FACTS.store) || "[]")) ticks.set(name, value); }
  catch (error) { kept = false; }
  kind = KINDS.find((name) => FACTS.counts[name]) || KINDS[0];
  const classes = NAMES.map((name, i) => [i, name]);
  options("given", [["", "given: all"], ...classes]);
  options("suggested", [["", "suggested: all"], ...classes]);
  options("split", [["", "train and val"], ...FACTS.splits.map((name, i) => [i, { train: "training", val: "validation" }[name] || name])]);
  options("verdict", [["", "ticked or not"], ["open", "not ticked"], ["ticked", "ticked"], ...Object.keys(VERDICTS).map((name) => [name, name])]);
  options("order", [["likely", "most likely first"], ["unlikely", "least likely first"], ["given", "by given class"], ["suggested", "by suggestion"], ["name", "by file name"]]);
  $("names").replaceChildren(...NAMES.map((name) => make("option", undefined, { value: name })));
  for (const id of ["given", "suggested", "split", "verdict", "order"]) $(id).onchange = () => choose();
  $("search").oninput = () => choose();
  $("previous").onclick = () => { page--; draw(); };
  $("next").onclick = () => { page++; draw(); };
  $("export").onclick = save;
  $("import").onclick = () => $("file").click();
  $("file").onchange = async () => { const file = $("file").files[0]; if (file) load(await file.text()); $("file").value = ""; };
  $("labels").oninput = () => $("labels").setCustomValidity("");
  $("relabel").querySelector("form").onsubmit = (event) => {
    if (event.submitter && event.submitter.value === "accept" && !written()) {
      event.preventDefault();
      $("labels").setCustomValidity("no such class");
      $("labels").reportValidity();
    }
  };
  document.onkeydown = press;
  tabs();
  panels();
  choose();
  say();
  addEventListener("load", () => setTimeout(more, 50));
}

if (!FACTS.first) start();
