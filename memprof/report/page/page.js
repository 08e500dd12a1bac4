// What is read, chosen and typed: the moment, the table, the findings.
// -- the table --------------------------------------------------------------------------------------------------------

const COLUMNS = [
  ["total", "total", true], ["count", "x", true], ["each", "each", true], ["tensor", "shape, dtype"],
  ["category", "category"], ["what", "what it is"], ["op", "operator"], ["source", "line"],
];

function rowsOf(alive) {
  const groups = new Map();
  for (const [kind, count] of alive.counts) {
    if (state.chosen && !state.chosen.kinds.has(kind)) continue;
    const group = kinds.group[kind], row = groups.get(group);
    if (row) Object.assign(row, {count: row.count + count, total: row.total + count * kinds.rounded[kind], several: true});
    else groups.set(group, {kind, count, total: count * kinds.rounded[kind], each: kinds.requested[kind]});
  }
  const rows = [...groups.values()];
  for (const row of rows) {
    const {kind, count} = row, name = word(kinds.name[kind]), module = moduleOf(kind);
    const what = name && module !== "outside modules" && !name.startsWith(module) ? `${module} ${name}` : name || module;
    Object.assign(row, {
      tensor: tensorOf(kind), category: word(kinds.category[kind]), what: count > 1 ? anyLayer(what) : what,
      op: word(kinds.op[kind]).replace(/^aten\./, ""), line: word(kinds.source[kind]),
    });
    row.source = row.line ? shortSource(row.line) : "";
  }
  const asked = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = rows.filter(row => {
    const all = [row.tensor, row.category, row.what, row.op, row.line].join(" ").toLowerCase();
    return asked.every(one => all.includes(one));
  });
  const key = state.sort, sign = state.falling ? -1 : 1;
  return found.sort((one, other) =>
    sign * (typeof one[key] === "number" ? one[key] - other[key] : one[key].localeCompare(other[key])) || other.total - one.total);
}

function fill(table, columns, rows) {
  table.tBodies[0].replaceChildren(...rows.map(cells => {
    const row = element("tr");
    cells.forEach((cell, place) => {
      const made = element("td", typeof cell === "object" ? cell.text : cell, {className: columns[place][2] ? "number" : ""});
      if (typeof cell === "object") Object.assign(made, {title: cell.title ?? ""}).dataset.value = cell.value ?? "";
      row.append(made);
    });
    return row;
  }));
}

function drawTable(alive) {
  const rows = rowsOf(alive), shown = rows.slice(0, state.rows);
  const bytes = rows.reduce((sum, row) => sum + row.total, 0), count = rows.reduce((sum, row) => sum + row.count, 0);
  const beyond = alive.beyond ? `, and ${exact(alive.beyond)} that their blocks have beyond that (fragmentation)` : "";
  const of = state.chosen || state.text ? ` of ${size(allocated[state.event])}` : beyond;
  const tensors = `${number(count, 0)} tensor${count === 1 ? "" : "s"} in ${number(rows.length, 0)} row${rows.length === 1 ? "" : "s"}`;
  $("shown").textContent = `${tensors}: ${exact(bytes)}${of}`;
  $("shown").dataset.bytes = bytes;
  fill($("tensors"), COLUMNS, shown.map(row => [
    {text: size(row.total), value: row.total, title: `${number(row.total, 0)} bytes`}, number(row.count, 0),
    {text: size(row.each), value: row.each, title: `${number(row.each, 0)} bytes as asked for`}, row.tensor, row.category,
    row.what, row.op, {text: row.source, value: row.line, title: row.line},
  ]));
  $("more").hidden = rows.length <= shown.length;
  $("more").textContent = `${number(rows.length - shown.length, 0)} more`;
  for (const header of $("tensors").tHead.querySelectorAll("th")) {
    const isSorted = header.dataset.key === state.sort;
    header.setAttribute("aria-sort", isSorted ? (state.falling ? "descending" : "ascending") : "none");
    header.querySelector("span").textContent = isSorted ? (state.falling ? " \u25be" : " \u25b4") : "";
  }
  $("chosen").replaceChildren();
  if (state.chosen) {
    const drop = element("button", `${state.chosen.label}  \u00d7`, {type: "button", title: "show all tensors"});
    drop.onclick = () => choose(null);
    $("chosen").append(drop);
  }
}

// -- a moment ---------------------------------------------------------------------------------------------------------

function happened(event) {
  const life = lifeAt[event];
  if (life < 0) return "";
  const kind = kindOf[life], source = word(kinds.source[kind]);
  const where = [moduleOf(kind), word(kinds.op[kind]), source && shortSource(source)].filter(Boolean).join(", ");
  const verb = isBirth[event] ? "takes" : "frees";
  return `${verb} ${size(kinds.rounded[kind] + extra[life])} of ${tensorOf(kind)} (${word(kinds.category[kind])}; ${where})`;
}

let now = aliveAt(state.event);
function showMoment() {
  const event = state.event, alive = now = aliveAt(event);
  const held = data.on_cpu ? "" : `, ${size(reserved[event])} reserved`;
  const at = stageAt(event), what = happened(event);
  $("moment").textContent =
    `Event ${number(event, 0)}${at && ` in ${at}`}: ${exact(allocated[event])} allocated${held}.${what && ` It ${what}.`}`;
  $("moment").dataset.bytes = allocated[event];
  $("event").value = event;
  const sums = new Map(alive.beyond ? [[moments.fragmentation, alive.beyond]] : []);
  for (const [kind, count] of alive.counts) {
    const category = kinds.category[kind];
    sums.set(category, (sums.get(category) ?? 0) + count * kinds.rounded[kind]);
  }
  $("categories").tBodies[0].replaceChildren(...[...sums].sort((one, other) => other[1] - one[1]).map(([category, bytes]) => {
    const row = element("tr"), name = element("td", word(category));
    const swatch = element("span", "", {className: "swatch"});
    swatch.style.background = COLOURS[word(category)];
    name.prepend(swatch);
    row.append(name, element("td", size(bytes), {className: "number", title: `${number(bytes, 0)} bytes`}),
      element("td", `${number(100 * bytes / allocated[event], 1)}%`, {className: "number"}));
    Object.assign(row.dataset, {category: word(category), bytes});
    return row;
  }));
  for (const button of $("moments").children) button.setAttribute("aria-pressed", Number(button.dataset.event) === event);
  drawHolders(alive);
  drawTable(alive);
}

function select(event) {
  state.event = Math.min(Math.max(Math.round(event) || 0, 0), N - 1);
  state.rows = ROWS;
  if (state.event < state.range[0] || state.event >= state.range[1]) state.range = [0, N];
  showMoment();
  drawTimeline();
}

// Show these kinds alone (null: all). Where none lives now, the moment at which most of them do.
function choose(chosen) {
  state.chosen = chosen;
  state.rows = ROWS;
  if (chosen && ![...now.counts.keys()].some(kind => chosen.kinds.has(kind))) {
    let sum = 0, most = 0, at = -1;
    for (let event = 0; event < N; event++) {
      const life = lifeAt[event];
      if (life < 0 || !chosen.kinds.has(kindOf[life])) continue;
      sum += (isBirth[event] ? 1 : -1) * kinds.rounded[kindOf[life]];
      if (sum > most) [most, at] = [sum, event];
    }
    if (at >= 0) return select(at);
  }
  drawTable(now);
}

// -- controls ---------------------------------------------------------------------------------------------------------

function radio(holder, names, key, changed) {
  const mark = () => [...holder.children].forEach(one => one.setAttribute("aria-checked", one.dataset.name === state[key]));
  for (const [name, label] of Object.entries(names)) {
    const button = element("button", label, {type: "button"});
    button.setAttribute("role", "radio");
    button.dataset.name = name;
    button.onclick = () => { state[key] = name; mark(); changed(); };
    holder.append(button);
  }
  mark();
}

function tell(event, pointer) {
  showTip([
    `Event ${number(event, 0)}${stageAt(event) && `, ${stageAt(event)}`}`,
    `${size(allocated[event])} allocated${data.on_cpu ? "" : `, ${size(reserved[event])} reserved`}`, happened(event),
  ], pointer);
}

function showTip(lines, pointer) {
  const tip = $("tip");
  tip.replaceChildren(...lines.filter(Boolean).map(line => element("div", line)));
  tip.hidden = false;
  const right = pointer.clientX + 14, below = pointer.clientY + 14;
  tip.style.left = `${Math.max(4, Math.min(right, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? pointer.clientY - tip.offsetHeight - 10 : below}px`;
}

function findings() {
  $("wrong").hidden = !data.findings.length;
  for (const finding of data.findings) {
    const item = element("li"), title = element("div"), list = element("ul"), line = element("li");
    item.id = `finding-${$("findings").children.length + 1}`;
    line.append(element("a", finding.title, {href: `#${item.id}`}));
    if (finding.fixes.length) {
      line.append(element("span", ` Suggested fixes: ${finding.fixes.map(one => one.name).join(", ")}.`, {className: "soft"}));
    }
    $("found").append(line);
    title.append(element("span", finding.severity, {className: `severity ${finding.severity}`}), `: ${finding.title}`);
    for (const evidence of finding.evidence) {
      const one = element("li");
      if (evidence.kinds.length) {
        const link = element("a", evidence.text, {href: "#all-tensors", title: "show these tensors"});
        link.onclick = () => choose({label: `finding: ${evidence.text.slice(0, 60)}`, kinds: new Set(evidence.kinds)});
        one.append(link);
      } else one.textContent = evidence.text;
      list.append(one);
    }
    item.append(title, list);
    if (finding.fixes.length) {
      const helps = element("div", "suggested fixes:", {className: "soft"}), names = element("ul");
      names.append(...finding.fixes.map(one => element("li", one.name + (one.changes && `: ${one.changes}`))));
      item.append(helps, names);
    }
    $("findings").append(item);
  }
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  drawTimeline();
  drawHolders(now);
  drawSegments();
  drawLadder();
}

function build() {
  document.title = $("title").textContent = data.heading[0];
  $("heading").append(...data.heading.slice(1).map(line => element("div", line)));
  $("verdict").textContent = data.verdict;
  if (data.fits !== null) $("verdict").className = data.fits ? "good" : "bad";
  $("text").textContent = data.text;
  $("next").hidden = !data.next;
  if (data.next) $("next").append(`Next, ${data.next[0]}: `, element("code", data.next[1]));
  radio($("modes"), MODES, "mode", drawTimeline);
  radio($("views"), VIEWS, "view", () => drawHolders(now));
  const places = {"the peak": moments.peak};
  if (!data.on_cpu) places["most reserved"] = moments.peak_reserved;
  if (moments.refused >= 0) places["the failed allocation"] = moments.refused;
  for (const [label, event] of Object.entries(places)) {
    const button = element("button", label, {type: "button"});
    button.dataset.event = event;
    button.onclick = () => select(event);
    $("moments").append(button);
  }
  $("event").max = N - 1;
  $("event").onchange = () => select(Number($("event").value));
  $("before").onclick = () => select(state.event - 1);
  $("after").onclick = () => select(state.event + 1);
  $("whole").onclick = () => zoom(0, N);
  $("filter").oninput = () => { state.text = $("filter").value; state.rows = ROWS; drawTable(now); };
  $("more").onclick = () => { state.rows *= 4; drawTable(now); };
  $("tensors").tHead.append(element("tr"));
  for (const [key, label, isNumber] of COLUMNS) {
    const header = element("th", undefined, {className: isNumber ? "number" : ""}), button = element("button", label, {type: "button"});
    header.dataset.key = key;
    button.append(element("span"));
    button.onclick = () => {
      state.falling = state.sort === key ? !state.falling : Boolean(isNumber);
      state.sort = key;
      drawTable(now);
    };
    header.append(button);
    $("tensors").tHead.rows[0].append(header);
  }
  $("beyond").hidden = moments.refused < 0;
  findings();
  severalTable();
  ladderTable();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
document.documentElement.dataset.theme = dark.matches ? "dark" : "light";
build();
showMoment();
document.documentElement.dataset.readable = Math.round(performance.now());
await new Promise(done => requestAnimationFrame(() => setTimeout(done)));  // what can be read is painted first

document.head.append(element("script", await inflated("library")));
Plotly = window.Plotly;
drawTimeline();
drawHolders(now);
drawSegments();
drawLadder();
$("timeline").on("plotly_relayout", change => {
  if ("xaxis.range[0]" in change) zoom(change["xaxis.range[0]"], change["xaxis.range[1]"]);
});
$("timeline").on("plotly_doubleclick", () => zoom(0, N));
$("timeline").on("plotly_click", ({points}) => select(points[0].x));
$("timeline").on("plotly_hover", ({points, event}) => tell(points[0].x, event));
$("timeline").on("plotly_unhover", () => { $("tip").hidden = true; });
$("holders").on("plotly_treemapclick", ({points}) => {
  const node = tree.get(points[0].id);
  choose(node && node.kinds.size ? {label: points[0].id.split("\u0000").filter(Boolean).join(" / "), kinds: node.kinds} : null);
});
if (!$("segments-section").hidden) {
  const pieceOf = ({points}) => pieces[points[0].pointNumber];
  $("segments").on("plotly_hover", hovered => tellPiece(pieceOf(hovered), hovered.event));
  $("segments").on("plotly_unhover", () => { $("tip").hidden = true; });
  $("segments").on("plotly_click", clicked => {
    const {kind} = pieceOf(clicked);
    if (kind < 0) return;
    if (state.event !== data.segments.event) select(data.segments.event);
    const alike = kinds.group.flatMap((group, one) => group === kinds.group[kind] ? [one] : []);
    choose({label: `${tensorOf(kind)} ${anyLayer(moduleOf(kind))}`, kinds: new Set(alike)});
    $("all-tensors").scrollIntoView();
  });
}
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
addEventListener("beforeprint", () => theme("light"));
addEventListener("afterprint", () => theme(dark.matches ? "dark" : "light"));
document.documentElement.dataset.ready = Math.round(performance.now());
