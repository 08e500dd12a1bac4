// What is known of every moment. The data are lives of storages, and the kinds that they are of (see moments.py); whatever
// is shown of a moment or a stretch is summed up from them here, in whole bytes (a double holds them up to 8 PiB).
const {moments, capacity, context} = data;
const {kinds, words, begin, end, kind: kindOf, extra, stages} = moments;
const N = moments.events;

// -- words ------------------------------------------------------------------------------------------------------------

const word = place => place < 0 ? "" : words[place];
const shortSource = source => {
  const [path, line] = source.replace(/ [^ ]*$/, "").replaceAll("\\", "/").split(/:(?=\d+$)/);
  return path.split("/").slice(-2).join("/") + (line ? `:${line}` : "");
};
const anyLayer = path => path.replace(/(?<=\.|^)\d+(?=\.|$)/g, "*");
const tensorOf = kind => `${word(kinds.shape[kind])} ${word(kinds.dtype[kind])}`.trim() || "storage";
const moduleOf = kind => kinds.module[kind] < 0 ? "outside modules" : word(kinds.module[kind]) || "the model's own code";
function stageAt(event) {
  const found = stages.find(([, first, last]) => first <= event && event < last);
  return found ? word(found[0]) : "";
}

// -- curves -----------------------------------------------------------------------------------------------------------

const COLOURS = data.colours;
const MOST_BINS = 1200;
const categoryPlaces = Object.keys(COLOURS).map(name => words.indexOf(name)).filter(place => place >= 0);
const columnOf = new Map(categoryPlaces.map((place, column) => [place, column]));
const fragmentation = columnOf.get(moments.fragmentation);
const lifeAt = new Int32Array(N).fill(-1), isBirth = new Uint8Array(N);
const allocated = new Float64Array(N), reserved = new Float64Array(N);
{
  const change = new Float64Array(N + 1);
  for (let life = 0; life < begin.length; life++) {
    const block = kinds.rounded[kindOf[life]] + extra[life];
    change[begin[life]] += block;
    change[end[life]] -= block;
    lifeAt[begin[life]] = life;
    isBirth[begin[life]] = 1;
    if (end[life] < N) lifeAt[end[life]] = life;
  }
  let now = 0, held = 0, next = 0;
  for (let event = 0; event < N; event++) {
    allocated[event] = now += change[event];
    if (next < moments.reserved_at.length && moments.reserved_at[next] === event) held = moments.reserved[next++];
    reserved[event] = held;
  }
}

// Events of [first, last) to draw: all, or of each bin those with the most and the least, so that no peak is lost.
function drawn(first, last, curves) {
  if (last - first <= 3 * MOST_BINS) return Array.from({length: last - first}, (_, place) => first + place);
  const chosen = new Set([first, last - 1]);
  for (let bin = 0; bin < MOST_BINS; bin++) {
    const from = first + Math.floor((last - first) * bin / MOST_BINS);
    const to = first + Math.floor((last - first) * (bin + 1) / MOST_BINS);
    for (const curve of curves) {
      let most = from;
      for (let event = from + 1; event < to; event++) if (curve[event] > curve[most]) most = event;
      chosen.add(most);
    }
    let least = from;
    for (let event = from + 1; event < to; event++) if (allocated[event] < allocated[least]) least = event;
    chosen.add(least);
  }
  return [...chosen].sort((one, other) => one - other);
}

// Bytes by category after each of these rising events.
function stacked(events) {
  const sums = new Float64Array(categoryPlaces.length), columns = categoryPlaces.map(() => new Array(events.length));
  let event = 0;
  events.forEach((until, place) => {
    for (; event <= until; event++) {
      const life = lifeAt[event];
      if (life < 0) continue;
      const kind = kindOf[life], sign = isBirth[event] ? 1 : -1;
      sums[columnOf.get(kinds.category[kind])] += sign * kinds.rounded[kind];
      if (extra[life]) sums[fragmentation] += sign * extra[life];
    }
    for (let column = 0; column < sums.length; column++) columns[column][place] = sums[column];
  });
  return columns;
}
