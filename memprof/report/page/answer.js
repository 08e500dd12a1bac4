// An answer in sections, each with a figure, a table that sorts and filters, or a text.
const shownRows = 60;

function tableOf({columns, rows}) {
  const holder = element("div"), controls = element("div", undefined, {className: "controls"}), scroll = element("div", undefined, {className: "scroll"});
  const table = element("table"), head = element("tr"), body = element("tbody"), said = element("p", "", {className: "note"});
  const asked = {text: "", sort: -1, falling: true, rows: shownRows};
  const value = cell => Array.isArray(cell) ? cell[1] : cell;
  const draw = () => {
    const words = asked.text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(row => {
      const all = row.map(cell => Array.isArray(cell) ? cell[0] : cell).join(" ").toLowerCase();
      return words.every(word => all.includes(word));
    });
    if (asked.sort >= 0) {
      const sign = asked.falling ? -1 : 1, missing = asked.falling ? -Infinity : Infinity;
      const key = row => value(row[asked.sort]) ?? missing;
      found.sort((one, other) => {
        const [a, b] = [key(one), key(other)];
        return sign * (typeof a === "number" && typeof b === "number" ? a - b || 0 : String(a).localeCompare(String(b)));
      });
    }
    body.replaceChildren(...found.slice(0, asked.rows).map(cells => {
      const row = element("tr");
      cells.forEach((cell, place) => {
        const [text, bytes] = Array.isArray(cell) ? cell : [cell];
        const width = text.length > 60 ? "long" : text.length > 24 ? "" : "short";
        const made = element("td", text, {className: columns[place].number ? "number" : width});
        if (typeof bytes === "number") Object.assign(made, {title: `${number(bytes, 0)} bytes`}).dataset.value = bytes;
        if (columns[place].code) made.replaceChildren(element("code", text));
        row.append(made);
      });
      return row;
    }));
    said.textContent = found.length > asked.rows ? `${number(found.length - asked.rows, 0)} more rows: filter, or` : "";
    more.hidden = found.length <= asked.rows;
    [...head.children].forEach((header, place) => header.setAttribute(
      "aria-sort", place !== asked.sort ? "none" : asked.falling ? "descending" : "ascending"));
  };
  const more = element("button", "show them", {type: "button"});
  more.onclick = () => { asked.rows *= 4; draw(); };
  columns.forEach(({name, number: isNumber}, place) => {
    const header = element("th", undefined, {className: isNumber ? "number" : ""}), button = element("button", name, {type: "button"});
    button.onclick = () => {
      asked.falling = asked.sort === place ? !asked.falling : Boolean(isNumber);
      asked.sort = place;
      draw();
    };
    header.append(button);
    head.append(header);
  });
  if (rows.length > 3) {
    const filter = element("input", undefined, {type: "search", placeholder: "filter by words"});
    filter.setAttribute("aria-label", "filter by words");
    filter.oninput = () => { asked.text = filter.value; asked.rows = shownRows; draw(); };
    controls.append(filter);
  }
  table.append(element("thead"), body);
  table.tHead.append(head);
  scroll.append(table);
  holder.append(controls, scroll, said, more);
  draw();
  return holder;
}

const drawnFigures = [];
function drawFigures() {
  const axis = {gridcolor: style("--line"), color: style("--soft"), zeroline: false, automargin: true};
  for (const [holder, figure] of drawnFigures) {
    const axes = Object.fromEntries(Object.entries(figure.layout).filter(([name]) => /^[xy]axis/.test(name))
      .map(([name, own]) => [name, {...axis, ...own}]));
    const shapes = (figure.layout.shapes ?? []).map(one => ({...one, line: {color: style("--bad"), ...one.line}}));
    const narrow = holder.clientWidth < 560;
    const annotations = (figure.layout.annotations ?? []).map(one => ({...one, font: {size: 11, color: style("--ink")}}));
    Plotly.react(holder, figure.data, layout({
      margin: {l: 8, r: 8, t: 24, b: 40}, ...figure.layout, ...axes, shapes, annotations, showlegend: figure.layout.showlegend && !narrow,
    }), CONFIG);
  }
}

document.title = $("title").textContent = data.heading[0];
$("heading").append(...data.heading.slice(1).map(line => element("div", line)));
$("verdict").textContent = data.verdict;
if (data.good !== null) $("verdict").className = data.good ? "good" : "bad";
$("text").textContent = data.text;
data.sections.forEach(({title, note, figure, table, text}, place) => {
  const section = element("section"), heading = element("h2", title, {id: `section-${place + 1}`});
  section.setAttribute("aria-labelledby", heading.id);
  section.append(heading);
  if (figure) {
    const holder = element("div", undefined, {className: "figure", id: `figure-${place + 1}`});
    drawnFigures.push([holder, figure]);
    section.append(holder);
  }
  if (note) section.append(element("p", note, {className: "note"}));
  if (table) section.append(tableOf(table));
  if (text) section.append(element("pre", text));
  $("sections").append(section);
});
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = name => { document.documentElement.dataset.theme = name; if (Plotly) drawFigures(); };
theme(dark.matches ? "dark" : "light");
await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
if (drawnFigures.length) {
  document.head.append(element("script", await inflated("library")));
  Plotly = window.Plotly;
  drawFigures();
}
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
addEventListener("beforeprint", () => theme("light"));
addEventListener("afterprint", () => theme(dark.matches ? "dark" : "light"));
document.documentElement.dataset.ready = Math.round(performance.now());
