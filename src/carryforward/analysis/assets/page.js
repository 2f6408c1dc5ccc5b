// SPDX-License-Identifier: Apache-2.0
// Adds colours and figures to the text of the page. Only windows near the viewport are split into token elements; the
// others stay plain text, so that the cost depends on what is visible and not on the length of the text. Data reaches
// the page only as text nodes, never as markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;

  // --- numbers ------------------------------------------------------------------------------------------------------

  function unpack(text, ArrayType) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new ArrayType(bytes.buffer);
  }
  const IndexArray = data.wide ? Uint32Array : Uint16Array;
  const lengths = unpack(data.lengths, Uint32Array);
  const ends = unpack(data.windows, Uint32Array);  // one past the last token of each window
  const kinds = unpack(data.kinds, Uint8Array);
  const tokens = unpack(data.tokens, IndexArray);
  const logProbs = data.logProbs.map((packed) => unpack(packed, Uint16Array));
  const topTokens = data.topTokens.map((packed) => unpack(packed, IndexArray));
  const topLogProbs = data.topLogProbs.map((packed) => unpack(packed, Uint16Array));
  const count = tokens.length, firstStateful = ends[0];  // the first token that is predicted with a state
  const gain = (i) => (logProbs[1][i] - logProbs[0][i]) / data.steps;
  const starts = (w) => (w ? ends[w - 1] : 0);

  function windowOf(i) {
    let low = 0, high = ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] > i) high = middle; else low = middle + 1;
    }
    return low;
  }

  const shades = [0.08, 0.2, 0.4, 0.7, 1].map((share) => share * data.scale);
  const shade = (value) => shades.filter((minimum) => Math.abs(value) >= minimum).length;

  const number = (value, digits = 2) => value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + number(Math.abs(value), digits);
  function percent(p) {
    return p >= 0.9995 ? "100%" : p >= 0.0995 ? number(100 * p, 0) + "%" : p >= 0.001 ? number(100 * p, 1) + "%" : "<0.1%";
  }

  // --- elements -----------------------------------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    const svg = ["svg", "rect", "line", "path", "circle", "text", "title", "g"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }
  const sign = (value) => (value < 0 ? "minus" : "plus");

  function visibleSpaces(text) {  // spaces, tabs and line ends as visible characters
    const parts = text.split(/([ \n\r\t]+)/).filter(Boolean);
    return parts.map((part) => /^[ \n\r\t]/.test(part)
      ? element("span", {class: "space"}, part.replace(/\r?\n/g, "↵").replace(/[ \r]/g, "␣").replace(/\t/g, "⇥"))
      : part);
  }

  // --- the text -----------------------------------------------------------------------------------------------------

  const sections = [...document.querySelectorAll(".window")];
  let current = -1;  // the selected token, or the last one that was

  sections.forEach((section, w) => {
    const row = data.byWindow[w - 1];
    const mark = element("div", {class: "mark"}, element("b", {}, String(w + 1)));
    mark.append(row ? element("span", {class: sign(row.gain), title: "mean gain of this window"}, signed(row.gain)) : "no state yet");
    section.prepend(mark);
  });

  function tokenElement(i, text) {
    const value = gain(i), step = i < firstStateful ? 0 : shade(value);
    const classes = ["token"];
    if (step) classes.push(value > 0 ? "helped" : "hurt", "s" + step);
    if (!text) classes.push("part");
    else if (/^\s*\n\s*$/.test(text)) classes.push("break");
    return element("span", {class: classes.join(" "), "data-i": i, tabindex: -1}, text);
  }

  function splitWindow(w) {
    const holder = sections[w].querySelector(".text");
    if (holder.dataset.split) return;
    const text = holder.textContent, fragment = document.createDocumentFragment();
    for (let i = starts(w), offset = 0; i < ends[w]; offset += lengths[i], i++) {
      const piece = text.slice(offset, offset + lengths[i]);
      const spaced = /^ \S/.test(piece);  // the space has no colour: it may be at the end of a line
      if (spaced) fragment.append(" ");
      fragment.append(tokenElement(i, spaced ? piece.slice(1) : piece));
    }
    holder.replaceChildren(fragment);
    holder.dataset.split = "yes";
  }

  function joinWindow(w) {  // back to plain text
    const holder = sections[w].querySelector(".text");
    if (!holder.dataset.split || (current >= 0 && windowOf(current) === w)) return;
    holder.textContent = holder.textContent;
    delete holder.dataset.split;
  }

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) (entry.isIntersecting ? splitWindow : joinWindow)(sections.indexOf(entry.target));
  }, {rootMargin: "100% 0px"});
  sections.forEach((section) => observer.observe(section));

  function tokenAt(i) {
    splitWindow(windowOf(i));
    return sections[windowOf(i)].querySelector(`[data-i="${i}"]`);
  }
  const textOf = (i) => tokenAt(i).textContent || data.vocabulary[tokens[i]];

  // --- one token ----------------------------------------------------------------------------------------------------

  function side(s, i, title) {
    const logProb = -logProbs[s][i] / data.steps;
    const node = element("div", {class: "side"}, element("h3", {}, title, element("b", {title: "log-probability"}, signed(logProb))));
    for (let k = 0; k < data.top; k++) {
      const token = topTokens[s][i * data.top + k], p = Math.exp(-topLogProbs[s][i * data.top + k] / data.steps);
      const came = token === tokens[i];  // the token that the text has
      node.append(element("div", {class: came ? "choice came" : "choice", style: `--p: ${(100 * p).toFixed(1)}%`},
        element("span", {}, ...visibleSpaces(data.vocabulary[token])), element("span", {}, percent(p))));
    }
    return node;
  }

  function describe(i) {
    const w = windowOf(i), kind = Math.floor(kinds[i] / data.seenNames.length), seen = kinds[i] % data.seenNames.length;
    const position = i ? `window ${w + 1}, token ${i - (w ? starts(w) : 1) + 1}` : "the first token";
    return `${position} · ${data.kindNames[kind]}` + (kind === data.kindNames.length - 1 ? "" : `, ${data.seenNames[seen]}`);
  }

  function showCard(i) {
    const card = byId("card"), word = element("div", {class: "word"}, element("b", {}, ...visibleSpaces(textOf(i))));
    card.replaceChildren(word, element("p", {class: "note"}, describe(i)));
    if (!i) {
      card.append(element("p", {class: "note"}, "The first token is not predicted."));
      return;
    }
    word.append(i < firstStateful ? element("span", {class: "hint"}, "no state yet") : element("span", {class: sign(gain(i)), title: "gain in nats"}, signed(gain(i))));
    card.append(element("div", {class: "sides"}, side(0, i, "with the state"), side(1, i, "state removed")));
  }

  function ariaLabel(i) {
    if (!i) return "the first token";
    const [withState, without] = logProbs.map((values) => number(-values[i] / data.steps));
    return `${textOf(i).trim() || "white space"}: log-probability ${withState} with the state, ${without} without, gain ${number(gain(i))}`;
  }

  function select(i, block = "nearest") {
    if (i < 0 || i >= count) return;
    const previous = current;
    current = i;
    const token = tokenAt(i);
    token.setAttribute("role", "note");
    token.setAttribute("aria-label", ariaLabel(i));
    token.focus({preventScroll: true});
    (block === "start" ? sections[windowOf(i)] : token).scrollIntoView({block, behavior: "instant"});
    showCard(i);
    markWindow(windowOf(i));
    if (previous >= 0 && windowOf(previous) !== windowOf(i)) {  // may be far away: let the observer check it again
      observer.unobserve(sections[windowOf(previous)]);
      observer.observe(sections[windowOf(previous)]);
    }
  }

  const main = byId("document");
  main.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) showCard(Number(token.dataset.i));
  });
  main.addEventListener("pointerleave", () => { if (current >= 0) showCard(current); });
  main.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token && getSelection().isCollapsed) select(Number(token.dataset.i));
  });

  // --- keys ---------------------------------------------------------------------------------------------------------

  function firstVisibleToken() {
    const w = sections.findIndex((section) => section.getBoundingClientRect().bottom > 60);
    return starts(Math.max(w, 0));
  }

  function moveLine(step) {  // select the token above or below
    const here = tokenAt(current).getClientRects()[0], middle = (here.left + here.right) / 2;
    let best = -1, distance = Infinity, top = null;
    for (let i = current + step; i >= 0 && i < count; i += step) {
      const box = tokenAt(i).getClientRects()[0];
      if (!box || (step > 0 ? box.top < here.bottom - 4 : box.bottom > here.top + 4)) continue;
      if (top !== null && Math.abs(box.top - top) > 8) break;
      top = box.top;
      const away = Math.abs((box.left + box.right) / 2 - middle);
      if (away < distance) [best, distance] = [i, away];
    }
    select(best);
  }

  function selectStrong(direction) {  // the next token whose gain has the deepest colour
    for (let i = Math.max(current < 0 ? firstVisibleToken() - 1 : current, firstStateful - 1) + 1; i < count; i++) {
      if (gain(i) * direction >= data.scale) return select(i, "center");
    }
  }

  const keys = {
    ArrowRight: () => select(current < 0 ? firstVisibleToken() : current + 1),
    ArrowLeft: () => select(current < 0 ? firstVisibleToken() : current - 1),
    ArrowDown: () => moveLine(1),
    ArrowUp: () => moveLine(-1),
    n: () => { const w = current < 0 ? windowOf(firstVisibleToken()) : windowOf(current) + 1; if (w < sections.length) select(starts(w), "start"); },
    p: () => { const w = windowOf(current < 0 ? firstVisibleToken() : current); select(starts(Math.max(w - 1, 0)), "start"); },
    "+": () => selectStrong(1),
    "-": () => selectStrong(-1),
    t: toggle,
    "?": () => byId("help").showModal(),
    Escape: () => { document.activeElement.blur(); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open || !(event.key in keys)) return;
    const onToken = document.activeElement.classList.contains("token");
    if (!onToken && (event.key === "ArrowUp" || event.key === "ArrowDown")) return;  // they scroll the page
    event.preventDefault();
    keys[event.key]();
  });

  function toggle() {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }
  byId("theme").addEventListener("click", toggle);
  byId("help-button").addEventListener("click", () => byId("help").showModal());

  // --- figures ------------------------------------------------------------------------------------------------------

  const WIDTH = 400, HEIGHT = 130, LEFT = 44, BOTTOM = 20;

  function axes(values, label, from, to) {  // an empty chart, and the function from a value to its y coordinate
    const low = Math.min(0, ...values), high = Math.max(0, ...values), margin = (high - low || 1) * 0.06;
    const y = (value) => 6 + (HEIGHT - BOTTOM - 6) * (1 - (value - low + margin) / (high - low + 2 * margin || 1));
    const svg = element("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label});
    const step = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5].find((size) => (high - low) / size <= 4) || 10;
    for (let n = Math.ceil(low / step); n * step <= high + 1e-9; n++) {
      const tick = n * step;
      svg.append(element("line", {class: n ? "axis" : "zero", x1: LEFT, x2: WIDTH, y1: y(tick), y2: y(tick)}));
      svg.append(element("text", {x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"}, (n < 0 ? "−" : "") + number(Math.abs(tick), step < 0.01 ? 3 : step < 0.1 ? 2 : 1)));
    }
    svg.append(element("text", {x: LEFT, y: HEIGHT - 4}, from), element("text", {x: WIDTH, y: HEIGHT - 4, "text-anchor": "end"}, to));
    return [svg, y];
  }

  function byPosition(rows) {
    const last = rows.at(-1), label = `Mean gain from ${signed(rows[0].gain)} at the start of a window to ${signed(last.gain)} at its end`;
    const [svg, y] = axes(rows.map((row) => row.gain), label, "token 1", `token ${last.to}`);
    const x = (row) => LEFT + 4 + (WIDTH - LEFT - 8) * (row.from + row.to - 1) / (2 * last.to - 1);
    svg.append(element("path", {class: "curve", d: "M" + rows.map((row) => `${x(row).toFixed(1)} ${y(row.gain).toFixed(1)}`).join("L")}));
    for (const row of rows) {
      const range = row.to - row.from > 1 ? `tokens ${row.from + 1} to ${row.to}` : `token ${row.to}`;
      svg.append(element("circle", {class: "dot", r: 3, cx: x(row), cy: y(row.gain)}, element("title", {}, `${range}: ${signed(row.gain, 3)}`)));
    }
    return svg;
  }

  function byWindow(rows) {
    const [svg, y] = axes(rows.map((row) => row.gain), `Mean gain of ${rows.length} windows`, "window 2", `window ${rows.length + 1}`);
    const slot = (WIDTH - LEFT) / rows.length, width = Math.min(Math.max(slot * 0.8, 0.8), 28);
    for (const row of rows) {
      const x = LEFT + slot * (row.window - 0.5) - width / 2, top = Math.min(y(row.gain), y(0)), height = Math.max(Math.abs(y(row.gain) - y(0)), 0.5);
      const bar = element("rect", {class: `bar go ${row.gain < 0 ? "down" : "up"}`, x, y: top, width, height, "data-w": row.window},
        element("title", {}, `window ${row.window + 1}: ${signed(row.gain, 3)}`));
      bar.addEventListener("click", () => select(starts(row.window), "start"));
      svg.append(bar);
    }
    return svg;
  }

  function markWindow(w) {
    for (const bar of document.querySelectorAll("#by-window .bar")) bar.classList.toggle("now", Number(bar.dataset.w) === w);
  }

  function attention(layers) {
    const heads = layers[0].length, values = layers.flat().filter((x) => x !== null), largest = Math.max(...values, 1e-9);
    const l = layers.findIndex((row) => row.includes(largest)), h = l < 0 ? -1 : layers[l].indexOf(largest);
    const maximum = `maximum ${percent(largest)} in layer ${l + 1}, head ${h + 1}`;
    const cellWidth = Math.min((WIDTH - LEFT) / heads, 46), cellHeight = Math.min(Math.max(200 / layers.length, 9), 22);
    const svg = element("svg", {viewBox: `0 0 ${WIDTH} ${cellHeight * layers.length + 20}`, role: "img",
      "aria-label": `Attention to the state, ${layers.length} layers and ${heads} heads; ${maximum}`});
    const every = Math.ceil(layers.length / 15);
    layers.forEach((row, i) => {
      if (i % every === 0) svg.append(element("text", {x: LEFT - 6, y: cellHeight * (i + 0.5) + 4, "text-anchor": "end"}, i ? i + 1 : "layer 1"));
      row.forEach((value, j) => {
        const box = {x: LEFT + cellWidth * j, y: cellHeight * i, width: cellWidth - 1, height: cellHeight - 1, rx: 2};
        if (value === null) svg.append(element("rect", {...box, class: "closed"}, element("title", {}, `the state does not enter layer ${i + 1}`)));
        else svg.append(element("rect", {...box, class: "level", "fill-opacity": (0.05 + 0.95 * value / largest).toFixed(3)},
          element("title", {}, `layer ${i + 1}, head ${j + 1}: ${percent(value)}`)));
      });
    });
    svg.append(element("text", {x: LEFT, y: cellHeight * layers.length + 14}, "head 1"),
      element("text", {x: LEFT + cellWidth * heads - 1, y: cellHeight * layers.length + 14, "text-anchor": "end"}, String(heads)));
    const closed = values.length < heads * layers.length ? " The state does not enter the grey layers." : "";
    return [svg, element("p", {class: "note"}, `Mean share of a token’s attention; ${maximum}.${closed}`)];
  }

  function layerWeights(weights) {
    const rowHeight = Math.min(16, 240 / weights.length), largest = Math.max(...weights);
    const svg = element("svg", {viewBox: `0 0 ${WIDTH} ${rowHeight * weights.length + 4}`, role: "img", "aria-label": `Weights of ${weights.length} layers`});
    weights.forEach((weight, i) => {
      const width = Math.max((WIDTH - LEFT - 50) * weight / largest, 1), y = rowHeight * i;
      svg.append(element("rect", {class: "level", x: LEFT, y, width, height: rowHeight - 2, rx: 2}),
        element("text", {x: LEFT - 6, y: y + rowHeight - 4, "text-anchor": "end"}, i ? i + 1 : "layer 1"),
        element("text", {x: LEFT + width + 6, y: y + rowHeight - 4}, number(weight, 3)));
    });
    return [svg, element("p", {class: "note"}, "Learned weights of the layers’ outputs (equation 1).")];
  }

  function kindTable(rows) {
    const heads = ["", "all", ...data.seenNames], body = element("tbody");
    for (const kind of data.kindNames) {
      const ofKind = rows.filter((row) => row.kind === kind);
      if (!ofKind.length) continue;
      const line = element("tr", {}, element("td", {}, kind));
      for (const seen of heads.slice(1)) {
        const row = ofKind.find((candidate) => candidate.seen === seen);
        const step = row ? shade(row.gain * 2.5) : 0;  // means are smaller than single gains
        line.append(row ? element("td", {class: step ? `${row.gain > 0 ? "helped" : "hurt"} s${step}` : "", title: `${row.tokens.toLocaleString("en")} tokens`}, signed(row.gain)) : element("td", {class: "hint"}, "–"));
      }
      body.append(line);
    }
    return element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {scope: "col"}, head)))), body);
  }

  function wordList(rows, title) {
    const list = element("div", {}, element("h3", {}, title));
    for (const row of rows) {
      const button = element("button", {class: "entry", type: "button", title: `mean gain per token ${signed(row.gain)}; click for the next occurrence`},
        element("span", {}, row.word), element("i", {}, `×${row.times}`), element("span", {class: sign(row.total)}, signed(row.total, 1)));
      button.addEventListener("click", () => select(row.places.find((token) => token > current) ?? row.places[0], "center"));
      list.append(button);
    }
    return list;
  }

  function showSummary() {
    const {summary} = data, shown = [
      ["perplexity with the state", number(summary.perplexity)], ["without the state", number(summary.perplexity_without)],
      ["mean gain, nats", signed(summary.gain, 3)], ["tokens helped", percent(summary.helped)],
      ["tokens", summary.tokens.toLocaleString("en")], ["windows", summary.windows.toLocaleString("en")],
    ];
    byId("summary").append(...shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    byId("model").textContent = `${data.model}, windows of ${data.window} tokens` + (data.overlap ? `, overlap ${data.overlap}` : "");
    if (data.overlap) byId("shared").textContent = `, except for the ${data.overlap} tokens that it shares with the window before`;
    for (let step = -5; step <= 5; step++) {
      const classes = step ? `${step > 0 ? "helped" : "hurt"} s${Math.abs(step)}` : "";
      byId("scale").append(element("span", {class: classes}, step ? signed(step < 0 ? -shades[-step - 1] : shades[step - 1], data.scale < 0.5 ? 3 : 2).replace(/0+$/, "").replace(/\.$/, "") : "0"));
    }
    const origin = data.provenance;
    byId("footer").textContent = `carryforward ${origin.carryforward} (${origin.commit.slice(0, 12)}${origin.commit.endsWith("-dirty") ? ", with local changes" : ""}) · ${origin.date} · `
      + Object.entries(origin.versions).map(([name, version]) => `${name} ${version}`).join(", ")
      + ` · ${origin.hardware.gpu || origin.hardware.cpu} · ${origin.command}`;
  }

  showSummary();
  byId("by-position").append(byPosition(data.byPosition));
  byId("by-window").append(byWindow(data.byWindow));
  if (data.attention.flat().some((x) => x !== null)) byId("attention").append(...attention(data.attention));
  else byId("attention-panel").remove(); // a matrix changes what layers read: no attention is paid to it
  if (data.layerWeights) byId("weights").append(...layerWeights(data.layerWeights));
  else byId("weights-panel").remove();
  byId("kinds").append(kindTable(data.byKind));
  byId("words").append(wordList(data.helped, "total gain, nats"), wordList(data.hurt, "total loss, nats"));
})();
