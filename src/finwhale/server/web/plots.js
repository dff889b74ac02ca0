/* Plots with axes, scales and values under the pointer. */

import uPlot from "./vendor/uplot.js";
import {element} from "./dom.js";

const HEIGHT = 190;
const MIN_SPAN_S = 60;
const pointer = uPlot.sync("engine");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function axes(unit, x = {}) {
  const grid = {stroke: colour("--line"), width: 1};
  const shared = {stroke: colour("--soft"), grid, ticks: {show: false}, font: "12px system-ui"};
  return [{...shared, ...x}, {...shared, size: 58, values: (_, values) => values.map(value => text(value, unit))}];
}

/* A time of day as the browser's locale writes it. */
function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString();
}

function text(value, unit) {
  if (value === null || value === undefined) return "–";
  const short = Math.abs(value) >= 10000 ? `${(value / 1000).toFixed(0)}k` : String(Number(value.toPrecision(3)));
  return `${short}${unit}`;
}

/* A figure with lines over time, or over positions.

   `lines` are [{label}]; `unit` follows each value; `highest` is the top of the scale. */
export class Plot {
  constructor({title, lines, unit = "", highest, positions = false}) {
    this.options = {lines, unit, highest, positions};
    this.note = element("span");
    this.place = element("div", {className: "plot", role: "img", "aria-label": title});
    this.figure = element("figure", {},
      element("figcaption", {}, element("h2", {textContent: title}), this.note), this.place);
  }

  /* `data` are uPlot's columns; `note` stands beside the title. The plot is made when it first has a width.
     Without a pointer over it, the legend has the last values. */
  show(data, note = "") {
    this.data = data;
    this.note.textContent = note;
    if (!this.place.clientWidth) return;
    if (!this.plot) this.#make();
    else {
      const width = this.place.clientWidth;
      if (this.plot.width !== width) this.plot.setSize({width, height: HEIGHT});
      this.plot.setData(data);
    }
    if (!(this.plot.cursor.left >= 0)) this.plot.setLegend({idx: data[0].length - 1});
  }

  /* Makes the plot again, in the colours of now. */
  restyle() {
    this.plot?.destroy();
    this.plot = null;
  }

  #make() {
    const {lines, unit, highest, positions} = this.options;
    const names = ["--plot-1", "--plot-2", "--plot-3", "--plot-4", "--plot-5", "--plot-6"];
    const dashes = [[], [6, 3], [2, 3], [8, 3, 2, 3], [], [6, 3]];
    const x = positions
      ? {values: (_, values) => values.map(value => (Number.isInteger(value) ? value : "")), incrs: [1, 2, 5]}
      : {values: (_, times) => times.map(clock), space: 90};
    this.plot = new uPlot({
      width: this.place.clientWidth,
      height: HEIGHT,
      scales: {
        x: positions
          ? {time: false, range: (_, low, high) => [low - 0.5, high + 0.5]}
          : {time: true, range: (_, low, high) => [Math.min(low, high - MIN_SPAN_S), high]},
        y: {range: (_, low, high) => [0, highest || (high || 1) * 1.1]},
      },
      axes: axes(unit, x),
      cursor: {sync: positions ? undefined : {key: pointer.key}, drag: {x: false, y: false}},
      series: [
        {
          label: positions ? "position" : "time",
          value: (_, found) =>
            (found === null ? "–" : positions ? found : clock(found)),
        },
        ...lines.map((line, i) => ({
          label: line.label,
          stroke: colour(names[i % names.length]),
          width: 2,
          dash: dashes[i % dashes.length],
          points: {show: positions, size: 7},
          spanGaps: false,
          value: (_, found) => text(found, unit),
          ...(positions && {paths: uPlot.paths.bars({size: [0.6, 60]}), fill: colour("--plot-1-fill")}),
        })),
      ],
    }, this.data, this.place);
  }
}
