"use strict";
(function () {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const NARROW = 640;
  const LONG = 24, SHORT = 15; // rows: tables longer than LONG show SHORT until asked for more

  // ---------------------------------------------------------------- theme

  function stored() { try { return localStorage.getItem("spikeprof-theme"); } catch (e) { return null; } }
  function theme() { return root.dataset.theme || (media.matches ? "dark" : "light"); }
  const chosen = stored();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  document.getElementById("theme").addEventListener("click", function () {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("spikeprof-theme", root.dataset.theme); } catch (e) { /* file:// without storage */ }
    drawAll();
  });
  media.addEventListener("change", function () { if (!root.dataset.theme) drawAll(); });

  // ---------------------------------------------------------------- charts

  const plots = Array.from(document.querySelectorAll("[data-figure]"));
  const config = {
    displaylogo: false, responsive: true, scrollZoom: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d"],
  };

  function dressed(figure, narrow) {
    const look = data.themes[theme()];
    const layout = structuredClone(figure.layout);
    layout.font.color = look.font.color;
    layout.modebar = look.modebar;
    layout.hoverlabel = Object.assign({}, layout.hoverlabel, look.hoverlabel);
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(key)) Object.assign(layout[key], look.axis);
    }
    if (layout.coloraxis) layout.coloraxis.colorscale = figure.meta.even ? look.evenscale : look.colorscale;
    for (const shape of layout.shapes || []) shape.fillcolor = look.shade;
    if (narrow) {
      layout.margin.l = figure.meta.labels ? 104 : figure.meta.tree ? 8 : 52;
      layout.margin.r = 8;
      layout.font.size = 11;
      layout.dragmode = false; // a finger on a chart scrolls the page
      if (layout.showlegend && figure.data.length > 8) layout.height += 18 * figure.data.length; // a line each
      if (layout.coloraxis && layout.coloraxis.colorbar) Object.assign(layout.coloraxis.colorbar, { len: 0.95, nticks: 4 });
      if (figure.meta.upright) { // heads of columns
        layout.xaxis.tickangle = -90;
        layout.xaxis.ticktext = layout.xaxis.ticktext.map(function (t) { return t.replace("<br>", " "); });
        layout.margin.t = 112;
        layout.height += 64;
      }
      if (layout.yaxis && layout.yaxis.ticktext) {
        layout.yaxis.ticktext = layout.yaxis.ticktext.map(function (t) { return clip(t, 14); });
        layout.yaxis.tickfont = { size: 10 };
      }
    }
    return layout;
  }

  // Labels hold entities (&lt;): cut whole characters only.
  function clip(text, most) {
    const characters = text.match(/&(?:lt|gt|amp|quot|#\d+);|[\s\S]/g) || [];
    return characters.length <= most ? text : characters.slice(0, most - 1).join("").replace(/…+$/, "") + "…";
  }

  function traces(figure, narrow) {
    const full = figure.meta.rows;
    return figure.data.map(function (t) {
      if (narrow && t.texttemplate) return Object.assign({}, t, { texttemplate: "" }); // no room for text in cells
      if (narrow && t.mode === "markers+text") return Object.assign({}, t, { mode: "markers" });
      if (!full || t.type !== "heatmap") return t;
      return Object.assign({}, t, { text: t.z.map(function (row, i) { return row.map(function () { return full[i]; }); }) });
    });
  }

  let syncing = false;
  function follow(plot, event) {
    if (syncing || !data.figures[plot.dataset.figure].meta.time) return;
    let range = null;
    if (event["xaxis.range[0]"] !== undefined) range = [event["xaxis.range[0]"], event["xaxis.range[1]"]];
    else if (event["xaxis.range"]) range = event["xaxis.range"];
    else if (event["xaxis.autorange"]) range = data.whole;
    if (!range) return;
    syncing = true;
    const others = plots.filter(function (p) { return data.figures[p.dataset.figure].meta.time && (p !== plot || range === data.whole); });
    Promise.all(others.map(function (p) { return Plotly.relayout(p, { "xaxis.range": range.slice() }); }))
      .then(function () { syncing = false; }, function () { syncing = false; });
  }

  function draw(plot) {
    const figure = data.figures[plot.dataset.figure];
    const narrow = plot.clientWidth < NARROW;
    const layout = dressed(figure, narrow);
    plot.style.height = layout.height + "px";
    return Plotly.react(plot, traces(figure, narrow), layout, Object.assign({ displayModeBar: narrow ? false : "hover" }, config)).then(function () {
      if (!plot.dataset.drawn) {
        plot.dataset.drawn = "yes";
        plot.on("plotly_relayout", function (event) { follow(plot, event); });
      }
    });
  }
  function drawAll() { if (window.Plotly) plots.forEach(draw); }

  let width = window.innerWidth;
  window.addEventListener("resize", function () {
    const crossed = (width < NARROW + 60) !== (window.innerWidth < NARROW + 60);
    width = window.innerWidth;
    if (crossed) drawAll();
  });

  // ---------------------------------------------------------------- tables

  function value(row, column) {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.v);
  }

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return (isNaN(a) ? -Infinity : a) - (isNaN(b) ? -Infinity : b);
    return a < b ? -1 : a > b ? 1 : 0;
  }

  document.querySelectorAll("[data-table]").forEach(function (box) {
    const body = box.querySelector("tbody");
    const heads = Array.from(box.querySelectorAll("thead th"));
    let sorted = function () {};
    if (body.rows.length > 1) heads.forEach(function (head, column) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.textContent = head.textContent;
      head.textContent = "";
      head.appendChild(button);
      button.addEventListener("click", function () {
        const numeric = head.classList.contains("num") || head.classList.contains("share");
        const before = head.getAttribute("aria-sort");
        const down = before ? before === "ascending" : numeric;
        heads.forEach(function (h) { h.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = Array.from(body.rows);
        rows.sort(function (a, b) { const c = compare(value(a, column), value(b, column)); return down ? -c : c; });
        rows.forEach(function (row) { body.appendChild(row); });
        sorted();
      });
    });
    const filter = box.querySelector("input[type=search]");
    let more = null;
    let whole = body.rows.length <= LONG;
    if (!whole) {
      more = document.createElement("button");
      more.type = "button";
      more.className = "more";
      more.addEventListener("click", function () { whole = !whole; show(); });
      box.appendChild(more);
    }
    function show() {
      const words = filter ? filter.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
      Array.from(body.rows).forEach(function (row, place) {
        const text = words.length ? row.textContent.toLowerCase() : "";
        row.hidden = words.length ? !words.every(function (w) { return text.includes(w); }) : !whole && place >= SHORT;
      });
      if (more) {
        more.textContent = whole ? "Show the first " + SHORT + " rows" : "Show all " + body.rows.length + " rows";
        more.hidden = words.length > 0;
      }
    }
    sorted = show;
    if (filter) filter.addEventListener("input", show);
    show();
  });

  // What is folded is printed, too.
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details.folded").forEach(function (one) { one.open = true; });
  });

  drawAll();
})();
