// A chart to look around in: by mouse, keyboard and buttons. Starts one for each recording of the page.

class Explorer extends Chart {
  async show() {
    await super.show();
    this.listen();
    this.place.dataset.ready = 'yes';
  }

  label(row) {
    const op = this.columns['ops.op'][row];
    return this.data.labels[op] ?? `${this.data.mark}${op}`;
  }

  what(row) {
    const [kind, name] = [this.columns['ops.kind'][row], this.columns['ops.name'][row]];
    return `${KINDS[kind][0]}, ${this.data.names[name]}`;
  }

  when(row) { return this.issued ? `${Math.round(this.ops.start[row] / 1000)}` : duration(this.ops.start[row]); }

  took(row) { return this.issued ? 'not measured' : duration(this.ops.end[row] - this.ops.start[row]); }

  about(row) {
    const of = (name) => this.columns[`ops.${name}`][row];
    const [group, low, high] = [of('group'), of('low'), of('high')];
    const groups = this.data.groups || (ROUNDS.has(of('kind')) ? 'round' : 'transfer');
    const layers = !high ? '' : high === low + 1 ? `, layer ${low}` : `, layers ${low} to ${high - 1}`;
    const when = this.issued ? `place ${this.when(row)} in issue order` : `from ${this.when(row)}, takes ${this.took(row)}`;
    return `${this.label(row)} on ${this.data.lanes[this.lane(row)]}: ${this.what(row)}, ${groups} ${group}${layers}; ${when}; ` +
      this.data.accesses[of('access')];
  }

  aboutWait(i) {
    const saved = this.saved[i + 1] - this.saved[i];
    const op = this.columns['waits.op'][i];
    return `wait ${this.data.labels[op] ?? `${this.data.mark}${op}`} on ${this.data.lanes[this.columns['waits.lane'][i]]}: ` +
      `stood still for ${duration(this.waits.end[i] - this.waits.start[i])}, ${saved ? duration(saved) : 'nothing'} of it avoidable`;
  }

  choose(row) {
    this.chosen = row;
    if (row >= 0) this.row = this.lane(row);
    this.place.dataset.chosen = row < 0 ? '' : this.columns['ops.op'][row];
    this.said = row < 0 ? '' : this.about(row);
    this.readout.textContent = this.said;
    this.draw();
  }

  near(x, y) {
    const lane = Math.round(-y);
    const reach = ((this.range.end - this.range.start) / this.view.frame.bbox.width) * 6;
    let best = -1, distance = Infinity;
    for (const stretch of this.ops.stretches) {
      if (stretch.lane !== lane) continue;
      const [low, high] = range(this.ops, stretch, x - reach, x + reach);
      for (let i = low; i < Math.min(high, low + EXACT); i++) {
        const away = Math.max(this.ops.start[i] - x, x - this.ops.end[i], 0);
        if (away <= reach && away < distance) [best, distance] = [i, away];
      }
    }
    if (distance === 0) return { row: best };
    for (const stretch of this.waits.stretches) {
      if (stretch.lane !== lane) continue;
      const [low, high] = range(this.waits, stretch, x, x);
      if (low < high) return { wait: low };
    }
    return { row: best };
  }

  choosePair(number, { scroll = false } = {}) {
    const count = this.data.pairs.length;
    if (!count) return;
    this.pair = (number + count) % count;
    const [first, second, card] = this.data.pairs[this.pair];
    this.chosen = -1;
    this.markSpoiled(card);
    for (const other of this.section.querySelectorAll('.card')) {
      const mine = Number(other.dataset.card) === card;
      other.classList.toggle('chosen', mine);
      if (mine) other.open = true;
    }
    const { name } = this.section.querySelector(`[data-card="${card}"]`).dataset;
    const rows = [first, second].filter((row) => row >= 0);
    const sides = [['earlier', first], ['later', second]]
      .map(([side, row]) => `${side}: ${row < 0 ? 'not on the timeline' : this.about(row)}`);
    this.said = [`pair ${this.pair + 1} of ${count}, ${name}`, ...sides].join('\n');
    this.readout.textContent = this.said;
    this.place.dataset.pair = this.pair;
    if (rows.length) {
      const from = Math.min(...rows.map((row) => this.ops.start[row]));
      const to = Math.max(...rows.map((row) => this.ops.end[row]));
      const around = Math.max((to - from) * 0.6, MIN_SPAN);
      this.zoom(from - around, to + around);
    } else this.draw();
    if (scroll) {
      this.section.querySelector('.chart').scrollIntoView({ block: 'start' });
      this.place.focus({ preventScroll: true });
    }
  }

  markSpoiled(card) {
    const { rounds, transfers } = this.data.spoiled[card];
    const sets = [new Set(rounds), new Set(transfers)];
    const [kind, group] = [this.columns['ops.kind'], this.columns['ops.group']];
    this.spoiled = [];
    if (sets[0].size + sets[1].size)
      for (let i = 0; i < kind.length; i++) if (kind[i] < 5 && sets[ROUNDS.has(kind[i]) ? 0 : 1].has(group[i])) this.spoiled.push(i);
  }

  chooseWait(op) {
    const i = this.columns['waits.op'].indexOf(op);
    if (i < 0) return;
    const span = this.waits.end[i] - this.waits.start[i];
    this.chosen = this.pair = -1;
    this.zoom(this.waits.start[i] - span, this.waits.end[i] + span);
    this.said = this.readout.textContent = this.aboutWait(i);
    this.section.querySelector('.chart').scrollIntoView({ block: 'start' });
  }

  step(by) {
    const rows = this.ops.stretches.filter(({ lane }) => lane === this.row);
    const { start: from, end: to } = this.range;
    const at = this.chosen >= 0 && this.lane(this.chosen) === this.row ? this.ops.start[this.chosen] : null;
    let best = -1;
    for (const { begin, end } of rows) {
      let next;
      if (at === null) next = bound(this.ops.start, begin, end, from, false);
      else if (this.chosen >= begin && this.chosen < end) next = this.chosen + by;
      else next = bound(this.ops.start, begin, end, at, by > 0) - (by > 0 ? 0 : 1);
      if (next < begin || next >= end) continue;
      if (best < 0 || (this.ops.start[next] - this.ops.start[best]) * by < 0) best = next;
    }
    if (best < 0) return;
    const x = this.ops.start[best];
    if (x < from || x > to) this.range.setv({ start: x - (to - from) / 2, end: x + (to - from) / 2 });
    this.choose(best);
  }

  // -- what the user does -----------------------------------------------------------------------------------

  act(what) {
    const { start: from, end: to } = this.range;
    const span = to - from;
    const middle = this.chosen < 0 ? (from + to) / 2 : Math.min(Math.max(this.ops.start[this.chosen], from), to);
    const toLane = (by) => {
      this.row = Math.min(Math.max(this.row + by, 0), this.data.lanes.length - 1);
      this.said = this.readout.textContent = `row ${this.data.lanes[this.row]}`;
    };
    const actions = {
      in: () => this.zoom(middle - (middle - from) / 2, middle + (to - middle) / 2),
      out: () => this.zoom(middle - (middle - from) * 2, middle + (to - middle) * 2),
      left: () => this.zoom(from - span / 4, to - span / 4),
      right: () => this.zoom(from + span / 4, to + span / 4),
      all: () => this.zoom(-this.margin, this.data.span + this.margin),
      next: () => this.choosePair(this.pair + 1),
      previous: () => this.choosePair(Math.max(this.pair, 0) - 1),
      up: () => toLane(-1),
      down: () => toLane(1),
      before: () => this.step(-1),
      after: () => this.step(1),
      close: () => {
        if (this.chosen < 0) return;
        const [start, end] = [this.ops.start[this.chosen], this.ops.end[this.chosen]];
        const around = Math.max(end - start, MIN_SPAN);
        this.zoom(start - around, end + around);
      },
    };
    actions[what]?.();
  }

  listen() {
    const keys = {
      '+': 'in', '=': 'in', '-': 'out', ArrowLeft: 'left', ArrowRight: 'right', 0: 'all', Home: 'all', n: 'next', p: 'previous',
      ArrowUp: 'up', ArrowDown: 'down', '[': 'before', ']': 'after', Enter: 'close',
    };
    this.place.addEventListener('keydown', (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      this.act(keys[event.key]);
    });
    this.section.addEventListener('click', ({ target }) => {
      const button = target.closest('button');
      if (!button) return;
      if (button.dataset.do) this.act(button.dataset.do);
      if (button.dataset.wait) this.chooseWait(Number(button.dataset.wait));
      if (button.dataset.pair) {
        const card = Number(button.closest('.card').dataset.card);
        this.choosePair(this.data.pairs.findIndex((pair) => pair[2] === card) + Number(button.dataset.pair), { scroll: true });
      }
    });
    this.listing.addEventListener('toggle', () => this.draw());
    this.figure.on_event('rangesupdate', () => this.later());
    this.figure.on_event('tap', ({ x, y }) => {
      const { row = -1, wait } = this.near(x, y);
      this.choose(row);
      if (wait !== undefined) this.said = this.readout.textContent = this.aboutWait(wait);
    });
    this.figure.on_event('mousemove', ({ x, y }) => {
      const { row = -1, wait } = this.near(x, y);
      this.readout.textContent = wait !== undefined ? this.aboutWait(wait) : row >= 0 ? this.about(row) : this.said ?? '';
    });
    this.figure.on_event('mouseleave', () => { this.readout.textContent = this.said ?? ''; });
    new ResizeObserver(() => this.later()).observe(this.place);
    dark.addEventListener('change', () => { this.paint(); this.draw(); });
  }
}

// -- the page -------------------------------------------------------------------------------------------------

async function start(section) {
  const data = JSON.parse(section.querySelector('.data').textContent);
  const columns = await unpack(data.packed);
  delete data.packed;
  await new Explorer(section, data, columns).show();
}

async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement('textarea'); // where the clipboard is not allowed
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = 'Copy'; }, 1500);
}

document.addEventListener('click', ({ target }) => {
  const button = target.closest('button[data-copy]');
  if (button) copy(button);
});
addEventListener('beforeprint', () => {
  for (const details of document.querySelectorAll('details.card')) details.open = true;
});
const waiting = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries)
    if (isIntersecting) {
      waiting.unobserve(target);
      start(target);
    }
}, { rootMargin: '800px' });
for (const section of document.querySelectorAll('.recording')) if (section.querySelector('.data')) waiting.observe(section);
