// The timeline of one recording and the maps of its pages, drawn with Bokeh.

class Chart {
  constructor(section, data, columns) {
    Object.assign(this, { section, data, columns });
    this.ops = stretches(columns, 'ops');
    this.waits = stretches(columns, 'waits');
    this.saved = new Float64Array(this.waits.start.length + 1); // sum of what could have been avoided
    columns['waits.avoidable'].forEach((ns, i) => { this.saved[i + 1] = this.saved[i] + ns; });
    this.place = section.querySelector('.timeline');
    this.readout = section.querySelector('.readout');
    this.listing = section.querySelector('.listing');
    this.issued = data.basis === 'issued';
    this.margin = data.span * 0.02;
    this.chosen = -1;
    this.pair = -1;
    this.row = 0;
    this.spoiled = [];
    this.maps = [];
  }

  async show() {
    this.section.querySelector('.chart').hidden = false;
    this.build();
    this.view = await Bokeh.Plotting.show(this.figure, this.place);
    await this.buildMaps();
    this.paint();
    this.zoom(-this.margin, this.data.span + this.margin);
  }

  build() {
    const { lanes, span } = this.data;
    const bounds = [-this.margin, span + this.margin];
    this.range = new Bokeh.Range1d({ start: bounds[0], end: bounds[1], bounds, min_interval: MIN_SPAN });
    this.figure = this.axes(this.range, [-lanes.length + 0.4, 0.6], lanes.length * ROW_PX + 70);
    this.figure.below[0].axis_label = this.issued
      ? 'place in issue order: there are no device times'
      : `time since the first operation, ${this.data.basis}`;
    const most = this.place.clientWidth < NARROW_PX ? 9 : 16;
    this.names(this.figure, lanes.map((name, lane) => [-lane, cut(name, most)]));
    const empty = (...names) => new Bokeh.ColumnDataSource({ data: Object.fromEntries(names.map((name) => [name, []])) });
    const box = { left: { field: 'left' }, right: { field: 'right' }, bottom: { field: 'bottom' }, top: { field: 'top' } };
    const boxes = (...more) => empty('left', 'right', 'bottom', 'top', ...more);
    this.sources = {
      ops: boxes('color'), waits: boxes(), avoidable: boxes(), chosen: boxes(),
      spoiled: empty('x', 'y'), earlier: empty('x', 'y'), later: empty('x', 'y'), link: empty('x0', 'y0', 'x1', 'y1'),
    };
    const { figure, sources } = this;
    this.glyphs = {
      waits: figure.quad({ ...box, source: sources.waits }),
      ops: figure.quad({ ...box, fill_color: { field: 'color' }, line_width: 0.5, source: sources.ops }),
      avoidable: figure.quad({ ...box, source: sources.avoidable }),
      chosen: figure.quad({ ...box, fill_alpha: 0, line_width: 3, source: sources.chosen }),
      link: figure.segment({
        x0: { field: 'x0' }, y0: { field: 'y0' }, x1: { field: 'x1' }, y1: { field: 'y1' }, line_width: 2,
        line_dash: 'dashed', source: sources.link,
      }),
      spoiled: figure.scatter({ x: { field: 'x' }, y: { field: 'y' }, marker: 'x', size: 7, line_width: 2, source: sources.spoiled }),
      earlier: figure.scatter({
        x: { field: 'x' }, y: { field: 'y' }, marker: 'triangle', size: 11, line_width: 2, source: sources.earlier,
      }),
      later: figure.scatter({
        x: { field: 'x' }, y: { field: 'y' }, marker: 'inverted_triangle', size: 11, line_width: 2, source: sources.later,
      }),
    };
    const pan = new Bokeh.PanTool({ dimensions: 'width' });
    const wheel = new Bokeh.WheelZoomTool({ dimensions: 'width', modifiers: { ctrl: true } });
    figure.add_tools(pan, wheel);
    figure.toolbar.active_drag = matchMedia('(pointer: coarse)').matches ? null : pan;
    figure.toolbar.active_scroll = wheel;
  }

  axes(x_range, [low, high], height) {
    const figure = Bokeh.Plotting.figure({
      sizing_mode: 'stretch_width', height, x_range, y_range: new Bokeh.Range1d({ start: low, end: high }), tools: [],
      toolbar_location: null, min_border_right: 12, output_backend: 'canvas',
    });
    const side = this.place.clientWidth < NARROW_PX ? SIDE_PX * 0.6 : SIDE_PX;
    figure.min_border_left = side;
    const [axis] = figure.below;
    axis.formatter.doFormat = (ticks) => this.ticks(ticks);
    axis.ticker.desired_num_ticks = this.place.clientWidth < NARROW_PX ? 3 : 7;
    axis.ticker.num_minor_ticks = 0;
    return figure;
  }

  names(figure, places) {
    // PlainText: a name with $$ in it would otherwise be typeset, by a library from the network.
    figure.left[0].ticker = new Bokeh.FixedTicker({ ticks: places.map(([y]) => y), minor_ticks: [] });
    figure.left[0].major_label_overrides = new Map(places.map(([y, text]) => [y, new Bokeh.PlainText({ text })]));
  }

  ticks(ticks) {
    if (this.issued) return ticks.map((tick) => whole(Math.round(tick / 1000)));
    const far = Math.max(...ticks.map(Math.abs), 1);
    const [unit, name] = [[1e9, 's'], [1e6, 'ms'], [1e3, 'µs'], [1, 'ns']].find(([size]) => far >= size);
    const step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) / unit : 1;
    const digits = Math.min(9, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
    const shown = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return ticks.map((tick) => `${(tick / unit).toLocaleString('en', shown)} ${name}`);
  }

  // -- what is drawn ----------------------------------------------------------------------------------------

  zoom(from, to) {
    const low = -this.margin, high = this.data.span + this.margin;
    const span = Math.min(Math.max(to - from, MIN_SPAN), high - low);
    const start = Math.min(Math.max(from, low), high - span);
    this.range.setv({ start, end: start + span });
    this.draw();
  }

  later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.draw(); });
  }

  draw() {
    const { start: from, end: to } = this.range;
    const width = Math.max(this.view.frame.bbox.width, 50);
    const grid = { from, to, pixel: (to - from) / width, columns: Math.max(1, Math.floor(width / COLUMN_PX)) };
    const ranges = this.ops.stretches.map((stretch) => range(this.ops, stretch, from, to));
    const count = ranges.reduce((sum, [low, high]) => sum + high - low, 0);
    const exact = count <= EXACT;
    this.sources.ops.data = exact ? this.exactOps(grid, ranges) : this.summedOps(grid);
    this.drawWaits(grid);
    this.drawMarks(grid);
    for (const map of this.maps) map.range.setv({ start: from, end: to });
    const { left, top, height } = this.view.frame.bbox;
    Object.assign(this.place.dataset, {
      frame: [left, top, width, height].join(' '), mode: exact ? 'exact' : 'summed', drawn: this.sources.ops.data.left.length, inView: count, from, to,
    });
    const how = exact ? 'each drawn as it ran' : `too many to draw: columns are as high as the share of time in use`;
    this.section.querySelector('.view').textContent =
      `${whole(count)} of ${whole(this.ops.start.length)} operations in view, ${how}. ` +
      (this.issued ? '' : `${duration(Math.round(to - from))} from ${duration(Math.round(Math.max(from, 0)))}.`);
    this.list(exact ? ranges : null, count);
  }

  exactOps({ pixel }, ranges) {
    const data = { left: [], right: [], bottom: [], top: [], color: [] };
    ranges.forEach(([low, high], number) => {
      const { lane, kind } = this.ops.stretches[number];
      const color = shade(KINDS[kind][1], KINDS[kind][2]);
      for (let i = low; i < high; i++) {
        data.left.push(this.ops.start[i]);
        data.right.push(Math.max(this.ops.end[i], this.ops.start[i] + 1.5 * pixel));
        data.bottom.push(-lane - 0.3);
        data.top.push(-lane + 0.3);
        data.color.push(color);
      }
    });
    return data;
  }

  // Per lane and column a bar, as high as the share of the column's time that each kind takes.
  summedOps({ from, to, columns }) {
    const data = { left: [], right: [], bottom: [], top: [], color: [] };
    const step = (to - from) / columns;
    const filled = new Map();
    for (const stretch of this.ops.stretches) {
      const color = shade(KINDS[stretch.kind][1], KINDS[stretch.kind][2]);
      if (!filled.has(stretch.lane)) filled.set(stretch.lane, new Float64Array(columns));
      const heights = filled.get(stretch.lane);
      let index = bound(this.ops.start, stretch.begin, stretch.end, from, false);
      let before = covered(this.ops, stretch, from, index);
      for (let column = 0; column < columns; column++) {
        const right = from + (column + 1) * step;
        const next = bound(this.ops.start, index, stretch.end, right, false);
        const sum = covered(this.ops, stretch, right, next);
        if (next > index || sum > before) {
          const height = Math.min(0.8 - heights[column], Math.max(0.06, (0.8 * (sum - before)) / step));
          data.left.push(right - step);
          data.right.push(right);
          data.bottom.push(-stretch.lane - 0.4 + heights[column]);
          data.top.push(-stretch.lane - 0.4 + heights[column] + Math.max(height, 0.02));
          data.color.push(color);
          heights[column] += Math.max(height, 0);
        }
        [index, before] = [next, sum];
      }
    }
    return data;
  }

  drawWaits({ from, to, columns }) {
    const waits = { left: [], right: [], bottom: [], top: [] }, avoidable = { left: [], right: [], bottom: [], top: [] };
    const put = (data, left, right, lane, height) => {
      data.left.push(left);
      data.right.push(right);
      data.bottom.push(-lane - height);
      data.top.push(-lane + height);
    };
    const step = (to - from) / columns;
    for (const stretch of this.waits.stretches) {
      const [low, high] = range(this.waits, stretch, from, to);
      if (high - low <= columns) {
        for (let i = low; i < high; i++) {
          const saved = this.saved[i + 1] - this.saved[i];
          put(waits, this.waits.start[i], this.waits.end[i], stretch.lane, 0.22);
          if (saved) put(avoidable, this.waits.end[i] - saved, this.waits.end[i], stretch.lane, 0.22);
        }
        continue;
      }
      let index = low;
      for (let column = 0; column < columns; column++) {
        const right = from + (column + 1) * step;
        const next = bound(this.waits.start, index, high, right, false);
        if (next > index) {
          put(waits, right - step, right, stretch.lane, 0.22);
          const total = this.waits.busy[next] - this.waits.busy[index];
          const share = total ? (this.saved[next] - this.saved[index]) / total : 0;
          if (share) put(avoidable, right - step, right, stretch.lane, 0.22 * Math.min(1, share));
        }
        index = next;
      }
    }
    this.sources.waits.data = waits;
    this.sources.avoidable.data = avoidable;
  }

  lane(row) { return this.columns['ops.lane'][row]; }

  // Triangles where the operations of findings start, crosses below spoiled ones: one per four columns and lane at most.
  drawMarks({ from, to, columns, pixel }) {
    const seen = new Set();
    const mark = (data, row, key, below) => {
      const x = this.ops.start[row];
      if (row < 0 || x < from - 6 * pixel || x > to + 6 * pixel) return;
      const id = `${key} ${this.lane(row)} ${Math.floor(((x - from) / (to - from)) * (columns / 4))}`;
      if (seen.has(id)) return;
      seen.add(id);
      data.x.push(x);
      data.y.push(-this.lane(row) - below);
    };
    const earlier = { x: [], y: [] }, later = { x: [], y: [] }, spoiled = { x: [], y: [] };
    for (const [first, second] of this.data.pairs) {
      mark(earlier, first, 'e', 0.36);
      mark(later, second, 'l', -0.36);
    }
    for (const row of this.spoiled) mark(spoiled, row, 's', 0.46);
    const chosen = { left: [], right: [], bottom: [], top: [] };
    const pair = this.pair < 0 ? [] : this.data.pairs[this.pair].slice(0, 2).filter((row) => row >= 0);
    for (const row of new Set(this.chosen < 0 ? pair : [this.chosen, ...pair])) {
      chosen.left.push(this.ops.start[row] - pixel);
      chosen.right.push(Math.max(this.ops.end[row], this.ops.start[row] + 2 * pixel) + pixel);
      chosen.bottom.push(-this.lane(row) - 0.36);
      chosen.top.push(-this.lane(row) + 0.36);
    }
    const link = { x0: [], y0: [], x1: [], y1: [] };
    if (pair.length === 2) {
      link.x0.push(this.ops.end[pair[0]]);
      link.y0.push(-this.lane(pair[0]));
      link.x1.push(this.ops.start[pair[1]]);
      link.y1.push(-this.lane(pair[1]));
    }
    Object.assign(this.place.dataset, {
      marks: earlier.x.length + later.x.length, spoiled: spoiled.x.length,
      waits: this.sources.waits.data.left.length, avoidable: this.sources.avoidable.data.left.length,
    });
    for (const [name, data] of Object.entries({ earlier, later, spoiled, chosen, link })) this.sources[name].data = data;
  }

  list(ranges, count) {
    if (!this.listing.open) return;
    const rows = [];
    for (const [low, high] of ranges ?? []) for (let i = low; i < high; i++) rows.push(i);
    rows.sort((a, b) => this.ops.start[a] - this.ops.start[b] || a - b);
    const body = this.listing.querySelector('tbody');
    body.replaceChildren(...rows.slice(0, LISTED).map((row) => {
      const line = document.createElement('tr');
      const cells = [this.label(row), this.data.lanes[this.lane(row)], this.what(row), this.when(row), this.took(row)];
      cells.forEach((text, place) => {
        const cell = document.createElement(place ? 'td' : 'th');
        if (place > 2) cell.className = 'number';
        cell.textContent = text;
        line.append(cell);
      });
      return line;
    }));
    const note = this.listing.querySelector('p');
    if (!ranges) note.textContent = `${whole(count)} operations in view: zoom in to list them.`;
    else note.textContent = rows.length > LISTED ? `The first ${LISTED} of ${whole(rows.length)}.` : '';
  }

  // -- maps of pages ----------------------------------------------------------------------------------------

  async buildMaps() {
    if (!this.data.maps.length) return;
    this.section.querySelector('.pages').hidden = false;
    const places = this.section.querySelector('.maps');
    for (const map of this.data.maps) {
      const title = document.createElement('p');
      title.textContent = map.title;
      const place = document.createElement('div');
      place.className = 'plot map';
      place.setAttribute('role', 'img');
      const [rows, columns, counts] = map.cells;
      const most = Math.max(...counts, 1);
      const last = map.low + map.rows * map.step - 1;
      place.setAttribute('aria-label', `${map.title} ${map.low} to ${last}, up to ${whole(most)} accesses per cell`);
      title.textContent += `: from 1 (faint) to ${whole(most)} (strong) page accesses per cell`;
      places.append(title, place);
      const x_range = new Bokeh.Range1d({ start: 0, end: this.data.span });
      const figure = this.axes(x_range, [-map.rows + 0.5, 0.5], 230);
      const tick = Math.max(1, Math.ceil(map.rows / 6));
      const ticks = [];
      for (let row = 0; row < map.rows; row += tick) ticks.push([-row, `page ${map.low + row * map.step}`]);
      this.names(figure, ticks);
      const data = {
        left: columns.map((c) => c * map.width), right: columns.map((c) => (c + 1) * map.width),
        bottom: rows.map((r) => -r - 0.5), top: rows.map((r) => -r + 0.5),
        alpha: counts.map((n) => 0.15 + (0.85 * Math.log1p(n)) / Math.log1p(most)),
      };
      const cells = figure.quad({
        left: { field: 'left' }, right: { field: 'right' }, bottom: { field: 'bottom' }, top: { field: 'top' },
        fill_alpha: { field: 'alpha' }, line_alpha: 0, source: new Bokeh.ColumnDataSource({ data }),
      });
      const raced = figure.scatter({
        x: { field: 'x' }, y: { field: 'y' }, marker: 'x', size: 9, line_width: 2,
        source: new Bokeh.ColumnDataSource({
          data: { x: map.raced.map(([, column]) => (column + 0.5) * map.width), y: map.raced.map(([row]) => -row) },
        }),
      });
      await Bokeh.Plotting.show(figure, place);
      this.maps.push({ figure, range: x_range, cells, raced });
    }
  }

  // -- colours ----------------------------------------------------------------------------------------------

  paint() {
    const race = shade('#B3261E', '#FF8A4C');
    for (const figure of [this.figure, ...this.maps.map((map) => map.figure)]) paintFigure(figure);
    const { glyphs } = this;
    glyphs.ops.glyph.line_color = color('ground');
    glyphs.waits.glyph.setv({ fill_color: color('quiet'), fill_alpha: 0.18, line_color: color('quiet'), line_width: 1 });
    paintAvoidable(glyphs.avoidable.glyph);
    glyphs.chosen.glyph.line_color = color('text');
    glyphs.link.glyph.line_color = race;
    for (const name of ['spoiled', 'earlier', 'later']) glyphs[name].glyph.line_color = race;
    glyphs.earlier.glyph.fill_color = color('ground');
    glyphs.later.glyph.fill_color = race;
    for (const { cells, raced } of this.maps) {
      cells.glyph.fill_color = shade('#0072B2', '#56B4E9');
      raced.glyph.line_color = race;
    }
    document.documentElement.classList.toggle('drawn-dark', dark.matches);
    this.legend(race);
  }

  legend(race) {
    const used = [...new Set(this.ops.stretches.map(({ kind }) => kind))].sort((a, b) => a - b);
    const entries = used.map((kind) => [KINDS[kind][0], 'M1 2h20v10H1z', shade(KINDS[kind][1], KINDS[kind][2]), 'none']);
    if (this.waits.start.length) entries.push(['waits', 'M1 2h20v10H1z', 'none', color('quiet')]);
    if (this.saved[this.waits.start.length])
      entries.push(['avoidable part of a wait', 'M1 2h20v10H1zM1 12 11 2M6 12 16 2M11 12 21 2', 'none', color('text')]);
    if (this.data.pairs.length) {
      entries.push(['earlier access', 'M11 2 17 12H5z', 'none', race], ['later access', 'M11 12 17 2H5z', race, race]);
      entries.push([this.data.groups ? 'order that the file does not show' : 'missing order', 'M1 12 21 2', 'none', race]);
      if (this.data.spoiled.some(({ rounds, transfers }) => rounds.length + transfers.length))
        entries.push(['spoiled since, or at most', 'M6 2 16 12M16 2 6 12', 'none', race]);
    }
    this.section.querySelector('.legend').replaceChildren(...entries.map(([name, path, fill, line]) => {
      const item = document.createElement('li');
      const picture = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
      picture.setAttribute('viewBox', '0 0 22 14');
      picture.setAttribute('aria-hidden', 'true');
      const shape = document.createElementNS('http://www.w3.org/2000/svg', 'path');
      for (const [key, value] of Object.entries({ d: path, fill, stroke: line, 'stroke-width': 1.5 })) shape.setAttribute(key, value);
      picture.append(shape);
      item.append(picture, name);
      return item;
    }));
  }
}
