const at = id => document.getElementById(id);
const headers = () => at("key")?.value ? {authorization: `Bearer ${at("key").value}`} : {};
// Names and lines come from models and requests: they are only ever set as text.
function element(kind, name, ...inside) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.append(...inside);
  return made;
}
function bar(parts) {
  const made = element("div", "bar");
  for (const [name, part] of Object.entries(parts)) {
    const filled = element("span", name);
    filled.style.width = `${100 * Math.min(1, Math.max(0, part))}%`;
    made.append(filled);
  }
  return made;
}
const figure = value => value.toLocaleString("en", {maximumSignificantDigits: 4});
const percent = part => `${Math.round(100 * part)} %`;
async function reply(path, options) {
  const found = await fetch(path, options);
  const body = await found.json().catch(() => ({error: `status ${found.status}`}));
  if (!found.ok) throw new Error(body.error.message ?? body.error);
  return body;
}
let before = null;
function rate(count) {
  const now = performance.now() / 1000;
  const known = before;
  if (!before || now - before.now > 2.5) before = {now, count};
  if (known && now > known.now) before.rate = (count - known.count) / (now - known.now);
  return (before.rate ?? 0).toFixed(before.rate >= 10 ? 0 : 1);
}
function tiles(figures) {
  at("tiles").replaceChildren(...Object.entries(figures).map(
    ([name, value]) => element("div", "", element("dt", "", name), element("dd", "", `${value}`))));
}
function stage(each, slowest) {
  const name = element("span", "", `Stage ${each.stage} `, element("span", "soft", `rank ${each.rank}, ${each.layers}`));
  const row = element("li", each.stage === slowest ? "limits" : "", name,
    bar({busy: each.busy, link: each.wait_link}), element("span", "percent", percent(each.busy)));
  return row;
}
function event(each) {
  const time = new Date(1000 * each.at);
  const shown = element("time", "", time.toLocaleString());
  shown.dateTime = time.toISOString();
  return element("li", "", shown, element("span", "", each.line));
}
function state(status) {
  if (status.epoch.recovering) return ["recovering", "recovering from a failure"];
  if (isBusy(status.queue)) return ["answering", "answering"];
  return ["idle", "waiting for requests"];
}
function tell([name, text]) {
  if (at("state").textContent === text) return;  // said once to those who listen
  at("state").dataset.state = name;
  at("state").textContent = text;
}
async function show() {
  try {
    const status = await reply("status", {headers: headers()});
    const {queue, epoch} = status;
    tell(state(status));
    const figures = figuresOf(queue);
    if (epoch.number) Object.assign(figures, {"epoch": epoch.number, "ranks lost": epoch.lost_ranks});
    tiles(figures);
    at("stages").replaceChildren(...status.stages.map(each => stage(each, status.bottleneck)));
    at("note").textContent = status.bottleneck === null
      ? "No stage is the bottleneck: the pipeline has time for more." : `Stage ${status.bottleneck} is the bottleneck.`;
    at("events").replaceChildren(...status.events.map(event));
  } catch (error) {
    tell(["failed", error.message]);
  }
  setTimeout(show, 1000);
}
