// The figures that plotly draws: memory over the run, and who holds a moment.
// -- what is looked at ------------------------------------------------------------------------------------------------

const MODES = data.on_cpu
  ? {allocated: "allocated"} : {allocated: "allocated", reserved: "reserved", used: "device used"};
const VIEWS = {module: "by module", category: "by category", source: "by source line"};
const ROWS = 200;
const state = {
  mode: "allocated", range: [0, N], event: moments.peak, view: "module", chosen: null, text: "", sort: "total",
  falling: true, rows: ROWS,
};

// Bytes by kind, how many of it live after the event, and what their blocks have beyond that.
function aliveAt(event) {
  const counts = new Map();
  let beyond = 0;
  for (let life = 0; life < begin.length && begin[life] <= event; life++) {
    if (end[life] <= event) continue;
    counts.set(kindOf[life], (counts.get(kindOf[life]) ?? 0) + 1);
    beyond += extra[life];
  }
  return {counts, beyond};
}

// -- figures ----------------------------------------------------------------------------------------------------------

// Stages within the range, one after another; many layers of one stack, or many steps, become one band.
function bands([from, to]) {
  let seen = stages.filter(([, first, last]) => first < to && last > from)
    .map(([name, first, last, stack, index]) => ({name: word(name), first, last, stack, index}));
  const join = (same, named) => {
    const joined = [];
    for (const one of seen) {
      const before = joined.at(-1);
      if (before && same(before, one)) Object.assign(before, {last: one.last, name: named(before, one), until: one.index});
      else joined.push({...one});
    }
    seen = joined;
  };
  const stepOf = name => / of step \d+$/.exec(name)?.[0] ?? "";
  if (seen.length > 24) join(
    (one, other) => one.stack >= 0 && one.stack === other.stack && stepOf(one.name) === stepOf(other.name),
    (one, other) => `layers ${one.index}-${other.index}${stepOf(one.name)}`,
  );
  if (seen.length > 60) join(
    (one, other) => stepOf(one.name) === stepOf(other.name),
    one => stepOf(one.name).slice(4) || "outside steps",
  );
  return seen;
}

function shapesAndWords(unit) {
  const [from, to] = state.range, shapes = [], annotations = [];
  const pixels = $("timeline").clientWidth - 70;
  bands(state.range).forEach((band, place) => {
    if (place % 2 === 0) shapes.push({
      type: "rect", xref: "x", yref: "paper", x0: band.first, x1: band.last, y0: 0, y1: 1, layer: "below",
      fillcolor: style("--band"), line: {width: 0},
    });
    const left = Math.max(band.first, from), right = Math.min(band.last, to);
    const room = (right - left) / (to - from) * pixels, name = band.name.replace(/ of step (\d+)$/, ", step $1");
    if (room > 6.6 * name.length) annotations.push({
      x: (left + right) / 2, xref: "x", y: 1, yref: "paper", yanchor: "bottom", text: plain(name), showarrow: false,
      font: {size: 11, color: style("--soft")},
    });
  });
  const line = (x, colour, dash) => shapes.push({
    type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: {color: colour, width: 1.5, dash},
  });
  const flag = (x, text, colour, y) => {
    if (x < from || x >= to) return;
    const share = (x - from) / (to - from);
    annotations.push({
      x, xref: "x", y, yref: "paper", text, showarrow: false, bgcolor: style("--paper"), bordercolor: colour,
      borderpad: 2, xanchor: share > .5 ? "right" : "left", xshift: share > .5 ? -4 : 4, font: {size: 11, color: colour},
    });
  };
  const isUsed = state.mode === "used", limit = isUsed ? capacity.total : capacity.usable;
  if (limit) {
    shapes.push({
      type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: limit / unit, y1: limit / unit,
      line: {color: style("--bad"), width: 1.5, dash: "dash"},
    });
    annotations.push({
      x: 0, xref: "paper", xanchor: "left", y: limit / unit, yref: "y", yanchor: "bottom", showarrow: false,
      text: `${isUsed ? "the GPU has" : "usable"} ${size(limit)}`, bgcolor: style("--paper"), borderpad: 1, font: {size: 11, color: style("--bad")},
    });
  }
  if (moments.refused >= 0) {
    line(moments.refused, style("--bad"), "solid");
    flag(moments.refused, `failed: ${size(moments.tried_bytes)}`, style("--bad"), .8);
  }
  line(moments.peak, style("--ink"), "dot");
  flag(moments.peak, `peak ${size(allocated[moments.peak])}`, style("--ink"), .96);
  if (state.event !== moments.peak) line(state.event, style("--mark"), "solid");
  if (state.event !== moments.peak) flag(state.event, "chosen", style("--mark"), .88);
  return {shapes, annotations};
}

function drawTimeline() {
  if (!Plotly) return;
  const [from, to] = state.range, curves = state.mode === "allocated" ? [allocated] : [reserved, allocated];
  const events = drawn(from, to, curves), columns = stacked(events);
  const beyond = state.mode === "used" ? context : 0, top = state.mode === "allocated" ? allocated : reserved;
  let highest = 1;
  for (const event of events) highest = Math.max(highest, top[event] + beyond);
  const limit = (state.mode === "used" ? capacity.total : capacity.usable) ?? 0;
  if (limit && limit < 3 * highest) highest = Math.max(highest, limit);
  const [unitName, unit] = UNITS.find(([, one]) => highest >= one);
  const area = (name, bytes) => ({
    type: "scatter", mode: "lines", name, x: events, y: bytes.map(value => value / unit), stackgroup: "all",
    line: {shape: "hv", width: 0}, fillcolor: COLOURS[name], hoverinfo: "none", legendgroup: name,
  });
  const traces = [];
  columns.forEach((bytes, column) => {
    if (bytes.some(value => value > 0)) traces.push(area(word(categoryPlaces[column]), bytes));
  });
  if (state.mode !== "allocated") {
    traces.push(area("free in segments", events.map(event => reserved[event] - allocated[event])));
  }
  if (beyond) traces.unshift(area("CUDA context", events.map(() => beyond)));
  // A peak of a few events is narrower than a pixel: this line is not.
  traces.push({
    type: "scatter", mode: "lines", x: events, y: events.map(event => (top[event] + beyond) / unit), hoverinfo: "none",
    line: {shape: "hv", width: 1, color: style("--ink")}, showlegend: false,
  });
  const narrow = $("timeline").clientWidth < 560;
  Plotly.react("timeline", traces, layout({
    ...shapesAndWords(unit), hovermode: "x", dragmode: "zoom", showlegend: !narrow, hoverdistance: -1,
    margin: {l: 62, r: 8, t: 22, b: narrow ? 40 : 20},
    legend: {orientation: "h", y: -.1, x: 0, font: {size: 11}, itemclick: false, itemdoubleclick: false},
    xaxis: {
      range: [from, Math.max(to - 1, from + 1)], showgrid: false, zeroline: false, tickformat: ",d", nticks: narrow ? 4 : 9,
      color: style("--soft"), title: {text: "event", standoff: 4},
    },
    yaxis: {
      range: [0, highest * 1.06 / unit], fixedrange: true, gridcolor: style("--line"), zeroline: false,
      color: style("--soft"), title: {text: unitName},
    },
  }), CONFIG);
  state.drawn = events.length;
}

function zoom(from, to) {
  const first = Math.max(0, Math.floor(Math.min(from, to))), last = Math.min(N, Math.ceil(Math.max(from, to)) + 1);
  if (last - first >= 2) state.range = [first, last];
  drawTimeline();
}

// A tree of bytes for a treemap: each node's bytes are those of all that is below it.
function treeOf(alive) {
  const nodes = new Map();
  const add = (path, kind, bytes) => {
    let id = "";
    path.forEach((label, depth) => {
      const parent = id;
      id = `${id}\u0000${label}`;
      if (!nodes.has(id)) nodes.set(id, {label, parent, bytes: 0, kinds: new Set(), byCategory: new Map(), depth});
      const node = nodes.get(id), category = kind === null ? moments.fragmentation : kinds.category[kind];
      node.bytes += bytes;
      node.byCategory.set(category, (node.byCategory.get(category) ?? 0) + bytes);
      if (kind !== null) node.kinds.add(kind);
    });
  };
  for (const [kind, count] of alive.counts) {
    const bytes = count * kinds.rounded[kind], category = word(kinds.category[kind]);
    const module = moduleOf(kind), source = kinds.source[kind] < 0 ? "no line known" : shortSource(word(kinds.source[kind]));
    if (state.view === "module") {
      const path = kinds.module[kind] < 0 || !word(kinds.module[kind]) ? [module] : module.split(".");
      add([...path, category, tensorOf(kind)], kind, bytes);
    } else if (state.view === "category") add([category, anyLayer(module), tensorOf(kind)], kind, bytes);
    else add([source, anyLayer(module), tensorOf(kind)], kind, bytes);
  }
  if (alive.beyond) add(["fragmentation"], null, alive.beyond);
  return nodes;
}

let tree = new Map();
function drawHolders(alive) {
  if (!Plotly) return;
  tree = treeOf(alive);
  const total = allocated[state.event], ids = [], labels = [], parents = [], values = [], colors = [], text = [];
  for (const [id, node] of tree) {
    if (node.bytes < total / 3000) continue;  // smaller than a pixel, and its part of the node above stays
    const [category] = [...node.byCategory].sort((one, other) => other[1] - one[1])[0];
    ids.push(id);
    labels.push(plain(node.label));
    parents.push(node.parent);
    values.push(node.bytes);
    colors.push(COLOURS[word(category)]);
    text.push(`${size(node.bytes)}, ${number(100 * node.bytes / total, 1)}%`);
  }
  Plotly.react("holders", [{
    type: "treemap", ids, labels, parents, values, text, branchvalues: "total", textinfo: "label+text",
    hoverinfo: "label+text", maxdepth: 3, tiling: {pad: 1},
    marker: {colors, line: {color: style("--paper"), width: 1}, pad: {t: 18, l: 2, r: 2, b: 2}},
    textfont: {color: "#101418"}, pathbar: {visible: true, textfont: {color: style("--ink")}},
    root: {color: style("--fill")},
  }], layout({margin: {l: 0, r: 0, t: 4, b: 4}, uniformtext: {minsize: 9, mode: "hide"}}), CONFIG);
}
