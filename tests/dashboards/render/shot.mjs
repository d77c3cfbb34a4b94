// node shot.mjs URL PICTURE HEIGHT QUERIES: draws the page; exit 1 on an error or if a query never ran.
import { chromium } from 'playwright-core';

const [url, picture, height, queries] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
const page = await browser.newPage({ viewport: { width: 1600, height: Number(height) } });
const thrown = [];
page.on('pageerror', (error) => thrown.push(String(error)));
await page.goto(url);
try {
  await page.waitForFunction((n) => window.queries?.length >= n || window.errors?.length, Number(queries), { timeout: 60000 });
} catch (error) {
  thrown.push(String(error));
}
await page.waitForTimeout(2000); // animations; nothing to wait for
const result = await page.evaluate(() => ({ errors: window.errors, queries: window.queries }));
await page.screenshot({ path: picture });
await browser.close();
const empty = result.queries.filter((query) => query.results === 0).map((query) => query.query);
console.log(JSON.stringify({ queries: result.queries.length, empty, errors: [...thrown, ...result.errors] }, null, 1));
process.exitCode = thrown.length || result.errors.length ? 1 : 0;
