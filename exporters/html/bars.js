// What the fences of each node cost, drawn with Bokeh: a bar per node, the avoidable part of it hatched.

const ROW_PX = 30;
const bars = JSON.parse(document.querySelector('.bars-data').textContent);
const place = document.querySelector('.bars');

function milliseconds(ticks) {
  return ticks.map((tick) => `${(tick / 1e6).toLocaleString('en', { maximumFractionDigits: 3 })} ms`);
}

function cut(name, most) { return name.length > most ? `${name.slice(0, most - 1)}…` : name; }

function build() {
  const most = Math.max(...bars.map(([, waited]) => waited), 1);
  const figure = Bokeh.Plotting.figure({
    sizing_mode: 'stretch_width', height: bars.length * ROW_PX + 70, tools: [], toolbar_location: null,
    x_range: new Bokeh.Range1d({ start: 0, end: most * 1.02 }), min_border_right: 12, output_backend: 'canvas',
    y_range: new Bokeh.Range1d({ start: -bars.length + 0.4, end: 0.6 }),
  });
  const narrow = place.clientWidth < NARROW_PX;
  figure.below[0].axis_label = 'time that transfers stood still for their fences';
  figure.below[0].formatter.doFormat = milliseconds;
  figure.below[0].ticker.desired_num_ticks = narrow ? 3 : 7;
  figure.below[0].ticker.num_minor_ticks = 0;
  // PlainText: a name with $$ in it would otherwise be typeset, by a library from the network.
  figure.left[0].ticker = new Bokeh.FixedTicker({ ticks: bars.map((_, row) => -row), minor_ticks: [] });
  figure.left[0].major_label_overrides = new Map(
    bars.map(([name], row) => [-row, new Bokeh.PlainText({ text: cut(name, narrow ? 9 : 20) })]),
  );
  const rows = (left, right) => new Bokeh.ColumnDataSource({ data: {
    left, right, bottom: bars.map((_, row) => -row - 0.35), top: bars.map((_, row) => -row + 0.35),
  } });
  const box = { left: { field: 'left' }, right: { field: 'right' }, bottom: { field: 'bottom' }, top: { field: 'top' } };
  const needed = bars.map(([, waited, avoidable]) => waited - avoidable);
  return {
    figure,
    needed: figure.quad({ ...box, source: rows(bars.map(() => 0), needed) }),
    avoidable: figure.quad({ ...box, source: rows(needed, bars.map(([, waited]) => waited)) }),
  };
}

function paint({ figure, needed, avoidable }) {
  paintFigure(figure);
  needed.glyph.setv({ fill_color: color('link'), fill_alpha: 0.7, line_color: color('link') });
  paintAvoidable(avoidable.glyph);
}

async function start() {
  const chart = build();
  paint(chart);
  await Bokeh.Plotting.show(chart.figure, place);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => paint(chart));
  place.dataset.ready = 'yes';
}

start();
