// The field options that Grafana's core registers and its libraries leave out.
import {
  FieldColorModeId,
  displayNameOverrideProcessor,
  identityOverrideProcessor,
  numberOverrideProcessor,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
} from '@grafana/data';

const nothing = () => null;

const option = (id, process = identityOverrideProcessor, defaultValue = undefined) => ({
  id,
  path: id,
  name: id,
  editor: nothing,
  override: nothing,
  process,
  settings: {},
  defaultValue,
  shouldApply: () => true,
});

export const standardFields = () => [
  option('unit', unitOverrideProcessor),
  option('min', numberOverrideProcessor),
  option('max', numberOverrideProcessor),
  option('decimals', numberOverrideProcessor),
  option('displayName', displayNameOverrideProcessor),
  option('color', identityOverrideProcessor, { mode: FieldColorModeId.PaletteClassic }),
  option('thresholds', thresholdsOverrideProcessor, {
    mode: 'absolute',
    steps: [{ value: -Infinity, color: 'green' }],
  }),
  option('mappings', identityOverrideProcessor, []),
  option('noValue', stringOverrideProcessor),
  option('links', identityOverrideProcessor),
];

export const standardEditors = () =>
  ['text', 'number', 'boolean', 'select', 'radio', 'unit', 'color', 'multi-select', 'strings', 'stats-picker',
    'field-name', 'timezone', 'links', 'slider', 'mappings', 'thresholds', 'fieldColor', 'multi-field-name',
  ].map((id) => ({ id, name: id, editor: nothing }));

const custom = (paths) => ({
  useCustomConfig: (builder) => {
    for (const path of paths) {
      builder.addCustomEditor({ ...option(path), path });
    }
  },
});

export const tableFields = custom(['width', 'minWidth', 'align', 'cellOptions', 'hidden', 'inspect', 'filterable']);

const drawing = ['drawStyle', 'lineInterpolation', 'lineWidth', 'fillOpacity', 'gradientMode', 'lineStyle',
  'spanNulls', 'showPoints', 'pointSize', 'stacking', 'axisPlacement', 'axisLabel', 'axisWidth', 'axisColorMode',
  'axisBorderShow', 'axisGridShow', 'axisSoftMin', 'axisSoftMax', 'axisCenteredZero', 'scaleDistribution',
  'hideFrom', 'thresholdsStyle', 'barAlignment', 'barWidthFactor', 'insertNulls', 'transform', 'showValues'];

export const timeseriesFields = custom(drawing);
