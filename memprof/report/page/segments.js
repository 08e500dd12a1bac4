// The segment map: what is reserved at the peak as lines of equal length, one block after another.
const LINES = 24;
const LEAST = 1 / 1500;  // of a line: shorter pieces are drawn together, in the colour of the longest
let pieces = [];

function layPieces({size: sizes, pool, stream, blocks}) {
  const whole = sizes.reduce((sum, bytes) => sum + bytes, 0), line = Math.max(whole / LINES, 1), laid = [];
  let at = 0;
  const lay = (bytes, kind, segment, end) => {
    const last = laid.at(-1);
    if (last && last.segment === segment && last.bytes < line * LEAST && Math.floor(last.at / line) === Math.floor(at / line)) {
      if (bytes > last.longest) Object.assign(last, {kind, longest: bytes});
      Object.assign(last, {bytes: last.bytes + bytes, several: true, end});
    } else laid.push({at, bytes, kind, segment, longest: bytes, block: bytes, end});
    at += bytes;
  };
  sizes.forEach((_, segment) => {
    const list = blocks[segment];
    for (let place = 0; place < list.length; place += 2) lay(list[place], list[place + 1], segment, place + 2 === list.length);
  });
  const rows = [];
  for (const piece of laid) {
    for (let from = piece.at; from < piece.at + piece.bytes;) {
      const row = Math.min(Math.floor(from / line + 1e-9), LINES - 1);
      const to = row === LINES - 1 ? piece.at + piece.bytes : Math.min((row + 1) * line, piece.at + piece.bytes);
      rows.push({...piece, row, from: from - row * line, part: to - from, pool: pool[piece.segment], stream: stream[piece.segment]});
      from = to;
    }
  }
  return {rows, line, whole};
}

function drawSegments() {
  const segments = data.segments;
  $("segments-section").hidden = !segments || !segments.size.length;
  if (!Plotly || $("segments-section").hidden) return;
  const {rows, line, whole} = layPieces(segments);
  pieces = rows;
  const [unitName, unit] = UNITS.find(([, one]) => line >= one);
  const free = segments.blocks.flat().reduce((sum, value, place, all) =>
    sum + (place % 2 === 0 && all[place + 1] === -1 ? value : 0), 0);
  const count = segments.size.length;
  $("segments-said").textContent = `${exact(whole)} reserved in ${number(count, 0)} segment${count === 1 ? "" : "s"}, `
    + `${exact(free)} of them free.`;
  Object.assign($("segments-said").dataset, {reserved: whole, free});
  // A thin gap ends a segment.
  const gap = piece => piece.end && piece.from + piece.part < line ? Math.min(piece.part * .3, line * .0015) : 0;
  const colour = kind => kind === -1 ? style("--hole") : kind === -2 ? "#8a939c" : COLOURS[word(kinds.category[kind])];
  Plotly.react("segments", [{
    type: "bar", orientation: "h", y: rows.map(piece => piece.row), base: rows.map(piece => piece.from / unit),
    x: rows.map(piece => (piece.part - gap(piece)) / unit), hoverinfo: "none",
    marker: {color: rows.map(piece => colour(piece.kind)), line: {width: 0}}, width: .86,
  }], layout({
    height: 60 + 17 * LINES, margin: {l: 8, r: 8, t: 4, b: 36}, bargap: 0, hovermode: "closest", dragmode: false,
    yaxis: {autorange: "reversed", visible: false, fixedrange: true},
    xaxis: {range: [0, line / unit], fixedrange: true, zeroline: false, showgrid: false, color: style("--soft"),
      title: {text: `${unitName} of a line, ${LINES} lines in all`, standoff: 4}},
  }), CONFIG);
}

function tellPiece(piece, pointer) {
  const isTensor = piece.kind >= 0, what = isTensor
    ? `${tensorOf(piece.kind)}, ${word(kinds.category[piece.kind])}; ${moduleOf(piece.kind)}`
    : piece.kind === -1 ? "free" : "waits for another stream";
  const blocks = piece.several ? `blocks of ${size(piece.bytes)}, the largest: ` : `block of ${size(piece.block)}: `;
  const pool = `${piece.pool} pool${piece.stream ? `, stream ${piece.stream}` : ""}`;
  showTip([`segment of ${size(data.segments.size[piece.segment])}, ${pool}`, blocks + what,
    isTensor && kinds.source[piece.kind] >= 0 ? shortSource(word(kinds.source[piece.kind])) : ""], pointer);
}

// -- GPUs and ranks -----------------------------------------------------------------------------------------------------

const OF_GPU = [
  ["which", "which"], ["allocated", "allocated", true], ["reserved", "reserved", true], ["used", "device used", true],
  ["share", ""], ["fits", "fits"], ["stage", "most allocated in"], ["note", ""],
];

function severalTable() {
  const rows = data.ranks.length ? data.ranks : data.gpus;
  $("several-section").hidden = rows.length < 2;
  if (rows.length < 2) return;
  const isRanks = rows === data.ranks;
  $("of-several").textContent = isRanks ? "Ranks" : "GPUs";
  $("several").tHead.replaceChildren(element("tr"));
  $("several").tHead.rows[0].append(
    ...OF_GPU.map(([, label, isNumber]) => element("th", label, {className: isNumber ? "number" : ""})));
  const most = Math.max(capacity.total ?? 0, ...rows.map(row => row.device_used_bytes), 1);
  const cell = bytes => ({text: size(bytes), value: bytes, title: `${number(bytes, 0)} bytes`});
  fill($("several"), OF_GPU, rows.map(row => [
    isRanks ? `rank ${row.rank}${row.like === null ? "" : ` (like rank ${row.like})`}` : row.device,
    cell(row.peak_allocated_bytes), cell(row.peak_reserved_bytes), cell(row.device_used_bytes), "",
    row.fits === null ? "not known" : row.fits ? "yes" : "no", row.peak_stage,
    [row.decides && "decides the verdict", row.shown && "shown here"].filter(Boolean).join(", "),
  ]));
  [...$("several").tBodies[0].rows].forEach((made, place) => {
    const bar = element("div", "", {className: `bar ${rows[place].fits === false ? "bad" : ""}`});
    bar.style.width = `${100 * rows[place].device_used_bytes / most}%`;
    made.cells[4].className = "bars";
    made.cells[4].append(bar);
  });
}
