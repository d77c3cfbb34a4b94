// node shot.mjs PROMETHEUS BOARD.json FROM TO PICTURE: draws a board 1280 wide and prints what is on it as JSON.
// There is no server: the page's requests are answered here, those for /prom by Prometheus.
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';

const WIDTH = 1280;
const [ROW_PIXELS, CONTROLS_PIXELS] = [38, 150];
const [prometheus, board, from, to, picture] = process.argv.slice(2);
const { panels } = JSON.parse(readFileSync(board));
const height = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * ROW_PIXELS + CONTROLS_PIXELS;
const queries = panels.flatMap((panel) => panel.targets ?? []).length;
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
const page = await browser.newPage({ viewport: { width: WIDTH, height } });
await page.route('**/*', async (route) => {
  const { pathname, search } = new URL(route.request().url());
  if (pathname.startsWith('/prom/')) {
    const answer = await fetch(prometheus + pathname.slice('/prom'.length) + search);
    return route.fulfill({ status: answer.status, contentType: 'application/json', body: await answer.text() });
  }
  const file = pathname === '/board.json' ? board : join('dist', pathname.slice(1) || 'index.html');
  return existsSync(file) ? route.fulfill({ path: file }) : route.fulfill({ status: 404 });
});
const thrown = [];
page.on('pageerror', (error) => thrown.push(String(error)));
await page.goto(`http://dashboards.test/?${new URLSearchParams({ from, to, scrape: '0.5' })}`);
try {
  await page.waitForFunction((n) => window.queries?.length >= n || window.errors?.length, queries, { timeout: 60000 });
} catch (error) {
  thrown.push(String(error));
}
await page.waitForTimeout(1500); // animations; nothing to wait for
const found = await page.evaluate(() => {
  // Pixels that are neither background, grid nor grey text.
  const coloured = (canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) {
      const rgb = [data[i], data[i + 1], data[i + 2]];
      count += data[i + 3] > 40 && Math.max(...rgb) - Math.min(...rgb) > 60 ? 1 : 0;
    }
    return count;
  };
  const panels = [...document.querySelectorAll('section[data-testid^="data-testid Panel header"]')].map((panel) => ({
    title: panel.getAttribute('data-testid').replace('data-testid Panel header ', ''),
    text: panel.innerText,
    drawn: [...panel.querySelectorAll('canvas')].reduce((sum, canvas) => sum + coloured(canvas), 0),
    colors: [...panel.querySelectorAll('*')]
      .map((element) => getComputedStyle(element))
      .flatMap((style) => [style.backgroundImage, style.backgroundColor])
      .filter((color) => color !== 'none' && color !== 'rgba(0, 0, 0, 0)'),
  }));
  // A text that reaches beyond an ancestor that clips or scrolls.
  const texts = document.createTreeWalker(document.getElementById('root'), NodeFilter.SHOW_TEXT);
  const cut = [];
  while (texts.nextNode()) {
    const range = document.createRange();
    range.selectNodeContents(texts.currentNode);
    const { left, right, top, bottom, width } = range.getBoundingClientRect();
    for (let box = texts.currentNode.parentElement; box && width; box = box.parentElement) {
      const clip = box.getBoundingClientRect();
      const beyond = right > clip.right + 1 || left < clip.left - 1 || bottom > clip.bottom + 1 || top < clip.top - 1;
      if (beyond && getComputedStyle(box).overflow !== 'visible') {
        cut.push(texts.currentNode.data);
        break;
      }
    }
  }
  const failed = [...document.querySelectorAll('[data-testid="data-testid Panel status error"]')]
    .map((badge) => `error badge: ${badge.closest('section').innerText.split('\n')[0]}`);
  return { errors: [...window.errors, ...failed], queries: window.queries, panels, cut, width: document.documentElement.scrollWidth };
});
await page.screenshot({ path: picture });
await browser.close();
console.log(JSON.stringify({ ...found, errors: [...thrown, ...found.errors] }));
