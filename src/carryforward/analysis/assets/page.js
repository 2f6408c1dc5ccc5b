// SPDX-License-Identifier: Apache-2.0
// Lays figures over a text that is already there. Only windows near the viewport are cut into tokens; the others stay
// the plain text they are, so that tens of thousands of tokens cost as much as those one sees. What comes from outside
// reaches the page as text nodes only.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;

  // --- numbers ------------------------------------------------------------------------------------------------------

  function unpacked(text, Kind) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Kind(bytes.buffer);
  }
  const Place = data.wide ? Uint32Array : Uint16Array;
  const lengths = unpacked(data.lengths, Uint32Array);
  const ends = unpacked(data.windows, Uint32Array);  // the token behind each window's last
  const kinds = unpacked(data.kinds, Uint8Array);
  const tokens = unpacked(data.tokens, Place);
  const logProbs = data.logProbs.map((one) => unpacked(one, Uint16Array));
  const topTokens = data.topTokens.map((one) => unpacked(one, Place));
  const topLogProbs = data.topLogProbs.map((one) => unpacked(one, Uint16Array));
  const count = tokens.length, first = ends[0];  // the first token that has a state
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
  const shade = (value) => shades.filter((least) => Math.abs(value) >= least).length;

  const number = (value, digits = 2) => value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
  const signed = (value, digits = 2) => (value < 0 ? "−" : "+") + number(Math.abs(value), digits);
  function percent(p) {
    return p >= 0.9995 ? "100%" : p >= 0.0995 ? number(100 * p, 0) + "%" : p >= 0.001 ? number(100 * p, 1) + "%" : "<0.1%";
  }

  // --- elements -----------------------------------------------------------------------------------------------------

  function element(name, attributes = {}, ...children) {
    const svg = ["svg", "rect", "line", "path", "circle", "text", "title", "g"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const sign = (value) => (value < 0 ? "minus" : "plus");

  function visible(text) {  // spaces and line ends as signs
    const parts = text.split(/([ \n\r\t]+)/).filter(Boolean);
    return parts.map((part) => /^[ \n\r\t]/.test(part)
      ? element("span", {class: "space"}, part.replace(/\r?\n/g, "↵").replace(/[ \r]/g, "␣").replace(/\t/g, "⇥"))
      : part);
  }

  // --- the text -----------------------------------------------------------------------------------------------------

  const sections = [...document.querySelectorAll(".window")];
  let current = -1;  // the token that was last gone to

  sections.forEach((section, w) => {
    const row = data.byWindow[w - 1];
    const mark = element("div", {class: "mark"}, element("b", {}, String(w + 1)));
    mark.append(row ? element("span", {class: sign(row.gain), title: "mean gain of this window"}, signed(row.gain)) : "no state yet");
    section.prepend(mark);
  });

  function tokenElement(i, text) {
    const value = gain(i), step = i < first ? 0 : shade(value);
    const classes = ["token"];
    if (step) classes.push(value > 0 ? "helped" : "hurt", "s" + step);
    if (!text) classes.push("part");
    else if (/^\s*\n\s*$/.test(text)) classes.push("break");
    return element("span", {class: classes.join(" "), "data-i": i, tabindex: -1}, text);
  }

  function fill(w) {
    const holder = sections[w].querySelector(".text");
    if (holder.dataset.filled) return;
    const text = holder.textContent, made = document.createDocumentFragment();
    for (let i = starts(w), at = 0; i < ends[w]; at += lengths[i], i++) {
      const piece = text.slice(at, at + lengths[i]);
      const spaced = /^ \S/.test(piece);  // the space stays uncoloured: it may hang at the end of a line
      if (spaced) made.append(" ");
      made.append(tokenElement(i, spaced ? piece.slice(1) : piece));
    }
    holder.replaceChildren(made);
    holder.dataset.filled = "yes";
  }

  function empty(w) {
    const holder = sections[w].querySelector(".text");
    if (!holder.dataset.filled || (current >= 0 && windowOf(current) === w)) return;
    holder.textContent = holder.textContent;
    delete holder.dataset.filled;
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) (entry.isIntersecting ? fill : empty)(sections.indexOf(entry.target));
  }, {rootMargin: "100% 0px"});
  sections.forEach((section) => watcher.observe(section));

  function at(i) {
    fill(windowOf(i));
    return sections[windowOf(i)].querySelector(`[data-i="${i}"]`);
  }
  const textOf = (i) => at(i).textContent || data.vocabulary[tokens[i]];

  // --- one token ----------------------------------------------------------------------------------------------------

  function side(s, i, title) {
    const logProb = -logProbs[s][i] / data.steps;
    const made = element("div", {class: "side"}, element("h3", {}, title, element("b", {title: "log-probability"}, signed(logProb))));
    for (let k = 0; k < data.top; k++) {
      const token = topTokens[s][i * data.top + k], p = Math.exp(-topLogProbs[s][i * data.top + k] / data.steps);
      const came = token === tokens[i];
      made.append(element("div", {class: came ? "choice came" : "choice", style: `--p: ${(100 * p).toFixed(1)}%`},
        element("span", {}, ...visible(data.vocabulary[token])), element("span", {}, percent(p))));
    }
    return made;
  }

  function described(i) {
    const w = windowOf(i), kind = Math.floor(kinds[i] / data.seenNames.length), seen = kinds[i] % data.seenNames.length;
    const place = i ? `window ${w + 1}, token ${i - (w ? starts(w) : 1) + 1}` : "the first token";
    return `${place} · ${data.kindNames[kind]}` + (kind === data.kindNames.length - 1 ? "" : `, ${data.seenNames[seen]}`);
  }

  function show(i) {
    const card = byId("card"), word = element("div", {class: "word"}, element("b", {}, ...visible(textOf(i))));
    card.replaceChildren(word, element("p", {class: "note"}, described(i)));
    if (!i) {
      card.append(element("p", {class: "note"}, "Nothing stands before it, so nothing predicts it."));
      return;
    }
    word.append(i < first ? element("span", {class: "hint"}, "no state yet") : element("span", {class: sign(gain(i)), title: "gain in nats"}, signed(gain(i))));
    card.append(element("div", {class: "sides"}, side(0, i, "with the state"), side(1, i, "state removed")));
  }

  function told(i) {
    if (!i) return "the first token";
    const [a, b] = logProbs.map((one) => number(-one[i] / data.steps));
    return `${textOf(i).trim() || "white space"}: log-probability ${a} with the state, ${b} without, gain ${number(gain(i))}`;
  }

  function go(i, block = "nearest") {
    if (i < 0 || i >= count) return;
    const before = current;
    current = i;
    const token = at(i);
    token.setAttribute("role", "note");
    token.setAttribute("aria-label", told(i));
    token.focus({preventScroll: true});
    (block === "start" ? sections[windowOf(i)] : token).scrollIntoView({block, behavior: "instant"});
    show(i);
    markWindow(windowOf(i));
    if (before >= 0 && windowOf(before) !== windowOf(i)) {  // which may be far away by now: looked at anew
      watcher.unobserve(sections[windowOf(before)]);
      watcher.observe(sections[windowOf(before)]);
    }
  }

  const reading = byId("document");
  reading.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    if (token) show(Number(token.dataset.i));
  });
  reading.addEventListener("pointerleave", () => { if (current >= 0) show(current); });
  reading.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token && getSelection().isCollapsed) go(Number(token.dataset.i));
  });

  // --- keys ---------------------------------------------------------------------------------------------------------

  function visibleToken() {
    const w = sections.findIndex((section) => section.getBoundingClientRect().bottom > 60);
    return starts(Math.max(w, 0));
  }

  function line(step) {  // the token above or below
    const here = at(current).getClientRects()[0], middle = (here.left + here.right) / 2;
    let best = -1, distance = Infinity, top = null;
    for (let i = current + step; i >= 0 && i < count; i += step) {
      const box = at(i).getClientRects()[0];
      if (!box || (step > 0 ? box.top < here.bottom - 4 : box.bottom > here.top + 4)) continue;
      if (top !== null && Math.abs(box.top - top) > 8) break;
      top = box.top;
      const away = Math.abs((box.left + box.right) / 2 - middle);
      if (away < distance) [best, distance] = [i, away];
    }
    go(best);
  }

  function strong(direction) {
    for (let i = Math.max(current < 0 ? visibleToken() - 1 : current, first - 1) + 1; i < count; i++) {
      if (gain(i) * direction >= data.scale) return go(i, "center");
    }
  }

  const keys = {
    ArrowRight: () => go(current < 0 ? visibleToken() : current + 1),
    ArrowLeft: () => go(current < 0 ? visibleToken() : current - 1),
    ArrowDown: () => line(1),
    ArrowUp: () => line(-1),
    n: () => { const w = current < 0 ? windowOf(visibleToken()) : windowOf(current) + 1; if (w < sections.length) go(starts(w), "start"); },
    p: () => { const w = windowOf(current < 0 ? visibleToken() : current); go(starts(Math.max(w - 1, 0)), "start"); },
    "+": () => strong(1),
    "-": () => strong(-1),
    t: toggle,
    "?": () => byId("help").showModal(),
    Escape: () => { document.activeElement.blur(); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open || !(event.key in keys)) return;
    const onToken = document.activeElement.classList.contains("token");
    if (!onToken && (event.key === "ArrowUp" || event.key === "ArrowDown")) return;  // they scroll
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

  const WIDE = 400, HIGH = 130, LEFT = 44, BOTTOM = 20;

  function frame(values, label, from, to) {  // a drawing with a scale, and what turns a value into a height
    const low = Math.min(0, ...values), high = Math.max(0, ...values), room = (high - low || 1) * 0.06;
    const y = (value) => 6 + (HIGH - BOTTOM - 6) * (1 - (value - low + room) / (high - low + 2 * room || 1));
    const drawn = element("svg", {viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label});
    const step = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5].find((one) => (high - low) / one <= 4) || 10;
    for (let n = Math.ceil(low / step); n * step <= high + 1e-9; n++) {
      const tick = n * step;
      drawn.append(element("line", {class: n ? "axis" : "zero", x1: LEFT, x2: WIDE, y1: y(tick), y2: y(tick)}));
      drawn.append(element("text", {x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end"}, (n < 0 ? "−" : "") + number(Math.abs(tick), step < 0.01 ? 3 : step < 0.1 ? 2 : 1)));
    }
    drawn.append(element("text", {x: LEFT, y: HIGH - 4}, from), element("text", {x: WIDE, y: HIGH - 4, "text-anchor": "end"}, to));
    return [drawn, y];
  }

  function byPosition(rows) {
    const last = rows.at(-1), label = `Mean gain from ${signed(rows[0].gain)} at the beginning of a window to ${signed(last.gain)} at its end`;
    const [drawn, y] = frame(rows.map((row) => row.gain), label, "token 1", `token ${last.to}`);
    const x = (row) => LEFT + 4 + (WIDE - LEFT - 8) * (row.from + row.to - 1) / (2 * last.to - 1);
    drawn.append(element("path", {class: "curve", d: "M" + rows.map((row) => `${x(row).toFixed(1)} ${y(row.gain).toFixed(1)}`).join("L")}));
    for (const row of rows) {
      const where = row.to - row.from > 1 ? `tokens ${row.from + 1} to ${row.to}` : `token ${row.to}`;
      drawn.append(element("circle", {class: "dot", r: 3, cx: x(row), cy: y(row.gain)}, element("title", {}, `${where}: ${signed(row.gain, 3)}`)));
    }
    return drawn;
  }

  function byWindow(rows) {
    const [drawn, y] = frame(rows.map((row) => row.gain), `Mean gain of ${rows.length} windows`, "window 2", `window ${rows.length + 1}`);
    const room = (WIDE - LEFT) / rows.length, width = Math.min(Math.max(room * 0.8, 0.8), 28);
    for (const row of rows) {
      const x = LEFT + room * (row.window - 0.5) - width / 2, top = Math.min(y(row.gain), y(0)), height = Math.max(Math.abs(y(row.gain) - y(0)), 0.5);
      const bar = element("rect", {class: `bar go ${row.gain < 0 ? "down" : "up"}`, x, y: top, width, height, "data-w": row.window},
        element("title", {}, `window ${row.window + 1}: ${signed(row.gain, 3)}`));
      bar.addEventListener("click", () => go(starts(row.window), "start"));
      drawn.append(bar);
    }
    return drawn;
  }

  function markWindow(w) {
    for (const bar of document.querySelectorAll("#by-window .bar")) bar.classList.toggle("now", Number(bar.dataset.w) === w);
  }

  function attention(layers) {
    const heads = layers[0].length, all = layers.flat().filter((x) => x !== null), most = Math.max(...all, 1e-9);
    const l = layers.findIndex((row) => row.includes(most)), h = l < 0 ? -1 : layers[l].indexOf(most);
    const wide = Math.min((WIDE - LEFT) / heads, 46), high = Math.min(Math.max(200 / layers.length, 9), 22);
    const drawn = element("svg", {viewBox: `0 0 ${WIDE} ${high * layers.length + 20}`, role: "img",
      "aria-label": `Attention paid to what is carried, ${layers.length} layers and ${heads} heads; most, ${percent(most)}, in layer ${l + 1}, head ${h + 1}`});
    const every = Math.ceil(layers.length / 15);
    layers.forEach((row, i) => {
      if (i % every === 0) drawn.append(element("text", {x: LEFT - 6, y: high * (i + 0.5) + 4, "text-anchor": "end"}, i ? i + 1 : "layer 1"));
      row.forEach((value, j) => {
        const box = {x: LEFT + wide * j, y: high * i, width: wide - 1, height: high - 1, rx: 2};
        if (value === null) drawn.append(element("rect", {...box, class: "closed"}, element("title", {}, `nothing enters layer ${i + 1}`)));
        else drawn.append(element("rect", {...box, class: "level", "fill-opacity": (0.05 + 0.95 * value / most).toFixed(3)},
          element("title", {}, `layer ${i + 1}, head ${j + 1}: ${percent(value)}`)));
      });
    });
    drawn.append(element("text", {x: LEFT, y: high * layers.length + 14}, "head 1"),
      element("text", {x: LEFT + wide * heads - 1, y: high * layers.length + 14, "text-anchor": "end"}, String(heads)));
    const closed = all.length < heads * layers.length ? " Nothing enters the grey layers." : "";
    return [drawn, element("p", {class: "note"}, `Mean share of a token’s attention; ${percent(most)} at the most, in layer ${l + 1}, head ${h + 1}.${closed}`)];
  }

  function layerWeights(weights) {
    const high = Math.min(16, 240 / weights.length), most = Math.max(...weights);
    const drawn = element("svg", {viewBox: `0 0 ${WIDE} ${high * weights.length + 4}`, role: "img", "aria-label": `Weights of ${weights.length} layers`});
    weights.forEach((weight, i) => {
      const width = Math.max((WIDE - LEFT - 50) * weight / most, 1), y = high * i;
      drawn.append(element("rect", {class: "level", x: LEFT, y, width, height: high - 2, rx: 2}),
        element("text", {x: LEFT - 6, y: y + high - 4, "text-anchor": "end"}, i ? i + 1 : "layer 1"),
        element("text", {x: LEFT + width + 6, y: y + high - 4}, number(weight, 3)));
    });
    return [drawn, element("p", {class: "note"}, "Learned weights of the layers’ outputs (equation 1).")];
  }

  function kindTable(rows) {
    const heads = ["", "all", ...data.seenNames], body = element("tbody");
    for (const kind of data.kindNames) {
      const mine = rows.filter((row) => row.kind === kind);
      if (!mine.length) continue;
      const line = element("tr", {}, element("td", {}, kind));
      for (const seen of heads.slice(1)) {
        const row = mine.find((one) => one.seen === seen);
        const step = row ? shade(row.gain * 2.5) : 0;  // means are smaller than single gains
        line.append(row ? element("td", {class: step ? `${row.gain > 0 ? "helped" : "hurt"} s${step}` : "", title: `${row.tokens.toLocaleString("en")} tokens`}, signed(row.gain)) : element("td", {class: "hint"}, "–"));
      }
      body.append(line);
    }
    return element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((one) => element("th", {scope: "col"}, one)))), body);
  }

  function wordList(rows, title) {
    const made = element("div", {}, element("h3", {}, title));
    for (const row of rows) {
      const button = element("button", {class: "entry", type: "button", title: `mean of its pieces ${signed(row.gain)}; go to the next occurrence`},
        element("span", {}, row.word), element("i", {}, `×${row.times}`), element("span", {class: sign(row.total)}, signed(row.total, 1)));
      button.addEventListener("click", () => go(row.places.find((place) => place > current) ?? row.places[0], "center"));
      made.append(button);
    }
    return made;
  }

  function facts() {
    const {summary} = data, shown = [
      ["perplexity with the state", number(summary.perplexity)], ["without", number(summary.perplexity_without)],
      ["mean gain, nats", signed(summary.gain, 3)], ["tokens helped", percent(summary.helped)],
      ["tokens", summary.tokens.toLocaleString("en")], ["windows", summary.windows.toLocaleString("en")],
    ];
    byId("summary").append(...shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    byId("model").textContent = `${data.model}, windows of ${data.window} tokens` + (data.overlap ? ` that share ${data.overlap}` : "");
    if (data.overlap) byId("shared").textContent = `, but for the ${data.overlap} tokens that windows share`;
    for (let step = -5; step <= 5; step++) {
      const classes = step ? `${step > 0 ? "helped" : "hurt"} s${Math.abs(step)}` : "";
      byId("scale").append(element("span", {class: classes}, step ? signed(step < 0 ? -shades[-step - 1] : shades[step - 1], data.scale < 0.5 ? 3 : 2).replace(/0+$/, "").replace(/\.$/, "") : "0"));
    }
    const origin = data.provenance;
    byId("footer").textContent = `carryforward ${origin.carryforward} (${origin.commit.slice(0, 12)}${origin.commit.endsWith("-dirty") ? ", changed" : ""}) · ${origin.date} · `
      + Object.entries(origin.versions).map(([name, version]) => `${name} ${version}`).join(", ")
      + ` · ${origin.hardware.gpu || origin.hardware.cpu} · ${origin.command}`;
  }

  facts();
  byId("by-position").append(byPosition(data.byPosition));
  byId("by-window").append(byWindow(data.byWindow));
  byId("attention").append(...attention(data.attention));
  if (data.layerWeights) byId("weights").append(...layerWeights(data.layerWeights));
  else byId("weights-panel").remove();
  byId("kinds").append(kindTable(data.byKind));
  byId("words").append(wordList(data.helped, "gain in all, nats"), wordList(data.hurt, "lose in all, nats"));
})();
