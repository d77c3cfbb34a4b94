// node chrome_viewer.mjs URL TRACE.json, in a folder with playwright-core: loads a trace into the viewer of
// chrome://tracing, which Perfetto's UI carries, and prints what the viewer made of it as JSON.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';

const { chromium } = createRequire(join(process.cwd(), 'package.json'))('playwright-core');
const [url, file] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'] });
const page = await browser.newPage();
await page.goto(url);
await page.waitForFunction(() => document.querySelector('x-profiling-view')?.setActiveTrace, undefined, { timeout: 60000 });
await page.evaluate((text) => document.querySelector('x-profiling-view').setActiveTrace('trace.json', text), readFileSync(file, 'utf8'));
const model = () => document.querySelector('x-profiling-view').timelineView?.model;
await page.waitForFunction(model, undefined, { timeout: 60000 });
const found = await page.evaluate(() => {
  const { processes, flowEvents, importWarnings } = document.querySelector('x-profiling-view').timelineView.model;
  const threads = Object.values(processes).flatMap((process) => Object.values(process.threads));
  return {
    processes: Object.keys(processes).length,
    threads: threads.map((thread) => thread.name),
    slices: threads.reduce((sum, thread) => sum + thread.sliceGroup.length, 0),
    arrows: flowEvents.length,
    warnings: importWarnings.map((warning) => warning.message),
  };
});
await browser.close();
console.log(JSON.stringify(found));
