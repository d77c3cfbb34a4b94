// A data source that asks Prometheus directly; Grafana's own asks Grafana's server.
import { DataSourceApi, FieldType, toDataFrame } from '@grafana/data';
import { getTemplateSrv } from '@grafana/runtime';
import { from } from 'rxjs';

const SCRAPE_SECONDS = Number(new URLSearchParams(location.search).get('scrape') ?? 1);

window.queries = [];

async function ask(path, parameters) {
  const response = await fetch(`/prom/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const answer = await response.json();
  if (answer.status !== 'success') {
    throw new Error(`${answer.error} :: ${parameters.query}`);
  }
  return answer.data;
}

function legend(format, labels) {
  return format && format !== '__auto'
    ? format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '')
    : JSON.stringify(labels);
}

// One frame, one row per series, one column per label: what Grafana's own data source makes of format "table".
function table(refId, queries, result) {
  const names = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))];
  const text = (name) => ({ name, type: FieldType.string, values: result.map(({ metric }) => metric[name]), config: {} });
  const time = { name: 'Time', type: FieldType.time, values: result.map(({ value }) => value[0] * 1000), config: {} };
  const value = {
    name: queries > 1 ? `Value #${refId}` : 'Value',
    type: FieldType.number,
    values: result.map((one) => parseFloat(one.value[1])),
    config: {},
  };
  return toDataFrame({ refId, fields: [time, ...names.map(text), value] });
}

export class Prometheus extends DataSourceApi {
  constructor(settings) {
    super(settings);
  }

  query(request) {
    const answers = Promise.all(request.targets.map((target) => this.one(target, request)));
    return from(answers.then((frames) => ({ data: frames.flat() })));
  }

  async one(target, request) {
    const start = request.range.from.valueOf() / 1000;
    const end = request.range.to.valueOf() / 1000;
    const step = Math.max(1, Math.round(request.intervalMs / 1000));
    const macro = (seconds) => ({ value: `${seconds}s`, text: `${seconds}s` });
    const query = getTemplateSrv().replace(target.expr, {
      ...request.scopedVars,
      __rate_interval: macro(Math.ceil(Math.max(4 * SCRAPE_SECONDS, step + SCRAPE_SECONDS))),
      __range: macro(Math.round(end - start)),
    });
    const data = target.instant
      ? await ask('query', { query, time: end })
      : await ask('query_range', { query, start, end, step });
    window.queries.push({ query, results: data.result.length });
    if (target.format === 'table') {
      return [table(target.refId, request.targets.length, data.result)];
    }
    return data.result.map(({ metric, values, value }) => {
      const points = values ?? [value];
      const name = legend(target.legendFormat, metric);
      return toDataFrame({
        refId: target.refId,
        name,
        fields: [
          { name: 'Time', type: FieldType.time, values: points.map((p) => p[0] * 1000), config: {} },
          {
            name: 'Value',
            type: FieldType.number,
            labels: metric,
            values: points.map((p) => parseFloat(p[1])),
            config: { displayNameFromDS: name },
          },
        ],
      });
    });
  }

  async metricFindQuery(query) {
    const text = typeof query === 'string' ? query : query.query;
    const [, series, label] = /label_values\((.+),\s*(\w+)\)/.exec(text);
    const values = await ask(`label/${label}/values`, { 'match[]': getTemplateSrv().replace(series) });
    return values.map((value) => ({ text: value }));
  }

  async testDatasource() {
    return { status: 'success', message: '' };
  }
}
