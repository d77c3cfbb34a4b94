// node perfetto_ui.mjs URL QUERIES.json PICTURE, in a folder with playwright-core: opens Perfetto's own UI, which loads
// the trace that its server has, asks its trace processor, shows the slice that the query "selected" found and takes a
// picture. Prints answers, shown texts and errors as JSON.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';

const { chromium } = createRequire(join(process.cwd(), 'package.json'))('playwright-core');
const [url, queryFile, picture] = process.argv.slice(2);
const queries = JSON.parse(readFileSync(queryFile));
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
const context = await browser.newContext({ viewport: { width: 1600, height: 1000 }, serviceWorkers: 'block' });
const thrown = [];
// The UI asks for news of itself; it gets none.
await context.route(
  (asked) => asked.origin !== url && !['blob:', 'data:'].includes(asked.protocol),
  (route) => route.abort(),
);
const page = await context.newPage();
page.on('pageerror', (error) => thrown.push(String(error)));
await page.goto(url);
const answers = {};
let shown = '';
try {
  await page.waitForFunction(() => window.app?.trace?.engine, undefined, { timeout: 60000 });
  await page.evaluate(() => window.waitForPerfettoIdle());
  for (const [name, sql] of Object.entries(queries)) {
    answers[name] = await page.evaluate(async (text) => {
      const result = await window.app.trace.engine.query(text);
      const columns = result.columns();
      const rows = [];
      for (const row = result.iter({}); row.valid(); row.next()) {
        const value = (column) => (typeof row.get(column) === 'bigint' ? Number(row.get(column)) : row.get(column));
        rows.push(Object.fromEntries(columns.map((column) => [column, value(column)])));
      }
      return rows;
    }, sql);
  }
  await page.evaluate(([selected]) => {
    const { trace } = window.app;
    for (const track of trace.workspace.flatTracks) track.expand();
    for (const process of trace.workspace.children) process.collapse();
    trace.timeline.setViewportTime(BigInt(selected.view_start), BigInt(selected.view_end));
    const options = { switchToCurrentSelectionTab: true, scrollToSelection: true }; // which opens its process
    trace.selection.selectSqlEvent('slice', selected.id, options);
  }, answers.selected);
  await page.waitForTimeout(1500);
  await page.evaluate(() => window.waitForPerfettoIdle());
  shown = await page.evaluate(() => document.body.innerText);
} catch (error) {
  thrown.push(String(error));
}
await page.screenshot({ path: picture });
await browser.close();
console.log(JSON.stringify({ answers, shown, thrown }));
