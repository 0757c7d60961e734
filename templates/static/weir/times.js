// Times in the reader's own zone and language.

const TIME_STYLES = {
  time: { hour: "2-digit", minute: "2-digit", second: "2-digit" },
  minute: { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" },
  day: { year: "numeric", month: "short", day: "numeric" },
  date: { weekday: "short", month: "short", day: "numeric", timeZone: "UTC" }, // a day of the tenant's, not a moment
};

/** Rewrites each `<time datetime data-style>` under `root` in the reader's own zone and language. */
export function localiseTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]:not([data-localised])")) {
    const when = new Date(element.dateTime);
    if (Number.isNaN(when.getTime())) continue;
    const style = TIME_STYLES[element.dataset.style] ?? TIME_STYLES.minute;
    element.textContent = new Intl.DateTimeFormat(undefined, style).format(when);
    if (!style.timeZone) element.title = new Intl.DateTimeFormat(undefined, { dateStyle: "full", timeStyle: "long" }).format(when);
    element.dataset.localised = "";
  }
}
