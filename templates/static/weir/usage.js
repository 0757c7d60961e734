// The chart of the usage page. Its figures are in the table too: this is for those who see it.

const data = JSON.parse(document.getElementById("usage-data").textContent);
const place = document.getElementById("usage-chart");
const HEIGHT = 240;
let chart = null;

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** A canvas knows no light-dark(): the colour as the page shows it. */
function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  place.append(probe);
  const shown = getComputedStyle(probe).color;
  probe.remove();
  return shown || token(name);
}
const count = (value) => (value == null ? "–" : new Intl.NumberFormat(undefined, { notation: value >= 1e5 ? "compact" : "standard" }).format(value));
const money = (value) =>
  value == null ? "–" : new Intl.NumberFormat(undefined, { style: "currency", currency: "USD", maximumSignificantDigits: 3 }).format(value / 1e6);
const day = (seconds) => new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", timeZone: "UTC" }).format(seconds * 1000);

function draw() {
  const drawn = document.querySelector("[data-chart-choice] input:checked").value;
  const bars = uPlot.paths.bars({ size: [0.7, 40] });
  const write = drawn === "cost" ? money : count;
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  // Stacked: each stands on those before it, so the highest is drawn first and the others over it.
  const stacked = [];
  let below = data.days.map(() => 0);
  data[drawn].forEach(({ label, values, rest }, index) => {
    const fill = colour(rest ? "--line-strong" : `--chart-${index + 1}`);
    below = values.map((value, at) => value + below[at]);
    stacked.unshift([below, { label, fill, stroke: fill, width: 0, paths: bars, points: { show: false }, value: (_, __, ___, at) => write(at == null ? null : values[at]) }]);
  });
  chart?.destroy();
  chart = new uPlot({
    width: place.clientWidth, height: HEIGHT,
    scales: { x: { time: false, range: (_, low, high) => [low - 43_200, high + 43_200] }, y: { range: (_, __, high) => [0, (high || 1) * 1.05] } },
    axes: [
      { ...axis, values: (_, splits) => splits.map(day), grid: { show: false }, incrs: [1, 2, 3, 7, 14, 30].map((days) => days * 86_400), space: 70 },
      { ...axis, values: (_, splits) => splits.map(write), size: 70 },
    ],
    series: [{ label: "Day", value: (_, seconds) => (seconds == null ? "–" : day(seconds)) }, ...stacked.map(([, series]) => series)],
    cursor: { drag: { x: false, y: false }, y: false },
  }, [data.days, ...stacked.map(([heights]) => heights)], place);
}

draw();
new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
for (const input of document.querySelectorAll("[data-chart-choice] input")) input.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
for (const radio of document.querySelectorAll("[data-theme-choice] input")) radio.addEventListener("change", () => setTimeout(draw));
