"use strict";
/* The charts, drawn by uPlot: made once, then only given new numbers. */
const charts = (() => {
  const ITEMS = 32;
  const REST = ITEMS + 4; // where the bar of all others stands
  const HEIGHT = 210;
  const TICKS = { 10: "10", 100: "100", 1e3: "1,000", 1e4: "10⁴", 1e5: "10⁵", 1e6: "10⁶" };
  const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const font = "12px system-ui, sans-serif";

  const axis = (splits, values, more = {}) => ({
    splits: () => splits,
    values: (_, shown) => shown.map(values),
    filter: (_, shown) => shown,
    stroke: colour("soft"),
    font,
    grid: { stroke: colour("grid"), width: 1 },
    ticks: { show: false },
    size: 30,
    ...more,
  });

  const line = (name, more = {}) => ({
    stroke: colour(name),
    width: 2,
    pxAlign: 0,
    points: { show: false },
    ...more,
  });
  const dashed = (name, dash) => line(name, { dash, width: 1.5 });

  const options = (scales, axes, series, hooks = {}) => ({
    width: 300,
    height: HEIGHT,
    padding: [10, 14, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    scales,
    axes,
    series: [{}, ...series],
    hooks,
  });

  // Where the slider stands: a vertical line, and a dot on the curves named in `dots`.
  const position = (chart, items, dots) => {
    const { ctx, bbox } = chart;
    const x = chart.valToPos(items, "x", true);
    ctx.save();
    ctx.strokeStyle = colour("soft")();
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    for (const [name, value] of dots) {
      ctx.fillStyle = colour(name)();
      ctx.beginPath();
      ctx.arc(x, chart.valToPos(value, "y", true), 4.5 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
    }
    ctx.restore();
  };

  const bySize = (element, sizes, scale, y, series) => {
    let current = null;
    const x = { time: false, distr: 3, range: [sizes[0], sizes[sizes.length - 1]] };
    const ticks = axis([10, 100, 1e3, 1e4, 1e5, 1e6], (n) => TICKS[n]);
    const draw = (chart) => current && position(chart, ...current);
    const chart = new uPlot(options({ x, y: scale }, [ticks, y], series, { draw: [draw] }), null, element);
    return {
      chart,
      show: (columns, items, dots) => {
        current = [items, dots];
        chart.setData([sizes, ...columns]);
      },
    };
  };

  const percent = (value) => `${Number((100 * value).toPrecision(2))}%`;

  const weightsChart = (element) => {
    const ranks = axis([1, 8, 16, 24, 32, REST], (k) => (k === REST ? "rest" : String(k)), { grid: { show: false } });
    const bars = (name, width) =>
      line(name, { fill: colour(name), width: 0, pxAlign: 1, paths: uPlot.paths.bars({ size: [width, 60] }) });
    const scales = { x: { time: false, range: [0, REST + 1] }, y: { range: [0, 1] } };
    const y = axis([0, 0.25, 0.5, 0.75, 1], percent, { size: 48 });
    const chart = new uPlot(options(scales, [ranks, y], [bars("pale", 0.95), bars("sharp", 0.55)]), null, element);
    const places = Array.from({ length: REST }, (_, k) => k + 1);
    const column = ({ first, rest }) => places.map((k) => (k === REST ? rest : (first[k - 1] ?? null)));
    return { chart, show: (plain, sharp) => chart.setData([places, column(plain), column(sharp)]) };
  };

  const entropyChart = (element, sizes) =>
    bySize(
      element,
      sizes,
      { range: [0, 14] },
      axis([0, 2, 4, 6, 8, 10, 12, 14], String, { size: 36 }),
      [dashed("bound", [2, 3]), dashed("bound", [8, 4]), line("plain"), line("sharp", { width: 3 })],
    );

  const topChart = (element, sizes) =>
    bySize(
      element,
      sizes,
      { distr: 3, range: [1e-6, 2] },
      axis([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1], percent, { size: 62 }),
      [dashed("loose", [2, 3]), dashed("bound", [8, 4]), line("plain"), line("sharp", { width: 3 })],
    );

  const fitted = (element, { chart }) =>
    new ResizeObserver(() => {
      if (element.clientWidth) chart.setSize({ width: element.clientWidth, height: HEIGHT });
    }).observe(element);

  return { ITEMS, weightsChart, entropyChart, topChart, fitted };
})();
