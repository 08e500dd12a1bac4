// The ladder: bars of what each row needs of the GPU, and a table of what its fixes cost.
const RUNGS = [["fixes", "fixes"], ["needs", "needs", true], ["saved", "saved", true], ["fits", "fits"], ["cost", "cost"]];
function drawLadder() {
  $("ladder-section").hidden = !data.ladder.length;
  if (!Plotly || !data.ladder.length) return;
  const names = data.ladder.map((rung, place) => `${place}. ${rung.added ? `+ ${rung.added}` : "baseline"}`);
  const shapes = capacity.total ? [{
    type: "line", xref: "x", yref: "paper", x0: capacity.total / 2 ** 30, x1: capacity.total / 2 ** 30, y0: 0, y1: 1,
    line: {color: style("--bad"), width: 1.5, dash: "dash"},
  }] : [];
  Plotly.react("ladder", [{
    type: "bar", orientation: "h", y: names.map(plain), x: data.ladder.map(rung => rung.device_used_bytes / 2 ** 30),
    text: data.ladder.map(rung => size(rung.device_used_bytes)), textposition: "auto", hoverinfo: "none",
    marker: {color: data.ladder.map(rung => rung.fits ? "#59a14f" : "#e15759")},
  }], layout({
    shapes, height: 90 + 34 * names.length, margin: {l: 8, r: 8, t: 8, b: 40},
    yaxis: {autorange: "reversed", automargin: true, fixedrange: true},
    xaxis: {title: {text: "GiB of the GPU"}, gridcolor: style("--line"), fixedrange: true, zeroline: false},
  }), CONFIG);
}

function ladderTable() {
  $("rungs").tHead.replaceChildren(element("tr"));
  $("rungs").tHead.rows[0].append(...RUNGS.map(([, label, isNumber]) => element("th", label, {className: isNumber ? "number" : ""})));
  fill($("rungs"), RUNGS, data.ladder.map(rung => {
    const seconds = rung.cost.extra_seconds ?? 0, amount = number(Math.abs(seconds), 3);
    const slower = Number(amount) ? `a step takes ${amount} s ${seconds > 0 ? "more" : "less"}; ` : "";
    const barely = rung.fits && capacity.total && rung.device_used_bytes > capacity.total ? "with retries" : "yes";
    return [
      rung.fixes.join(", ") || "none", {text: size(rung.device_used_bytes), value: rung.device_used_bytes},
      size(rung.saved_bytes), rung.fits === null ? "not known" : rung.fits ? barely : "no", slower + rung.cost.note,
    ];
  }));
}
