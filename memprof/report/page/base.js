// What every page has: its data, sizes as words, and how figures of plotly look.
const $ = id => document.getElementById(id);

async function inflated(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function element(tag, text, properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  if (text !== undefined && text !== null) made.textContent = text;
  return made;
}

const data = JSON.parse(await inflated("data"));

const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["bytes", 1]];
const number = (value, digits = 2) =>
  value.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
function size(bytes) {
  const [name, unit] = UNITS.find(([, one]) => Math.abs(bytes) >= one) ?? UNITS[3];
  return unit === 1 ? `${bytes} bytes` : `${number(bytes / unit)} ${name}`;
}
const exact = bytes => Math.abs(bytes) < 1024 ? size(bytes) : `${size(bytes)} (${number(bytes, 0)} bytes)`;
// plotly reads a few tags of HTML in its texts; a name such as <lambda> is none.
const plain = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

let Plotly = null;
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const CONFIG = {displaylogo: false, responsive: true, displayModeBar: false, doubleClick: false};
function layout(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: {color: style("--ink"), family: "system-ui, sans-serif", size: 12}, ...more,
  };
}

