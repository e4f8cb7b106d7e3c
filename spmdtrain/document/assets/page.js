(() => {
  "use strict";
  const POLL_MS = 2000;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const first = JSON.parse(document.getElementById("page-data").textContent);
  let charts = first.charts;
  const logarithmic = new Set(); // ids of charts
  const drawn = new Map(); // id of a chart -> {json, view, element}

  function config() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    const category = Array.from({ length: 10 }, (_, n) => color(`color-${n}`));
    const font = getComputedStyle(document.body).fontFamily;
    const label = { labelColor: color("muted"), titleColor: color("muted") };
    return {
      background: null,
      font,
      padding: { left: 0, right: 6, top: 6, bottom: 4 },
      view: { stroke: null },
      range: { category },
      mark: { color: category[0] },
      rule: { color: color("muted") },
      text: { color: color("text") },
      axis: {
        ...label, gridColor: color("line"), domainColor: color("strong-line"),
        tickColor: color("strong-line"), labelFontSize: 11, titleFontSize: 11,
        titleFontWeight: 400, labelOverlap: "greedy", titlePadding: 6,
      },
      axisX: { tickCount: 8 },
      axisY: { domain: false, ticks: false, labelPadding: 6, minExtent: 34 },
      legend: { ...label, labelFontSize: 12, orient: "top", title: null, symbolType: "square", labelLimit: 260, columnPadding: 14 },
      header: label,
      title: { color: color("text"), fontSize: 12, fontWeight: 600, anchor: "start" },
    };
  }

  function rowsOf(dataset) {
    if (dataset.rows) return dataset.rows;
    const rows = [];
    for (const { name, color, marked, x, y, mean } of dataset.series) {
      const faint = mean !== null;
      for (let i = 0; i < x.length; i++) {
        // A value between two gaps has no line, so it gets a mark.
        const alone = y[i] !== null && (i === 0 || y[i - 1] === null) && (y[i + 1] ?? null) === null;
        rows.push({ x: x[i], y: y[i], series: name, color, faint, marked: y[i] !== null && (marked || alone) });
      }
      if (faint) {
        mean.x.forEach((at, i) => {
          rows.push({ x: at, y: mean.y[i], series: name, color, faint: false, marked: false });
        });
      }
    }
    return rows;
  }

  function specOf(id) {
    const spec = structuredClone(charts[id].spec);
    if (logarithmic.has(id)) {
      for (const { encoding } of spec.layer) {
        if (encoding.y) encoding.y.scale = { type: "log", nice: true };
      }
    }
    return spec;
  }

  function datasets(chart) {
    return Object.fromEntries(Object.entries(chart.data).map(([name, of]) => [name, rowsOf(of)]));
  }

  async function draw(id) {
    const element = document.getElementById(id);
    const chart = charts[id];
    if (!element || !chart || drawn.has(id)) return;
    const entry = { json: JSON.stringify(specOf(id)), element };
    drawn.set(id, entry);
    try {
      const spec = { ...specOf(id), datasets: datasets(chart) };
      const result = await vegaEmbed(element, spec, {
        mode: "vega-lite", actions: false, renderer: "svg", ast: true, config: config(), logLevel: 1 /* errors */,
        tooltip: { disableDefaultStyle: false, theme: "custom" },
      });
      entry.view = result.view;
      if (chart.hover) followPointer(id, entry);
      element.dataset.drawn = "yes";
    } catch (error) {
      element.textContent = `This chart cannot be drawn: ${error.message}`;
    }
  }

  // -- values at the pointer ------------------------------------------------------------------

  const short = (value) => {
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    const size = Math.abs(value);
    if (size >= 10000) return Math.round(value).toLocaleString("en-US");
    return size && size < 0.0001 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  };

  function nearest(x, target) {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= target) low = middle; else high = middle;
    }
    return Math.abs(x[high] - target) < Math.abs(x[low] - target) ? high : low;
  }

  function followPointer(id, entry) {
    const { element } = entry;
    const box = document.createElement("div");
    box.className = "pointer";
    box.hidden = true;
    element.append(box);
    const set = (rows) => entry.view.data("hover", rows).runAsync();
    const leave = () => { box.hidden = true; set([]); };
    element.onpointerleave = leave;
    element.onpointermove = (event) => {
      const view = entry.view;
      const bounds = element.querySelector("svg").getBoundingClientRect();
      const at = event.clientX - bounds.left - view.origin()[0];
      if (at < -8 || at > view.width() + 8) return leave();
      const target = view.scale("x").invert(at);
      const rows = [];
      for (const { name, color, x, y } of charts[id].data.series.series) {
        if (!x.length || target < x[0] && x.length > 1 && view.scale("x")(x[0]) - at > 24) continue;
        const i = nearest(x, target);
        if (Math.abs(view.scale("x")(x[i]) - at) > 48) continue;
        if (y[i] !== null) rows.push({ x: x[i], y: y[i], series: name, color });
      }
      if (!rows.length) return leave();
      set(rows);
      const step = rows.reduce((a, b) =>
        Math.abs(b.x - target) < Math.abs(a.x - target) ? b : a).x;
      const line = (mark, text, value) => {
        const row = document.createElement("div");
        if (mark !== null) {
          const dot = document.createElement("i");
          dot.className = `color-${mark}`;
          row.append(dot);
        }
        row.append(text);
        if (value !== null) {
          const strong = document.createElement("b");
          strong.textContent = value;
          row.append(strong);
        }
        return row;
      };
      const title = entry.xTitle ?? (entry.xTitle = charts[id].spec.layer?.[0].encoding.x.title ?? "");
      box.replaceChildren(
        line(null, `${title} ${short(step)}`, null),
        ...rows.map((row) => line(row.color, row.series, short(row.y))));
      box.hidden = false;
      const left = event.clientX - element.getBoundingClientRect().left;
      const right = left > element.clientWidth / 2;
      box.style.left = right ? "" : `${left + 14}px`;
      box.style.right = right ? `${element.clientWidth - left + 14}px` : "";
    };
  }

  // -- drawing: what is visible first, the rest one after the other ---------------------------------

  let isDrawing = false;

  function distance(id) {
    const { top, bottom } = document.getElementById(id).getBoundingClientRect();
    return top > innerHeight ? top - innerHeight : Math.max(0, -bottom);
  }

  async function drawAll() {
    delete document.documentElement.dataset.drawn;
    if (isDrawing) return;
    isDrawing = true;
    for (;;) {
      const left = Object.keys(charts).filter((id) => !drawn.has(id) && document.getElementById(id));
      if (!left.length) break;
      const next = left.reduce((a, b) => (distance(b) < distance(a) ? b : a));
      const isVisible = distance(next) === 0;
      await draw(next);
      // The browser can scroll between two charts.
      if (!isVisible) await new Promise((resolve) => setTimeout(resolve, 10));
    }
    isDrawing = false;
    document.documentElement.dataset.drawn = "yes";
  }

  function redraw(ids) {
    for (const id of ids) {
      const { view, element } = drawn.get(id);
      view?.finalize();
      element.replaceChildren();
      drawn.delete(id);
    }
    drawAll();
  }

  function showButtons() {
    for (const button of document.querySelectorAll("button.log")) {
      button.setAttribute("aria-pressed", logarithmic.has(button.dataset.chart));
    }
  }

  document.addEventListener("click", (event) => {
    const id = event.target.closest?.("button.log")?.dataset.chart;
    if (!id) return;
    if (!logarithmic.delete(id)) logarithmic.add(id);
    showButtons();
    if (drawn.has(id)) redraw([id]);
  });

  dark.addEventListener("change", () => redraw([...drawn.keys()]));
  addEventListener("beforeprint", () => Object.keys(charts).forEach(draw));

  // -- a page that is followed -----------------------------------------------------------------------

  function show(update) {
    const open = new Set([...document.querySelectorAll("details[open]")].map((x) => x.id));
    const main = document.getElementById("page");
    const { scrollX, scrollY } = window;
    charts = update.charts;
    document.title = update.title;
    main.innerHTML = update.main; // all text in it is escaped, and the policy allows no script
    for (const details of main.querySelectorAll("details")) details.open = open.has(details.id);
    for (const [id, entry] of drawn) {
      const place = document.getElementById(id);
      if (!place || !entry.view || !charts[id] || entry.json !== JSON.stringify(specOf(id))) {
        entry.view?.finalize();
        drawn.delete(id);
        continue;
      }
      place.replaceWith(entry.element); // the drawn chart moves to the new page
      for (const [name, rows] of Object.entries(datasets(charts[id]))) {
        entry.view.data(name, rows);
      }
      entry.view.runAsync();
    }
    showButtons();
    scrollTo(scrollX, scrollY);
    drawAll();
  }

  async function poll(version) {
    try {
      const answer = await fetch(`update?version=${encodeURIComponent(version)}`);
      if (answer.status === 200) {
        const update = await answer.json();
        show(update);
        version = update.version;
      }
      document.documentElement.dataset.connected = answer.ok ? "yes" : "failed";
    } catch {
      document.documentElement.dataset.connected = "no"; // the server has ended
    }
    setTimeout(poll, POLL_MS, version);
  }

  drawAll();
  if (first.version !== null) setTimeout(poll, POLL_MS, first.version);
})();
