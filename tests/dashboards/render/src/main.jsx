// Draws /board.json with @grafana/scenes. Errors collect in window.errors, queries in window.queries.
import {
  EventBusSrv,
  LoadingState,
  createTheme,
  ThemeContext,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
} from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import * as runtime from '@grafana/runtime';
import * as scenes from '@grafana/scenes';
import { GlobalStyles } from '@grafana/ui';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import { from, map } from 'rxjs';

import { standardEditors, standardFields } from './fields.js';
import { plugins } from './panels.jsx';
import { Prometheus } from './prometheus.js';

window.errors = [];
window.addEventListener('error', (event) => window.errors.push(String(event.error?.stack ?? event.message)));
window.addEventListener('unhandledrejection', (event) => window.errors.push(String(event.reason?.stack ?? event.reason)));

const theme = createTheme({ colors: { mode: 'dark' } });
const panelPlugins = plugins(theme);
const info = { logos: { small: '', large: '' } };
const settings = {
  id: 1,
  uid: 'prom',
  type: 'prometheus',
  name: 'Prometheus',
  meta: { id: 'prometheus', name: 'Prometheus', info },
  jsonData: {},
  access: 'proxy',
  readOnly: true,
};
const source = new Prometheus(settings);
const parameters = new URLSearchParams(location.search);
const DATASOURCE = { uid: 'prom', type: 'prometheus' };
let scene;

function setUpRuntime() {
  runtime.config.theme2 = theme;
  runtime.config.featureToggles ??= {};
  standardEditorsRegistry.setInit(standardEditors);
  standardFieldConfigEditorRegistry.setInit(standardFields);
  standardTransformersRegistry.setInit(() =>
    [standardTransformers.mergeTransformer, standardTransformers.organizeFieldsTransformer].map((transformation) => ({
      id: transformation.id,
      name: transformation.name,
      transformation: async () => transformation,
      editor: () => null,
    }))
  );
  runtime.setDataSourceSrv({
    get: async () => source,
    getList: () => [settings],
    getInstanceSettings: () => settings,
    reload() {},
  });
  runtime.setTemplateSrv({
    replace: (text, scoped, format) => scenes.sceneGraph.interpolate(scene, text, scoped, format),
    getVariables: () => [],
    containsTemplate: (text) => /\$/.test(text),
    updateTimeRange() {},
  });
  runtime.setRunRequest((datasource, request) =>
    datasource.query(request).pipe(
      map(({ data }) => ({
        state: LoadingState.Done,
        series: data,
        annotations: [],
        timeRange: request.range,
        request,
        structureRev: 1,
      }))
    )
  );
  runtime.setPluginImportUtils({
    importPanelPlugin: async (id) => panelPlugins[id],
    getPanelPluginFromCache: (id) => panelPlugins[id],
  });
  runtime.setAppEvents(new EventBusSrv());
  runtime.setLocationSrv({ update() {} });
  runtime.setBackendSrv({ get: async () => ({}), post: async () => ({}), fetch: () => from([]) });
  runtime.setEchoSrv({ flush() {}, addBackend() {}, addEvent() {} });
}

function variable(v) {
  if (v.type === 'datasource') {
    const chosen = { value: 'prom', text: 'Prometheus' };
    return new scenes.DataSourceVariable({ name: v.name, label: v.label, pluginId: v.query, ...chosen });
  }
  if (v.type === 'textbox') {
    return new scenes.TextBoxVariable({ name: v.name, value: v.query, hide: v.hide });
  }
  return new scenes.QueryVariable({
    name: v.name,
    label: v.label,
    query: v.query.query,
    datasource: DATASOURCE,
    isMulti: v.multi,
    includeAll: v.includeAll,
    allValue: v.allValue,
    defaultToAll: v.includeAll,
  });
}

function place(panel) {
  if (panel.type === 'row') {
    return new scenes.SceneGridRow({ title: panel.title, y: panel.gridPos.y, isCollapsible: true, children: [] });
  }
  const { x, y, w, h } = panel.gridPos;
  const queries = new scenes.SceneQueryRunner({
    datasource: DATASOURCE,
    queries: panel.targets,
    maxDataPoints: 300,
    minInterval: '1s',
  });
  return new scenes.SceneGridItem({
    x,
    y,
    width: w,
    height: h,
    body: new scenes.VizPanel({
      title: panel.title,
      description: panel.description,
      pluginId: panel.type,
      options: panel.options,
      fieldConfig: panel.fieldConfig,
      $data: panel.transformations
        ? new scenes.SceneDataTransformer({ $data: queries, transformations: panel.transformations })
        : queries,
    }),
  });
}

function build(board) {
  const { from = board.time.from, to = board.time.to } = Object.fromEntries(parameters);
  return new scenes.EmbeddedScene({
    $timeRange: new scenes.SceneTimeRange({ from, to, timeZone: 'utc' }),
    $variables: new scenes.SceneVariableSet({ variables: board.templating.list.map(variable) }),
    controls: [
      new scenes.VariableValueSelectors({}),
      new scenes.SceneControlsSpacer(),
      new scenes.SceneTimePicker({}),
    ],
    body: new scenes.SceneGridLayout({ children: board.panels.map(place) }),
  });
}

class Boundary extends React.Component {
  state = {};

  static getDerivedStateFromError(error) {
    window.errors.push(String(error.stack));
    return { error };
  }

  render() {
    return this.state.error ? <pre style={{ color: 'red' }}>{String(this.state.error.stack)}</pre> : this.props.children;
  }
}

async function main() {
  setUpRuntime();
  await initPluginTranslations('grafana-ui', []);
  await initPluginTranslations('grafana-scenes', []);
  const response = await fetch('/board.json');
  scene = build(await response.json());
  createRoot(document.getElementById('root')).render(
    <Boundary>
      <ThemeContext.Provider value={theme}>
        <GlobalStyles />
        <MemoryRouter>
          <div style={{ padding: 16, color: '#ccc', minHeight: '100%', display: 'flex', flexDirection: 'column' }}>
            <scene.Component model={scene} />
          </div>
        </MemoryRouter>
      </ThemeContext.Provider>
    </Boundary>
  );
}

main().catch((error) => window.errors.push(String(error.stack)));
