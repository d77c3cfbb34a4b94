// How every figure looks, on whichever page: in the colours of the page's style sheet. Comes before the other scripts.

const NARROW_PX = 600;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function paintFigure(figure) {
  Object.assign(figure, {
    background_fill_color: color('ground'), border_fill_color: color('ground'), outline_line_color: color('line'),
  });
  for (const axis of [figure.below[0], figure.left[0]])
    axis.setv({
      axis_line_color: color('quiet'), major_tick_line_color: color('quiet'), minor_tick_line_color: null,
      major_label_text_color: color('text'), axis_label_text_color: color('quiet'), axis_label_text_font_style: 'normal',
      major_label_text_font_size: '12px',
    });
  figure.xgrid.grid_line_color = color('line');
  figure.ygrid.grid_line_color = null;
}

function paintAvoidable(glyph) {
  glyph.setv({
    fill_color: color('ground'), fill_alpha: 0.4, line_color: color('text'), line_width: 1,
    hatch_pattern: 'right_diagonal_line', hatch_color: color('text'), hatch_scale: 7, hatch_weight: 1.5,
  });
}
