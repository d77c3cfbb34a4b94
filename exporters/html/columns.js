// What the charts are made of: unpacked columns, sums over them, and words. figures.js, this file, chart.js and
// explorer.js become one script (page.py), so what one declares the next can use. No name from a trace is ever used as
// markup: text goes in as textContent, or is painted on a canvas as plain text.

const EXACT = 4000; // operations in view up to which each is drawn; more are summed up in columns
const COLUMN_PX = 3;
const LISTED = 100;
const ROW_PX = 34;
const SIDE_PX = 128;
const MIN_SPAN = 20; // ns
const KINDS = [
  // name, colour on light, colour on dark: told apart with any kind of colour vision, and named on every click
  ['kernel', '#0072B2', '#56B4E9'],
  ['copy host to device', '#E69F00', '#E69F00'],
  ['copy device to host', '#009E73', '#2BC79A'],
  ['copy on the device', '#CC79A7', '#DD93BA'],
  ['graph replay', '#332288', '#B5A5FF'],
  ['storage or network', '#8C6D00', '#F0E442'],
  ['host access', '#555555', '#BBBBBB'],
  ['memset', '#88CCEE', '#88CCEE'],
  ['other', '#999999', '#888888'],
];
const ROUNDS = new Set([0, 4]);
const dark = matchMedia('(prefers-color-scheme: dark)');
const shade = (light, night) => (dark.matches ? night : light);

// -- data ---------------------------------------------------------------------------------------------------

async function unpack({ columns, data }) {
  const text = atob(data);
  const squeezed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) squeezed[i] = text.charCodeAt(i);
  const stream = new Blob([squeezed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const found = {};
  let begin = 0;
  for (const [name, count, width, how] of columns) {
    const values = new Float64Array(count);
    for (let plane = 0, unit = 1; plane < width; plane++, unit *= 256, begin += count)
      for (let i = 0; i < count; i++) values[i] += bytes[begin + i] * unit;
    if (how === 'delta')
      for (let i = 0, sum = 0; i < count; i++) {
        const folded = values[i];
        values[i] = sum += folded % 2 ? -(folded + 1) / 2 : folded / 2;
      }
    found[name] = values;
  }
  return found;
}

// Stretches of one lane and kind. `busy[i]`: time covered by the stretch's first i operations; `reach`: latest end so far.
function stretches(columns, part) {
  const [lane, kind, start, length] = ['lane', 'kind', 'start', 'length'].map((name) => columns[`${part}.${name}`]);
  const count = lane.length;
  const end = new Float64Array(count), reach = new Float64Array(count), busy = new Float64Array(count + 1);
  const found = [];
  let current = null;
  for (let i = 0, latest = 0; i < count; i++) {
    const of = kind ? kind[i] : 0;
    if (!current || current.lane !== lane[i] || current.kind !== of) {
      current = { lane: lane[i], kind: of, begin: i, end: i };
      found.push(current);
      latest = -Infinity;
    }
    end[i] = start[i] + length[i];
    busy[i + 1] = busy[i] + Math.max(0, end[i] - Math.max(start[i], latest));
    reach[i] = latest = Math.max(latest, end[i]);
    current.end = i + 1;
  }
  return { start, end, reach, busy, stretches: found };
}

// First index in [low, high) whose value is not below `limit` (above it, if `above`).
function bound(values, low, high, limit, above) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] < limit || (above && values[middle] === limit)) low = middle + 1;
    else high = middle;
  }
  return low;
}

const range = (of, stretch, from, to) => [
  bound(of.reach, stretch.begin, stretch.end, from, false),
  bound(of.start, stretch.begin, stretch.end, to, true),
];

function covered(of, stretch, time, index) {
  if (index === stretch.begin) return 0;
  return of.busy[index] - of.busy[stretch.begin] - Math.max(0, of.reach[index - 1] - time);
}

// -- words --------------------------------------------------------------------------------------------------

function duration(ns) {
  for (const [unit, name] of [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs']])
    if (Math.abs(ns) >= unit) return `${(ns / unit).toLocaleString('en', { maximumFractionDigits: 3 })} ${name}`;
  return `${ns} ns`;
}

const whole = (number) => number.toLocaleString('en');
// The ends of a name tell more than its middle: device and stream.
const cut = (text, most) => {
  const letters = [...text];
  const half = Math.floor((most - 1) / 2);
  return letters.length > most ? [...letters.slice(0, half), '…', ...letters.slice(half + 1 - most)].join('') : text;
};
