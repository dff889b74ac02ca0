/* Draws a report's plots, and computes differences against the run that the reader chooses. */
(() => {
  "use strict";
  const HEIGHT = 260;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const short = value => (value == null ? "–" : Number(value.toPrecision(4)).toLocaleString("en"));

  /* uPlot wants one column of x for all lines. */
  function columns(lines) {
    const tables = lines.map(line => [line.points.map(([x]) => x), line.points.map(([, y]) => y)]);
    return uPlot.join(tables);
  }

  function draw(place) {
    const plot = JSON.parse(place.parentElement.querySelector("script").textContent);
    const lines = plot.lines.filter(line => line.points.length);
    if (!lines.length) return;
    const grid = {stroke: colour("--line"), width: 1};
    const axis = {stroke: colour("--soft"), grid, ticks: {show: false}, font: "12px system-ui"};
    // A run's lines have one colour: its name is the first word of their labels.
    const runs = [...new Set(lines.map(line => line.label.split(" ")[0]))];
    const scale = plot.logarithmic
      ? {distr: 3} : {range: (_, low, high) => [0, (high || 1) * 1.05]};
    place.textContent = "";
    new uPlot({
      width: place.clientWidth,
      height: HEIGHT,
      scales: {x: {time: false, ...scale}, y: scale},
      axes: [
        {...axis, label: plot.x, labelSize: 22},
        {...axis, label: plot.y, labelSize: 22, size: 62, values: (_, values) => values.map(value => (value == null ? "" : short(value)))},
      ],
      cursor: {drag: {x: false, y: false}},
      series: [
        {label: plot.x, value: (_, found) => short(found)},
        ...lines.map(line => ({
          label: line.label,
          stroke: colour(`--c${runs.indexOf(line.label.split(" ")[0]) % 8}`),
          width: 2,
          dash: line.dashed ? [6, 4] : [],
          points: {show: true, size: 6},
          spanGaps: true,
          value: (_, found) => short(found),
        })),
      ],
    }, columns(lines), place);
  }

  function drawAll() {
    for (const place of document.querySelectorAll(".plot")) draw(place);
  }

  /* Compares every cell of a table with the cell of one column in its row. */
  function compare(table, base) {
    for (const row of table.tBodies[0].rows) {
      const cells = [...row.querySelectorAll("td")], from = Number(cells[base]?.dataset.value);
      cells.forEach((cell, i) => {
        const delta = cell.querySelector(".delta");
        if (!delta) return;
        const change = 100 * (Number(cell.dataset.value) - from) / Math.abs(from);
        const better = cell.dataset.better, told = i !== base && Number.isFinite(change);
        delta.textContent = told ? `${change < 0 ? "-" : "+"}${Math.abs(change).toFixed(1)}%` : "";
        delta.className = "delta";
        if (told && better && Math.abs(change) >= 0.05)
          delta.classList.add((change > 0) === (better === "more") ? "good" : "bad");
      });
    }
  }

  for (const table of document.querySelectorAll(".wide table")) {
    const buttons = [...table.tHead.querySelectorAll("button")];
    buttons.forEach((button, base) => button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      compare(table, base);
    }));
  }

  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 200);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
