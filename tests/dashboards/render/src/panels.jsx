// Panel plugins live in Grafana's core; these put its published components into their place.
import { FieldType, PanelPlugin, cacheFieldDisplayNames, getDisplayProcessor } from '@grafana/data';
import { BarGauge, BigValue, TimeSeries } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import React from 'react';

import { tableFields, timeseriesFields } from './fields.js';

const NO_LEGEND = { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [] };

function shown(frame, theme) {
  const field = frame.fields.find((candidate) => candidate.type === 'number');
  const display = field.display ?? getDisplayProcessor({ field, theme });
  return { field, display, value: display(field.values[field.values.length - 1]) };
}

const Nothing = ({ text }) => <div style={{ padding: 20, fontSize: 24 }}>{text ?? 'No data'}</div>;

// As in Grafana's core: a quantile of nothing is NaN, and is drawn as a gap.
const gaps = (frame) => ({
  ...frame,
  fields: frame.fields.map((field) =>
    field.type === FieldType.number
      ? { ...field, values: field.values.map((value) => (Number.isFinite(value) ? value : null)) }
      : field
  ),
});

const Lines = ({ data, width, height, timeRange, options, fieldConfig }) =>
  data.series.length === 0 ? (
    <Nothing text={fieldConfig.defaults.noValue} />
  ) : (
    <TimeSeries
      frames={data.series.map(gaps)}
      structureRev={data.structureRev}
      timeRange={timeRange}
      timeZone="utc"
      width={width}
      height={height}
      legend={options.legend ?? NO_LEGEND}
      options={options}
    />
  );

// As Grafana's core shows a stat panel without data: its own mapping of no value, or its lowest threshold's colour.
const nothing = (theme, fieldConfig) => {
  const field = { name: '', type: FieldType.other, config: fieldConfig.defaults };
  return { ...getDisplayProcessor({ field, theme })(null), numeric: 0 };
};

const stat = (theme) => ({ data, width, height, options, fieldConfig }) => {
  const values = data.series.map((frame) => {
    const { value } = shown(frame, theme);
    return options.textMode === 'name' ? { ...value, text: frame.name, suffix: '' } : value;
  });
  if (values.length === 0) {
    values.push(nothing(theme, fieldConfig));
  }
  return (
    <div style={{ display: 'flex', width, height }}>
      {values.map((value, index) => (
        <BigValue
          key={index}
          value={value}
          theme={theme}
          width={width / values.length}
          height={height}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode="value"
        />
      ))}
    </div>
  );
};

const bars = (theme) => ({ data, width, height, options, fieldConfig }) =>
  data.series.length === 0 ? (
    <Nothing text={fieldConfig.defaults.noValue} />
  ) : (
    <div>
      {data.series.map((frame, index) => {
        const { field, display, value } = shown(frame, theme);
        return (
          <BarGauge
            key={index}
            value={{ ...value, title: frame.name }}
            field={field.config}
            display={display}
            theme={theme}
            width={width}
            height={height / data.series.length - 4}
            orientation={options.orientation}
            displayMode={options.displayMode}
            valueDisplayMode={options.valueMode}
            showUnfilled={options.showUnfilled}
            itemSpacing={4}
            lcdCellWidth={12}
          />
        );
      })}
    </div>
  );

const Rows = ({ data, width, height, options, fieldConfig }) => {
  cacheFieldDisplayNames(data.series);
  return data.series.length === 0 || data.series[0].length === 0 ? (
    <Nothing text={fieldConfig.defaults.noValue} />
  ) : (
    <TableNG
      data={data.series[0]}
      width={width}
      height={height}
      cellHeight={options.cellHeight}
      sortBy={options.sortBy}
      fieldConfig={fieldConfig}
      structureRev={data.structureRev}
      timeRange={data.timeRange}
      getActions={() => []}
      sortByBehavior="initial"
    />
  );
};

export function plugins(theme) {
  const made = {
    timeseries: new PanelPlugin(Lines).useFieldConfig(timeseriesFields),
    stat: new PanelPlugin(stat(theme)).useFieldConfig({}),
    table: new PanelPlugin(Rows).useFieldConfig(tableFields),
    bargauge: new PanelPlugin(bars(theme)).useFieldConfig({}),
  };
  for (const [id, plugin] of Object.entries(made)) {
    const info = { logos: { small: '', large: '' } };
    plugin.meta = { id, name: id, type: 'panel', info, module: '', baseUrl: '' };
  }
  return made;
}
