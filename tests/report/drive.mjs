// node drive.mjs REPORT.html OPTIONS.json: opens a report in Chromium from its file, does what the steps say, and prints
// what the page then says as JSON. Run in the folder that `make render-env` makes, where playwright-core is.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const { chromium } = createRequire(join(process.cwd(), 'package.json'))('playwright-core');
const [report, options] = process.argv.slice(2);
const { width = 1280, height = 1000, scheme = 'light', wait = 60000, steps = [] } = JSON.parse(readFileSync(options));
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme });
await context.grantPermissions(['clipboard-read', 'clipboard-write']);
const page = await context.newPage();
const found = { complaints: [], requests: [], states: [] };
page.on('console', (message) => ['error', 'warning'].includes(message.type()) && found.complaints.push(message.text()));
page.on('pageerror', (error) => found.complaints.push(String(error)));
page.on('request', (request) => found.requests.push(request.url()));
page.on('dialog', (dialog) => { found.complaints.push(`dialog ${dialog.message()}`); dialog.dismiss(); });
const began = Date.now();
await page.goto(pathToFileURL(report).href);
if (await page.locator('.timeline').count()) await page.waitForSelector('.timeline[data-ready]', { timeout: wait });
found.ready_ms = Date.now() - began;

// Where nanosecond `x` of row `lane` is on the screen.
const place = (x, lane) => page.evaluate(([x, lane]) => {
  const plot = document.querySelector('.timeline');
  const [left, top, width, height] = plot.dataset.frame.split(' ').map(Number);
  const { left: x0, top: y0 } = plot.getBoundingClientRect();
  const { from, to } = plot.dataset;
  const lanes = Number(plot.getAttribute('aria-label').match(/on (\d+) rows/)[1]);
  return [x0 + 1 + left + ((x - from) / (to - from)) * width, y0 + 1 + top + ((lane + 0.6) / lanes) * height];
}, [x, lane]);

const doers = {
  key: (key) => page.locator('.timeline').first().press(key),
  click: (selector) => page.locator(selector).first().click(),
  tap: async ([x, lane]) => page.mouse.click(...(await place(x, lane))),
  drag: async ([x, lane, pixels]) => {
    const [left, top] = await place(x, lane);
    await page.mouse.move(left, top);
    await page.mouse.down();
    await page.mouse.move(left + pixels, top, { steps: 5 });
    await page.mouse.up();
  },
  wheel: async ([x, lane, turns]) => {
    await page.mouse.move(...(await place(x, lane)));
    const to = await page.locator('.timeline').first().getAttribute('data-to');
    await page.keyboard.down('Control');
    await page.mouse.wheel(0, turns);
    await page.waitForFunction((before) => document.querySelector('.timeline').dataset.to !== before, to, { timeout: 10000 });
    await page.keyboard.up('Control');
  },
  scheme: (colorScheme) => page.emulateMedia({ colorScheme }),
  view: (path) => page.screenshot({ path, type: 'jpeg', quality: 85 }),
  shot: (path) => page.screenshot({ path, fullPage: true }),
  pdf: async (path) => { found.pdf = (await page.pdf({ path, width: '11in', height: '16in' })).length; },
};
for (const step of steps) {
  const [[name, argument]] = Object.entries(step);
  const start = Date.now();
  await doers[name](argument);
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  found.states.push(await page.evaluate(() => {
    const plot = document.querySelector('.timeline');
    return {
      ...plot?.dataset,
      readout: document.querySelector('.readout')?.textContent,
      view: document.querySelector('.view')?.textContent,
      listed: [...document.querySelectorAll('.listing tbody tr')].map((row) => row.innerText),
      open: [...document.querySelectorAll('.card')].map((card) => card.open),
    };
  }));
  found.states.at(-1).took_ms = Date.now() - start;
}
// Colours on the canvases of the timeline: of a copy, for reading a canvas makes it slow.
found.colours = await page.evaluate(() => {
  const deep = (root) => [...root.querySelectorAll('*')].flatMap((e) => [e, ...(e.shadowRoot ? deep(e.shadowRoot) : [])]);
  const seen = new Set();
  const plot = document.querySelector('.timeline');
  for (const canvas of plot ? deep(plot).filter((e) => e.tagName === 'CANVAS' && e.width && e.height) : []) {
    const context = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
    context.drawImage(canvas, 0, 0);
    const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4)
      if (data[i + 3] === 255) seen.add(`#${((1 << 24) | (data[i] << 16) | (data[i + 1] << 8) | data[i + 2]).toString(16).slice(1)}`);
  }
  return [...seen];
});
found.clipboard = await page.evaluate(() => navigator.clipboard.readText()).catch(() => null);
found.width = await page.evaluate(() => document.documentElement.scrollWidth);
found.text = await page.evaluate(() => document.body.innerText);
found.scripts = await page.evaluate(() => document.scripts.length);
found.heap = await page.evaluate(() => performance.memory?.usedJSHeapSize ?? 0);
await browser.close();
console.log(JSON.stringify(found));
